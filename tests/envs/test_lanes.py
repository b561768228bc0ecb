"""Every way of stepping environments gives the rows of a brute-force oracle: users.md item 1, P2 and P4."""

from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core.errors import UsageError
from rookery.envs.lanes import SyncLanes
from rookery.envs.scripted import ENDS, NAMES, Counter
from rookery.envs.vector import MaskedLanes, VectorLanes, adapt


def oracle(seed, lengths, ends, actions, discarded=0):
    """The rows of one lane, from the script alone: [(obs, reward, terminated, truncated)], first row the reset's.

    `discarded` episodes are begun and thrown away between two that are played.
    """
    who, episode, t, over = seed % NAMES, 0, 0, False
    rows = [((who, 0, 0), 0.0, False, False)]
    for action in actions:
        if over:
            episode, t, over = episode + 1 + discarded, 0, False
            rows.append(((who, episode, 0), 0.0, False, False))
            continue
        reward, t = t + action / 4, t + 1
        over = t == lengths[episode % len(lengths)]
        flags = ENDS[ends[episode % len(ends)]] if over else (False, False)
        rows.append(((who, episode, t), reward, *flags))
    return rows


def played(lanes, seeds, actions):
    """What lanes return, as the oracle writes it: per lane a list of rows. Everything is copied at once."""
    obs = lanes.reset(seeds)["obs"]
    zero = np.zeros(len(seeds))
    rows = [(obs.copy(), zero, zero, zero)]
    for action in actions:
        obs, *rest = lanes.step(action)
        rows.append((obs["obs"].copy(), *(column.copy() for column in rest)))
    return [
        [(tuple(obs[lane]), reward[lane], bool(term[lane]), bool(trunc[lane])) for obs, reward, term, trunc in rows]
        for lane in range(len(seeds))
    ]


def sync(envs):
    return SyncLanes("counter", [make() for make in envs])


def next_step(envs):
    return VectorLanes("counter", SyncVectorEnv(envs, autoreset_mode=AutoresetMode.NEXT_STEP))


def disabled(envs):
    return MaskedLanes("counter", SyncVectorEnv(envs, autoreset_mode=AutoresetMode.DISABLED))


def same_step_taken_apart(envs):
    return adapt(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP), "counter")


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=3)
KINDS = st.lists(st.sampled_from(list(ENDS)), min_size=1, max_size=3)
SOURCES = [(sync, 0), (next_step, 0), (same_step_taken_apart, 0), (disabled, 1)]


@pytest.mark.parametrize("source, discarded", SOURCES)
@settings(max_examples=40, deadline=None)
@given(
    scripts=st.lists(st.tuples(LENGTHS, KINDS), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    reuse=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_rows_are_those_of_the_oracle(source, discarded, scripts, seed, reuse, draw):
    lanes = source([lambda s=s: Counter(lengths=s[0], ends=s[1], actions=4, reuse=reuse) for s in scripts])
    seeds = [seed + lane for lane in range(len(scripts))]
    actions = np.array([[draw.randrange(4) for _ in scripts] for _ in range(17)])
    found = played(lanes, seeds, actions)
    for lane, (lengths, ends) in enumerate(scripts):
        assert found[lane] == oracle(seeds[lane], lengths, ends, actions[:, lane], discarded)


class Counted(Counter):
    steps = 0

    def step(self, action):
        type(self).steps += 1
        return super().step(action)


@pytest.mark.parametrize("source, discarded", [(sync, 0), (next_step, 0)])
def test_live_rows_are_the_environments_steps_and_none_mixes_episodes(source, discarded):
    Counted.steps = 0
    lanes = source([lambda: Counted(lengths=[3, 1, 2], ends=["terminated", "truncated"])] * 2)
    rows = played(lanes, [1, 2], np.ones((20, 2), np.int64))
    live = 0
    for lane in rows:
        for (obs, *_, term, trunc), (after, *_) in pairwise(lane):
            if not (term or trunc):  # the next row is live: a real transition, within one episode, one step on
                live += 1
                assert after[1] == obs[1] and after[2] == obs[2] + 1
    assert live == Counted.steps


@pytest.mark.parametrize("source, discarded", SOURCES)
def test_the_observation_behind_an_end_is_the_final_one(source, discarded):
    """P2: what a value is bootstrapped from after a truncation is the episode's own last observation."""
    lanes = source([lambda: Counter(lengths=[3], ends=["truncated"], reuse=True)])
    lanes.reset([7])
    for _ in range(3):
        obs, _, _, truncated = lanes.step(np.array([0]))
    assert truncated[0] and tuple(obs["obs"][0]) == (7, 0, 3)
    obs, reward, terminated, truncated = lanes.step(np.array([1]))
    assert tuple(obs["obs"][0]) == (7, 1 + discarded, 0) and reward[0] == 0 and not (terminated | truncated)[0]


def test_a_reset_amid_an_episode_starts_anew():
    for source, _ in SOURCES:
        lanes = source([lambda: Counter(lengths=[2])] * 2)
        lanes.reset([1, 2])
        lanes.step(np.array([0, 0]))
        lanes.step(np.array([0, 0]))  # both have ended
        assert lanes.reset([3, 4])["obs"].tolist() == [[3, 0, 0], [4, 0, 0]]
        obs, reward, *_ = lanes.step(np.array([1, 0]))  # so this is an ordinary row
        assert obs["obs"].tolist() == [[3, 0, 1], [4, 0, 1]] and reward.tolist() == [0.25, 0.0]


def test_gymnasiums_own_sync_vector_environment_is_driven_by_our_loop():
    for mode in AutoresetMode:
        assert type(adapt(SyncVectorEnv([Counter], autoreset_mode=mode), "counter")) is SyncLanes


@pytest.mark.parametrize(
    "mode, adapter", [(AutoresetMode.NEXT_STEP, VectorLanes), (AutoresetMode.DISABLED, MaskedLanes)]
)
def test_other_vector_environments_are_adapted_by_their_mode(mode, adapter):
    env = VectorWrapper(SyncVectorEnv([lambda: Counter(lengths=[2])], autoreset_mode=mode))
    lanes = adapt(env, "counter")
    assert type(lanes) is adapter
    assert played(lanes, [5], np.zeros((3, 1), np.int64))[0][2][2:] == (True, False)


def test_a_same_step_vector_environment_is_refused_with_the_way_out():
    env = VectorWrapper(SyncVectorEnv([Counter], autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(UsageError, match=r"counter: .*SAME_STEP.*autoreset_mode NEXT_STEP or DISABLED"):
        adapt(env, "counter")


@pytest.mark.parametrize("declared", [None, "sometimes"])
def test_an_undeclared_mode_is_refused_with_the_way_out(declared):
    inner = SyncVectorEnv([Counter])
    inner.metadata = {} if declared is None else {"autoreset_mode": declared}
    with pytest.raises(UsageError, match="does not say how it resets"):
        adapt(VectorWrapper(inner), "counter")


class Sloppy(gymnasium.vector.VectorEnv):
    """Pays in reset rows, like vector environments that forget to clear it; ends every second step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2
    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, stuck=False):
        self.stuck, self.t = stuck, 0

    def reset(self, *, seed=None, options=None):
        self.t, self.seed = 0, seed
        return np.zeros((2, 1)), {}

    def step(self, actions):
        self.t += 1
        ends = np.array([self.t % 2 == 1 or self.stuck, False])
        return np.full((2, 1), 0.1 * self.t), np.ones(2), ends, np.zeros(2, bool), {}


def test_rewards_of_reset_rows_are_nought_whatever_the_environment_says():
    lanes = VectorLanes("sloppy", Sloppy())
    lanes.reset([1, 2])
    rewards = [lanes.step(np.zeros(2, np.int64))[1].tolist() for _ in range(3)]
    assert rewards == [[1, 1], [0, 1], [1, 1]]


def test_float64_observations_of_a_batch_come_out_as_float32():
    lanes = VectorLanes("sloppy", Sloppy())
    lanes.reset([1, 2])
    obs = lanes.step(np.zeros(2, np.int64))[0]["obs"]
    assert obs.dtype == np.float32 and obs.tolist() == np.full((2, 1), 0.1, np.float32).tolist()


def test_a_vector_environment_with_one_generator_gets_one_seed_made_of_all():
    seeds = []
    for given_seeds in ([1, 2], [1, 2], [1, 3]):
        env = Sloppy()
        VectorLanes("sloppy", env).reset(given_seeds)
        seeds.append(env.seed)
    assert seeds[0] == seeds[1] != seeds[2] and all(isinstance(seed, int) for seed in seeds)


def test_lanes_with_different_spaces_are_refused():
    with pytest.raises(UsageError, match="lane 1"):
        SyncLanes("counter", [Counter(actions=2), Counter(actions=3)])
