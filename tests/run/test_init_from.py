"""A run that begins with the networks of another one: the same bits, nothing else, and it never reads them again."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

import rookery
from rookery.algorithms.registry import build_algorithm
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.metrics.plot import read_curve
from rookery.recipes import RECIPES
from rookery.recipes import recipe as recipe_named
from rookery.roles.learner import Learner
from rookery.run.init_from import OF_RUN, Unfit
from rookery.storage import checkpoint
from rookery.storage.stored import decode_config

SMALL = {"quiet": True, "topology": "serial", "actors": 2, "envs_per_actor": 2, "env_steps": 64, "log_every": 0.0}
ALGO = {"unroll": 8, "epochs": 1, "minibatches": 1}
BIAS = "nets/policy.linear.bias"
NET = {"hidden": (8,), "activation": "relu", "normalize_obs": True}
SPEC = EnvSpec("any", {"obs": Leaf((4,), "float32", "vector")}, ActionSpec("discrete", (2,), (0,)))
BOX = EnvSpec("any", SPEC.obs, ActionSpec("box", (), (), 1, (-1.0,), (1.0,), (1,)))
DQN = {"algo": {"unroll": 4, "replay": {"min_size": 16, "batch": 8, "capacity": 500}}}


def small(recipe="ppo", env="CartPole-v1", **fields):
    return rookery.train(recipe, env=env, **({"algo": ALGO} | SMALL | fields))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with a small network and statistics of observations, and its weights."""
    return small(out=str(tmp_path_factory.mktemp("init") / "source"), net=NET, seed=7, env_steps=256)


@pytest.fixture
def first(monkeypatch):
    """The networks before the first step of training, of every learner in this process."""
    seen: list[dict[str, torch.Tensor]] = []
    step = Learner.step

    def spied(learner, *args, **more):
        if not learner.updates:
            seen.append({name: tensor.clone() for name, tensor in learner.nets.state_dict().items()})
        return step(learner, *args, **more)

    monkeypatch.setattr(Learner, "step", spied)
    return seen


def stored(run):
    tensors = checkpoint.newest(run.path / "checkpoints")[0].tensors
    return {name.removeprefix("nets/"): tensor for name, tensor in tensors.items() if name.startswith("nets/")}


def assert_learnt_are_equal(one, other):
    compared = [name for name in one if name not in OF_RUN]
    assert len(compared) > 5
    for name in compared:
        assert torch.equal(one[name], other[name]), name


def test_the_networks_are_equal_bit_for_bit_before_the_first_update_and_nothing_else_comes_along(
    source, first, tmp_path
):
    run = small(out=str(tmp_path / "run"), init_from=source, envs_per_actor=3)
    assert_learnt_are_equal(first[0], stored(source))
    assert float(first[0]["normalizer.leaves.0.running.count"]) > 100, "statistics are part of the networks"
    assert not first[0]["reward_scaler.returns"].any() and len(first[0]["reward_scaler.returns"]) == 6
    assert run.summary["updates"] == 2 and run.summary["env_steps"] < 100, "counters begin at 0"
    saved = checkpoint.newest(run.path / "checkpoints")[0]
    assert saved.meta["learner"]["version"] == run.summary["updates"]
    assert float(saved.tensors["optimizer/all/step"]) == run.summary["updates"]


def test_its_network_is_that_of_the_other_run_and_config_json_says_where_it_comes_from(source, tmp_path):
    run = small(out=str(tmp_path / "run"), init_from=source.path)
    assert run.config.net.hidden == (8,) and run.config.net.activation == "relu" and run.config.net.normalize_obs
    kept = decode_config((run.path / "config.json").read_bytes()).init_from
    saved = checkpoint.newest(source.path / "checkpoints")[0]
    assert (kept.run, kept.checkpoint) == (str(source.path), f"checkpoints/{saved.path.name}")
    assert kept.env_steps == saved.env_steps and kept.digest == checkpoint.digest(saved.path)
    assert f"begins with the networks of {saved.path}" in (run.path / "metrics.jsonl").read_text()


def test_a_checkpoint_may_be_named_and_the_best_be_asked_for(source, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(source.path, folder)
    saved = checkpoint.newest(folder / "checkpoints")[0]
    scored = {"keep": 9, "best": 500.0}
    checkpoint.save(folder / "checkpoints", 32, saved.tensors, saved.meta, **scored)  # older than all, and the best
    for given, more in ((folder, {"init_best": True}), (folder / "checkpoints" / "step-000000000032", {})):
        config = rookery.configure("ppo", "CartPole-v1", init_from=given, **more)
        assert config.init_from.checkpoint == "checkpoints/step-000000000032", given
    policy = rookery.load(folder, which="best")
    assert rookery.configure("ppo", "CartPole-v1", init_from=policy).init_from.env_steps == 32


@pytest.mark.parametrize(
    "fields, fix",
    [
        ({"net": {"hidden": (16,)}}, r"it would fit with net.hidden=\(8,\)$"),
        ({"net": {"hidden": (8,), "core": "gru"}}, "it would fit with net.core='none'$"),
        ({"net.normalize_obs": False}, "it would fit with net.normalize_obs=True$"),
        ({"algo": {"autoencoder": {"on": True}}, "recipe": "appo"}, "it would fit with algo.autoencoder.on=False$"),
        ({"recipe": "dqn"}, "recipe dqn has other networks than ppo, and no field of net or algo would change that"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_with_the_fields_that_would(source, fields, fix):
    recipe = fields.get("recipe", "ppo")
    with pytest.raises(Unfit, match=fix):
        rookery.configure(recipe, "CartPole-v1", init_from=source, **{k: v for k, v in fields.items() if k != "recipe"})


def test_of_the_same_recipe_the_fields_that_shape_the_networks_are_taken_too(tmp_path):
    algo = DQN["algo"] | {"dueling": True, "stream": 4, "lr": 1e-5}
    run = small("dqn", out=str(tmp_path / "run"), algo=algo)
    again = rookery.configure("dqn", "CartPole-v1", init_from=run)
    assert (again.algo.dueling, again.algo.stream) == (True, 4) and again.algo.lr != 1e-5
    with pytest.raises(Unfit, match=r"it would fit with algo\.dueling=True, algo\.stream=4$"):
        rookery.configure("double_dqn", "CartPole-v1", init_from=run)
    taken = rookery.configure("double_dqn", "CartPole-v1", init_from=run, algo={"dueling": True, "stream": 4})
    assert taken.algo.double and taken.init_from == again.init_from


@pytest.mark.parametrize("recipe", ["appo", "impact", "impala"])
def test_other_recipes_with_the_same_networks_begin_with_them(source, first, tmp_path, recipe):
    small(recipe, out=str(tmp_path / "run"), init_from=source, algo={"unroll": 8, "queue": {"loaders": 0}})
    before = stored(source)
    for name, tensor in first[0].items():
        if name not in OF_RUN:  # a target network that the source has not is what it follows
            assert torch.equal(tensor, before[name.removeprefix("target.")]), name


def test_target_networks_come_along(first, tmp_path):
    source = small("dqn", out=str(tmp_path / "source"), **DQN)
    small("double_dqn", out=str(tmp_path / "run"), init_from=source, **DQN)
    assert_learnt_are_equal(first[-1], stored(source))
    assert any(name.startswith("target_") for name in first[-1])


def test_all_state_of_networks_is_known_as_weights_or_as_of_a_run():
    """A buffer of a new module must be put on one side: statistics come along, the state of a schedule does not."""
    known = ("running.", "scale32", "shift32", "low32", "high32", "layers.", "atoms")
    for recipe in RECIPES:
        chosen = recipe_named(recipe)
        continuous = recipe in ("ddpg", "apex_dpg", "d4pg")
        spec = BOX if continuous else SPEC
        config = chosen.build("any", lambda spec=spec: spec)
        nets = build_algorithm(config, spec).nets()
        parameters = {name for name, _ in nets.named_parameters()}
        for name in nets.state_dict():
            assert name in parameters or name in OF_RUN or any(part in name for part in known), (recipe, name)


@pytest.mark.parametrize("env", ["Acrobot-v1", "Pendulum-v1"])
def test_other_spaces_are_refused_and_leave_no_folder(source, tmp_path, env):
    algo = {"quiet": True, "preset": "vector"}
    with pytest.raises(UsageError, match=r"do not fit .*: they were trained on observations obs vector \[4\]"):
        rookery.train("ppo", env=env, out=str(tmp_path / "run"), init_from=source, **algo)
    assert list(tmp_path.iterdir()) == []


def test_the_other_folder_is_never_needed_again(source, tmp_path, first):
    """Neither to go on nor to begin once more, and what config.json says of it makes nobody look there."""
    old = tmp_path / "old"
    shutil.copytree(source.path, old)
    run = small(out=str(tmp_path / "run"), init_from=old)
    shutil.rmtree(old)
    assert rookery.resume(run.path, env_steps=128).summary["env_steps"] >= 128
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "summary.json").unlink()
    first.clear()
    again = rookery.resume(run.path)  # from the start: it was killed before its first checkpoint
    assert again.summary["env_steps"] >= 128
    assert_learnt_are_equal(first[0], stored(source))
    shutil.rmtree(run.path / "init")
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="init is missing"):
        rookery.resume(run.path)


def test_a_run_that_is_killed_while_it_copies_leaves_the_place_free(source, tmp_path, monkeypatch):
    """Otherwise it could not be resumed: config.json would name networks that are not there."""

    def killed(*_, **__):
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", killed)
        with pytest.raises(SystemExit):
            small(out=str(tmp_path / "run"), init_from=source)
    assert not (tmp_path / "run" / "config.json").exists()
    assert small(out=str(tmp_path / "run"), init_from=source).exit_code == 0


def test_what_a_folder_says_is_checked_before_it_is_used(source, tmp_path):
    run = small(out=str(tmp_path / "run"), init_from=source)
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "summary.json").unlink()
    saved = checkpoint.newest(run.path / "init")[0]
    spoilt = saved.tensors | {BIAS: torch.full_like(saved.tensors[BIAS], torch.nan)}
    for tensors, why in ((spoilt, "policy.linear.bias is not finite"), ({}, "absent in the checkpoint")):
        checkpoint.save(run.path / "init", saved.env_steps, tensors, saved.meta, keep=1)
        with pytest.raises(CheckpointError, match=why):
            rookery.resume(run.path)


def test_a_run_does_not_overwrite_the_one_it_begins_from(tmp_path):
    folder = tmp_path / "run"
    small(out=str(folder))
    (folder / "summary.json").unlink()  # as if it had failed: such a folder may be overwritten
    with pytest.raises(UsageError, match="holds the run whose networks the new one begins with"):
        small(out=str(folder), init_from=folder, overwrite=True)
    assert (folder / "checkpoints").is_dir()


def test_a_config_begins_with_the_checkpoint_that_it_was_made_with(source, tmp_path):
    config = rookery.configure("ppo", "CartPole-v1", init_from=source, **SMALL, algo=ALGO)
    run = rookery.train(dataclasses.replace(config, out=str(tmp_path / "run")))
    assert (run.path / "init").is_dir()
    other = dataclasses.replace(config.init_from, digest="0" * 64)
    with pytest.raises(UsageError, match="is not the checkpoint that this run was configured with"):
        rookery.train(dataclasses.replace(config, init_from=other, out=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_actor_processes_begin_with_them(source, tmp_path):
    """Two processes act with the weights of the source: what they do is what the serial run does."""
    runs = [
        small(out=str(tmp_path / name), init_from=source, topology=name, env_steps=64) for name in ("serial", "local")
    ]
    assert all(torch.equal(tensor, stored(runs[1])[name]) for name, tensor in stored(runs[0]).items())


def test_fine_tuning_reaches_a_return_sooner_than_from_scratch(tmp_path):
    fields = {"quiet": True, "seed": 3, "log_every": 0.0}
    scratch = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "scratch"), env_steps=11_000, **fields)
    tuned = rookery.train(
        "ppo", env="CartPole-v1", out=str(tmp_path / "tuned"), env_steps=3_000, init_from=scratch, **fields
    )
    first = [
        curve.env_steps[np.argmax(curve.return_mean >= 80)] for curve in map(read_curve, (scratch.path, tuned.path))
    ]
    assert read_curve(tuned.path).return_mean.max() >= 80 and first[1] < first[0] / 2


def test_a_resume_cannot_change_where_a_run_came_from(source, tmp_path):
    run = small(out=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="init_from belongs to the run and cannot change"):
        rookery.resume(run.path, env_steps=128, init_from=None)
    config = json.loads((run.path / "config.json").read_text())
    assert config["init_from"] is None and config["history"] == []
