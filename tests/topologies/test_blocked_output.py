"""Where the output of a run leads decides neither whether the run goes on nor its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.cli.main import main
from rookery.metrics import sink as sink_module
from rookery.metrics.sink import read_records
from rookery.storage import checkpoint

DEADLINE = 120
TINY = ["--algo.unroll", "16", "--algo.epochs", "1", "--algo.minibatches", "1", "--actors", "1",
        "--envs-per-actor", "2", "--log-every", "0"]  # fmt: skip
TERM = ["--env-steps", "100000000", "--fault-plan", "learner@update=40:sigterm"]
GRACE = 30.0  # seconds


def words(folder: Path, more: list[str]) -> list[str]:
    return ["train", "ppo", "--env", "CartPole-v1", *TINY, *more, "--out", str(folder)]


def full_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 1024)
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write


@contextlib.contextmanager
def descriptor(kind: str) -> Iterator[int]:
    """One that takes nothing, and never will."""
    if kind == "full device":
        other, fd = -1, os.open("/dev/full", os.O_WRONLY)
    elif kind == "stopped terminal":
        other, fd = os.openpty()
        tty.setraw(fd)
        termios.tcflow(fd, termios.TCOOFF)  # Ctrl-S
    elif kind == "unread pipe":
        other, fd = full_pipe()
    else:
        other, fd = os.pipe()
        os.close(other)
        other = -1
    yield fd
    if kind == "stopped terminal":
        termios.tcflow(fd, termios.TCOON)
    if other >= 0:
        os.close(other)  # whoever is stuck in a write gets an error now
    os.close(fd)


@pytest.mark.filterwarnings("ignore:the panel is off")
@pytest.mark.parametrize("kind, code", [
    ("unread pipe", 75), ("stopped terminal", 0), ("left pipe", 75), ("full device", 75),
])  # fmt: skip
def test_a_run_ends_with_its_own_code_whatever_its_output_is(tmp_path, monkeypatch, kind, code):
    more = TERM if code else ["--env-steps", "1500"]
    with descriptor(kind) as fd, open(os.dup(fd), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(words(tmp_path / "run", more)) == code
        monkeypatch.undo()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == {0: "env_steps", 75: "requeue"}[code] and summary["records_lost"] == {}
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps == summary["env_steps"]
    assert read_records(tmp_path / "run" / "metrics.jsonl")


def test_a_process_whose_output_nobody_reads_hears_the_first_signal(tmp_path):
    """Both streams are one full pipe; the panel is on, and has tried to draw."""
    read, write = full_pipe()
    out = tmp_path / "run"
    command = [sys.executable, "-m", "rookery", *words(out, ["--env-steps", "100000000"])]
    with subprocess.Popen(command, stdout=write, stderr=write) as process:
        try:
            pause, left = threading.Event(), DEADLINE
            while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_bytes().count(b"\n") > 50):
                assert left > 0 and process.poll() is None, "the run does not go on"
                pause.wait(0.02)
                left -= 0.02
            process.send_signal(signal.SIGTERM)
            assert process.wait(GRACE) == 75
        finally:
            process.kill()
    os.close(read)
    os.close(write)
    assert json.loads((out / "summary.json").read_text())["exit_reason"] == "requeue"
    assert checkpoint.newest(out / "checkpoints")[0].env_steps > 0


def test_a_process_with_closed_streams_writes_its_run_and_nothing_into_it(tmp_path):
    command = [sys.executable, "-m", "rookery", *words(tmp_path / "run", ["--env-steps", "500"])]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], timeout=DEADLINE)
    assert done.returncode == 0
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 500
    assert all(record["kind"] for record in read_records(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize("more, code", [(["--env-steps", "1500"], 0), (TERM, 75)])
def test_a_disk_that_blocks_costs_records_and_they_are_counted(tmp_path, monkeypatch, capsys, more, code):
    go, real = threading.Event(), os.write

    def write(handle: int, data: bytes) -> int:
        if b'"kind":"train"' in bytes(data):
            go.wait()
        return real(handle, data)

    monkeypatch.setattr(sink_module.os, "write", write)
    grace = ["--supervisor.grace", "5", "--quiet"]
    with pytest.warns(UserWarning, match=r"metrics.jsonl: .* records were not written \(blocked\)"):
        monkeypatch.setattr("rookery.run.run.CLOSING", 0.5)
        assert main(words(tmp_path / "run", [*more, *grace])) == code
    go.set()
    lost = json.loads((tmp_path / "run" / "summary.json").read_text())["records_lost"]["metrics.jsonl"]
    assert lost > 30
    assert f"metrics.jsonl: {lost:,} records" in capsys.readouterr().out
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps > 500
