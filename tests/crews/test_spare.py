"""The spare process: ready some seconds after the workers, takes a dead one's place, and its log."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support_crew import GORILA, LONG, MODE, PPO, balances, kill

import rookery
from rookery.core.errors import RookeryError
from rookery.core.types import Delivery
from rookery.crews import pool
from rookery.crews.pool import ProcessLauncher, WorkerPool
from rookery.crews.process import ProcessCrew
from rookery.processes import spare
from rookery.processes.signals import Signals
from rookery.processes.spare import AFTER, TRIES, Spare
from rookery.processes.worker import Worker
from rookery.topologies import local
from rookery.topologies.loop import Loop


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
        workers = WorkerPool(
            config, "unrolls", tmp_path / "logs", signals, ProcessLauncher("no_such_module", dict),
            up=lambda index: None, ended=lambda index: 0, where=lambda index: "",
        )  # fmt: skip
        workers.spare.expect()
        workers.poll(0.0)
        assert (workers.spare.worker is not None) == wanted
        workers.stop()


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


class Watch:
    """Kills actor 1 as soon as there is a spare process, and ends the run when its successor has delivered thrice."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, loops: list[Loop], before: Callable[[int], None] = lambda _: None
    ):
        self.spares: list[int] = []  # the process that was to take over
        self.successors: list[int] = []  # the process that did, for each of its deliveries
        arrived = ProcessCrew.arrived

        def watched(crew: ProcessCrew, patience: float) -> Iterator[Delivery]:
            if not self.spares and loops[0].job.journal.env_steps > 100:
                crew.pool._looked = 0.0  # have it start a spare process now, if there is none
                if crew.pool.spare.worker is not None:
                    self.spares.append(crew.pool.spare.worker.pid)
                    before(self.spares[0])
                    kill(crew, 1)
            for delivery in arrived(crew, patience):
                place = crew.pool.places[1]
                if place.incarnation and delivery.actor == 1:
                    self.successors.append(place.worker.pid)
                yield delivery

        monkeypatch.setattr(spare, "AFTER", 0.0)
        monkeypatch.setattr(ProcessCrew, "arrived", watched)
        monkeypatch.setattr(
            "rookery.metrics.journal.Journal.finished", lambda _: "env_steps" if len(self.successors) > 2 else None
        )


RUNS = [
    ("ppo", PPO | {"topology": "local", "preset": "vector"}),
    pytest.param("gorila", GORILA, marks=pytest.mark.attack),
]


@pytest.mark.parametrize(("recipe", "fields"), RUNS)
def test_a_killed_worker_is_replaced_by_the_spare_process(tmp_path, monkeypatch, loops, recipe, fields):
    monkeypatch.setattr(pool, "ASSIGNED", LONG)  # it may still load its libraries
    watch = Watch(monkeypatch, loops)
    run = rookery.train(recipe, env="test_spare:talking", out=str(tmp_path / "run"), env_steps=10**9, **fields)
    assert run.summary["restarts"] == 1
    assert set(watch.successors) == set(watch.spares), "the spare process has done the work"
    assert balances(run.summary["ledger"])
    assert named(tmp_path) == []
    assert f"hello from {watch.spares[0]}" in (run.path / "logs" / "actor-1.log").read_text()


@pytest.mark.parametrize("how", ["stopped", pytest.param("hangs", marks=pytest.mark.attack)])
def test_a_spare_process_that_does_not_take_its_work_is_replaced_by_a_new_process(tmp_path, monkeypatch, loops, how):
    """It is not counted as a failure, and gets less time than a worker has to start.

    The next spare process, which is there by then, may be no better: it is not tried.
    """
    assign, assigned = Worker.assign, []

    def assign_once(worker: Worker, *args: Any) -> bool:
        assigned.append(worker.pid)
        assert len(assigned) == 1
        return assign(worker, *args)

    def stop(pid: int) -> None:
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)

    monkeypatch.setattr(Worker, "assign", assign_once)
    monkeypatch.setattr(pool, "ASSIGNED", 2 * pool.LOOK)
    if how == "hangs":
        monkeypatch.setenv(MODE, how)
        monkeypatch.setattr(local, "ProcessCrew", partial(ProcessCrew, module="support_crew"))
    watch = Watch(monkeypatch, loops, stop)
    recipe, fields = RUNS[0]
    run = rookery.train(recipe, env="test_spare:talking", out=str(tmp_path / "run"), env_steps=10**9, **fields)
    assert run.summary["restarts"] == 1
    assert len(set(watch.successors)) == 1 and watch.spares[0] not in watch.successors
    assert balances(run.summary["ledger"])
    assert named(tmp_path) == []
    assert f"hello from {watch.spares[0]}" not in (run.path / "logs" / "actor-1.log").read_text()
