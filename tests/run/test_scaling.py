"""The simulation of scaling: exact cases, the analytic mean of the slowest rank, and what preemption may not do."""

from types import SimpleNamespace

import numpy as np
import pytest

from rookery.core.errors import UsageError
from rookery.envs.delay import Delay
from rookery.run import habitat
from rookery.run.measured import Measured, read, workload
from rookery.run.scaling import (
    Network,
    Preemption,
    Workload,
    all_reduce_s,
    fit_link,
    ring_s,
    simulate,
    stops,
    tree_s,
)

FREE = Network("free", 0.0, 0.0)


def work(step_s, learn_s=(0.5,), rows=8, **fields) -> Workload:
    numbers = {"row_s": np.zeros(1), "steps_per_row": 4, "minibatches": 4, "floats": 1000} | fields
    return Workload(step_s=np.asarray(step_s, float), rows=rows, learn_s=np.asarray(learn_s, float), **numbers)


@pytest.mark.parametrize("preemption", [None, Preemption()])
@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_constant_times_and_a_free_network_scale_perfectly(ranks, preemption):
    load = work(np.full((3, 2, 8), 0.25))
    alone, many = simulate(load, 1, FREE, None, 5), simulate(load, ranks, FREE, preemption, 5)
    assert alone.steps_per_s == pytest.approx(8 * 4 / (8 * 0.25 + 0.5), rel=1e-12)
    assert many.efficiency(alone) == pytest.approx(1.0, rel=1e-12)
    assert (many.cut, many.waiting) == (0, pytest.approx(0, abs=1e-12))


def test_without_preemption_a_round_is_as_long_as_the_slowest_rank():
    exponential = -np.log1p(-(np.arange(4000) + 0.5) / 4000)  # quantiles of mean 1
    load = work(exponential[:, None, None] / 8, learn_s=[0.0])
    for ranks in (2, 16):
        expected = sum(1 / k for k in range(1, ranks + 1))  # mean of the maximum: the harmonic number
        found = simulate(load, ranks, FREE, None, 40_000 // ranks)
        assert found.collect_s == pytest.approx(expected, rel=0.03)


def test_preemption_never_makes_a_round_longer_and_never_cuts_below_the_least():
    rng = np.random.default_rng(0)
    ends = rng.lognormal(0, 1.2, (200, 10, 12)).cumsum(axis=2)
    rows = stops(ends, Preemption(0.6, 0.25))
    assert rows.min() == 3 and (rows == 12).sum(axis=1).min() >= 6  # 25 % of 12 rows, 60 % of 10 ranks
    called = np.sort(ends[..., -1], axis=1)[:, 5]
    stopped = np.take_along_axis(ends, rows[..., None] - 1, axis=2)[..., 0]
    before = np.take_along_axis(ends, np.maximum(rows[..., None] - 2, 0), axis=2)[..., 0]
    cut = rows < 12
    assert (stopped[cut] >= np.broadcast_to(called[:, None], cut.shape)[cut])[rows[cut] > 3].all()
    assert (before[cut & (rows > 3)] < np.broadcast_to(called[:, None], cut.shape)[cut & (rows > 3)]).all()
    load = work(rng.lognormal(0, 1, (40, 3, 8)))
    for ranks in (2, 5, 32):
        waiting, preempted = (simulate(load, ranks, FREE, each, 50) for each in (None, Preemption(0.5)))
        assert preempted.round_s < waiting.round_s and preempted.steps < waiting.steps
        assert waiting.cut == 0 < preempted.cut <= 0.5


def test_ranks_in_order_keep_their_own_environments():
    load = work([[[1.0]], [[3.0]], [[2.0]], [[9.0]], [[50.0]], [[50.0]]], stepped_together=2, learn_s=[0.0])
    assert simulate(load, 1, FREE, None, 3, in_order=True).collect_s == 8 * 3.0  # the slowest of its two
    assert simulate(load, 2, FREE, None, 3, in_order=True).collect_s == 8 * 9.0


def test_all_reduce_golden_numbers():
    assert ring_s(4, 1e6, 1e-5, 1e-9) == pytest.approx(6e-5 + 1.5e-3)
    assert tree_s(1024, 1e6, 1e-5, 1e-9) == pytest.approx(20e-5 + 2 * 1023 / 1024 * 1e-3)
    near = Network("n", 1e-5, 1e-9, ring_up_to=8)
    assert all_reduce_s(1, 250_000, near) == 0
    assert all_reduce_s(8, 250_000, near) == ring_s(8, 1e6, 1e-5, 1e-9)
    assert all_reduce_s(9, 250_000, near) == tree_s(9, 1e6, 1e-5, 1e-9)
    assert all_reduce_s(512, 250_000, Network("n", 1e-5, 1e-9)) == ring_s(512, 1e6, 1e-5, 1e-9)
    slow = simulate(work(np.ones((1, 1, 1)), floats=250_000), 8, near, None, 2)
    assert slow.round_s == pytest.approx(8.5 + 4 * ring_s(8, 1e6, 1e-5, 1e-9))  # one per minibatch


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_link_is_recovered_from_its_own_times(ranks):
    sizes = [4e3, 6e4, 1e6, 2e7]
    times = [ring_s(ranks, size, 3e-5, 2e-10) for size in sizes]
    assert fit_link(sizes, times, ranks) == pytest.approx((3e-5, 2e-10), rel=1e-6)
    assert fit_link([1e6, 2e6], [1e-3, 3e-3]) == (0.0, pytest.approx(15 / 13 * 1e-9))  # latency is never negative


def slept(first: int, rollouts: int) -> np.ndarray:
    """Seconds that the task itself sleeps in rollouts of 16 steps of two environments, from number `first` on."""
    delay, taken = Delay(2, 0.01, 0.5, 1.0), []
    delay.sleep = taken.append
    delay.number_lanes(first)
    for _ in range(16 * rollouts):
        delay.wait((0, 1))
    return np.array(taken).reshape(rollouts, 16).sum(axis=1)


def test_a_run_of_one_rank_predicts_two_ranks_with_delays_as_the_task_has_them():
    config = SimpleNamespace(algo=SimpleNamespace(unroll=16), lanes=2, env_kwargs={"delay": 0.01, "delay_spread": 0.5})
    times = {"rollout_s": [[9.0] + [0.4] * 9], "wait_s": [[0.0] * 10], "learn_s": [[0.1] * 10]}
    run = read(config, {"ranks": times, "steps_per_s": 64.0}, 1, 1.0)
    assert run.rollout_s == [[0.4] * 9] and run.round_s == pytest.approx(0.5)  # without the warm-up
    load = workload(run, 4, 1000)
    first, second = slept(0, 400), slept(2, 400)
    added = 0.4 - first.mean()
    for ranks, expected in ((1, 0.4), (2, np.maximum(first, second).mean() + added)):
        found = simulate(load, ranks, FREE, None, 2000, in_order=True).collect_s
        assert found == pytest.approx(expected, rel=0.05)


def test_a_run_without_times_of_its_ranks_is_refused():
    with pytest.raises(UsageError, match="no times of its ranks"):
        read(SimpleNamespace(), {"steps_per_s": 1.0}, 2, 1.0)


def test_a_run_of_one_rank_reports_its_mean_round():
    """It has no rounds of its own: 20 of 4 × 8 steps in 10 s, 30 % of them learning."""
    config = SimpleNamespace(lanes=4, algo=SimpleNamespace(unroll=8), env_kwargs={"delay": 0.1})
    summary = {"env_steps": 640, "wall_s": 10.0, "time_split": {"learn": 0.3}, "steps_per_s": 64.0}
    run = read(config, summary, 1, 1.0)
    assert run.round_s == pytest.approx(0.5) and run.learn_s[0] == pytest.approx([0.15])
    assert (run.ranks, run.rows, run.envs, run.delay) == (1, 8, 4, 0.1) and run.wait_s == [[0.0]]


def test_measured_rollouts_are_drawn_where_nothing_is_delayed():
    run = Measured(2, 1.0, 4, 3, 0.0, 0.0, [[1.0, 1.0], [2.0, 2.0]], [[1.0] * 2, [0.0] * 2], [[0.5] * 2] * 2, 1.0)
    load = workload(run, 4, 1000)
    assert simulate(load, 2, FREE, None, 4, in_order=True).round_s == pytest.approx(run.round_s)


def test_the_fit_meets_the_papers_number_and_waiting_for_all_is_worse():
    fit = habitat.fitted(habitat.COLLECTING, 8)
    preempted = habitat.run(fit.work, 128, Preemption(), 8).efficiency(fit.alone)
    assert preempted == pytest.approx(107 / 128, abs=0.005)
    assert habitat.run(fit.work, 128, None, 8).efficiency(fit.alone) < preempted - 0.2
