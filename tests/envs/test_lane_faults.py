"""What an environment does wrong is caught at the border, with its lane and a reason (reliability.md F7, F8)."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rookery.core.errors import UsageError
from rookery.envs.lanes import LaneFault, SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.scripted import Counter, Faulty
from rookery.envs.vector import VectorLanes, adapt

GO = np.zeros(3, np.int64)


def lanes_with(env):
    return SyncLanes("faulty", [Counter(), env, Counter()])


def run(lanes, steps):
    lanes.reset([1, 2, 3])
    for _ in range(steps):
        lanes.step(GO)


@pytest.mark.parametrize(
    "fault, what, reason",
    [
        ("raise_step", "raised in step", "env_raised"),
        ("bad_shape", r"returned an observation of shape \(6,\), expected \(3,\)", "bad_shape"),
    ],
)
def test_a_fault_in_a_step_names_lane_and_reason(fault, what, reason):
    lanes = lanes_with(Faulty(fault, at_step=2, at_episode=1))
    run(lanes, 8)  # five steps, the reset row, two steps
    with pytest.raises(LaneFault, match=what) as caught:
        lanes.step(GO)
    assert (caught.value.lane, caught.value.reason) == (1, reason)


def test_the_cause_is_kept():
    lanes = lanes_with(Faulty("raise_step", at_step=0))
    with pytest.raises(LaneFault, match="RuntimeError: scripted fault: raise_step in episode 0, step 0") as caught:
        run(lanes, 1)
    assert isinstance(caught.value.cause, RuntimeError) and caught.value.what == "raised in step"


@pytest.mark.parametrize("episode, steps", [(0, 0), (1, 6)])
def test_a_fault_in_a_reset_is_said_to_be_one(episode, steps):
    with pytest.raises(LaneFault) as caught:
        run(lanes_with(Faulty("raise_reset", at_episode=episode)), steps)
    assert (caught.value.lane, caught.value.what, caught.value.reason) == (1, "raised in reset", "env_raised")


@pytest.mark.parametrize("fault", ["nan_obs", "nan_reward"])
def test_nan_passes_the_border_for_the_gate_to_find(fault):
    lanes = lanes_with(Faulty(fault, at_step=1))
    run(lanes, 1)
    obs, reward, *_ = lanes.step(GO)
    nan = obs["obs"] if fault == "nan_obs" else reward
    assert np.isnan(nan[1]).all() and np.isfinite(nan[[0, 2]]).all()


def test_a_marker_lets_only_one_environment_fail_once(tmp_path):
    marker = str(tmp_path / "struck")
    lanes = SyncLanes("faulty", [Faulty(at_step=1, marker=marker) for _ in range(3)])
    lanes.reset([1, 2, 3])
    lanes.step(GO)
    with pytest.raises(LaneFault) as caught:
        lanes.step(GO)
    assert caught.value.lane == 0
    run(SyncLanes("faulty", [Faulty(at_step=1, marker=marker) for _ in range(3)]), 10)  # the replacement behaves


def test_a_seed_chooses_the_lane_that_fails():
    lanes = SyncLanes("faulty", [Faulty(at_step=0, seed=3) for _ in range(3)])
    with pytest.raises(LaneFault) as caught:
        run(lanes, 1)
    assert caught.value.lane == 2


# A lane that fails is recreated alone


def mendable(*envs, build=lambda lane: Counter(lengths=(4,))):
    lanes = SyncLanes("faulty", envs, build)
    lanes.reset([1, 2, 3])
    return lanes


@pytest.mark.parametrize(
    "broken",
    [Faulty(at_step=2), Faulty("bad_shape", at_step=2), Faulty("raise_reset", at_episode=1, lengths=(2,))],
    ids=lambda env: env.fault,
)
def test_the_other_lanes_take_the_step_to_its_end(broken):
    """Before the failed lane, where an episode ends in that step, and behind it, where one is reset."""
    lanes = mendable(Counter(lengths=(3,)), broken, Counter(lengths=(2,)))
    lanes.step(GO)
    lanes.step(GO)
    with pytest.raises(LaneFault) as caught:
        lanes.step(GO)
    obs, reward, terminated, truncated = (column[[0, 2]].tolist() for column in flat(caught.value.row))
    assert caught.value.lane == 1 and not caught.value.others
    assert obs == [[1, 0, 3], [3, 1, 0]] and reward == [2, 0]
    assert terminated == [True, False] and truncated == [False, False]


def flat(row):
    return row[0]["obs"], *row[1:]


def test_all_that_fail_in_one_step_are_told():
    lanes = mendable(Faulty(at_step=0), Counter(), Faulty("bad_shape", at_step=0))
    with pytest.raises(LaneFault) as caught:
        lanes.step(GO)
    assert caught.value.lane == 0 and [(each.lane, each.reason) for each in caught.value.others] == [(2, "bad_shape")]
    assert caught.value.row[0]["obs"][1].tolist() == [2, 0, 1]


class Closing(Faulty):
    closed = 0

    def close(self):
        type(self).closed += 1
        raise RuntimeError("and it does not even close")


def test_the_failed_environment_is_closed_and_a_new_one_begins_where_the_others_are():
    lanes = mendable(Counter(), Closing(at_step=1), Counter())
    lanes.step(GO)
    with pytest.raises(LaneFault):
        lanes.step(GO)
    assert lanes.rebuild(1, 77)["obs"].tolist() == [[1, 0, 2], [77, 0, 0], [3, 0, 2]]
    assert Closing.closed == 1
    obs, reward, *_ = lanes.step(GO)
    assert obs["obs"].tolist() == [[1, 0, 3], [77, 0, 1], [3, 0, 3]] and reward.tolist() == [2, 0, 2]


def test_what_cannot_be_made_again_is_a_fault_of_its_own_and_may_be_tried_again():
    made = iter([Faulty("raise_reset"), Counter(actions=3), Counter()])

    def build(lane):
        assert lane == 1
        if (env := next(made, None)) is None:
            raise OSError("no licence left")
        return env

    lanes = mendable(Counter(), Faulty(at_step=0), Counter(), build=build)
    with pytest.raises(LaneFault):
        lanes.step(GO)
    for what in ("raised in reset", "has other spaces than the one before it"):
        with pytest.raises(LaneFault, match=what) as caught:
            lanes.rebuild(1, 5)
        assert caught.value.lane == 1
    assert lanes.rebuild(1, 6)["obs"][1].tolist() == [6, 0, 0]
    with pytest.raises(LaneFault, match="raised when it was made: OSError: no licence left"):
        lanes.rebuild(1, 7)
    lanes.close()  # one of them is not there


def test_what_it_needs_and_is_not_installed_is_not_tried_again():
    def build(lane):
        raise UsageError("pip install it")

    with pytest.raises(UsageError):
        mendable(Counter(), Counter(), Counter(), build=build).rebuild(1, 5)


def test_the_environments_of_a_sync_vector_can_be_recreated_too():
    lanes = adapt(SyncVectorEnv([Counter, lambda: Faulty(at_step=0)]), "vector")
    lanes.reset([1, 2])
    with pytest.raises(LaneFault) as caught:
        lanes.step(np.zeros(2, np.int64))
    assert caught.value.lane == 1 and lanes.rebuild(1, 9)["obs"].tolist() == [[1, 0, 1], [9, 0, 0]]


def test_a_batch_cannot_recreate_one_of_its_lanes():
    lanes = VectorLanes("broken", Broken())
    assert not lanes.mendable
    with pytest.raises(NotImplementedError):
        lanes.rebuild(1, 5)


def test_last_action_and_reward_go_on_in_the_others_and_begin_anew_in_the_lane():
    lanes = LastLanes(mendable(Counter(), Faulty(at_step=2, at_episode=1), Counter(lengths=(2,))))
    lanes.reset([1, 2, 3])
    lanes.step(GO + 1)
    lanes.step(GO + 1)
    with pytest.raises(LaneFault) as caught:
        lanes.step(GO + 1)
    obs = caught.value.row[0]
    assert obs["last_reward"][[0, 2]].ravel().tolist() == [2.25, 0] and obs["last_action"][[0, 2], 1].tolist() == [1, 0]
    assert lanes.mendable
    obs = lanes.rebuild(1, 9)
    assert obs["obs"][1].tolist() == [9, 0, 0] and not obs["last_action"][1].any() and not obs["last_reward"][1]
    assert obs["last_reward"][0] == 2.25
    obs, *_ = lanes.step(GO + 1)
    assert obs["last_reward"].ravel().tolist() == [3.25, 0.25, 0.25]


class Odd(Counter):
    """Returns one wrong thing."""

    def __init__(self, **wrong):
        super().__init__()
        self.wrong = wrong

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        return self.wrong.get("reset", result)

    def step(self, action):
        row = dict(zip(("obs", "reward", "terminated", "truncated", "info"), super().step(action)))
        result = tuple((row | self.wrong).values())
        return result[:4] if "short" in self.wrong else result[:5]


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"obs": np.zeros(1, np.float32)}, r"observation of shape \(1,\), expected \(3,\)"),  # would broadcast
        ({"obs": np.float32(1)}, r"observation of shape \(\)"),
        ({"obs": np.zeros(3, complex)}, "observation of dtype complex128, expected float32"),
        ({"obs": [[1], [2, 3]]}, "observation that is no array"),
        ({"obs": None}, "observation of shape"),
        ({"reward": np.ones(1)}, r"reward of shape \(1,\), expected a number"),
        ({"reward": None}, "reward that is a NoneType"),
        ({"reward": "1"}, "reward that is a str"),
        ({"terminated": None}, "terminated that is a NoneType, expected a bool"),
        ({"truncated": np.zeros(2, bool)}, "truncated that is a ndarray"),
        ({"short": True}, "returned 4 values from step.*old gym"),
        ({"reset": np.zeros(3, np.float32)}, "returned a ndarray from reset"),
    ],
)
def test_wrong_returns_are_named(wrong, what):
    with pytest.raises(LaneFault, match=what) as caught:
        run(lanes_with(Odd(**wrong)), 1)
    assert (caught.value.lane, caught.value.reason) == (1, "bad_shape")


@pytest.mark.parametrize("reward", [1, np.float64(1), np.float32(1), np.int64(1), True, np.array(1.0)])
def test_rewards_of_any_number_type_are_taken(reward):
    lanes = lanes_with(Odd(reward=reward, terminated=np.bool_(False), truncated=0))
    lanes.reset([1, 2, 3])
    assert lanes.step(GO)[1].tolist() == [0, 1, 0]


def test_a_vector_environment_says_what_but_not_which_lane():
    lanes = VectorLanes("faulty", SyncVectorEnv([Counter, lambda: Faulty(at_step=0)]))
    lanes.reset([1, 2])
    with pytest.raises(LaneFault, match=r"raised in step .*some lane.*scripted fault") as caught:
        lanes.step(np.zeros(2, np.int64))
    assert caught.value.reason == "env_raised"


class Broken(gymnasium.vector.VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2
    single_observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **row):
        ok = {"obs": np.zeros((2, 1), np.float32), "reward": np.zeros(2), "terminated": np.zeros(2, bool)}
        self.row = tuple((ok | {"truncated": np.zeros(2, bool)} | row).values())

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        return *self.row, {}


@pytest.mark.parametrize(
    "row, what",
    [
        ({"obs": np.zeros((1, 1), np.float32)}, r"observation of shape \(1, 1\), expected \(2, 1\)"),
        ({"reward": np.zeros((2, 1))}, r"columns of shape reward \(2, 1\).*expected \(2,\)"),
        ({"terminated": False}, r"terminated \(\).*expected \(2,\)"),
    ],
)
def test_batches_of_wrong_shape_are_named(row, what):
    lanes = VectorLanes("broken", Broken(**row))
    lanes.reset([1, 2])
    with pytest.raises(LaneFault, match=what) as caught:
        lanes.step(np.zeros(2, np.int64))
    assert caught.value.reason == "bad_shape"


def test_a_vector_environment_that_ends_in_its_reset_row_is_stopped():
    lanes = VectorLanes("broken", Broken(truncated=np.array([False, True])))
    lanes.reset([1, 2])
    lanes.step(np.zeros(2, np.int64))
    with pytest.raises(LaneFault, match="ended an episode in the row that resets it") as caught:
        lanes.step(np.zeros(2, np.int64))
    assert caught.value.lane == 1
