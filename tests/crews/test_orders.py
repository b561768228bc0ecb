"""What every crew promises of its orders, driven by hand: delivered once, in sequence, and room is never lost."""

from __future__ import annotations

import os
import random
import select
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support_crew import LONG, idle, kill, until

import rookery
from rookery.algorithms.registry import build_algorithm
from rookery.core.config import RunConfig
from rookery.core.errors import EnvError
from rookery.core.types import Delivery, Failure
from rookery.crews.crew import Setup
from rookery.crews.inline import InlineCrew
from rookery.crews.pool import State
from rookery.crews.process import ProcessCrew
from rookery.processes.faults import InjectedFault
from rookery.processes.signals import Signals
from rookery.processes.threads import Threads
from rookery.processes.worker import Restarts
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, handover_shapes


def configure(env: str = "rookery/Counter-v0", **fields: Any) -> RunConfig:
    settings = {
        "preset": "vector", "actors": 2, "envs_per_actor": 1, "env_kwargs": {"lengths": [1000]},
        "algo": {"unroll": 4, "epochs": 1, "minibatches": 1}, "supervisor": {"spare": False},
    }  # fmt: skip
    return rookery.configure("ppo", env, **settings | fields)


class Hand:
    """Orders, takes and releases; checks what every delivery must be."""

    def __init__(self, crew: InlineCrew | ProcessCrew, config: RunConfig, ahead: int):
        self.crew, self.ahead, self.actors = crew, ahead, config.actors
        self.failures: list[Failure] = []
        self.held: list[tuple[Delivery, np.ndarray]] = []  # not released, with a copy of what it held when it came
        self.orders = [0] * config.actors  # given, and neither delivered nor lost
        self.delivered = [0] * config.actors
        self.came: list[tuple[int, int]] = []  # actor, sequence
        self.failed_after: list[int] = []  # how many had come when a failure was told
        algorithm = build_algorithm(config, crew.spec)
        self.learner = Learner(algorithm, config.seed)
        shapes = handover_shapes(
            crew.spec, algorithm.plan(), config.envs_per_actor, algorithm.initial_state(self.learner.nets, 1)
        )
        self.setup = Setup(
            algorithm, shapes, self.learner.published.size, ahead, [0] * config.actors, [], self._failed, print
        )

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.failed_after.append(len(self.came))
        if failure.replaced:  # what it was told to fill, and has not delivered, nobody waits for
            self.orders[failure.actor] = 0

    def order(self) -> None:
        actor = self.crew.openings.popleft()
        self.orders[actor] += 1
        self.crew.order(actor, 0.0)

    def take(self, patience: float = 0.05) -> None:
        for delivery in self.crew.arrived(patience):
            actor = delivery.actor
            assert delivery.sequence == self.delivered[actor]
            assert self.orders[actor] > 0, f"actor {actor} was not told to"
            self.orders[actor] -= 1
            self.delivered[actor] += 1
            self.came.append((actor, delivery.sequence))
            self.held.append((delivery, delivery.arrays["reward"].copy()))

    def release(self, index: int = 0) -> None:
        delivery, came = self.held.pop(index)
        assert np.array_equal(delivery.arrays["reward"], came), "its memory was given to somebody else"
        delivery.release()

    def up(self) -> bool:
        return not isinstance(self.crew, ProcessCrew) or all(p.state is State.UP for p in self.crew.pool.places)

    def await_up(self, failures: int) -> None:
        """Until so many failures are known, and everybody is up again."""

        def look() -> bool:
            self.take()
            return len(self.failures) >= failures and self.up()

        until(look, f"{failures} failures, and replacements")

    def check_room(self) -> None:
        assert self.crew.ordered == sum(self.orders)
        assert len(self.crew.openings) + self.crew.ordered + len(self.held) == self.actors * self.ahead

    def finish(self) -> None:
        """Everything that was ordered comes; then every actor has all its room."""

        def look() -> bool:
            self.take()
            return self.up() and not self.crew.ordered

        until(look, "all orders")
        while self.held:
            self.release()
        assert Counter(self.crew.openings) == dict.fromkeys(range(self.actors), self.ahead)
        assert self.orders == [0] * self.actors and not self.crew.busy
        assert self.delivered == self.crew.sequences


@contextmanager
def hand(config: RunConfig, folder: Path, ahead: int, process: bool, in_order: bool = False) -> Iterator[Hand]:
    with Signals() as signals:
        crew = ProcessCrew(config, folder, signals) if process else InlineCrew(config, signals)
        with crew:
            driver = Hand(crew, config, ahead)
            if isinstance(crew, ProcessCrew):
                crew.open(driver.setup)
            else:
                crew.open(driver.setup, driver.learner, Threads(config), in_order)
            crew.publish(driver.learner.read, 0)
            yield driver


def play(driver: Hand, chance: random.Random, turns: int) -> None:
    """Order, take and release at random."""
    for _ in range(turns):
        for _ in range(chance.randrange(4)):
            if driver.crew.openings:
                driver.order()
        if chance.random() < 0.5:
            driver.take()
        while driver.held and chance.random() < 0.5:
            driver.release(chance.randrange(len(driver.held)))
        if driver.up():
            driver.check_room()


def test_room_is_conserved_when_actors_in_this_process_fail(tmp_path, monkeypatch):
    chance, fill = random.Random(1), Producer.fill

    def fill_or_fail(producer: Producer, *args: Any) -> Any:
        if chance.random() < 0.2:
            raise chance.choice([EnvError("at random"), InjectedFault("at random")])
        return fill(producer, *args)

    monkeypatch.setattr(Restarts, "next", lambda restarts, error: 0.0)
    monkeypatch.setattr(Producer, "fill", fill_or_fail)
    with hand(configure(actors=3), tmp_path, ahead=3, process=False) as driver:
        play(driver, chance, 200)
        assert len(driver.failures) > 10 and min(driver.delivered) > 10
        driver.finish()


def test_room_is_conserved_when_processes_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(Restarts, "next", lambda restarts, error: 0.0)
    chance = random.Random(2)
    with hand(configure(debug=True), tmp_path, ahead=3, process=True) as driver:
        for round in range(2):
            play(driver, chance, 50)
            kill(driver.crew, chance.randrange(2))
            play(driver, chance, 50)
            driver.await_up(failures=round + 1)
            driver.check_room()
        play(driver, chance, 50)
        assert len(driver.failures) == 2 and min(driver.delivered) > 10
        driver.finish()


# In one process


def arrivals(tmp_path: Path, seed: int, in_order: bool = False) -> list[tuple[int, int]]:
    orders = 0
    with hand(configure(actors=4, seed=seed), tmp_path, ahead=2, process=False, in_order=in_order) as driver:
        while orders < 40:
            while driver.crew.openings and orders < 40:
                driver.order()
                orders += 1
            driver.take()
            while driver.held:
                driver.release()
        driver.finish()
        assert len(driver.came) == len(set(driver.came)) == 40
        return driver.came


def test_what_runs_ahead_arrives_in_an_order_that_the_seed_decides(tmp_path):
    came = arrivals(tmp_path, seed=1)
    assert came == arrivals(tmp_path, seed=1)
    assert came != arrivals(tmp_path, seed=2)
    assert came != sorted(came, key=lambda each: (each[1], each[0])), "not a random order"


def test_what_does_not_run_ahead_arrives_as_it_was_ordered(tmp_path):
    assert arrivals(tmp_path, seed=1, in_order=True) == [(actor, turn) for turn in range(10) for actor in range(4)]


# In processes


def test_room_that_is_given_back_after_a_death_is_that_of_the_successor(tmp_path):
    """One unroll is released while there is nobody, one when the successor is there."""
    with hand(configure(actors=1), tmp_path, ahead=3, process=True) as driver:
        for _ in range(3):
            driver.order()
        until(lambda: driver.take() or len(driver.held) == 3, "three unrolls")
        kill(driver.crew, 0)
        until(lambda: driver.take() or driver.failures, "the death to be noticed")
        assert not driver.up()
        driver.release()
        assert not driver.crew.openings, "nobody is there to be told"
        driver.await_up(failures=1)
        assert list(driver.crew.openings) == [0]
        driver.release()
        assert list(driver.crew.openings) == [0, 0]
        driver.order()
        driver.order()
        until(lambda: driver.take() or len(driver.held) == 3, "two unrolls of the successor")
        assert driver.came == [(0, sequence) for sequence in range(5)]
        driver.finish()


def test_a_death_without_an_order_is_noticed_and_costs_no_step(tmp_path):
    with hand(configure(), tmp_path, ahead=2, process=True) as driver:
        driver.order()
        driver.order()
        until(lambda: driver.take() or len(driver.held) == 2, "an unroll of each")
        driver.release()
        kill(driver.crew, 1)
        driver.await_up(failures=1)
        assert [(f.actor, f.steps, f.reason, f.replaced) for f in driver.failures] == [(1, 0, "actor_died", True)]
        driver.check_room()
        while driver.crew.openings:
            driver.order()
        driver.finish()


def test_an_order_that_a_dead_worker_cannot_hear_is_not_lost(tmp_path):
    with hand(configure(actors=1), tmp_path, ahead=1, process=True) as driver:
        kill(driver.crew, 0)
        driver.order()
        driver.await_up(failures=1)
        assert driver.failures[0].steps == 0 and list(driver.crew.openings) == [0]
        driver.order()
        until(lambda: driver.take() or driver.held, "the unroll")
        driver.finish()


def test_a_worker_that_is_late_and_announces_its_unroll_at_that_moment_is_heard(tmp_path):
    """The announcement comes after the last look at the channels, and before the look at the heartbeats."""
    with hand(configure(actors=1), tmp_path, ahead=1, process=True) as driver:
        crew = driver.crew
        driver.order()
        channel = crew.pool.channel(0)
        poll, crew.pool.poll = crew.pool.poll, lambda timeout: []
        assert select.select([channel], [], [], LONG)[0], "no announcement"
        crew._deadlines[0].seconds = -1.0
        crew._deadlines[0].rearm()
        crew._looked = 0.0
        driver.take()
        crew.pool.poll = poll
        crew._deadlines[0].seconds = LONG
        until(lambda: driver.take() or driver.held, "what was announced")
        assert not driver.failures
        driver.finish()


def test_a_failure_is_told_after_the_unroll_before_it_and_before_the_one_after_it(tmp_path):
    """Both unrolls, and between them the news of an environment that was recreated, lie in the channel."""
    kwargs = {"fault": "raise_step", "at_step": 5, "marker": str(tmp_path / "marker"), "lengths": [1000]}
    with hand(configure("rookery/Faulty-v0", actors=1, env_kwargs=kwargs), tmp_path, 2, process=True) as driver:
        driver.order()
        driver.order()
        until(lambda: idle(driver.crew, 0), "two unrolls")
        until(lambda: driver.take() or len(driver.held) == 2, "both")
        assert [failure.replaced for failure in driver.failures] == [False] and driver.failed_after == [1]
        driver.finish()


def test_a_worker_that_comes_up_while_snapshots_are_taken_is_not_asked_for_one(tmp_path):
    with hand(configure(), tmp_path, ahead=1, process=True) as driver:
        kill(driver.crew, 1)
        until(lambda: driver.take() or driver.failures, "the death to be noticed")
        pid = driver.crew.pool.places[0].worker.pid
        os.kill(pid, signal.SIGSTOP)  # answers when its peer is there
        came_up = driver.crew.pool._up

        def go_on(index: int) -> None:
            came_up(index)
            os.kill(pid, signal.SIGCONT)

        driver.crew.pool._up = go_on
        states = driver.crew.snapshots()
        assert states[0] is not None and states[1] is None
        driver.finish()


def test_states_larger_than_the_socket_come_whole(tmp_path):
    config = configure(env_kwargs={"size": 5_000_000}, env="support_crew:bulky")
    with hand(config, tmp_path, ahead=1, process=True) as driver:
        states = driver.crew.snapshots()
        assert all(state is not None for state in states)
        driver.finish()
