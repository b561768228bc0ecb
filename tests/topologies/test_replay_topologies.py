"""Replay in every topology: the same bits where nobody runs ahead, balanced books and bounded ratios where they do."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import rookery
from rookery.core.errors import CheckpointError, UsageError
from rookery.storage import checkpoint, replay_writer
from rookery.tables import replay as replay_module
from rookery.tables.memory import ReplayMemory
from rookery.tables.replay import FreeReplayTable

REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0}
RANKED = {"start": "actor", "sampler": "rank"}
SMALL = {"quiet": True, "seed": 3, "actors": 2, "envs_per_actor": 2}
SEQUENCES = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "target_period": 10}
SEQUENCES |= {"replay": REPLAY | {"min_size": 10, "batch": 4, "capacity": 50}}


def weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = checkpoint.newest(path / "checkpoints")[0].tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("actors/")}


def assert_same(a: rookery.Run, b: rookery.Run) -> None:
    one, other = weights(a.path), weights(b.path)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"
    for name in ("env_steps", "updates", "return_mean"):
        assert a.summary[name] == b.summary[name], name
    assert a.summary["updates"] > 20


def train(tmp_path: Path, name: str, recipe: str, env: str, **fields) -> rookery.Run:
    return rookery.train(recipe, env=env, out=str(tmp_path / name), **(SMALL | fields))


CASES = {
    "dqn": ("dqn", "CartPole-v1", {"algo": {"replay": REPLAY, "target_period": 20}}),
    "rainbow": ("rainbow", "CartPole-v1", {"algo": {"replay": REPLAY, "target_period": 20}}),
    "r2d2": ("r2d2", "CartPole-v1", {"algo": SEQUENCES}),
    "ladder": ("dqn", "support_masks:Maskable", {"algo": {"replay": REPLAY | RANKED, "ladder": True, "refresh": 400}}),
    "ddpg": ("ddpg", "Pendulum-v1", {"algo": {"replay": REPLAY, "noise": "ou"}}),
}  # fmt: skip


# A DQN and a Rainbow differ in their networks, and those in test_dqn_acting.py; each starts two processes.
@pytest.mark.parametrize("case", ["rainbow", "r2d2", "ladder", "ddpg", pytest.param("dqn", marks=pytest.mark.attack)])
def test_serial_and_local_end_with_the_same_bits(tmp_path, case):
    recipe, env, fields = CASES[case]
    serial = train(tmp_path, "serial", recipe, env, topology="serial", env_steps=1000, **fields)
    local = train(tmp_path, "local", recipe, env, topology="local", env_steps=1000, **fields)
    assert_same(serial, local)
    assert serial.summary["ledger"] == local.summary["ledger"]


def test_one_worker_alone_repeats_a_serial_run(tmp_path):
    fields = {"algo": {"replay": REPLAY, "target_period": 20}, "actors": 1, "env_steps": 800}
    serial = train(tmp_path, "serial", "gorila", "CartPole-v1", topology="serial", **fields)
    alone = train(tmp_path, "alone", "gorila", "CartPole-v1", topology="async_grads", **fields)
    assert_same(serial, alone)


LOCAL_DQN = pytest.param("local", "dqn", marks=pytest.mark.attack)  # its items are simpler than those of R2D2


@pytest.mark.parametrize(("topology", "case"), [("serial", "dqn"), ("serial", "r2d2"), ("local", "r2d2"), LOCAL_DQN])
def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path, topology, case):
    """The environments of this task can be restored, and the memory comes with the checkpoint: nothing differs."""
    recipe, _, fields = CASES[case]
    constant = {"epsilon_share": 1.0, "epsilon_end": 1.0, "lr": 1e-3, "lr_end": 1e-3}  # ends depend on the run's length
    fields = fields | {"topology": topology, "algo": fields["algo"] | constant}
    if case == "dqn":
        fields["algo"]["replay"] = REPLAY | {"sampler": "proportional", "beta_end": None}
    whole = train(tmp_path, "whole", recipe, "rookery/TMaze-v0", env_steps=1600, **fields)
    half = train(tmp_path, "half", recipe, "rookery/TMaze-v0", env_steps=800, **fields)
    assert half.summary["env_steps"] < whole.summary["env_steps"]
    resumed = rookery.resume(half.path, env_steps=1600)
    assert_same(resumed, whole)
    assert resumed.summary["ledger"] == whole.summary["ledger"]


def test_a_resumed_run_without_its_memory_fills_a_new_one(tmp_path):
    recipe, env, fields = CASES["dqn"]
    run = train(tmp_path, "run", recipe, env, env_steps=600, topology="serial", **fields)
    for path in sorted((run.path / "replay").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    resumed = rookery.resume(run.path, env_steps=1200)
    assert "filled again from empty" in (run.path / "metrics.jsonl").read_text()
    assert resumed.summary["ledger"]["dropped"]["resumed"] > 0
    assert resumed.summary["updates"] > run.summary["updates"]


def test_a_memory_older_than_the_checkpoint_is_taken_and_its_frames_end_there(tmp_path):
    """The environments go on exactly, so their actors number frames on from where the newer memory ended."""
    fields = CASES["dqn"][2] | {"topology": "serial", "net": {"torso": "tiny", "features": 16}}
    run = train(tmp_path, "run", "dqn", "support_pixels:make", env_steps=600, preset="pixels", **fields)
    memory, old = run.path / "replay", tmp_path / "old"
    shutil.copytree(memory, old)
    rookery.resume(run.path, env_steps=900, trust=("support_pixels",))
    shutil.rmtree(memory)
    shutil.copytree(old, memory)
    resumed = rookery.resume(run.path, env_steps=1500, trust=("support_pixels",))
    assert "older than the checkpoint" in (run.path / "metrics.jsonl").read_text()
    assert resumed.summary["exit_reason"] == "env_steps" and resumed.summary["env_steps"] >= 1500


def test_a_corrupt_memory_is_refused_by_name(tmp_path):
    recipe, env, fields = CASES["dqn"]
    run = train(tmp_path, "run", recipe, env, env_steps=600, topology="serial", **fields)
    victim = max((run.path / "replay").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CheckpointError, match=victim.name) as caught:
        rookery.resume(run.path, env_steps=1200)
    assert caught.value.exit_code == 6
    assert "remove" in str(caught.value)


# Actors and learner at once

APEX = {"replay": REPLAY | {"slack": 64.0, "sampler": "proportional", "start": "actor"}, "unroll": 5, "n_step": 3}


def test_nobody_waits_and_the_books_balance(tmp_path):
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", env_steps=3000, algo=APEX)
    ledger = run.summary["ledger"]
    assert ledger["collected"] == run.summary["env_steps"] >= 3000
    assert ledger["trained"] > 1000
    assert run.summary["env_steps"] < 3000 + 2 * 5 * SMALL["envs_per_actor"] * SMALL["actors"]
    memory = run.summary["replay"]
    # The limiter holds draws to 2 an item, give or take the slack and what was on its way.
    assert memory["sampled"] <= 2.0 * (memory["inserted"] - 100) + 16 + 64
    on_the_way = 3 * 5 * SMALL["envs_per_actor"] * SMALL["actors"]  # items of the slots that were ordered ahead
    assert memory["sampled"] >= 2.0 * (memory["inserted"] - 100 - on_the_way) - 16 - 64, "actors outran the learner"
    assert memory["size"] <= 600 * 1.25
    assert 0.0 <= memory["learner_idle"] <= 1.0
    assert math.isfinite(memory["age_mean"]) and math.isfinite(memory["priority_max"])


@pytest.mark.parametrize(
    ("recipe", "algo"), [("apex_dqn", APEX), pytest.param("r2d2", SEQUENCES, marks=pytest.mark.attack)]
)
def test_a_killed_actor_is_replaced_and_what_it_held_is_counted(tmp_path, recipe, algo):
    run = train(
        tmp_path, "run", recipe, "CartPole-v1", topology="local", env_steps=2000, algo=algo,
        fault_plan="actor[1]@env_step=137:sigkill",
    )  # fmt: skip
    assert run.summary["restarts"] == 1
    assert run.summary["ledger"]["dropped"]["actor_died"] > 0
    assert run.summary["exit_reason"] == "env_steps"


def test_free_running_actors_are_never_held_back(tmp_path):
    algo = APEX | {"replay": REPLAY | {"samples_per_insert": 0.0, "remover": "soft", "remove_every": 5}}
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", actors=1, env_steps=3000, algo=algo)
    assert run.summary["replay"]["size"] <= 750
    assert run.summary["updates"] > 0


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_priorities_are_written_back_weights_annealed_and_the_memory_trimmed(tmp_path, monkeypatch, topology):
    drawn, trimmed = [], []
    pick, remove_to_fit = ReplayMemory.pick, ReplayMemory.remove_to_fit

    def watched_pick(table, progress):
        drawn.append(progress)
        return pick(table, progress)

    def watched_trim(table, most=None):
        before = len(table)
        more = remove_to_fit(table, most)
        trimmed.append((before, len(table)))
        return more

    monkeypatch.setattr(ReplayMemory, "pick", watched_pick)
    monkeypatch.setattr(ReplayMemory, "remove_to_fit", watched_trim)
    replay = REPLAY | {"samples_per_insert": 4.0, "slack": 64.0, "capacity": 300, "remover": "soft", "remove_every": 5}
    algo = {"unroll": 5, "replay": replay | {"sampler": "proportional", "start": "max"}}
    run = train(tmp_path, "run", "dqn", "CartPole-v1", topology=topology, actors=1, env_steps=1500, algo=algo)
    assert drawn == sorted(drawn) and drawn[0] < 0.2 and drawn[-1] > 0.9
    assert max(before for before, _ in trimmed) > 300 and max(after for _, after in trimmed) <= 300
    assert len(trimmed) == run.summary["updates"] // 5
    memory = run.summary["replay"]
    assert memory["priority_mean"] < 0.9 * memory["priority_max"], "all would be equal if none was ever written"


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_where_loaders_wait_the_memory_is_trimmed_piece_by_piece(tmp_path, monkeypatch, topology):
    """In turns nobody waits, and what is removed at once decides what a uniform sampler draws."""
    calls, remove_to_fit = [], ReplayMemory.remove_to_fit

    def watched_trim(table, most=None):
        before = len(table)
        more = remove_to_fit(table, most)
        calls.append((most, before - len(table), more, len(table) > 300))
        return more

    monkeypatch.setattr(ReplayMemory, "remove_to_fit", watched_trim)
    monkeypatch.setattr(replay_module, "PIECE", 7)
    replay = REPLAY | {"samples_per_insert": 4.0, "capacity": 300, "remover": "soft", "remove_every": 5}
    algo = {"unroll": 5, "replay": replay | ({"slack": 64.0} if topology == "local" else {})}
    run = train(tmp_path, "run", "dqn", "CartPole-v1", topology=topology, actors=1, env_steps=1500, algo=algo)
    assert {most for most, *_ in calls} == ({7} if topology == "local" else {None})
    assert all(more == left for *_, more, left in calls) and max(removed for _, removed, *_ in calls) > 0
    if topology == "local":
        assert max(removed for _, removed, *_ in calls) == 7
        assert len(calls) > run.summary["updates"] // 5, "what is left is removed after the next update"


def test_an_actor_looks_at_the_weights_after_as_many_rows_as_it_is_told(tmp_path, monkeypatch):
    """Rows without a step count: CartPole's episodes end all the time, and put nothing off."""
    versions: dict[int, list[int]] = {0: [], 1: []}
    insert = ReplayMemory.insert

    def watched(table, parcel, actor):
        versions[actor].append(int(parcel["version"][parcel["count"][0] - 1]))  # the first may be of the last unroll
        insert(table, parcel, actor)

    monkeypatch.setattr(ReplayMemory, "insert", watched)
    monkeypatch.setattr(FreeReplayTable, "publish_every", 0.0)  # there is always something new to see
    algo = APEX | {"n_step": 1, "refresh": 40}  # four unrolls of 5 rows of 2 environments
    train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", env_steps=3000, algo=algo)
    for seen in versions.values():
        changes = [at for at, (before, now) in enumerate(pairwise(seen), 1) if before != now]
        assert len(changes) > 5 and all(at % 4 == 0 for at in changes), changes


def test_free_running_in_one_process_takes_turns(tmp_path):
    algo = APEX | {"replay": REPLAY | {"samples_per_insert": 0.0}}
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="serial", env_steps=1000, algo=algo)
    rounds = run.summary["env_steps"] / (5 * SMALL["envs_per_actor"] * SMALL["actors"])
    assert 0.7 * rounds < run.summary["updates"] <= rounds + 1


def test_checkpoints_while_loaders_draw_have_balanced_books(tmp_path):
    """A draw moves steps from the memory to the batches ahead; nobody may count them in between."""
    run = train(
        tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", actors=1, env_steps=1500, algo=APEX,
        checkpoint={"every": 50, "keep": 100},
    )  # fmt: skip
    saved = sorted((run.path / "checkpoints").glob("step-*/meta.json"))
    assert len(saved) > 10
    for path in saved:
        ledger = json.loads(path.read_text())["journal"]["ledger"]
        gone = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
        assert gone == ledger["collected"], path


def test_a_run_at_once_goes_on_with_its_memory(tmp_path):
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", actors=1, env_steps=1500, algo=APEX)
    resumed = rookery.resume(run.path, env_steps=2500)
    assert resumed.summary["replay"]["inserted"] > run.summary["replay"]["inserted"] > 1000
    assert resumed.summary["updates"] > run.summary["updates"]


# Gradients of others


def test_gorila_trains_and_its_books_balance(tmp_path):
    algo = {"replay": REPLAY, "target_period": 20}
    run = train(tmp_path, "run", "gorila", "CartPole-v1", env_steps=2000, algo=algo)
    ledger = run.summary["ledger"]
    assert run.summary["topology"] == "async_grads"
    assert ledger["trained"] > 500 and ledger["collected"] == run.summary["env_steps"]
    assert run.summary["policy_lag"]["max"] >= 1, "two workers never overtook each other"
    policy = rookery.load(run.path)
    assert policy.env_steps == run.summary["env_steps"]


def test_stale_gradients_are_dropped_and_counted(tmp_path):
    algo = {"replay": REPLAY, "target_period": 20}
    run = train(tmp_path, "run", "gorila", "CartPole-v1", env_steps=2000, algo=algo, gradients={"max_age": 0})
    assert run.summary["ledger"]["dropped"]["stale_gradient"] > 0
    assert run.summary["policy_lag"]["max"] == 0


def test_a_killed_worker_is_replaced_and_its_memory_counted(tmp_path):
    algo = {"replay": REPLAY, "target_period": 20}
    run = train(
        tmp_path, "run", "gorila", "CartPole-v1", env_steps=2000, algo=algo,
        fault_plan="actor[1]@env_step=137:sigkill",
    )  # fmt: skip
    assert run.summary["restarts"] == 1
    assert run.summary["ledger"]["dropped"]["actor_died"] > 0


BESIDE_THE_POINT = [
    ("ppo", "CartPole-v1", {}, "several passes over a batch"),
    ("ddpg", "Pendulum-v1", {}, "target networks of a worker would not follow"),
    ("a2c", "CartPole-v1", {"net": {"normalize_obs": False}}, "no rewards to scale"),
    ("dqn", "CartPole-v1", {"net": {"normalize_obs": True}}, "no observations to normalise by"),
]


@pytest.mark.parametrize(("recipe", "env", "fields", "why"), BESIDE_THE_POINT)
def test_gradients_of_others_are_refused_where_they_cannot_work(tmp_path, recipe, env, fields, why):
    with pytest.raises(UsageError, match=why):
        train(tmp_path, "run", recipe, env, topology="async_grads", actors=1, env_steps=100, **fields)


# Bad input


WRONG = [("dqn", "Pendulum-v1"), ("rainbow", "Pendulum-v1"), ("d4pg", "CartPole-v1")]


@pytest.mark.parametrize(("recipe", "env"), WRONG)
def test_the_wrong_kind_of_actions_is_refused_with_what_fits(tmp_path, recipe, env):
    with pytest.raises(UsageError, match=r"use .*ppo"):
        train(tmp_path, "run", recipe, env, topology="serial", env_steps=100)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("topology", ["serial", "local", "async_grads"])
def test_a_memory_larger_than_the_machine_is_refused_before_it_is_allocated(tmp_path, topology):
    algo = {"replay": {"capacity": 10**12}}
    with pytest.raises(
        UsageError, match=r'needs .* TiB.*, and there are .* GiB .*algo=\{"replay": \{"capacity": \d+\}\}'
    ):
        train(tmp_path, "run", "dqn", "CartPole-v1", topology=topology, actors=1, env_steps=100, algo=algo)


def test_a_range_of_values_that_clips_the_returns_is_said(tmp_path):
    algo = {"replay": REPLAY, "v_min": -1.0, "v_max": 1.0, "target_period": 10}
    run = train(tmp_path, "run", "c51", "CartPole-v1", topology="serial", env_steps=1500, algo=algo, log_every=0.01)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    said = [line["text"] for line in lines if line["kind"] == "message" and "clip the returns" in line["text"]]
    assert len(said) == 1 and "v_max 1" in said[0] and "%" in said[0]


def test_a_signal_during_the_last_save_is_heard(tmp_path, monkeypatch):
    """The memory of a finished run may take an hour to reach the disk; of one that shall end, the time of grace."""
    joined, patient = [], replay_writer.Writer.join

    def join(writer, timeout):
        joined.append(writer)
        if len(joined) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(replay_writer.Writer, "join", join)
    recipe, env, fields = CASES["dqn"]
    run = train(tmp_path, "run", recipe, env, topology="serial", env_steps=200, supervisor={"grace": 0.2}, **fields)
    assert run.exit_code == 75 and len(joined) > 3
    assert "could not be saved in time" in (run.path / "metrics.jsonl").read_text()
    assert patient(joined[-1], 60), "it goes on writing, and shall not do so into the next test"


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_the_memory_goes_with_the_run_and_does_not_wait_for_the_collector(tmp_path, monkeypatch, topology):
    """It may be most of the machine's: whoever trains twice in one process cannot wait until somebody tidies up."""
    made, init = [], ReplayMemory.__init__

    def seen(table, *args):
        made.append(weakref.ref(table))
        init(table, *args)

    monkeypatch.setattr(ReplayMemory, "__init__", seen)
    gc.disable()
    try:
        train(
            tmp_path,
            "run",
            "apex_dqn",
            "CartPole-v1",
            topology=topology,
            actors=1,
            env_steps=400,
            algo={"replay": REPLAY},
        )
        assert [table() for table in made] == [None]
    finally:
        gc.enable()


def test_a_memory_that_is_slow_to_fill_is_saved_meanwhile(tmp_path):
    """Hours may pass before the first update: what was collected is not worth less for it."""
    algo = {"replay": REPLAY | {"min_size": 550, "samples_per_insert": 0.0}}
    fields = {
        "topology": "local",
        "actors": 1,
        "env_steps": 500,
        "algo": algo,
        "checkpoint": {"every": 100, "keep": 100},
    }
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", **fields)
    assert run.summary["updates"] == 0 and len(checkpoint.all_steps(run.path / "checkpoints")) >= 3


def test_several_loaders_draw_every_batch_once(tmp_path):
    algo = APEX | {"replay": REPLAY | {"samples_per_insert": 2.0, "slack": 64.0, "loaders": 3, "prefetch": 6}}
    run = train(tmp_path, "run", "apex_dqn", "CartPole-v1", topology="local", actors=1, env_steps=2000, algo=algo)
    memory, ledger = run.summary["replay"], run.summary["ledger"]
    drawn_ahead = 16 * (6 + 3)  # what waits in the queue, and one in every loader's hand
    assert 0 <= memory["sampled"] - 16 * run.summary["updates"] <= drawn_ahead
    assert ledger["collected"] == ledger["trained"] + ledger["evicted"] + ledger["in_flight"]
