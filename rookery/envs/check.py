"""What `rookery check-env` finds out about an environment: its spaces, whether it keeps the interface, and its speed.

A pure function of the configuration that returns a report; it plays random actions in this process. An environment
that may crash or hang is checked from a process of its own by the caller.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from rookery.core.errors import RookeryError
from rookery.core.frames import with_frames
from rookery.core.legal import random_legal
from rookery.core.types import MASK, ActionSpec, EnvSpec, Leaf
from rookery.envs.gate import find_nonfinite
from rookery.envs.lanes import LaneFault, Lanes, SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.make import Config, WithMask, make, make_single
from rookery.envs.masks import MaskInInfo, Masks
from rookery.envs.spaces import Actions, as_mask
from rookery.envs.vector import MaskedLanes

SEED = 1
LARGE = 1e3  # observations or rewards beyond this call for normalisation
LIMITS = ("_max_episode_steps", "max_episode_steps", "max_steps", "time_limit")  # attributes by which limits go
SLOW = 200.0  # steps per second of one environment below which it will be what limits a run


@dataclass
class Report:
    """Findings; `errors` keep an environment from being trained on, `warnings` do not."""

    env: str
    obs: dict[str, Leaf] = field(default_factory=dict)
    action: ActionSpec | None = None
    reset_mode: str = ""  # how next-step reset comes about
    convention: bool = False  # rows after an end carry reward 0 and no flag
    deterministic: bool | None = None  # the same seeds and actions give the same rows
    finite: bool = True  # no NaN or infinity was seen
    in_space: bool | None = None  # observations of a single environment lie in its space; None: not checked
    mask_from: str = ""  # where it says which actions are legal: observation, method or info; empty: it does not
    legal: float = 1.0  # share of the choices that was legal, on average
    restorable: bool = False  # get_state and set_state restore exactly: a resumed run is bit-exact
    steps: int = 0  # environment steps played, of all lanes
    episodes: int = 0
    mean_length: float = 0.0  # of finished episodes
    mean_return: float = 0.0  # of random actions
    time_limit: int = 0  # steps after which an episode is cut, where the environment says so
    lanes: int = 0
    vector_speed: float = 0.0  # steps per second of all lanes together
    single_speed: float = 0.0  # steps per second of one environment by itself
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors

    def lines(self) -> list[str]:
        """The report for a reader."""
        out = [f"{self.env}: {'ready to train on' if self.ok else 'not usable yet'}"]
        for name, leaf in self.obs.items():
            counts = f"{leaf.n}" if leaf.kind == "discrete" else _counts(leaf.counts)
            values = f", {counts} values" if counts else ""
            out.append(f"  observation {name}: {leaf.kind} {leaf.shape} {leaf.dtype}{values}")
        if self.action is not None:
            size = self.action.size if self.action.kind == "box" else "x".join(map(str, self.action.choices))
            out.append(f"  action: {self.action.kind} {size}")
            if self.mask_from:
                where = {"observation": f"the observation {MASK!r}", "info": f"info[{MASK!r}]"}
                told = where.get(self.mask_from, "the method action_masks()")
                out.append(f"  legal actions: {told}; {self.legal:.0%} of the choices are legal on average")
            out.append(f"  resets: {self.reset_mode}; {_said(self.convention, 'exact', 'BROKEN')}")
            out.append(f"  same seed, same rows: {_said(self.deterministic, 'yes', 'no')}")
            out.append(f"  finite: {_said(self.finite, 'yes', 'NO')}")
            out.append(f"  inside its space: {_said(self.in_space, 'yes', 'no')}")
            out.append(f"  exact resume: {_said(self.restorable, 'yes', 'no, resumed runs begin new episodes')}")
            played = f"{self.episodes} episodes, mean length {self.mean_length:.1f}, mean return {self.mean_return:.3g}"
            limit = f"; episodes are cut after {self.time_limit:,} steps" if self.time_limit else ""
            out.append(f"  random play: {played if self.episodes else f'no end in {self.steps} steps'}{limit}")
            alone = f"{self.single_speed:,.0f} alone"
            out.append(f"  speed: {self.vector_speed:,.0f} steps/s in {self.lanes} lanes, {alone}")
        return out + [f"  warning: {each}" for each in self.warnings] + [f"  error: {each}" for each in self.errors]


def _counts(counts: tuple[int, ...], most: int = 8) -> str:
    """Values of integers side by side, as "3 + 2 + 2"."""
    return " + ".join(map(str, counts[:most])) + (f" + ... ({sum(counts)})" if len(counts) > most else "")


def _said(value: bool | None, yes: str, no: str) -> str:
    return "not looked at" if value is None else yes if value else no


def check(config: Config, steps: int = 1000, lanes: int = 4) -> Report:
    """Play about `steps` steps at random, twice, and report. Never raises for the environment's faults."""
    report = Report(config.env, lanes=lanes)
    rows = max(steps // lanes, 2)
    try:
        try:
            first = _together(config, report, rows)
        except MaskInInfo:
            config = WithMask(config)
            first = _together(config, report, rows)
        if first is not None:
            report.deterministic = first == _again(config, rows, lanes)
            _alone(config, report, rows)
    except LaneFault as fault:
        detail = f": {type(fault.cause).__name__}: {fault.cause}" if fault.cause is not None else ""
        report.errors.append(with_frames(f"{fault.what}{detail}", fault.cause))
    except RookeryError as error:
        report.errors.append(str(error))
    _advise(report)
    return report


def _together(config: Config, report: Report, rows: int) -> list[bytes] | None:
    """Play the lanes, fill in what they show, and return a digest per row; None if that was not possible."""
    envs = make(config, report.lanes)
    try:
        report.obs, report.action, report.mask_from = envs.spec.obs, envs.spec.action, envs.spec.mask_from
        report.reset_mode = _mode(envs)
        play = _Play(envs, report)
        digests = play.rows(rows)
        report.vector_speed = rows * envs.count / max(play.seconds, 1e-9)
        play.summarise()
        report.restorable = _restorable(envs, play.obs, report)
        return digests
    finally:
        envs.close()


def _again(config: Config, rows: int, lanes: int) -> list[bytes]:
    envs = make(config, lanes)
    try:
        return _Play(envs, Report(config.env)).rows(rows)
    finally:
        envs.close()


class _Play:
    """Random play on lanes: rows are checked, counted and hashed."""

    def __init__(self, envs: Lanes, report: Report):
        self.envs, self.report, self.rng = envs, report, np.random.default_rng(SEED)
        self.live = np.ones(envs.count, bool)
        self.total, self.length = np.zeros(envs.count), np.zeros(envs.count, np.int64)
        self.done: list[tuple[float, int]] = []
        self.seconds = 0.0  # spent in the environments
        self.largest = {"observations": 0.0, "rewards": 0.0}
        report.convention = True
        self.obs = envs.reset([SEED + lane for lane in range(envs.count)])
        self.legal: list[float] = []
        self.first = _digest(*self.obs.values())

    def rows(self, count: int) -> list[bytes]:
        return [self.first, *(self.row() for _ in range(count))]

    def row(self) -> bytes:
        action = random_actions(self.envs.spec, self.envs.count, self.rng, self.obs)
        started = perf_counter()
        obs, reward, terminated, truncated = self.envs.step(action)
        self.obs = obs
        self.seconds += perf_counter() - started
        ends = terminated | truncated
        bad = find_nonfinite({name: x[None] for name, x in obs.items()}, reward[None])
        if bad is not None and self.report.finite:
            self.report.finite = False
            self.report.errors.append(f"returned {bad[2]} (lane {bad[1]}, episode step {self.length[bad[1]]})")
        dead = ~self.live
        if reward[dead].any() or ends[dead].any():
            self.report.convention = False
            self.report.errors.append("a row after an end carries a reward or ends again")
        self.total += reward
        self.length += self.live
        self.report.steps += int(self.live.sum())
        for lane in np.flatnonzero(ends):
            self.done.append((float(self.total[lane]), int(self.length[lane])))
            self.total[lane], self.length[lane] = 0.0, 0
        self.live = ~ends
        if self.envs.spec.masked and self.live.any():
            self.legal.append(float(obs[MASK][self.live].mean()))
        vectors = [np.abs(obs[name]).max() for name, leaf in self.envs.spec.obs.items() if leaf.kind == "vector"]
        self.largest["observations"] = max(self.largest["observations"], *vectors, 0.0)
        self.largest["rewards"] = max(self.largest["rewards"], float(np.abs(reward).max()))
        return _digest(*obs.values(), reward, terminated, truncated)

    def summarise(self) -> None:
        report = self.report
        report.episodes = len(self.done)
        report.legal = float(np.mean(self.legal)) if self.legal else 1.0
        if self.done:
            report.mean_return, report.mean_length = (float(x) for x in np.mean(self.done, axis=0))
        for what, largest in self.largest.items():
            if LARGE < largest < np.inf:
                report.warnings.append(f"{what} reach {largest:.3g}; normalise or scale them, or learning will suffer")


def random_actions(
    spec: EnvSpec, lanes: int, rng: np.random.Generator, obs: dict[str, np.ndarray] | None = None
) -> np.ndarray:
    """Any of the actions that are legal by `obs`; without it, any."""
    action = spec.action
    if obs is not None and spec.masked:
        return random_legal(obs[MASK], action.choices, rng).reshape(lanes, *action.shape)
    if action.kind == "box":
        return rng.uniform(-1.0, 1.0, (lanes, action.size)).astype(np.float32)
    return rng.integers(np.array(action.choices).reshape(action.shape), size=(lanes, *action.shape))


def _digest(*arrays: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _mode(envs: Lanes) -> str:
    if isinstance(envs, LastLanes):
        return _mode(envs.inner)
    if isinstance(envs, SyncLanes):
        return "next-step, by Rookery's own loop over single environments"
    if isinstance(envs, MaskedLanes):
        return "next-step, from a vector environment that is reset by mask"
    return "next-step, by the environment's own vector version"


def _restorable(envs: Lanes, obs: dict[str, np.ndarray], report: Report) -> bool:
    """Continue from a state twice and compare; `obs` is what the lanes have shown last."""
    obs, state = {name: column.copy() for name, column in obs.items()}, envs.get_state()
    if state is None:
        return False
    futures = []
    for _ in range(2):
        envs.set_state(state)
        rng, shown, rows = np.random.default_rng(0), obs, []
        for _ in range(20):
            shown, *rest = envs.step(random_actions(envs.spec, envs.count, rng, shown))
            rows.append(_digest(*shown.values(), *rest))
        futures.append(rows)
    if futures[0] != futures[1]:
        report.errors.append("get_state and set_state do not restore exactly: something is missing from the state")
    return futures[0] == futures[1]


def _alone(config: Config, report: Report, rows: int) -> None:
    """A single environment in its own terms: observations against its space, and its speed."""
    try:
        env = make_single(config)
    except RookeryError as error:
        report.warnings.append(f"no single environment, so no recording: {error}")
        return
    report.time_limit = _time_limit(env)
    try:
        outside, seconds = _walk(env, rows, report)
    except (Exception, SystemExit) as error:
        report.errors.append(with_frames(f"raised when stepped by itself: {type(error).__name__}: {error}", error))
        return
    finally:
        env.close()
    report.single_speed = rows / max(seconds, 1e-9)
    report.in_space = not outside
    if outside:
        report.warnings.append(f"{len(outside)} of {rows} observations lie outside the space; the first: {outside[0]}")


def _time_limit(env: Any) -> int:
    """The steps after which an episode is cut, as far as the environment and its wrappers say; 0: they do not."""
    found = []
    layer: Any = env
    while layer is not None:
        spec = vars(layer).get("spec")
        values = [vars(layer).get(name) for name in LIMITS] + [getattr(spec, "max_episode_steps", None)]
        # dm_control counts inside, and says `inf` where there is no limit.
        values.append(getattr(vars(layer).get("inner"), "_step_limit", None))
        found += [int(each) for each in values if isinstance(each, int | float) and 0 < each < np.inf]
        layer = vars(layer).get("env")
    return min(found, default=0)


def _walk(env: gymnasium.Env, rows: int, report: Report) -> tuple[list[str], float]:
    """Observations outside the space, in words, and the seconds that the steps took."""
    env.action_space.seed(SEED)
    chooser = _Chooser(env, report)
    obs, info = env.reset(seed=SEED)
    outside, seconds = [], 0.0
    for _ in range(rows):
        action = chooser.action(obs, info)
        started = perf_counter()
        obs, _, terminated, truncated, info = env.step(action)
        seconds += perf_counter() - started
        if not env.observation_space.contains(obs):
            outside.append(repr(obs)[:200])
        if terminated or truncated:
            obs, info = env.reset()
    return outside, seconds


class _Chooser:
    """Random actions in the environment's own terms, legal ones if it says which these are."""

    def __init__(self, env: gymnasium.Env, report: Report):
        assert report.action is not None
        self.env, self.masked, self.rng = env, bool(report.mask_from), np.random.default_rng(SEED)
        self.spec = EnvSpec(report.env, report.obs, report.action, mask_from=report.mask_from)  # type: ignore[arg-type]
        self.masks, self.actions = Masks(self.spec, "off"), Actions(env.action_space, report.env)

    def action(self, obs: Any, info: Any) -> Any:
        if not self.masked:
            return self.env.action_space.sample()
        row = np.zeros((1, *self.spec.obs[MASK].shape), bool)
        if self.spec.mask_from == "observation":
            row[0] = as_mask(obs[MASK], row[0].shape)
        self.masks.read(row[0], self.env, info)
        return self.actions.batch(random_actions(self.spec, 1, self.rng, {MASK: row}))[0]


def _advise(report: Report) -> None:
    if report.deterministic is False:
        report.warnings.append("the same seeds gave different rows; runs cannot be reproduced (is np_random used?)")
    if report.action is not None and not report.episodes and not report.time_limit and report.ok:
        report.warnings.append(f"no episode ended in {report.steps} steps; if none ever does, set a time limit")
    if report.action is not None and any(bound is None for bound in report.action.low + report.action.high):
        report.warnings.append("actions are not bounded on all sides; such dimensions are passed on unscaled")
    if report.action is not None and report.action.kind != "box" and MASK in report.obs and not report.mask_from:
        report.warnings.append(
            f"the observation {MASK!r} is no mask of legal actions: with {sum(report.action.choices)} choices it would "
            "be as many numbers that are 0 or 1"
        )
    if 0 < report.single_speed < SLOW:
        report.warnings.append(f"{report.single_speed:.0f} steps/s is slow: use many actors")
