"""The journal: books that balance, a target that needs a full window, a run that goes on where it stopped."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from rookery.algorithms.ppo import PPOConfig
from rookery.core.config import RunConfig
from rookery.core.machine import Machine
from rookery.core.types import ActorReport, Episode, Failure, Sample, StepReport
from rookery.metrics.journal import Journal
from rookery.metrics.ledger import Ledger
from rookery.tables.table import Losses
from rookery.topologies.loop import Loop

CONFIG = RunConfig("ppo", "rookery.algorithms.ppo:PPO", "CartPole-v1", PPOConfig(), env_steps=1000, log_every=10.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Sinks:
    def __init__(self):
        self.records: list[dict] = []

    def write(self, record: dict) -> None:
        json.dumps(record)  # what is written is plain
        self.records.append(record)

    def news(self) -> list[str]:
        return []


class Panel:
    shown: dict | None = None

    def update(self, snapshot: dict) -> None:
        self.shown = snapshot


def journal(**fields) -> Journal:
    return Journal(dataclasses.replace(CONFIG, **fields), Sinks(), Panel(), Clock())


def report(steps: int, returns: list[float] = (), length: int = 5, **seconds: float) -> ActorReport:
    return ActorReport(steps, [Episode(0, float(total), length) for total in returns], **seconds)


def train(j: Journal, steps: int, lags: tuple[int, ...] = (0, 0), updates: int = 1, **losses: float) -> None:
    j.trained(steps, list(lags), StepReport(dict(losses)), updates)


# The ledger


def test_the_ledger_balances_by_what_became_of_the_steps():
    ledger = Ledger(collected=100, trained=60, evicted=5, in_flight=15)
    assert ledger.imbalance == 20
    ledger.drop(12, "nonfinite")
    ledger.drop(8, "env_raised")
    assert ledger.imbalance == 0
    ledger.drop(3, "nonfinite")
    assert ledger.imbalance == -3 and ledger.dropped == {"nonfinite": 15, "env_raised": 8}
    ledger.drop(0, "hung")
    assert "hung" not in ledger.dropped, "a reason without steps is no reason"


def test_every_step_the_journal_hears_of_is_on_one_side_of_the_books():
    j = journal()
    j.collected(report(128))
    assert j.ledger.imbalance == 128
    train(j, 100)
    assert j.ledger.imbalance == 28
    j.failed(Failure(1, 40, "env_raised", "actor 1 replaced", replaced=True))
    assert j.ledger.imbalance == 28 and j.ledger.dropped == {"env_raised": 40}
    j.ledger.in_flight = 28
    assert j.ledger.imbalance == 0
    assert j.env_steps == 168 == j.ledger.collected, "lost steps were taken too"
    assert j.restarts == 1 and j.sinks.records[-1]["text"] == "actor 1 replaced"


def test_what_waits_is_counted_for_a_record_and_only_then():
    j, asked = journal(), []
    j.waiting = lambda: asked.append(1) or 21
    j.told(0, report(128, pending=7), 1, overlaps=True)
    train(j, 100)
    j.report()
    assert not asked and not j.sinks.records, "the last record is not long enough ago"
    j._clock.now += 11.0
    j.report()
    assert len(asked) == 1 and j.sinks.records[-1]["ledger"]["in_flight"] == 28 and j.ledger.imbalance == 0


def test_the_dictionary_of_a_ledger_is_a_copy():
    ledger = Ledger(collected=3, dropped={"x": 1})
    stored = ledger.as_dict()
    ledger.drop(1, "x")
    assert stored == {"collected": 3, "trained": 0, "evicted": 0, "dropped": {"x": 1}, "in_flight": 0}
    assert Ledger(**stored).imbalance == 2


# Reasons to stop


def test_a_target_counts_only_with_a_full_window():
    j = journal(target_return=10.0)
    j.collected(report(500, [50.0] * 99))
    assert j.window.return_mean == 50.0 and j.finished() is None and j.env_steps_to_target is None
    j._clock.now += 7
    j.collected(report(5, [50.0]))
    assert j.finished() == "target_return"
    assert (j.env_steps_to_target, j.wall_s_to_target) == (505, pytest.approx(7.0))
    j._clock.now += 5
    j.collected(report(5, [-1e9]))
    assert j.finished() == "target_return", "reached is reached"
    assert (j.env_steps_to_target, j.wall_s_to_target) == (505, pytest.approx(7.0))


def test_a_target_is_met_exactly_and_missed_by_a_hair():
    for last, reached in ((10.0, True), (9.999, False)):
        j = journal(target_return=10.0)
        j.collected(report(10, [10.0] * 99 + [last]))
        assert (j.finished() == "target_return") is reached


def test_negative_targets_and_zero_are_targets():
    j = journal(target_return=0.0)
    j.collected(report(1, [0.0] * 100))
    assert j.finished() == "target_return"
    j = journal(target_return=-100.0)
    j.collected(report(1, [-101.0] * 100))
    assert j.finished() is None


def test_a_run_ends_with_its_steps():
    j = journal()
    j.collected(report(999))
    assert j.finished() is None
    j.collected(report(1))
    assert j.finished() == "env_steps"
    assert journal(target_return=1.0).finished() is None


def test_a_resumed_run_stops_for_its_own_target_and_not_for_an_old_one():
    """`resume RUN --target-return 500` after 400 was reached, or without a target: there is something left to do."""
    old = journal(target_return=400.0)
    old.collected(report(600, [450.0] * 100))
    assert old.finished() == "target_return"
    state = json.loads(json.dumps(old.state()))
    for target in (500.0, None):
        j = journal(target_return=target)
        j.load(state)
        assert j.finished() is None, target
    same = journal(target_return=400.0)
    same.load(state)
    assert same.finished() == "target_return" and same.env_steps_to_target == 600


def test_progress_is_0_in_the_first_update_and_less_than_1_in_the_last():
    """P30: an annealed learning rate begins at its start, and no update is made with its end."""
    j, seen = journal(), []
    step = lambda batch, progress, tell: seen.append(progress) or StepReport({})  # noqa: E731
    learner = SimpleNamespace(version=0, updates=1, step=step)
    algorithm = SimpleNamespace(plan=lambda: SimpleNamespace(unroll=1), remarks=lambda metrics: [])
    threads = SimpleNamespace(learning=lambda: None)
    table = mock.MagicMock(small_updates=False)
    table.next.return_value = Sample(None, np.zeros(2, np.int64), 100)
    table.losses.return_value = Losses()
    loop = Loop(SimpleNamespace(journal=j, config=j.config, algorithm=algorithm, threads=threads), None, table, learner)
    while j.finished() is None:
        j.collected(report(100))
        loop.learn()
    assert seen == pytest.approx([i / 10 for i in range(10)])


# Telling


def test_the_policy_lag_is_a_mean_over_all_lanes_and_a_maximum():
    j = journal()
    assert j.lag_mean == 0.0
    train(j, 10, (0, 0, 3))
    train(j, 10, (1,))
    assert (j.lag_mean, j.lag_max) == (1.0, 3)


def test_records_come_at_the_given_interval():
    j = journal()
    j.begin()
    for now, records in ((100.0, 0), (109.9, 0), (110.0, 1), (119.9, 1), (120.1, 2)):
        j._clock.now = now
        j.report()
        assert len(j.sinks.records) == records, now
    j.report(force=True)
    assert len(j.sinks.records) == 3


def test_a_record_tells_of_the_run_and_the_panel_of_more():
    j = journal(target_return=475.0)
    j.begin()
    j.collected(report(200, [1.0, 3.0]))
    train(j, 200, (0, 2), updates=7, policy_loss=0.5)
    j.say("hello")
    j._clock.now += 50.0
    j.report(force=True)
    record = j.sinks.records[-1]
    assert record["kind"] == "train" and record["env_steps"] == 200 and record["updates"] == 7
    assert record["return_mean"] == 2.0 and record["return_std"] == 1.0 and record["episodes"] == 2
    assert record["losses"] == {"policy_loss": 0.5} and record["lag_mean"] == 1.0 and record["lag_max"] == 2
    assert record["wall_s"] == pytest.approx(50.0) and record["steps_per_s"] == pytest.approx(4.0)
    assert record["eta_s"] == pytest.approx(200.0) and record["ledger"]["trained"] == 200
    assert abs(sum(record["shares"].values()) - 1) < 1e-9
    assert j.panel.shown["messages"] == ["hello"] and j.panel.shown["history"] == [(200, 2.0)]
    assert j.panel.shown["target_return"] == 475.0


def test_the_advice_counts_the_cores_that_the_cgroup_allows(monkeypatch):
    monkeypatch.setattr(Machine, "cores", lambda _: 3)
    j = journal(topology="serial")
    j.begin()
    j.split.add("env", 40.0)
    j._clock.now += 50.0
    j.report(force=True)
    assert "topology='local', actors=3" in j.panel.shown["advice"]


def test_what_was_told_does_not_change_afterwards():
    """Panel and sinks look at it later, on threads of their own."""
    j = journal(env_steps=10**6)
    told = []
    j.sinks.write = lambda record: told.append((record, copy.deepcopy(record)))
    j.panel.update = lambda snapshot: told.append((snapshot, copy.deepcopy(snapshot)))
    for step in range(30):
        j.collected(report(10, [float(step)]))
        train(j, 8, (step,), updates=step, policy_loss=0.1 * step)
        j.failed(Failure(0, 1, f"reason {step % 3}", f"message {step}", replaced=True))
        j.ledger.in_flight += 1
        j.replay = {"size": step}
        j.report(force=True)
    assert len(told) == 90
    assert all(later == before for later, before in told)


def test_the_curve_does_not_grow_without_end():
    j = journal()
    j.collected(report(1, [1.0]))
    for step in range(6000):
        j.ledger.collected = step
        j.report(force=True)
        assert len(j.history) <= 2000
    steps = [step for step, _ in j.history]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] >= 5990


def test_collecting_says_where_the_time_of_the_mean_actor_went():
    j = journal()
    for actor, env_s in enumerate((1.0, 3.0)):
        with j.collecting(overlaps=False, waits=True):
            j._clock.now += 3.0
        j.told(actor, report(10, env_s=env_s, inference_s=1.0, total_s=env_s + 1.5), 2, overlaps=False)
    assert j.env_steps == 0, "not before the round is over"
    j.end_round()
    train(j, 20)
    seconds = j.split.seconds
    assert (seconds["env"], seconds["inference"], seconds["other"]) == pytest.approx((2.0, 1.0, 0.5))
    assert seconds["wait"] == pytest.approx(2.5), "what is left, the actors waited for the slowest"
    assert j.env_steps == 20 and j.collect_s == pytest.approx(6.0)


def test_the_clock_stops_with_the_last_checkpoint():
    """Processes take half a second to end: that is no part of the speed of a run."""
    j = journal()
    j.begin()
    j.collected(report(100))
    j._clock.now += 2.0
    j.end()
    j._clock.now += 5.0
    assert j.wall_s == j.life_s == pytest.approx(2.0) and j.steps_per_s == pytest.approx(50.0)
    assert j.summary("env_steps", 1, 0)["wall_s"] == pytest.approx(2.0)
    j.begin()
    j._clock.now += 1.0
    assert j.life_s == pytest.approx(1.0)


def test_where_actors_act_beside_the_learner_only_its_own_waiting_counts():
    j = journal()
    j.begin()
    for waits, seconds in ((False, 1.0), (True, 2.0)):
        with j.collecting(overlaps=True, waits=waits):
            j._clock.now += seconds
    j.told(0, report(10, env_s=1.0, inference_s=3.0, total_s=9.0), 2, overlaps=True)
    train(j, 20)
    assert (j.idle_s, j.split.seconds["wait"], j.split.seconds["other"]) == pytest.approx((2.0, 2.0, 0.0))
    assert (j.split.seconds["env"], j.split.seconds["inference"]) == pytest.approx((0.5, 1.5))
    assert j.collect_s == j.life_s == pytest.approx(3.0)


def test_what_an_actor_held_back_is_lost_with_it_and_with_a_part_of_it():
    j = journal()
    j.waiting = lambda: 0
    for actor in (0, 1):
        j.told(actor, report(10, pending=4), 2, overlaps=True)
    train(j, 12)
    j.failed(Failure(1, 3, "actor_died", "gone", replaced=True), held=0)
    j.count_in_flight()
    assert j.ledger.dropped == {"actor_died": 7} and j.ledger.in_flight == 4 and j.ledger.imbalance == 0
    j.failed(Failure(0, 0, "env_raised", "recreated", replaced=False))
    j.count_in_flight()
    assert j.ledger.dropped == {"actor_died": 7, "env_raised": 4} and j.ledger.in_flight == j.ledger.imbalance == 0


def test_the_unrolls_of_a_round_count_in_the_order_of_the_actors_and_before_a_failure():
    j, seen = journal(), []
    j.collected = lambda report: seen.append(report.steps)
    for actor in (2, 0, 3, 1):
        j.told(actor, report(actor), 4, overlaps=False)
    j.failed(Failure(3, 0, "actor_died", "gone", replaced=True))
    assert seen == [3], "what the failed actor had delivered, and no other"
    j.end_round()
    assert seen == [3, 0, 1, 2]
    j.end_round()
    assert len(seen) == 4


SUMMARY = {
    "recipe", "env", "seed", "topology", "env_steps", "updates", "wall_s", "steps_per_s", "return_mean",
    "env_steps_to_target", "wall_s_to_target", "policy_lag", "time_split", "ledger", "exit_reason",
}  # fmt: skip


def test_the_summary_of_a_run():
    j = journal(target_return=1.0, seed=5)
    j.begin()
    j.collected(report(300, [2.0] * 100))
    train(j, 300, (0, 1), updates=12)
    j._clock.now += 30.0
    summary = j.summary("target_return", updates=12, skipped=1)
    assert summary.keys() >= SUMMARY
    json.dumps(summary, allow_nan=False)
    assert summary["env_steps"] == summary["env_steps_to_target"] == 300 and summary["wall_s_to_target"] == 0.0
    assert summary["policy_lag"] == {"mean": 0.5, "max": 1} and summary["seed"] == 5
    assert summary["steps_per_s"] == pytest.approx(10.0) and summary["wall_s"] == pytest.approx(30.0)
    assert (summary["updates"], summary["updates_skipped"], summary["exit_reason"]) == (12, 1, "target_return")
    assert summary["ledger"]["collected"] == summary["ledger"]["trained"] == 300
    assert abs(sum(summary["time_split"].values()) - 1) < 1e-9


def test_the_summary_of_a_run_without_an_episode():
    summary = journal().summary("interrupted", 0, 0)
    assert summary.keys() >= SUMMARY and summary["return_mean"] is None and summary["env_steps_to_target"] is None
    json.dumps(summary, allow_nan=False)


# State


def test_a_loaded_journal_goes_on_where_the_other_stopped():
    a = journal(target_return=99.0)
    a.begin()
    a.collected(report(300, [float(i) for i in range(130)], length=3))
    train(a, 280, (0, 4), updates=9)
    a.failed(Failure(0, 20, "hung", "actor 0 hung", replaced=True))
    a.report(force=True)
    a.best = 12.5
    a._clock.now += 60.0
    a.ledger.in_flight = 20
    state = json.loads(json.dumps(a.state()))

    b = journal(target_return=99.0)
    b.load(state)
    b._clock.now += 1000.0  # setting up takes its time, which is not the run's
    b.begin()
    for name in ("env_steps", "episodes", "lag_sum", "lag_count", "lag_max", "best", "restarts", "history"):
        assert getattr(b, name) == getattr(a, name), name
    assert b.window.to_dict() == a.window.to_dict() and b.window.return_mean == a.window.return_mean
    assert b.wall_s == pytest.approx(60.0)
    b.settle(0)
    assert b.ledger.imbalance == 0 and b.ledger.in_flight == 0
    assert b.ledger.dropped == {"hung": 20, "resumed": 20}, "what was in flight did not come along"
    b._clock.now += 10.0
    b.collected(report(100))
    assert b.steps_per_s == pytest.approx(10.0), "of this life, not of both"
    assert b.wall_s == pytest.approx(70.0) and b.env_steps == 420
    train(b, 100, (1, 1))
    assert b.ledger.imbalance == 0 and b.lag_mean == pytest.approx(6 / 4)


def test_a_loaded_journal_knows_of_the_target_that_was_reached():
    a = journal(target_return=1.0)
    a.collected(report(300, [2.0] * 100))
    b = journal(target_return=1.0)
    b.load(json.loads(json.dumps(a.state())))
    assert b.finished() == "target_return" and b.env_steps_to_target == 300


def test_updates_are_known_after_loading():
    """The first record of a resumed run must not say that nothing was learnt yet."""
    a = journal()
    a.collected(report(300))
    train(a, 300, updates=9)
    b = journal()
    b.load(json.loads(json.dumps(a.state())))
    assert b.snapshot()["updates"] == 9
