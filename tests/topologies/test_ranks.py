"""Several ranks for real: processes, gloo, kills and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_ranks import agreed, ranks, together

import rookery
from rookery.core.config import GroupConfig
from rookery.core.errors import LearnerError, UsageError
from rookery.pipes.collective import Collective, Place, open_store, place_of
from rookery.run.notes import rank_notes
from rookery.storage import checkpoint
from rookery.topologies.allreduce import check_same

BASE = [
    "ppo", "--env", "CartPole-v1", "--preset", "vector", "--envs-per-actor", "2", "--algo.unroll", "32",
    "--algo.epochs", "2", "--algo.minibatches", "2", "--algo.chunk", "16", "--net.hidden", "16", "--quiet",
]  # fmt: skip
RANKS = ["--topology", "allreduce", "--ranks", "2"]


def command(out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "rookery", "train", *BASE, *flags, "--out", str(out)]


FIELDS = {
    "preset": "vector", "envs_per_actor": 2, "quiet": True, "algo": {"unroll": 32, "epochs": 2, "minibatches": 2,
    "chunk": 16, "scale_reward": True}, "net": {"hidden": (16,), "core": "lstm", "core_size": 8}, "env_steps": 1260,
}  # fmt: skip


def newest(out: Path) -> checkpoint.Checkpoint:
    return checkpoint.newest(out / "checkpoints")[0]


def resumed(out: Path, *flags: str) -> checkpoint.Checkpoint:
    words = [sys.executable, "-m", "rookery", "resume", str(out), *flags, "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return checkpoint.newest(out / "checkpoints")[0]


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def test_two_ranks_on_half_batches_are_one_rank_on_the_whole_and_go_on_with_the_same_bits(tmp_path):
    """P21, ten updates with several passes, recurrent, with running statistics."""
    one, two, parts = (str(tmp_path / name) for name in ("one", "two", "parts"))
    rookery.train("ppo", env="CartPole-v1", topology="serial", actors=2, out=one, **FIELDS)
    pair = {"env": "CartPole-v1", "topology": "allreduce", "ranks": 2, "actors": 1} | FIELDS
    rookery.train("ppo", out=two, group={"crew": "inline"}, **pair)
    whole, halves = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert whole.meta["learner"] == halves.meta["learner"] and whole.meta["learner"]["version"] >= 10
    assert whole.env_steps == halves.env_steps
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(halves.tensors[name], tensor, atol=1e-6, rtol=1e-6, msg=name)
    assert whole.meta["journal"]["window"] == halves.meta["journal"]["window"], "episodes come in the same order"
    assert summary(tmp_path / "two")["ranks"]["size"] == 2
    # A pair with actors in processes, that was interrupted, goes on with the same bits.
    fault = {"fault_plan": "learner@update=20:sigterm", "group": {"crew": "processes"}}
    assert rookery.train("ppo", out=parts, **pair, **fault).exit_code == 75
    first = newest(tmp_path / "parts")
    assert first.meta["exact"] and 5 <= first.meta["learner"]["version"] < whole.meta["learner"]["version"]
    rookery.resume(parts)
    rest = newest(tmp_path / "parts")
    assert rest.env_steps == halves.env_steps and rest.meta["journal"]["window"] == halves.meta["journal"]["window"]
    for name, tensor in halves.tensors.items():
        assert torch.equal(rest.tensors[name], tensor), name


def started(out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    """A long run, with its first checkpoint written."""
    flags = ("--env-steps", "10000000", "--checkpoint.every", "2000", *flags)
    run = subprocess.Popen(command(out, *flags, launcher=launcher), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + 90
    while not list(out.glob("checkpoints/step-*")):
        assert run.poll() is None and time.monotonic() < until, run.stderr.read().decode()
        time.sleep(0.05)
    return run


def ranks_of(run: subprocess.Popen) -> dict[int, int]:
    """Processes of the ranks, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            name = next((word for word in words if word.startswith("rank ")), "")
            if name and parent == run.pid:
                found[int(name[5:])] = int(entry.name)
    return found


def test_a_rank_that_is_killed_costs_what_was_learnt_since_the_last_checkpoint(tmp_path):
    """Both ranks in turn; then SIGTERM: every rank at the same update, exit 75, and the run can be resumed."""
    run = started(tmp_path / "run", *RANKS)
    try:
        for victim in (1, 0):
            before = ranks_of(run)
            assert set(before) == {0, 1}
            os.kill(before[victim], signal.SIGKILL)
            until = time.monotonic() + 60
            while set(now := ranks_of(run)) != {0, 1} or set(now.values()) & set(before.values()):
                assert run.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            steps = max(checkpoint.all_steps(tmp_path / "run" / "checkpoints"))
            while max(checkpoint.all_steps(tmp_path / "run" / "checkpoints")) <= steps:
                assert run.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        left = set(ranks_of(run).values())
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 75
    finally:
        run.kill()
    told = run.stderr.read().decode()
    assert "rank 1 was killed by SIGKILL" in told and "rank 0 was killed by SIGKILL" in told
    ledger = summary(tmp_path / "run")["ledger"]
    assert ledger["collected"] == ledger["trained"], "no step is counted twice, none is lost"
    assert not any(Path(f"/proc/{pid}").exists() for pid in left), "no orphans"
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints")[0]
    assert saved.meta["exact"] and len(saved.meta["sequences"]) == 2
    assert resumed(tmp_path / "run", "--env-steps", str(saved.env_steps + 300)).env_steps >= saved.env_steps + 300


def test_torchrun_starts_the_ranks_and_starts_them_again(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone")
    run = started(tmp_path / "run", "--topology", "allreduce", launcher=launcher)
    try:
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        steps, until = max(checkpoint.all_steps(tmp_path / "run" / "checkpoints")), time.monotonic() + 90
        while max(checkpoint.all_steps(tmp_path / "run" / "checkpoints")) <= steps + 4000:
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    finally:
        run.kill()
    assert summary(tmp_path / "run")["exit_reason"] == "requeue"


def test_the_error_of_a_rank_ends_the_run_with_its_own_message(tmp_path):
    fault = ["--fault-plan", "actor[1]@env_step=70:raise:always", "--supervisor.restarts", "0"]
    done = subprocess.run(
        command(tmp_path / "run", *RANKS, "--env-steps", "2000", *fault), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 3, done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "rank 1" in first and "fault plan" in first


def test_ranks_with_another_command_are_refused_and_the_field_is_named(tmp_path):
    """What a scheduler starts with different commands ends on all ranks, before a folder is made."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = [
        subprocess.Popen(
            command(tmp_path / "run", "--topology", "allreduce", "--algo.clip", clip),
            env=os.environ | places | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank, clip in enumerate(("0.2", "0.3"))
    ]  # fmt: skip
    told = [run.communicate(timeout=90)[1] for run in runs]
    assert [run.returncode for run in runs] == [2, 2], told
    assert all("config.algo.clip is 0.3 on rank 1, and 0.2 on rank 0" in text for text in told)
    assert not (tmp_path / "run").exists()


def test_a_store_that_cannot_be_reached_is_named_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = Place(1, 2, "127.0.0.1", port)
    assert GroupConfig().join <= 30
    with pytest.raises(LearnerError, match=rf"rank 1 of 2 could not reach .* at 127.0.0.1:{port} within 1 s"):
        Collective(place, timeout=5.0, join=1.0)


def test_a_rank_that_never_comes_is_named():
    store = open_store(2)
    place = Place(1, 2, "127.0.0.1", store.port, kept=True)
    with pytest.raises(LearnerError, match=r"rank 1 of 2: rank 0 is not at 127.0.0.1:\d+ after 0.3 s"):
        Collective(place, timeout=5.0, join=0.3)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_other_environments_are_refused_on_all_of_them(size):
    group = ranks(size)
    spaces = [{"obs": {"shape": [4], "dtype": "float32"}, "actions": 2} for _ in range(size)]
    spaces[-1]["obs"]["shape"] = [5]
    results = together(group, lambda rank: check_same(group[rank], "environment", spaces[rank]))
    assert all(isinstance(error, UsageError) for error in results)
    assert f"obs.shape is [5] on rank {size - 1}, and [4] on rank 0" in str(results[0])
    assert agreed(together(group, lambda rank: check_same(group[rank], "environment", spaces[0]))) == [None] * size


def test_more_ranks_than_cores_are_told_of(monkeypatch):
    monkeypatch.setattr("rookery.run.notes.available_cores", lambda: 2)
    config = rookery.configure("ddppo", "CartPole-v1", ranks=3)
    assert rank_notes(config) == ["3 ranks share 2 cores: more ranks than cores do not make a run faster"]
    assert rank_notes(replace(config, ranks=2)) == []


def test_variables_of_torchrun_that_are_half_set_are_refused():
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    place = place_of(whole)
    assert place is not None and (place.rank, place.size) == (1, 2)
    assert place_of({}) is None and place_of({"MASTER_ADDR": "x"}) is None
    for missing in whole:
        if missing in ("RANK", "WORLD_SIZE"):
            other = {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK"}[missing]
            with pytest.raises(UsageError, match=missing):
                place_of({name: value for name, value in whole.items() if name != missing} | {other: whole[other]})
        else:
            with pytest.raises(UsageError, match=missing):
                place_of({name: value for name, value in whole.items() if name != missing})
    for name, bad in (("RANK", "2"), ("RANK", "one"), ("WORLD_SIZE", "0")):
        with pytest.raises(UsageError, match=r"RANK|WORLD_SIZE"):
            place_of(whole | {name: bad})
