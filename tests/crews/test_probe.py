"""The probe: an answer, whatever the environment leaves running, prints, or does to its process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support_orphans import WAYS, Breeding, clear, guards, living

from rookery.core.errors import EnvError
from rookery.crews.probe import ask, probe
from rookery.envs.scripted import Counter
from rookery.processes import worker_log
from rookery.processes.signals import Signals, Stopped

LONG = 60.0  # seconds: never reached unless something is broken


def keeps_stdout(folder: str) -> gymnasium.Env:
    """A child that inherits standard output and error, and stays."""
    subprocess.Popen(["sleep", "3600"], cwd=folder, start_new_session=True, stdout=1, stderr=2)
    return Counter()


def everything(folder: str) -> gymnasium.Env:
    return Breeding(folder, list(WAYS))


def chatty(megabytes: int) -> gymnasium.Env:
    for _ in range(megabytes):
        print("x" * (1 << 20))
    print("the last word", file=sys.stderr)
    os._exit(7)


def stuck() -> gymnasium.Env:
    print("about to hang")
    select.select([], [], [])
    return Counter()


def stays_in_threads() -> gymnasium.Env:
    threading.Thread(target=select.select, args=([], [], [])).start()
    return Counter()


def prints_an_answer() -> gymnasium.Env:
    os.write(1, b'rookery-answer {"value": 1}\n{"op": "answer", "value": 1}\n')
    return Counter()


@pytest.fixture
def nest(tmp_path):
    yield tmp_path
    left, guarding = living(tmp_path), guards(os.getpid())
    clear(tmp_path)
    assert left == [] and guarding == []


def spec_of(name: str, deadline: float = LONG, **kwargs: Any) -> Any:
    return probe(f"test_probe:{name}", kwargs, deadline)


@pytest.mark.parametrize("name", ["keeps_stdout", "everything"])
def test_what_the_environment_started_neither_holds_up_the_answer_nor_stays(nest, name):
    assert spec_of(name, folder=str(nest)).obs is not None


def test_check_env_ends_what_the_environment_started(nest):
    question = {"what": "check", "env": "test_probe:everything", "env_kwargs": {"folder": str(nest)}, "steps": 20}
    assert ask(question, LONG)["errors"] == []


def test_an_answer_cannot_be_printed():
    assert spec_of("prints_an_answer").obs is not None


def test_threads_that_stay_do_not_hold_up_the_answer():
    assert spec_of("stays_in_threads").obs is not None


def test_the_end_of_its_output_is_told_and_its_size_is_bounded(monkeypatch):
    lengths, shorten = [], worker_log.WorkerLog.shorten

    def seen(log: worker_log.WorkerLog) -> None:
        shorten(log)
        lengths.append(log.path.stat().st_size)

    monkeypatch.setattr(worker_log.WorkerLog, "shorten", seen)
    with pytest.raises(EnvError, match=r"ended its process \(exit 7\)") as caught:
        spec_of("chatty", megabytes=40)
    assert str(caught.value).endswith("the last word") and len(str(caught.value)) < 1 << 17


def test_one_that_hangs_is_told_with_its_stack():
    with pytest.raises(EnvError, match="gave no answer within 3 s") as caught:
        spec_of("stuck", deadline=3.0)
    assert "in stuck" in str(caught.value)


def test_a_request_to_shut_down_ends_it():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped) as caught:
            probe("test_probe:stuck", {}, LONG, signals)
    assert caught.value.exit_code == 75


def test_no_file_of_it_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec_of("prints_an_answer")
    assert list(Path(tmp_path).iterdir()) == []
