"""Forged run folders whose digests fit: exit code 6, or a run that goes on; never a raw exception, never exit code 4.

ROOKERY_ATTACK_ROUNDS makes as many of them; ROOKERY_ATTACK_SEED another series. Both are in the message of a failure.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from forge import Forger, edit_json, edit_meta, edit_tensors, seal

import rookery
from rookery.core.errors import CheckpointError, RookeryError
from rookery.metrics import sink
from rookery.storage.files import pretty
from rookery.storage.limits import MAX_ELEMENTS, MAX_JSON

ROUNDS = int(os.environ.get("ROOKERY_ATTACK_ROUNDS", "260"))
SEED = int(os.environ.get("ROOKERY_ATTACK_SEED", "9"))
SMALL = {"quiet": True, "topology": "serial", "actors": 2, "envs_per_actor": 2, "env_steps": 200, "threads": 1}
REPLAY = {"min_size": 20, "batch": 8, "capacity": 100, "samples_per_insert": 1.0}
PPO = {"unroll": 8, "epochs": 1, "minibatches": 2, "chunk": 8}
SEQUENCES = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "replay": REPLAY | {"min_size": 5, "batch": 4}}
CASES = {
    "ppo": ("ppo", "rookery/TMaze-v0", {"net": {"core": "gru", "hidden": (8,), "core_size": 8}, "algo": PPO}, 5),
    "vector": ("ppo", "rookery/CliffWalk-v0", {"net": {"hidden": (8,), "normalize_obs": True}, "algo": PPO}, 3),
    "rainbow": ("rainbow", "rookery/TMaze-v0", {"net": {"hidden": (8,)}, "algo": {"replay": REPLAY, "unroll": 8}}, 2),
    "r2d2": ("r2d2", "rookery/CliffWalk-v0", {"net": {"hidden": (8,), "core_size": 8}, "algo": SEQUENCES}, 3),
}
ALLOWED = {2, 3, 5, 6}  # usage (of what the config asks for), environment, diverged, checkpoint


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sink, "tensorboard_installed", lambda: False)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "tensorboard_installed", lambda: False)
        for name, (recipe, env, fields, _) in CASES.items():
            made[name] = rookery.train(recipe, env=env, out=str(folder / name), **SMALL, **fields).path
    return made


def outcome(act) -> int:
    """The exit code that a call would end with; anything but an error of ours is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act()
    except RookeryError as error:
        assert str(error), "an error without words"
        return error.exit_code
    return 0


def play(policy) -> None:
    """Act a few times on the same observation, greedily and at random."""
    obs = {name: np.zeros((2, *leaf.shape), leaf.dtype) for name, leaf in policy.spec.obs.items()}
    for noise in (None, torch.Generator().manual_seed(1)):
        state = policy.initial_state(2)
        for _ in range(3):
            _, state = policy.act_batch(obs, state, noise)


@pytest.mark.parametrize("case", CASES)
def test_a_forged_folder_is_refused_or_goes_on(runs, tmp_path, case):
    total = sum(weight for *_, weight in CASES.values())
    codes: dict[int, int] = {}
    for number in range(ROUNDS * CASES[case][-1] // total):
        run = Path(shutil.copytree(runs[case], tmp_path / f"{number}"))
        seed = f"{SEED}-{case}-{number}"
        what = Forger(seed).forge(run)
        for act in (lambda: play(rookery.load(run)), lambda: rookery.resume(run, env_steps=240)):  # noqa: B023
            try:
                code = outcome(act)
                codes[code] = codes.get(code, 0) + 1
                assert code in {0} | ALLOWED, code
            except BaseException as error:
                error.add_note(f"seed {seed}: {what}")
                raise
        shutil.rmtree(run)
    assert codes.get(6, 0) > sum(codes.values()) / 4, codes


# Particular values, each of which ended in a raw exception, a hang or gigabytes of memory


def other_generator(meta):
    meta["states"]["0"]["env"]["env"]["generators"][0]["bit_generator"] = "SeedSequence"


def sequences_apart(meta):
    meta["sequences"][1] += 1
    meta["states"]["1"]["sequence"] += 1


CHECKPOINTS = {
    "a negative version": lambda meta: meta["learner"].update(version=-1),
    "no journal": lambda meta: meta.pop("journal"),
    "steps that were never taken": lambda meta: meta["journal"]["ledger"].update(trained=10**6),
    "more steps than the manifest has": lambda meta: meta["journal"].update(env_steps=10**6),
    "returns that cannot be squared": lambda meta: meta["journal"]["window"].update(returns=[1e308], lengths=[1]),
    "a window of no size": lambda meta: meta["journal"]["window"].update(size=0),
    "a history of text": lambda meta: meta["journal"].update(history=[["a", "b"]]),
    "a lag of nothing": lambda meta: meta["journal"].update(lag=[1, 0, 0]),
    "a wall time that is no number": lambda meta: meta["journal"].update(wall_s={"$float": "nan"}),
    "too few sequences": lambda meta: meta["sequences"].pop(),
    "sequences apart": sequences_apart,
    "exact by word": lambda meta: meta.update(exact="yes"),
    "exact without states": lambda meta: meta.update(states={}),
    "a state that is a list": lambda meta: meta["states"].update({"0": []}),
    "a generator that is none": other_generator,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_forged_number_is_exit_code_6(runs, tmp_path, name):
    case = "vector" if "generator" in name else "ppo"
    run = Path(shutil.copytree(runs[case], tmp_path / "run"))
    (path,) = (run / "checkpoints").iterdir()
    edit_meta(path, CHECKPOINTS[name])
    config = (run / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="checkpoint"):
        rookery.resume(run, env_steps=240)
    assert (run / "config.json").read_bytes() == config, "as it was before"


def test_steps_that_no_actor_holds_back_are_exit_code_6(runs, tmp_path):
    run = Path(shutil.copytree(runs["r2d2"], tmp_path / "run"))
    (path,) = (run / "checkpoints").iterdir()
    edit_meta(path, lambda meta: meta["states"]["0"].update(pending=0))
    with pytest.raises(CheckpointError, match="counts 0 steps that actor 0 holds back"):
        rookery.resume(run, env_steps=240)
    edit_meta(path, lambda meta: meta["states"]["0"].update(pending=10_000))
    with pytest.raises(CheckpointError, match="the checkpoint knows of"):
        rookery.resume(run, env_steps=240)


def test_a_worker_that_cannot_restore_its_state_ends_with_exit_code_6_and_is_not_replaced(runs, tmp_path):
    run = Path(shutil.copytree(runs["vector"], tmp_path / "run"))
    (path,) = (run / "checkpoints").iterdir()
    edit_meta(path, other_generator)
    with pytest.raises(CheckpointError, match="is not a bit generator") as caught:
        rookery.resume(run, env_steps=240, topology="local")
    assert "replaced" not in (run / "metrics.jsonl").read_text()
    assert str(path) in "\n".join([str(caught.value), *caught.value.__notes__])


def absurd_net(config):
    config["net"].update(hidden=[10**9, 10**9])


def deep_net(config):
    config["net"].update(core_layers=10**9)


def wide_view(spec):
    spec["obs"]["obs"]["shape"] = [10**6, 10**6]


def many_choices(spec):
    spec["action"]["choices"] = [10**12]


ABSURD = {
    "a network of 4 exabytes": ("config.json", absurd_net),
    "a billion layers": ("config.json", deep_net),
    "a billion environments": ("config.json", lambda config: config.update(envs_per_actor=10**9)),
    "an update without an end": ("config.json", lambda config: config["algo"].update(epochs=1 << 31)),
    "an evaluation without an end": ("config.json", lambda config: config["eval"].update(episodes=1 << 31)),
    "an observation of a trillion numbers": ("spec.json", wide_view),
    "a trillion actions": ("spec.json", many_choices),
    "an observation of another type": ("spec.json", lambda spec: spec["obs"]["obs"].update(dtype="O")),
}


def test_absurd_sizes_are_refused_before_memory_is_taken(runs, tmp_path):
    for number, (name, change) in enumerate(ABSURD.values()):
        run = Path(shutil.copytree(runs["vector"], tmp_path / str(number)))
        edit_json(run / name, change)
        tracemalloc.start()
        assert outcome(lambda: rookery.load(run)) == 6  # noqa: B023
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50 << 20, (name, peak)
        assert outcome(lambda: rookery.resume(run, env_steps=240)) in (6, 0 if name == "spec.json" else 6)  # noqa: B023


def test_the_worst_json_is_read_or_refused_quickly(runs, tmp_path):
    """Refused before it is parsed, or at the limit and parsed: less than a second on a machine of its own."""
    for number, blob in enumerate((
        b"[" + b"[],\n" * (MAX_JSON // 4 - 1) + b"[]]",
        pretty({"a": [[]] * (MAX_ELEMENTS - 5)}),
        pretty({"a": [{"$tuple": []}] * (MAX_ELEMENTS // 3 - 5)}),
    )):  # fmt: skip
        run = Path(shutil.copytree(runs["vector"], tmp_path / str(number)))
        (path,) = (run / "checkpoints").iterdir()
        (path / "meta.json").write_bytes(blob)
        seal(path)
        began = time.process_time()
        with pytest.raises(CheckpointError):
            rookery.resume(run, env_steps=240)
        assert time.process_time() - began < 3


def test_a_config_of_absurd_size_is_not_read(runs, tmp_path):
    run = Path(shutil.copytree(runs["vector"], tmp_path / "run"))
    os.truncate(run / "config.json", 1 << 40)
    assert outcome(lambda: rookery.load(run)) == outcome(lambda: rookery.resume(run)) == 6


COMMANDS = {
    "eval": (
        "vector",
        ["eval", "RUN", "--episodes", "1"],
        lambda tensors: tensors["nets/value.linear.bias"].fill_(math.nan),
    ),
    "resume": (
        "rainbow",
        ["resume", "RUN", "--env-steps", "300", "--quiet"],
        lambda tensors: tensors.pop("nets/epsilon.value"),
    ),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_command_ends_with_exit_code_6_and_one_message(runs, tmp_path, verb):
    case, words, change = COMMANDS[verb]
    run = Path(shutil.copytree(runs[case], tmp_path / "run"))
    (path,) = (run / "checkpoints").iterdir()
    edit_tensors(path, change)
    words = [str(run) if word == "RUN" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "rookery", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr and str(path) in done.stderr
