"""The spare process: ready some seconds after the workers, takes a dead one's place, and its log."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from rookery.crews.staff import Staff

import rookery
from rookery.core.errors import RookeryError
from rookery.crews import staff
from rookery.crews.process import Crew
from rookery.processes import spare
from rookery.processes.signals import Signals
from rookery.processes.spare import AFTER, TRIES, Spare

LONG = 120.0  # seconds: never reached unless something is broken
PPO = {"quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "actors": 2, "envs_per_actor": 2}
REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0}
GORILA = PPO | {"algo": {"replay": REPLAY}, "topology": "async_grads"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Process:
    """What `Spare` needs of a worker."""

    def __init__(self) -> None:
        self.dead, self.closed = False, False
        self.channel = self

    def gone(self) -> bool:
        return self.dead

    def close(self) -> None:
        self.closed = True


def make(clock: Clock, started: list[Process]) -> Spare:
    def start() -> Any:
        started.append(Process())
        return started[-1]

    return Spare(start, clock)


def test_it_is_started_once_some_seconds_after_the_workers_and_again_after_its_use():
    clock, started = Clock(), []
    spare = make(clock, started)
    spare.look()
    assert spare.take() is None and not started, "the workers are not up yet"
    spare.expect()
    spare.look()
    assert not started
    clock.now += AFTER
    spare.look()
    spare.look()
    assert len(started) == 1 and spare.take() is started[0] and spare.worker is None
    spare.look()
    assert len(started) == 1, "its use takes the machine some seconds"
    clock.now += AFTER
    spare.look()
    assert len(started) == 2


def test_one_that_dies_is_replaced_a_few_times_and_never_handed_out():
    clock, started = Clock(), []
    spare = make(clock, started)
    spare.expect()
    for _ in range(5 * TRIES):
        clock.now += AFTER
        spare.look()
        started[-1].dead = True
    assert len(started) == TRIES and spare.take() is None
    assert all(process.closed for process in started)


def test_one_that_cannot_be_started_is_not_asked_for_for_ever():
    clock, asked = Clock(), []

    def start() -> Any:
        asked.append(1)
        raise RookeryError("cannot start spare")

    spare = Spare(start, clock)
    spare.expect()
    for _ in range(5 * TRIES):
        clock.now += AFTER
        spare.look()
    assert len(asked) == TRIES


@pytest.mark.parametrize("wanted", [True, False])
def test_it_can_be_switched_off(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(spare, "AFTER", 0.0)
    config = rookery.configure("ppo", "CartPole-v1", supervisor={"spare": wanted})
    with Signals() as signals:
        people = Staff(config, tmp_path / "logs", signals, "no_such_module", dict, lambda index: "")
        people.spare.expect()
        people.look()
        assert (people.spare.worker is not None) == wanted
        people.stop()


def named(folder: Path) -> list[int]:
    """Processes of a run that call themselves spare."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                if "spare" in words and str(folder) in os.readlink(f"/proc/{name}/fd/1"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def talking() -> gymnasium.Env:
    print("hello from", os.getpid(), flush=True)
    return gymnasium.make("CartPole-v1")


def kill_when_there(crew: Crew, done: list[int]) -> None:
    """Kill actor 1 once the spare process is there."""
    worker = crew.staff.spare.worker
    if not done and worker is not None:
        done.append(worker.pid)
        fd = os.pidfd_open(crew.staff.workers[1].pid)
        os.kill(crew.staff.workers[1].pid, signal.SIGKILL)
        assert select.select([fd], [], [], LONG)[0]
        os.close(fd)


@pytest.mark.parametrize(("recipe", "fields"), [("ppo", PPO | {"topology": "local"}), ("gorila", GORILA)])
def test_a_killed_worker_is_replaced_by_the_spare_process(tmp_path, monkeypatch, recipe, fields):
    monkeypatch.setattr(spare, "AFTER", 0.0)
    monkeypatch.setattr(staff, "LOOK", 0.0)
    arrived, killed, seen, successor = Crew.arrived, [], [], {}

    def watched(crew: Crew, timeout: float, again: bool = True):
        if crew._job.journal.env_steps > 100:
            kill_when_there(crew, killed)
        for actor, slot, report in arrived(crew, timeout, again):
            if killed and actor == 1 and crew.staff.incarnation[1] == 1:
                successor["pid"] = crew.staff.workers[1].pid
                seen.append(crew._job.journal.env_steps)
            yield actor, slot, report

    monkeypatch.setattr(Crew, "arrived", watched)
    monkeypatch.setattr(
        "rookery.metrics.journal.Journal.finished", lambda journal: "env_steps" if len(seen) > 2 else None
    )
    fields = fields | {"preset": "vector"} if recipe == "ppo" else fields
    run = rookery.train(recipe, env="test_spare:talking", out=str(tmp_path / "run"), env_steps=10**9, **fields)
    assert run.summary["restarts"] == 1 and successor["pid"] == killed[0], "the spare process has done the work"
    ledger = run.summary["ledger"]
    dropped, kept = sum(ledger["dropped"].values()), ledger.get("evicted", 0) + ledger["in_flight"]
    assert ledger["collected"] == ledger["trained"] + dropped + kept
    assert named(tmp_path) == []
    assert f"hello from {killed[0]}" in (run.path / "logs" / "actor-1.log").read_text()
