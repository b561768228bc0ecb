"""Evaluation: whole episodes, fixed seeds, frozen statistics, unclipped rewards; numbers that are not finite end it.

Every lane plays the same number of episodes, so that short ones are not over-represented.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rookery.core.config import RunConfig
from rookery.core.errors import EnvError, UsageError
from rookery.core.frames import with_frames
from rookery.core.legal import random_legal
from rookery.core.seeding import seed_of
from rookery.core.types import MASK, ActionSpec
from rookery.envs.gate import check_finite
from rookery.envs.lanes import LaneFault, Lanes
from rookery.envs.make import make
from rookery.play.memory import forgotten
from rookery.play.policy import Policy

ENDLESS = 50_000  # steps without an end after which that is told


@dataclass
class Evaluation:
    env: str
    env_steps: int  # of the checkpoint
    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    seed: int
    greedy: bool
    epsilon: float  # share of actions drawn at random
    checkpoint: str
    returns: list[float] = field(default_factory=list, repr=False)
    info: dict[str, float] = field(default_factory=dict)  # means of the numbers that the environment gave at the ends


def divisor(episodes: int, most: int) -> int:
    """The largest number of environments up to `most` that share the episodes evenly."""
    return next(count for count in range(min(episodes, most), 0, -1) if episodes % count == 0)


def evaluate_as_set(policy: Policy, config: RunConfig, tick: Callable[[], object] | None = None) -> Evaluation:
    """An evaluation of a run that trains, as its `eval` fields say: in new environments, so that nothing of an earlier
    evaluation is left in them."""
    setting = config.eval
    lanes = make(config, divisor(setting.episodes, setting.envs), training=False)
    try:
        return evaluate(policy, lanes, setting.episodes, setting.seed, epsilon=setting.epsilon, tick=tick)
    finally:
        lanes.close()


def evaluate(
    policy: Policy, lanes: Lanes, episodes: int, seed: int, greedy: bool = True, epsilon: float = 0.0,
    tick: Callable[[], object] | None = None, tell: Callable[[str], object] | None = None,
) -> Evaluation:  # fmt: skip
    """Play at least `episodes` episodes (the next multiple of the lanes), greedily or as in training.

    `tick` is called before every step; what it raises ends the evaluation. `tell` hears of episodes that do not end.

    A share `epsilon` of the actions is drawn at random, as the papers on Atari do: a deterministic game cannot
    be solved by a memorised sequence, and a greedy policy that does nothing does not get stuck.
    """
    if not 0.0 <= epsilon <= 1.0:
        raise UsageError(f"epsilon is {epsilon:g}; it is a share of the actions, from 0 to 1")
    policy.check_fits(lanes.spec)
    if epsilon and policy.spec.action.kind == "box":
        raise UsageError(f"epsilon is for discrete actions and {policy.spec.id} has a Box; leave it out")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as actors do: too few rows for several threads
    try:
        return _evaluate(policy, lanes, episodes, seed, greedy, epsilon, tick or _nothing, tell or _nothing)
    except LaneFault as fault:
        told = f"environment {lanes.spec.id} failed in evaluation: {fault}"
        raise EnvError(with_frames(told, fault.cause), fault.reason) from fault
    finally:
        torch.set_num_threads(threads)


def _nothing(*args: object) -> None:
    pass


def _evaluate(
    policy: Policy, lanes: Lanes, episodes: int, seed: int, greedy: bool, epsilon: float, tick: Callable[[], object],
    tell: Callable[[str], object],
) -> Evaluation:  # fmt: skip
    count = lanes.count
    quota = math.ceil(episodes / count)
    rng = None if greedy else torch.Generator().manual_seed(seed_of(seed, "evaluate"))
    dice = np.random.default_rng(seed_of(seed, "epsilon"))
    obs = lanes.reset([seed_of(seed, "evaluate", lane) % 2**31 for lane in range(count)])
    state = policy.initial_state(count)
    live = np.ones(count, bool)
    total, length = np.zeros(count), np.zeros(count, np.int64)
    returns: list[list[float]] = [[] for _ in range(count)]
    lengths: list[list[int]] = [[] for _ in range(count)]
    told: list[dict[str, float]] = []
    steps = 0
    while any(len(done) < quota for done in returns):
        tick()
        steps += 1
        if steps == ENDLESS and not any(returns):
            tell(
                f"no episode of {lanes.spec.id} has ended in {steps:,} steps; an environment without a time limit may "
                "never end one (gymnasium.wrappers.TimeLimit sets one). The evaluation goes on; Ctrl-C ends it"
            )
        action, state = policy.act_batch(obs, state, rng)
        if epsilon:
            action = _mixed(action, epsilon, policy.spec.action, dice, obs.get(MASK) if policy.spec.masked else None)
        obs, reward, terminated, truncated = lanes.step(action)
        check_finite(obs, reward)
        total += reward
        length += live
        if not live.all():  # the row after an end was a reset: the recurrent state is zeroed
            state = forgotten(state, ~live)
        ends = terminated | truncated
        infos = lanes.take_infos() if lanes.metrics else None
        for lane in np.flatnonzero(ends):
            if len(returns[lane]) < quota:
                returns[lane].append(float(total[lane]))
                lengths[lane].append(int(length[lane]))
                told += infos[lane] if infos is not None else []
            total[lane], length[lane] = 0.0, 0
        live = ~ends
    flat = [value for lane in returns for value in lane]
    return Evaluation(
        env=policy.spec.id, env_steps=policy.env_steps, episodes=len(flat), return_mean=float(np.mean(flat)),
        return_std=float(np.std(flat)), return_min=min(flat), return_max=max(flat),
        length_mean=float(np.mean([n for lane in lengths for n in lane])), seed=seed, greedy=greedy,
        epsilon=epsilon, checkpoint=policy.path.name, returns=flat,
        info={name: float(np.mean([each[name] for each in told if name in each])) for name in _names(told)},
    )  # fmt: skip


def _names(told: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in told for name in each))


def _mixed(
    action: np.ndarray, epsilon: float, spec: ActionSpec, dice: np.random.Generator, mask: np.ndarray | None = None
) -> np.ndarray:
    """Actions [B, *shape], each replaced with probability epsilon by a uniform draw of those that `mask` allows."""
    random = dice.random(len(action)) < epsilon
    if mask is not None:
        drawn = random_legal(mask, spec.choices, dice).reshape(action.shape)
    else:
        drawn = dice.integers(0, np.reshape(spec.choices, spec.shape), action.shape)
    return np.where(random.reshape(-1, *[1] * len(spec.shape)), drawn, action)
