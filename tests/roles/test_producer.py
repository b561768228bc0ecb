"""Producers: an environment that fails is recreated, the unroll taken anew, and no item reaches across the gap."""

from __future__ import annotations

import numpy as np
import pytest
from support_dqn import built
from support_lanes import RESET, ScriptedLanes

from rookery.core.config import NetConfig
from rookery.core.errors import EnvError
from rookery.roles.producer import Producer, empty_arrays, handover_shapes

GRU = NetConfig(hidden=(8,), core="gru", core_size=5)
FAULTS = {(1, 1, 2): "raise", (2, 0, 11): "nan_obs", (0, 2, RESET): "raise", (1, 101, 3): "nan_reward"}
# Lane by lane; long enough for gaps within an episode.
LENGTHS = ((9, 14, 30), (7, 12, 30), (40, 3, 25), (1, 23, 5))


class Run:
    """A producer over lanes with faults, what it was told of, and the parcels that it made."""

    def __init__(self, net: NetConfig = NetConfig(hidden=()), faults: dict | None = None, **changes):  # noqa: B008
        self.lanes = ScriptedLanes(lengths=LENGTHS, faults=dict(FAULTS if faults is None else faults), mendable=True)
        learner = built(net, unroll=5, **changes)
        self.producer = Producer(learner.algorithm, learner.nets, self.lanes, 3)
        state = learner.algorithm.initial_state(learner.nets, 1)
        self.arrays = empty_arrays(handover_shapes(self.lanes.spec, self.producer.plan, 4, state))
        self.lost: list[EnvError] = []
        self.pending = self.collected = self.dropped = self.carried = 0
        self.parcels: list[dict[str, np.ndarray]] = []
        self.producer.recover = self.recover
        self.producer.begin(0, "0.0")

    def recover(self, error: EnvError) -> None:
        self.lost.append(error)
        self.collected += error.steps
        self.dropped += error.steps + self.pending  # as a feed does
        self.pending = 0

    def fill(self, unrolls: int) -> None:
        for _ in range(unrolls):
            report = self.producer.fill(self.arrays, 0)
            items = int(self.arrays["count"][0])
            self.parcels.append({p: x[:items].copy() for p, x in self.arrays.items() if p != "count"})
            self.pending = report.pending
            self.collected += report.steps
            self.dropped += report.skipped
            self.carried += int(self.parcels[-1]["steps"].sum())

    def columns(self, path: str) -> np.ndarray:
        return np.concatenate([parcel[path] for parcel in self.parcels])


def test_no_transition_reaches_across_a_gap_and_every_step_is_counted():
    run = Run(n_step=3)
    run.fill(20)
    assert len(run.lost) == len(FAULTS) and all(error.mendable for error in run.lost)
    assert run.collected == run.carried + run.dropped + run.pending == run.lanes.taken - sum_of_failed(run)
    obs, after, discount = (run.columns(path) for path in ("obs/obs", "next_obs/obs", "discount"))
    spans = (after - obs)[:, 2]
    assert np.array_equal(obs[:, :2], after[:, :2]), "lane and episode"
    assert set(spans) == {1, 2, 3}
    full = discount > 0
    np.testing.assert_allclose(discount[full], 0.9 ** spans[full], rtol=1e-6)
    assert len(np.unique(obs, axis=0)) == len(obs), "every step once"


def sum_of_failed(run: Run) -> int:
    """Steps that the lanes took and that failed: they are not counted, what they returned is of no use."""
    return sum("returned" in str(error) for error in run.lost)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_no_sequence_reaches_across_a_gap_and_every_step_is_counted(burn_in):
    run = Run(GRU, burn_in=burn_in)
    run.fill(20)
    assert len(run.lost) == len(FAULTS)
    assert run.collected == run.carried + run.dropped + run.pending
    obs, live = run.columns("obs/obs"), run.columns("live")
    for rows, alive in zip(obs, live):
        shown = rows[:-1][alive]
        assert (shown[:, :2] == shown[0, :2]).all() and (np.diff(shown[:, 2]) == 1).all()
    padded = np.flatnonzero(~live[:, 0])
    assert (obs[padded, live[padded].argmax(1), 2] == 0).all(), "only an episode's start is padded"


def test_without_anybody_to_tell_the_first_failure_is_the_end():
    run = Run()
    run.producer.recover = None
    with pytest.raises(EnvError) as caught:
        run.fill(20)
    assert caught.value.mendable and not run.lanes.rebuilt


def test_one_who_has_heard_enough_raises_the_error():
    run = Run(faults={(0, 0, 0): "raise", (0, 100, 0): "raise", (0, 200, 0): "raise"})
    heard = []

    def recover(error: EnvError) -> None:
        heard.append(error)
        if len(heard) == 3:
            raise error

    run.producer.recover = recover
    with pytest.raises(EnvError) as caught:
        run.fill(1)
    assert caught.value is heard[2] and len(run.lanes.rebuilt) == 2


def test_a_replacement_has_seeds_of_its_own_and_a_resumed_run_the_same_ones():
    """Each failure of an unroll has its own, whatever happened in the unrolls before."""
    seeds = {}
    for life in ("0.0", "2.0", "2.1"):
        run = Run(faults={})
        run.producer.begin(2, life)  # with the same unroll, whenever the life began
        run.lanes.faults = {(3, 0, 0): "raise", (3, 100, 0): "raise"}
        run.fill(1)
        seeds[life] = run.lanes.rebuilt
    assert seeds["0.0"] == seeds["2.0"] and len(set(seeds["0.0"])) == 2
    assert not set(seeds["2.0"]) & set(seeds["2.1"])
