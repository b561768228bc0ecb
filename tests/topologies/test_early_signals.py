"""Signals before a run has begun: exit 75 and a folder that can be resumed, at whatever moment they come."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rookery
from rookery.cli import train as cli_train
from rookery.cli.main import main
from rookery.envs.scripted import Counter
from rookery.processes.signals import CODES, Signals, Stopped
from rookery.storage import checkpoint

DEADLINE = 120
TINY = ["--env-steps", "64", "--algo.unroll", "8", "--algo.epochs", "1", "--algo.minibatches", "1", "--quiet",
        "--actors", "1", "--envs-per-actor", "1"]  # fmt: skip


def signalling(marker: str, where: str, number: int, then: str = "goes on", group: bool = False) -> Counter:
    """An environment that signals the run when it is made, in the probe, in a worker or in the run itself; once."""
    main_module = sys.modules["__main__"].__spec__
    here = {"rookery.crews.answer": "probe", "rookery.crews.actor_main": "worker"}
    place = here.get(main_module.name if main_module else "", "run")
    if place == where and not Path(marker).exists():
        Path(marker).touch()
        run = os.getpid() if place == "run" else os.getppid()
        os.killpg(os.getpgid(run), number) if group else os.kill(run, number)
        if then == "hangs":
            select.select([], [], [])
    return Counter()


def words(tmp_path: Path, where: str, number: int = signal.SIGTERM, **more: Any) -> list[str]:
    kwargs = {"marker": str(tmp_path / "marker"), "where": where, "number": int(number), **more}
    given = ["train", "ppo", "--env", "test_early_signals:signalling", "--env-kwargs", json.dumps(kwargs), *TINY]
    given += [] if where == "probe" else ["--preset", "vector"]  # without a preset the environment is probed
    given += ["--topology", "local" if where == "worker" else "serial"]
    return [*given, "--out", str(tmp_path / "run")]


def assert_resumable(folder: Path) -> None:
    """It has begun nothing, and a resume takes it to its end."""
    assert (folder / "config.json").exists()
    assert not (folder / "checkpoints").exists() and not (folder / "summary.json").exists()
    run = rookery.resume(folder, trust=("test_early_signals",), topology="serial")
    assert run.exit_code == 0 and checkpoint.newest(folder / "checkpoints")[0].env_steps >= 64


def test_a_request_while_environments_are_made_leaves_a_run_to_resume(tmp_path, capsys):
    assert main(words(tmp_path, "run", signal.SIGHUP)) == 75
    assert (tmp_path / "marker").exists()
    said = capsys.readouterr().err
    assert "asked to stop before the run had begun" in said and f"rookery resume {tmp_path / 'run'}" in said
    assert_resumable(tmp_path / "run")


@pytest.mark.parametrize("where", ["run", "worker"])
def test_nobody_waits_for_an_environment_that_takes_long_to_make(tmp_path, where):
    assert main([*words(tmp_path, where, then="hangs"), "--supervisor.grace", "0.3"]) == 75
    assert_resumable(tmp_path / "run")


def test_a_probe_that_takes_long_is_ended_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_train, "PROBE", 0.2)
    assert main(words(tmp_path, "probe", then="hangs")) == 75
    assert "nothing was written: run the command again" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["probe", "run"])
def test_an_interrupt_is_130_and_takes_the_folder_away(tmp_path, where):
    assert main(words(tmp_path, where, signal.SIGINT, then="hangs")) == 130
    assert not (tmp_path / "run").exists()


def test_a_resume_that_is_stopped_early_changes_nothing(tmp_path):
    (tmp_path / "marker").touch()  # not yet
    assert main(words(tmp_path, "run")) == 0
    before = (tmp_path / "run" / "summary.json").read_bytes()
    (tmp_path / "marker").unlink()
    again = ["resume", str(tmp_path / "run"), "--env-steps", "128", "--trust", "test_early_signals"]
    assert main(again) == 75
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    assert main(again) == 0
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 128


def test_in_python_it_is_an_exception_with_the_code(tmp_path):
    kwargs = {"marker": str(tmp_path / "marker"), "where": "run", "number": int(signal.SIGTERM)}
    with pytest.raises(Stopped) as caught:
        rookery.train(
            "ppo", env="test_early_signals:signalling", env_kwargs=kwargs, preset="vector", env_steps=64,
            out=str(tmp_path / "run"), quiet=True,
        )  # fmt: skip
    assert caught.value.exit_code == 75 and (tmp_path / "run" / "config.json").exists()


# Processes of their own: from the first line of the command on


def caught_signals(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)


def wait_for(condition, what: str) -> None:
    pause, left = threading.Event(), DEADLINE
    while not condition():
        assert left > 0, f"waited in vain for {what}"
        pause.wait(0.01)
        left -= 0.01


@pytest.mark.parametrize("moment", ["handlers", "probe"])
def test_a_signal_in_the_first_second_leaves_a_run_to_resume(tmp_path, moment):
    """`timeout` and batch systems signal the whole group: the environment's probe must not die of that."""
    command = words(tmp_path, "probe" if moment == "probe" else "nowhere", group=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rookery", *command], env=environment, process_group=0, stderr=subprocess.PIPE, text=True
    )
    try:
        if moment == "handlers":
            bit = 1 << (signal.SIGTERM - 1)
            wait_for(lambda: caught_signals(process.pid) & bit, "the handlers")
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 75, process.stderr.read()
        assert "asked to stop before the run had begun" in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    assert_resumable(tmp_path / "run")


# What can be interrupted, and when


def test_interruptible_work_ends_at_once_for_ctrl_c_and_later_for_the_others():
    for number, patience in ((signal.SIGINT, 3600.0), (signal.SIGTERM, 0.05), (signal.SIGHUP, 0.0)):
        with Signals() as signals, pytest.raises(Stopped) as caught, signals.interruptible(patience):
            os.kill(os.getpid(), number)
            select.select([], [], [], DEADLINE)
        assert caught.value.exit_code == CODES[number]


def test_a_request_from_before_counts_in_interruptible_work():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), signals.interruptible(0.05):
            select.select([], [], [], DEADLINE)


def test_interruptible_work_that_is_quick_is_finished_and_nothing_comes_later():
    old, done = signal.getsignal(signal.SIGALRM), []
    with Signals() as signals:
        with signals.interruptible(3600.0):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(True)
        assert done and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) == old
        with pytest.raises(Stopped):
            signals.check()


def test_the_alarm_is_the_environments_own_as_long_as_nobody_wants_to_stop():
    rang, old = [], signal.getsignal(signal.SIGALRM)
    try:
        with Signals() as signals, signals.interruptible(3600.0):
            signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
            signal.setitimer(signal.ITIMER_REAL, 3600.0)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000.0
        signal.raise_signal(signal.SIGALRM)
        assert rang == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)


def test_an_environment_that_catches_everything_is_interrupted_again():
    caught = []
    with Signals() as signals, pytest.raises(Stopped), signals.interruptible(0.01):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            try:
                select.select([], [], [], DEADLINE)
            except BaseException as error:
                if caught:
                    raise
                caught.append(error)
    assert len(caught) == 1 and not isinstance(caught[0], Exception)


def test_in_another_thread_nothing_is_interrupted():
    done = []

    def work() -> None:
        with Signals() as signals, signals.interruptible(0.0):
            done.append(signals.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE)
    assert done == [None]
