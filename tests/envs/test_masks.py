"""Masks of legal actions at the border: three ways to tell them, what is refused, and what stands behind an end."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from support_masks import WAYS, Maskable

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.core.legal import random_legal
from rookery.core.types import MASK, Leaf
from rookery.envs.check import check
from rookery.envs.lanes import LaneFault, SyncLanes
from rookery.envs.make import look
from rookery.envs.masks import MaskInInfo
from rookery.envs.vector import MaskedLanes, VectorLanes, adapt

SEEDS = [5, 6, 7]
SETTING = {"observation": "auto", "method": "auto", "info": "info"}


def lanes(way: str, count: int = 3, **options) -> SyncLanes:
    return SyncLanes("m", [Maskable(way, **options) for _ in range(count)], masks=SETTING[way])


def config(env: str, setting: str = "auto", **kwargs):
    return SimpleNamespace(env=env, env_kwargs=kwargs, atari=AtariConfig(), net=NetConfig(action_mask=setting))


def played(envs, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Masks [rows + 1, B, n] and rewards [rows, B] of random legal play."""
    dice, choices = np.random.default_rng(0), envs.spec.action.choices
    obs = envs.reset(SEEDS[: envs.count])
    seen, rewards = [obs[MASK].copy()], []
    for _ in range(rows):
        action = random_legal(obs[MASK], choices, dice).reshape(envs.count, *envs.spec.action.shape)
        obs, reward, _, _ = envs.step(action)
        seen.append(obs[MASK].copy())
        rewards.append(reward.copy())
    return np.stack(seen), np.stack(rewards)


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_masks_are_read_wherever_they_are_told(way, multi):
    envs = lanes(way, multi=multi)
    assert envs.spec.masked and envs.spec.mask_from == way
    assert envs.spec.obs[MASK] == Leaf((8 if multi else 6,), "bool", "mask")
    assert MASK not in envs.spec.seen.obs and len(envs.spec.seen.obs) == 1
    obs = envs.reset(SEEDS)
    assert obs[MASK].tolist() == [env.mask.tolist() for env in envs.envs]
    seen, rewards = played(envs)  # an illegal action would raise
    reference, expected = played(lanes("info", multi=multi))
    assert (rewards == expected).all()
    # Behind a terminal state the method is not asked; elsewhere masks are the same.
    assert way == "method" or (seen == reference).all()
    assert not seen.all() and seen.any(2).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("final", ["none", "missing", "drawn"])
def test_behind_an_end_everything_is_legal_unless_a_mask_says_otherwise(way, final):
    envs = lanes(way, count=1, length=1, final=final)  # the first episode is truncated, the second terminated
    obs = envs.reset([1])
    for _ in range(4):
        obs, _, terminated, truncated = envs.step(random_legal(obs[MASK], (6,), np.random.default_rng(0))[:, 0])
        if terminated[0] or truncated[0]:
            kept = final == "drawn" or (final == "missing" and way != "info")
            told = envs.envs[0].mask if kept and not (way == "method" and terminated[0]) else np.ones(6, bool)
            assert obs[MASK][0].tolist() == told.tolist()


def test_a_mask_that_allows_nothing_in_an_episode_is_the_fault_of_its_lane():
    envs = lanes("info")
    envs.reset(SEEDS)
    envs.envs[1]._drawn = lambda n: np.zeros(n, bool)
    with pytest.raises(LaneFault, match="allows no action") as raised:
        envs.step(np.array([env.mask.argmax() for env in envs.envs]))
    assert raised.value.lane == 1 and raised.value.reason == "bad_shape"


def test_one_branch_without_a_choice_is_a_fault_too():
    envs = lanes("info", count=1, multi=True)
    envs.envs[0]._drawn = lambda n: np.zeros(n, bool) if n == 3 else np.ones(n, bool)
    with pytest.raises(LaneFault, match="allows no action"):
        envs.reset([1])


@pytest.mark.parametrize(
    "given, message",
    [
        (np.ones(5, bool), r"info\['action_mask'\] of shape \(5,\), expected \(6,\)"),
        (np.array([0, 1, 2, 0, 0, 0]), "other numbers than 0 and 1"),
        ([[1], [1, 0]], "that is no array"),
        (None, "no 'action_mask' in `info`"),
    ],
)
def test_what_is_no_mask_is_the_fault_of_its_lane(given, message):
    class Odd(Maskable):
        def _shown(self, over):
            obs, info = super()._shown(over)
            return obs, {} if given is None else info | {MASK: given}

    envs = SyncLanes("m", [Odd()], masks="info")
    with pytest.raises(LaneFault, match=message) as raised:
        envs.reset([1])
    assert raised.value.reason == "bad_shape"


def test_a_mask_in_info_that_nobody_was_told_of_is_not_ignored():
    with pytest.raises(MaskInInfo, match=r"net\.action_mask to 'info'"):
        SyncLanes("m", [Maskable("info")]).reset([1])
    SyncLanes("m", [Maskable("info")], masks="off").reset([1])
    assert look(config("support_masks:Maskable")).mask_from == "info"
    assert not look(config("support_masks:Maskable", "off")).masked


@pytest.mark.parametrize("way", ["observation", "method"])
def test_masks_can_be_turned_off(way):
    envs = SyncLanes("m", [Maskable(way)], masks="off")
    assert not envs.spec.masked and envs.spec.mask_from == ""
    if way == "observation":
        assert envs.spec.obs[MASK] == Leaf((6,), "float32", "vector")  # an ordinary observation
        assert envs.reset([1])[MASK].dtype == np.float32


def with_mask(mask, action):
    env = gymnasium.Env()
    env.observation_space = spaces.Dict({MASK: mask, "seen": spaces.Box(-1, 1, (2,), np.float32)})
    env.action_space = action
    return SyncLanes("e", [env]).spec


@pytest.mark.parametrize(
    "mask, action",
    [
        (spaces.Box(0, 1, (4,), np.int8), spaces.Discrete(4)),
        (spaces.Box(0.0, 1.0, (4,), np.float32), spaces.Discrete(4, start=2)),
        (spaces.Box(0, 1, (4,), np.bool_), spaces.Discrete(4)),
        (spaces.MultiBinary(4), spaces.Discrete(4)),
        (spaces.MultiDiscrete([2] * 5), spaces.MultiDiscrete([2, 3])),
        (spaces.Box(0, 1, (6,), np.uint8), spaces.MultiBinary(3)),
        (spaces.MultiBinary([3, 2]), spaces.MultiBinary(3)),
    ],
)
def test_spaces_that_are_masks(mask, action):
    spec = with_mask(mask, action)
    assert spec.mask_from == "observation" and spec.obs[MASK].shape == (sum(spec.action.choices),)


@pytest.mark.parametrize(
    "mask, action",
    [
        (spaces.Box(0, 1, (3,), np.int8), spaces.Discrete(4)),  # another number of choices
        (spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(4)),
        (spaces.MultiDiscrete([3] * 4), spaces.Discrete(4)),
        (spaces.MultiBinary([2, 3]), spaces.MultiBinary(3)),
        (spaces.Box(0, 1, (4,), np.int8), spaces.Box(-1, 1, (4,), np.float32)),  # nothing to be masked
    ],
)
def test_other_observations_of_that_name_stay_observations(mask, action):
    spec = with_mask(mask, action)
    assert not spec.masked and spec.obs[MASK].kind != "mask" and spec.seen is spec


def test_a_mask_alone_is_no_observation():
    env = gymnasium.Env()
    env.observation_space = spaces.Dict({MASK: spaces.MultiBinary(3)})
    env.action_space = spaces.Discrete(3)
    with pytest.raises(UsageError, match="its only observation is 'action_mask'"):
        SyncLanes("e", [env])
    assert SyncLanes("e", [env], masks="off").spec.obs[MASK].kind == "vector"


def test_a_wrapper_with_the_method_counts():
    class Wrapped(gymnasium.Wrapper):
        def action_masks(self):
            return [True] * 5 + [False]

    envs = SyncLanes("m", [gymnasium.wrappers.TimeLimit(Wrapped(Maskable("info")), 5)])
    assert envs.spec.mask_from == "method" and envs.reset([1])[MASK].tolist() == [[True] * 5 + [False]]


def test_a_method_that_raises_is_the_fault_of_its_lane():
    class Broken(Maskable):
        def action_masks(self):
            raise ValueError("no masks today")

    with pytest.raises(LaneFault, match="raised in action_masks: ValueError: no masks today") as raised:
        SyncLanes("m", [Broken("drawn")]).reset([1])
    assert raised.value.reason == "env_raised"


def test_a_failed_lane_is_recreated_with_its_mask():
    envs = SyncLanes("m", [Maskable("method") for _ in range(2)], lambda lane: Maskable("method"))
    envs.reset([1, 2])
    obs = envs.rebuild(1, 9)
    assert obs[MASK].tolist() == [env.mask.tolist() for env in envs.envs]


# Vector environments


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("way", ["observation", "info"])
def test_a_vector_environment_tells_what_single_ones_tell(way, mode):
    """Gymnasium's own, by its observations and by the columns of its `info`."""

    class Vector(SyncVectorEnv):  # a subclass is not taken apart
        pass

    envs = adapt(Vector([lambda: Maskable(way)] * 3, autoreset_mode=mode), "m", SETTING[way])
    assert type(envs) is (VectorLanes if mode is AutoresetMode.NEXT_STEP else MaskedLanes)
    assert envs.spec == lanes(way).spec.__class__("m", envs.spec.obs, envs.spec.action, mask_from=way)
    seen, rewards = played(envs)
    assert seen.any(2).all() and not seen.all()
    if mode is AutoresetMode.NEXT_STEP:
        alone, expected = played(lanes(way))
        assert (seen == alone).all() and (rewards == expected).all()


def test_a_vector_environment_with_the_method():
    class Vector(gymnasium.vector.VectorEnv):
        num_envs, metadata = 3, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        single_observation_space, single_action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)
        observation_space, action_space = batch_space(single_observation_space, 3), batch_space(single_action_space, 3)
        nothing = False

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros((3, 2), np.float32), {}

        def action_masks(self):
            mask = np.arange(4) <= self.t % 4 + np.arange(3)[:, None]
            mask[1] &= not self.nothing
            return mask

        def step(self, actions):
            self.t += 1
            return np.zeros((3, 2), np.float32), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool), {}

    envs = adapt(Vector(), "v")
    assert envs.spec.mask_from == "method"
    assert envs.reset([1, 2, 3])[MASK].sum(1).tolist() == [1, 2, 3]
    assert envs.step(np.zeros(3, np.int64))[0][MASK].sum(1).tolist() == [2, 3, 4]
    envs.env.nothing = True
    with pytest.raises(LaneFault, match="allows no action") as raised:
        envs.step(np.zeros(3, np.int64))
    assert raised.value.lane == 1


def test_a_vector_environment_whose_mask_nobody_was_told_of():
    envs = adapt(AsyncVectorEnv([lambda: Maskable("info")] * 2, autoreset_mode=AutoresetMode.NEXT_STEP), "m")
    with pytest.raises(MaskInInfo):
        envs.reset([1, 2])
    envs.close()


# The check


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("multi", [False, True])
def test_the_check_plays_legal_actions_and_says_where_masks_come_from(way, multi):
    report = check(config("support_masks:Maskable", way=way, multi=multi), 200)
    assert report.ok and report.mask_from == way and 0.2 < report.legal < 0.8
    assert any("legal actions: " in line for line in report.lines())


def test_the_check_reports_a_mask_that_cannot_be_and_one_that_is_none():
    report = check(config("test_masks:Stuck"), 100)
    assert not report.ok and "allows no action" in report.errors[0]
    report = check(config("test_masks:Misnamed"), 100)
    assert any("is no mask of legal actions: with 6 choices" in warning for warning in report.warnings)


class Stuck(Maskable):
    def _drawn(self, n):
        return super()._drawn(n) & (self.t < 3)


class Misnamed(Maskable):
    def __init__(self):
        super().__init__("observation")
        self.observation_space = spaces.Dict(self.observation_space.spaces | {MASK: spaces.Box(0, 1, (2,), np.int8)})

    def step(self, action):
        obs, *rest = super().step(self.mask.argmax())
        return obs, *rest

    def _shown(self, over):
        obs, info = super()._shown(over)
        return obs | {MASK: np.zeros(2, np.int8)}, info
