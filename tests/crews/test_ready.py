"""The crew that acts for whichever environments are ready: rows, states, carried steps, failures, checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_crew import balances, messages
from support_lanes import shaken

import rookery
from rookery.algorithms.registry import build_algorithm
from rookery.core import tree
from rookery.core.errors import EnvError, UsageError
from rookery.core.reduce import ALONE
from rookery.core.types import Failure
from rookery.core.unroll import Unroll, as_unroll
from rookery.crews.crew import Setup
from rookery.crews.ready import ReadyCrew
from rookery.crews.ready_state import pack, unpack
from rookery.nets import build
from rookery.processes.signals import Signals
from rookery.roles.learner import Learner
from rookery.roles.producer import handover_shapes
from rookery.run.configured import configure
from rookery.topologies import local

T, LANES = 12, 3
FIELDS = {
    "preset": "vector", "quiet": True, "actors": 1, "envs_per_actor": LANES,
    "algo": {"unroll": T, "stretch": 4, "chunk": 4, "epochs": 1, "minibatches": 1},
}  # fmt: skip


@contextmanager
def crew_of(folder: Path, states: list[Any], sequence: int = 0, **fields: Any) -> Iterator[tuple[ReadyCrew, Learner]]:
    config = configure("ppo", "support_ready:paced", **(FIELDS | fields))
    with Signals() as signals, ReadyCrew(config, folder, signals) as crew:
        algorithm = build_algorithm(config, crew.spec)
        learner = Learner(algorithm, 1)
        shaken(learner, 0.2)
        shapes = handover_shapes(crew.spec, algorithm.plan(), LANES, algorithm.initial_state(learner.nets, 1))
        crew.failures: list[Failure] = []
        crew.open(
            Setup(algorithm, shapes, 0, 1, [sequence], states, crew.failures.append, lambda text: None)
        )  # fmt: skip
        crew.publish(learner.read, 0)
        yield crew, learner


def rollout(crew: ReadyCrew) -> tuple[Unroll, np.ndarray, Any]:
    """One rollout, the rows of each lane, and the report."""
    actor = crew.openings.popleft()
    crew.order(actor, 0.0)
    (delivery,) = crew.arrived(1.0)
    out = as_unroll({path: array.copy() for path, array in delivery.arrays.items()})
    delivery.release()
    return out, crew.rollout.rows.copy(), delivery.report


def check_rows(out: Unroll, rows: np.ndarray, live: np.ndarray) -> None:
    """Every row by the script: observation, action, reward and what follows belong together."""
    obs = out.obs["obs"]
    for lane in range(LANES):
        alive, length = live[lane], 3 + lane
        for row in range(rows[lane]):
            who, episode, t = obs[row, lane]
            assert out.live[row, lane] == alive
            if not alive:
                assert out.reward[row, lane] == 0.0 and (obs[row + 1, lane] == (who, episode + 1, 0)).all()
                alive = True
                continue
            assert out.reward[row, lane] == t + out.action[row, lane] / 4
            assert (obs[row + 1, lane] == (who, episode, t + 1)).all()
            ended = t + 1 == length
            kind = (ended and episode % 2 == 0, ended and episode % 2 == 1)
            assert (out.terminated[row, lane], out.truncated[row, lane]) == kind
            alive = not ended
        used = max(T, rows.max())
        assert not out.live[rows[lane] :, lane].any() and not out.reward[rows[lane] :, lane].any()
        assert (obs[rows[lane] : used + 1, lane] == obs[rows[lane], lane]).all()
        live[lane] = alive


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_rollouts_of_environments_that_are_not_equally_fast(tmp_path, core):
    fields = {"net": {"core": core, "core_size": 5, "hidden": (8,)}, "group": {"workers": 2 if core == "none" else 0}}
    fields["env_kwargs"] = {"clock": str(tmp_path / "clock")}
    with crew_of(tmp_path, [], **fields) as (crew, learner):
        live, last, ended, stale = np.ones(LANES, bool), None, [], 0
        for _ in range(4):
            out, rows, report = rollout(crew)
            assert rows.sum() == T * LANES and report.steps == out.live.sum()
            if last is not None:
                np.testing.assert_array_equal(out.obs["obs"][0], last, "it goes on where the last one ended")
            check_rows(out, rows, live)
            last = out.obs["obs"][rows, np.arange(LANES)]
            ended += report.episodes
            stale += report.stale
            assert (out.lane == np.arange(LANES)).all() and (out.version == 0).all()
            if core == "lstm":
                check_states(out, rows, learner)
        assert rows[0] > rows[1], "a fast environment gives more steps than a slow one"
        assert stale > 0, "the slow one was under way when a rollout ended"
        for episode in ended:
            length = 3 + episode.lane
            assert episode.length == length and episode.info == {"lane": float(episode.lane)}
            assert 0 <= episode.total - sum(range(length)) <= length / 4


def check_states(out: Unroll, rows: np.ndarray, learner: Learner) -> None:
    """P15, P27: what the policy said when acting is what it says when it is trained, in every chunk."""
    batch = tree.map_fields(out, torch.from_numpy, skip=("replayed",))
    prepared = learner.algorithm.prepare(learner.nets, batch, ALONE)
    told = learner.algorithm.losses(learner.nets, prepared).metrics
    assert abs(told["kl"]) < 1e-8 and told["clip_fraction"] == 0
    with torch.no_grad():
        value = build.policy_value_sequence(learner.nets, prepared.obs, prepared.state, prepared.reset).value
    for lane in range(LANES):
        # And the value that the last step bootstraps from; a chunk that would begin there is dead and has no state.
        for row in range(min(rows[lane] + bool(rows[lane] % 4), len(value) * value.shape[1] // LANES)):
            found = value[row % 4, row // 4 * LANES + lane]
            np.testing.assert_allclose(found, out.extras["value"][row, lane], atol=1e-5)


def test_a_snapshot_goes_on_where_the_environments_are(tmp_path):
    with crew_of(tmp_path / "a", []) as (crew, _):
        rollout(crew)
        (state,) = crew.snapshots()
        rollout(crew)  # the run itself goes on too
    with crew_of(tmp_path / "b", [state], sequence=1) as (again, _):
        out, rows, report = rollout(again)
        np.testing.assert_array_equal(out.obs["obs"][0], state["obs"]["obs"])
        check_rows(out, rows, state["live"].copy())
        assert report.stale == 0 and all(e.length == 3 + e.lane for e in report.episodes)


def test_a_rollout_is_cut_when_it_is_asked_for_and_not_before_a_share_of_it(tmp_path):
    asked = []
    with crew_of(tmp_path, [], group={"preempt_after": 0.5}) as (crew, _):
        crew.cut = lambda: asked.append(crew.rollout.rows.sum()) or True
        out, rows, _ = rollout(crew)
        assert T * LANES / 2 <= asked[0] <= rows.sum() < T * LANES
        check_rows(out, rows, np.ones(LANES, bool))


def test_a_worker_that_is_killed_is_replaced_and_the_others_make_up_for_it(tmp_path):
    with crew_of(tmp_path, []) as (crew, _):
        rollout(crew)
        os.kill(crew.pool.places[1].worker.pid, signal.SIGKILL)
        before = crew.rollout.obs["obs"][0].copy()
        out, rows, report = rollout(crew)
        assert rows.sum() == T * LANES and (out.obs["obs"][0, 0] == before).all()
        while not crew.failures or crew.pool.restarting:
            crew._watch(0.1)
        assert [(f.actor, f.reason, f.replaced) for f in crew.failures] == [(0, "actor_died", False)]
        out, rows, report = rollout(crew)
        assert rows[1] > 0 and out.obs["obs"][0, 1].tolist()[1:] == [0.0, 0.0], "it has begun an episode"
        assert rows.sum() == T * LANES and report.steps == out.live.sum()


@pytest.mark.parametrize("fault", ["sigkill", "hang", "raise"])
def test_a_run_with_a_worker_that_fails_has_books_that_balance(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(local, "ProcessCrew", ReadyCrew)
    fields = FIELDS | {"topology": "local", "fault_plan": f"actor[0]@env_step=100:{fault}", "env_steps": 300}
    fields["group"] = {"workers": 1}  # nobody can make up for it: the run waits for its replacement
    fields["supervisor"] = {"step_deadline": 2.0}
    run = rookery.train("ppo", env="support_ready:paced", out=str(tmp_path / "run"), **fields)
    assert run.summary["exit_reason"] == "env_steps" and run.summary["restarts"] == 1
    assert balances(run.summary["ledger"])
    words = {"sigkill": "SIGKILL", "hang": "no sign of life", "raise": "fault plan"}[fault]
    assert any(words in text for text in messages(run.path)), messages(run.path)
    (lost,) = run.summary["ledger"]["dropped"].values() or (0,)
    assert lost < T * LANES


def test_an_environment_that_fails_every_time_ends_the_run_with_its_own_error(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "ProcessCrew", ReadyCrew)
    fields = FIELDS | {"topology": "local", "env_kwargs": {"broken": 2}, "env_steps": 10**6}
    fields |= {"supervisor": {"restarts": 1}}
    with pytest.raises(EnvError, match="out of cheese") as caught:
        rookery.train("ppo", env="support_ready:paced", out=str(tmp_path / "run"), **fields)
    assert "support_ready:paced" in str(caught.value) and "lane 1, episode 0, step 1" in str(caught.value)


def test_several_actors_are_refused(tmp_path):
    with Signals() as signals, pytest.raises(UsageError, match="envs_per_actor"):
        ReadyCrew(configure("ppo", "support_ready:paced", **(FIELDS | {"actors": 2})), tmp_path, signals)


def test_states_of_environments_travel_whole():
    state = {"a": [1, 2.5, None, "x", b"y"], 3: (True, 2**100, -(2**70)), "n": {"x": np.arange(6).reshape(2, 3)}}
    found = unpack(pack(state))
    assert found["a"] == state["a"] and found[3] == state[3]
    np.testing.assert_array_equal(found["n"]["x"], state["n"]["x"])
    with pytest.raises(ValueError, match="object"):
        pack({"handle": object()})
