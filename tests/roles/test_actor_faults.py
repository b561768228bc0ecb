"""Faults of environments: each with its exact address, counted by the steps that are lost with it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from support_lanes import BOX, RESET, SMALL, ScriptedLanes, build, columns, script

from rookery.algorithms.ppo import PPO
from rookery.core.config import NetConfig
from rookery.core.errors import EnvError, NumericError
from rookery.envs.lanes import LaneFault
from rookery.roles.actor import Actor

T, B = SMALL.unroll, 4
GRU = NetConfig(hidden=(8,), core="gru", core_size=5)


def addresses(rows: int):
    """Each (lane, episode, step, row) of the script that is a real step, and each reset."""
    for lane in range(B):
        for row, (episode, t, live, *_) in enumerate(itertools.islice(script(lane), rows)):
            yield (lane, episode, t, row) if live else (lane, episode + 1, RESET, row)


def run_into(fault: str, lane: int, episode: int, step: int) -> tuple[Actor, EnvError]:
    lanes = ScriptedLanes(faults={(lane, episode, step): fault})
    rig = build(lambda: lanes)
    actor = Actor(rig.algorithm, rig.learner.nets, lanes, seed=1, index=2)
    actor.reset()
    with pytest.raises(EnvError) as caught:
        for _ in range(8):
            actor.unroll(rig.buffers[0], 0)
    return actor, caught.value


def address(lane: int, episode: int, step: int) -> str:
    return f"(actor 2, lane {2 * B + lane}, episode {episode}, step {max(step, 0)})"


@pytest.mark.parametrize("lane", range(B))
def test_a_fault_is_located_exactly_wherever_it_strikes(lane):
    """Also several episodes into an unroll, in the first and last row, and behind a dead row at the boundary."""
    wrong = []
    for at, episode, step, row in addresses(3 * T):
        if at != lane:
            continue
        actor, error = run_into("raise", lane, episode, step)
        verb = "reset" if step == RESET else "step"
        said = f"environment scripted raised in {verb} {address(lane, episode, step)}: RuntimeError: on purpose"
        if str(error) != said:
            wrong.append((f"row {row}", said, str(error)))
        assert error.reason == "env_raised"
        # Counted: what the whole vector steps of this unroll took, not the one that failed.
        lost = columns(3 * T)[row // T * T : row, :, 2].sum()
        assert error.steps == lost, (row, error.steps, lost)
        assert actor.sequence == row // T
    assert not wrong, wrong


@pytest.mark.parametrize("fault", ["nan_obs", "inf_obs", "nan_reward"])
@pytest.mark.parametrize("lane", range(B))
def test_what_is_not_finite_is_found_in_the_step_that_brought_it_and_located_exactly(lane, fault):
    value, name = fault.split("_")
    what = f"a reward of {value}" if name == "reward" else f"an observation of {value}"
    wrong = []
    for at, episode, step, row in addresses(3 * T):
        if at != lane or (step == RESET and fault != "nan_obs"):
            continue
        actor, error = run_into(fault, lane, episode, step)
        said = f"environment scripted returned {what} {address(lane, episode, step)}"
        if str(error) != said:
            wrong.append((f"row {row}", said, str(error)))
        assert error.reason == "nonfinite"
        assert error.steps == columns(3 * T)[row // T * T : row, :, 2].sum()
        assert len(actor.lanes.actions) == row + 1, "no step more was taken"
        assert actor.sequence == row // T, "an unroll that failed is not an unroll"
    assert not wrong, wrong


def test_a_fault_in_the_first_reset_is_located():
    lanes = ScriptedLanes(faults={(2, 0, RESET): "raise"})
    algorithm = PPO(SMALL, NetConfig(), lanes.spec, B)
    actor = Actor(algorithm, algorithm.nets(), lanes, 1, 3)
    with pytest.raises(EnvError, match=r"scripted raised in reset \(actor 3, lane 14, episode 0, step 0\)") as caught:
        actor.reset()
    assert caught.value.steps == 0


def test_the_first_cause_is_told_when_a_bad_observation_makes_a_bad_action():
    """A NaN observation gives a NaN action in a box; an environment that refuses it is not the one to blame."""

    class Strict(ScriptedLanes):
        def step(self, action):
            if not np.isfinite(action).all():
                self.faults |= {(lane, int(self.episode[lane]), int(self.t[lane])): "raise" for lane in range(B)}
            return super().step(action)

    rig = build(lambda: Strict(action=BOX, faults={(2, 0, 1): "nan_obs"}))
    with pytest.raises(EnvError) as caught:
        rig.actors[0].unroll(rig.buffers[0], 0)
    assert "returned an observation of nan (actor 0, lane 2, episode 0, step 1)" in str(caught.value)
    assert caught.value.reason == "nonfinite"


def test_after_a_fault_a_reset_begins_anew():
    rig = build(lambda: ScriptedLanes(faults={(1, 0, 2): "raise"}), net=GRU)
    actor = rig.actors[0]
    with pytest.raises(EnvError):
        actor.unroll(rig.buffers[0], 0)
    actor.lanes.faults = {}
    actor.reset("0.1")
    report = actor.unroll(rig.buffers[0], 0)
    assert rig.buffers[0].live[0].all() and not rig.buffers[0].state0["h"][0].any()
    assert report.steps == columns(T)[:, :, 2].sum()
    first, second = actor.lanes.seeds
    assert not set(first) & set(second), "a restart must not repeat the episodes that failed"


class Sick(PPO):
    """A policy that chooses NaN in lane 1 from the `after`th action on."""

    after = 4
    acted = 0

    def act(self, nets, obs, state, explore):
        output = super().act(nets, obs, state, explore)
        self.acted += 1
        if self.acted > self.after:
            output.action[1] = np.nan
        return output


def sick(faults: dict | None = None, taken: str = "as it is") -> Exception:
    lanes = ScriptedLanes(action=BOX, faults=faults)
    rig = build(lambda: lanes)
    algorithm = Sick(rig.algorithm.config, rig.algorithm.net, lanes.spec, lanes.count)
    actor = Actor(algorithm, rig.learner.nets, lanes, seed=1, index=2)
    actor.reset()
    step = lanes.step
    if taken == "refused":
        lanes.step = lambda action: step(action) if np.isfinite(action).all() else _refuse()
    if taken == "ignored":
        lanes.step = lambda action: step(np.nan_to_num(action))
    with pytest.raises((EnvError, NumericError)) as caught:
        for _ in range(3):
            actor.unroll(rig.buffers[0], 0)
    return caught.value


def _refuse():
    raise LaneFault(1, "raised in step", ValueError("a number, please"))


@pytest.mark.parametrize("taken", ["as it is", "refused", "ignored"])
def test_a_policy_that_has_diverged_is_not_the_environments_fault(taken):
    error = sick(taken=taken)
    assert isinstance(error, NumericError)
    assert "the policy chose" in str(error) and f"actor 2, lane {2 * B + 1}, unroll 0" in str(error)


@pytest.mark.parametrize("step", [0, 2])
def test_a_bad_observation_that_came_first_is(step):
    """The action that a policy makes of it is not finite either, and an environment may choke on that one."""
    error = sick(faults={(1, 0, step): "nan_obs"})
    assert isinstance(error, EnvError) and "returned an observation of nan" in str(error)


def test_a_bad_observation_of_the_first_reset_is_found_before_anybody_acts():
    lanes = ScriptedLanes(action=BOX)
    reset = lanes.reset
    lanes.reset = lambda seeds: {"obs": np.where(np.arange(B)[:, None] == 1, np.nan, reset(seeds)["obs"])}
    with pytest.raises(EnvError, match=r"returned an observation of nan \(actor 0, lane 1, episode 0, step 0\)"):
        build(lambda: lanes)
    assert not lanes.actions


# Lanes that are recreated while the others go on


def fails_at(fault: str, *places: tuple[int, int, int], net: NetConfig = NetConfig(hidden=(8,)), **more):  # noqa: B008
    """An actor on lanes that can be recreated, up to its first failure, and the error."""
    lanes = ScriptedLanes(faults=dict.fromkeys(places, fault), mendable=True, **more)
    rig = build(lambda: lanes, config=dataclasses.replace(SMALL, chunk=1), net=net)
    actor, out, reports = rig.actors[0], rig.buffers[0], []
    with pytest.raises(EnvError) as caught:
        for _ in range(8):
            reports.append(actor.unroll(out, 0))
    assert caught.value.mendable and actor.broken
    return rig, caught.value, reports


def told(reports) -> list[tuple[int, float, int]]:
    return sorted((each.lane, each.total, each.length) for report in reports for each in report.episodes)


@pytest.mark.parametrize("fault", ["raise", "nan_obs", "nan_reward"])
@pytest.mark.parametrize("lane", range(B))
def test_the_others_go_on_where_they_are_and_nothing_of_their_episodes_is_lost(lane, fault):
    """Wherever it strikes: rows, live rows, episode returns and lengths, and the steps that are lost."""
    script_rows = columns(6 * T)
    others = [each for each in range(B) if each != lane]
    for at, episode, step, row in addresses(T + 2):
        if at != lane or (step == RESET and fault == "nan_reward"):
            continue
        rig, error, reports = fails_at(fault, (lane, episode, step))
        actor, out = rig.actors[0], rig.buffers[0]
        begun = row // T * T
        own = int(script_rows[row, lane, 2])
        assert error.steps == script_rows[begun : row + 1, :, 2].sum() - own, (row, error.steps)
        actor.mend("a life")
        assert actor.sequence == row // T and not actor.broken
        assert (actor.episodes.age >= 0).tolist() == [x == lane or bool(script_rows[row + 1, x, 2]) for x in range(B)]
        for unroll in range(3):
            reports.append(actor.unroll(out, 0))
            rows = script_rows[row + 1 + unroll * T : row + 1 + (unroll + 1) * T]
            np.testing.assert_array_equal(out.obs["obs"][:-1, others, 1:], rows[:, others, :2])
            np.testing.assert_array_equal(out.live[:, others], rows[:, others, 2])
            if unroll == 0:
                assert out.live[0, lane] and out.obs["obs"][0, lane].tolist() == [lane, 100, 0]
        assert told(reports) == sorted(actor.lanes.finished), "not the episode that failed, and all others whole"


@pytest.mark.parametrize("row", range(T))
def test_recurrent_states_go_on_and_that_of_the_new_lane_is_zero(row):
    """A twin that does not fail takes the same actions up to there, and has the states of every row."""
    net, lane = GRU, 2  # one long episode
    twin = build(ScriptedLanes, config=dataclasses.replace(SMALL, chunk=1), net=net)
    twin.actors[0].unroll(twin.buffers[0], 0)
    whole = [twin.buffers[0].state0["h"].copy(), twin.actors[0]._state["h"].numpy().copy()[None]]
    rig, _, _ = fails_at("raise", (lane, 0, row), net=net)
    wanted = np.concatenate(whole)[row + 1]
    wanted[lane] = 0.0
    rig.actors[0].mend("a life")
    rig.actors[0].unroll(rig.buffers[0], 0)
    np.testing.assert_array_equal(rig.buffers[0].state0["h"][0], wanted)
    assert wanted.any()


def test_several_lanes_may_fail_in_one_step():
    rig, error, _ = fails_at("raise", (0, 0, 2), (2, 0, 2))
    assert "lane 0, episode 0, step 2; in this step 1 more lanes failed" in str(error)
    actor = rig.actors[0]
    actor.mend("a life")
    assert [lane for lane, _ in actor.lanes.rebuilt] == [0, 2] and len({seed for _, seed in actor.lanes.rebuilt}) == 2
    actor.unroll(rig.buffers[0], 0)
    assert rig.buffers[0].obs["obs"][0, :, 1].tolist() == [100, 0, 100, 1]


def test_one_that_cannot_be_recreated_is_located_and_tried_again_with_another_seed():
    rig, _, _ = fails_at("raise", (1, 0, 2), (1, 100, RESET))
    actor = rig.actors[0]
    with pytest.raises(EnvError, match=r"raised in reset \(actor 0, lane 1, episode 0, step 0\)") as caught:
        actor.mend("one")
    assert caught.value.mendable and caught.value.steps == 0 and actor.broken and actor.attempt == 2
    actor.lanes.faults[1, 200, RESET] = "nan_obs"
    with pytest.raises(EnvError, match=r"returned an observation of nan \(actor 0, lane 1, episode 0, step 0\)"):
        actor.mend("two")
    actor.mend("three")
    actor.unroll(rig.buffers[0], 0)
    assert rig.buffers[0].obs["obs"][0, 1].tolist() == [1, 300, 0]
    assert len({seed for _, seed in actor.lanes.rebuilt}) == 3 and actor.attempt == 0


def test_an_unroll_that_is_taken_anew_takes_other_actions():
    rig, _, _ = fails_at("raise", (2, 0, 5))
    actor = rig.actors[0]
    first = np.array(actor.lanes.actions[:5])
    actor.mend("a life")
    actor.unroll(rig.buffers[0], 0)
    assert not np.array_equal(first, rig.buffers[0].action[:5])
