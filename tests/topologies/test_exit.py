"""How a run ends when somebody wants it to: exit codes, a checkpoint to go on from, and nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.storage import checkpoint

COMMAND = [sys.executable, "-m", "rookery", "train", "ppo", "--env", "CartPole-v1", "--env-steps", "100000000",
           "--algo.unroll", "16", "--algo.epochs", "1", "--algo.minibatches", "1", "--quiet",
           "--topology", "local", "--actors", "1", "--envs-per-actor", "2"]  # fmt: skip
DEADLINE = 120


def actors_of(folder: Path) -> list[int]:
    """Living processes that were started for this run: the folder is the log's place, and so among their open files."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(folder) in os.readlink(fd):
                found.append(int(fd.parts[2]))
        except OSError:
            continue
    return found


@contextlib.contextmanager
def started(command: list, **options) -> Iterator[subprocess.Popen]:
    """A process that does not outlive a test that fails."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition, what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.mark.parametrize(("name", "code", "reason"), [("sigint", 130, "interrupted"), ("sigterm", 75, "requeue")])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, name, code, reason):
    out = tmp_path / "run"
    plan = ["--fault-plan", f"learner@update=5:{name}"]
    done = subprocess.run([*COMMAND, *plan, "--out", out], timeout=DEADLINE, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    saved, skipped = checkpoint.newest(out / "checkpoints")
    assert summary["exit_reason"] == reason and not skipped
    assert saved.env_steps == summary["env_steps"] > 0
    assert saved.meta["learner"]["updates"] == summary["updates"] >= 5
    assert actors_of(out) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_while_libraries_load_is_heard(tmp_path, number, code):
    out = tmp_path / "run"
    with started([*COMMAND, "--out", out], stderr=subprocess.PIPE, text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch_cpu" in maps.read_text(), "torch to load")
        process.send_signal(number)
        assert process.wait(DEADLINE) == code
        assert process.stderr.read().startswith("error: asked to stop before the run had begun: no step was taken\n")
    assert [path.name for path in out.glob("config.json")] == (["config.json"] if code == 75 else [])
    assert code == 75 or not out.exists()


def test_actors_die_with_a_learner_that_is_killed(tmp_path):
    out = tmp_path / "run"
    with started([*COMMAND, "--out", out], stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and actors_of(out), "the run to start")
        process.send_signal(signal.SIGKILL)
        assert process.wait(DEADLINE) == -signal.SIGKILL
    wait_for(lambda: actors_of(out) == [], "the actors to die")


def test_a_second_signal_ends_the_run_at_once_and_leaves_nobody(tmp_path):
    out = tmp_path / "run"
    # The environment hangs, so that the first signal cannot be honoured before the deadline.
    hang = ["--env", "rookery/Faulty-v0", "--preset", "vector", "--env-kwargs", '{"fault": "hang", "at_step": 3}']
    with started([*COMMAND, *hang, "--out", out], stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: (out / "spec.json").exists() and actors_of(out), "the run to start")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) in (130, 75)
    wait_for(lambda: actors_of(out) == [], "the actors to die")


def test_an_environment_that_breaks_gives_exit_code_3_and_its_own_words_first(tmp_path):
    fault = ["--env", "rookery/Faulty-v0", "--preset", "vector", "--env-kwargs", '{"fault": "raise_step"}']
    command = [*COMMAND, *fault, "--supervisor.restarts", "0", "--out", tmp_path / "run"]
    done = subprocess.run(command, timeout=DEADLINE, capture_output=True, text=True)
    assert done.returncode == 3
    assert "rookery/Faulty-v0 raised in step" in done.stderr.strip().splitlines()[0]
    assert "Traceback" not in done.stderr
