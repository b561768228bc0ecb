"""Lanes: B environments stepped together, and the place where other reset conventions are converted.

Next-step reset (Gymnasium's NEXT_STEP): the row that ends an episode returns its final observation; the next step
ignores that lane's action, resets it, and returns the reset observation with reward 0 and both flags False.

`SyncLanes` drives single environments in a loop of its own: quicker than gymnasium's SyncVectorEnv, it knows which
lane failed, and can recreate that one alone. Environments that step as a batch are adapted in `vector.py`. Not here:
the finite check (`gate.py`, by the actor), processes, and the episode and step numbers of a fault, which the caller
knows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np

from rookery.core.errors import EnvError, UsageError
from rookery.core.frames import with_frames
from rookery.core.types import MASK, EnvSpec
from rookery.envs.masks import Masks, Setting, method_of, source
from rookery.envs.snapshot import env_state, restore_env
from rookery.envs.spaces import Actions, Mismatch, Observations

OLD_STEP = "; this is the interface of old gym: return terminated (the task has ended) and truncated (a limit) for done"
OLD_RESET = "; if this is the interface of old gym: `return observation, {}`"
Step = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]  # obs, reward, terminated, truncated


class LaneFault(Exception):
    """An environment broke its contract. The caller adds where it was (episode, step) and makes it an EnvError."""

    def __init__(self, lane: int, what: str, cause: BaseException | None = None, reason: str = "env_raised"):
        super().__init__(f"lane {lane} {what}" + (f": {type(cause).__name__}: {cause}" if cause is not None else ""))
        self.lane = lane
        self.what = what  # reads on after the environment's name: "raised in step", "returned ..."
        self.cause = cause
        self.reason = reason  # env_raised | bad_shape | nonfinite: the ledger's reason for the steps lost with it
        self.others: list[LaneFault] = []  # of further lanes, in the same step
        self.row: Step | None = None  # what that step brought the lanes that did not fail; None: it was not finished

    def located(self, env: str, actor: int, first_lane: int, episode: int, step: int) -> EnvError:
        """The fault with its location."""
        more = f"; in this step {len(self.others)} more lanes failed" if self.others else ""
        cause = f": {type(self.cause).__name__}: {self.cause}" if self.cause is not None else ""
        where = f"actor {actor}, lane {first_lane + self.lane}, episode {episode}, step {step}{more}"
        return EnvError(with_frames(f"environment {env} {self.what} ({where}){cause}", self.cause), self.reason)


class Lanes(ABC):
    """B environments stepped together, next-step reset. What is returned may be overwritten by the next call."""

    spec: EnvSpec
    count: int
    score: np.ndarray | None = None  # [B] reward of the last step before clipping; None where nothing is clipped
    metrics: tuple[str, ...] = ()  # numbers in `info` at the end of an episode that are kept for `take_infos`
    mendable: bool = False  # whether `rebuild` is possible: a lane that fails costs the others nothing

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        """Start an episode in every lane, one seed per lane; observations [B, ...]."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Step:
        """Take actions [B, ...] in Rookery's form; observations, reward float32, terminated and truncated bool."""

    def rebuild(self, lane: int, seed: int) -> dict[str, np.ndarray]:
        """Recreate the environment of one lane, which has failed, and start an episode in it; observations [B, ...]."""
        raise NotImplementedError(f"{self.spec.id}: its lanes are one object")

    @abstractmethod
    def close(self) -> None: ...

    def number_lanes(self, first: int) -> None:  # noqa: B027
        """These are the lanes first, first + 1, ... of the run. Environments with a `number_lanes` are told so."""

    _infos: list[list[dict[str, float]]] | None = None

    def take_infos(self) -> list[list[dict[str, float]]] | None:
        """By lane, `metrics` of the episodes that have ended since the last call, in their order; None: of none."""
        infos, self._infos = self._infos, None
        return infos

    def _keep_info(self, lane: int, info: dict[str, Any]) -> None:
        """`metrics` of an episode that has ended."""
        if self._infos is None:
            self._infos = [[] for _ in range(self.count)]
        numbers = {}
        for name in self.metrics:
            if name not in info:
                found = f"it has {', '.join(map(str, info))}" if info else "it is empty"
                raise UsageError(f"{self.spec.id}: no {name!r} in `info` at the end of an episode ({found})")
            several = info[name].items() if isinstance(info[name], Mapping) else ()
            parts = {f"{name}.{key}": value for key, value in several if np.ndim(value) == 0 and _is_number(value)}
            for path, value in (parts or {name: info[name]}).items():
                numbers[path] = _number(path, value)
                if not math.isfinite(numbers[path]):
                    raise LaneFault(lane, f"returned {numbers[path]} as {path!r} in `info`", reason="nonfinite")
        self._infos[lane].append(numbers)

    def get_state(self) -> dict[str, Any] | None:
        """Everything needed to continue exactly (a tree of arrays, numbers, strings); None if that cannot be saved."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        raise UsageError(f"{self.spec.id} cannot be restored: its environments have no set_state")


class SyncLanes(Lanes):
    """Single environments, one after the other. `build` recreates the one of a lane that failed."""

    def __init__(
        self, env_id: str, envs: Sequence[gymnasium.Env], build: Callable[[int], gymnasium.Env] | None = None,
        masks: Setting = "auto",
    ):  # fmt: skip
        self.envs: list[gymnasium.Env | None] = list(envs)  # None: recreating it failed
        self._build, self.mendable = build, build is not None
        self.count = len(self.envs)
        first = envs[0]
        for lane, env in enumerate(envs):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise UsageError(f"{env_id}: the spaces of lane {lane} are not those of lane 0; lanes must be alike")
        self._spaces = first.observation_space, first.action_space
        self._actions = Actions(first.action_space, env_id)
        self._observations = Observations(
            first.observation_space, env_id, None if masks == "off" else self._actions.spec
        )
        spec = EnvSpec(env_id, self._observations.leaves, self._actions.spec)
        self.spec = source(spec, masks, method_of(first))
        self._masks = Masks(self.spec, masks)
        self._obs = self._observations.allocate(self.count) | self._masks.allocate(self.count)
        self._reward = np.zeros(self.count, np.float32)
        self._terminated = np.zeros(self.count, bool)
        self._truncated = np.zeros(self.count, bool)
        self._ended = [True] * self.count  # a plain list: read once per lane and step
        self.metrics = tuple(first.metadata.get("episode_metrics", ()))
        self._first_lane: int | None = None

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        assert len(seeds) == self.count, (len(seeds), self.count)
        self._infos = None
        for lane, seed in enumerate(seeds):
            self._reset(lane, int(seed))
        return self._obs

    def step(self, action: np.ndarray) -> Step:
        assert len(action) == self.count, (len(action), self.count)
        actions = self._actions.batch(action)
        try:
            self._step(actions, 0)
        except LaneFault as fault:
            if self.mendable:
                self._finish(actions, fault)
            raise
        return self._obs, self._reward, self._terminated, self._truncated

    def _step(self, actions: Any, first: int) -> None:
        """Step the lanes from `first` on; the first that fails ends it."""
        ended, write, obs_out = self._ended, self._observations.write, self._obs
        reward_out, terminated_out, truncated_out = self._reward, self._terminated, self._truncated
        lane = first
        try:
            for lane, env in enumerate(self.envs[first:] if first else self.envs, first):
                if ended[lane]:
                    self._reset(lane, None)
                    continue
                assert env is not None
                result = env.step(actions[lane])
                if type(result) is not tuple or len(result) != 5:
                    raise Mismatch(_odd_result(result))
                obs, reward, terminated, truncated, info = result
                write(obs, obs_out, lane)
                reward_out[lane] = reward if type(reward) is float else _scalar(reward)
                terminated_out[lane] = terminated = _flag(terminated, "terminated")
                truncated_out[lane] = truncated = _flag(truncated, "truncated")
                if self._masks.on:
                    self._masks.read(self._obs[MASK][lane], env, info, terminated, terminated or truncated)
                if terminated or truncated:
                    ended[lane] = True
                    if self.metrics:
                        self._keep_info(lane, info)
        except Mismatch as error:
            raise LaneFault(lane, str(error), reason="bad_shape") from error
        except (LaneFault, UsageError):
            raise
        except (Exception, SystemExit) as error:
            raise LaneFault(lane, "raised in step", error) from error

    def _finish(self, actions: Any, fault: LaneFault) -> None:
        """Step the lanes behind one that failed, and put the results of this step into the fault."""
        last: LaneFault | None = fault
        while last is not None:
            try:
                self._step(actions, last.lane + 1)
                last = None
            except LaneFault as other:
                fault.others.append(other)
                last = other
        fault.row = (self._obs, self._reward, self._terminated, self._truncated)

    def number_lanes(self, first: int) -> None:
        self._first_lane = first
        for lane, env in enumerate(self.envs):
            tell_lane(env, first + lane)

    def rebuild(self, lane: int, seed: int) -> dict[str, np.ndarray]:
        assert self._build is not None
        old, self.envs[lane] = self.envs[lane], None
        if old is not None:
            with suppress(Exception, SystemExit):  # it has failed already, and may do so again
                old.close()
        try:
            env = self.envs[lane] = self._build(lane)
        except UsageError:  # what it needs is missing now: a retry would not help
            raise
        except (Exception, SystemExit) as error:
            cause = error.__cause__ if isinstance(error, EnvError) else error
            raise LaneFault(lane, "raised when it was made", cause) from error
        if (env.observation_space, env.action_space) != self._spaces:
            raise LaneFault(lane, "has other spaces than the one before it", reason="bad_shape")
        if self._first_lane is not None:
            tell_lane(env, self._first_lane + lane)
        self._reset(lane, seed)
        return self._obs

    def _reset(self, lane: int, seed: int | None) -> None:
        """The seed is given once; later episodes use the environment's own generator."""
        env = self.envs[lane]
        try:
            assert env is not None
            result = env.reset(seed=seed) if seed is not None else env.reset()
        except (Exception, SystemExit) as error:
            raise LaneFault(lane, "raised in reset", error) from error
        try:
            if type(result) is not tuple or len(result) != 2:
                hint = "" if type(result) is tuple else OLD_RESET
                raise Mismatch(f"returned {_count(result)} from reset, expected (observation, info){hint}")
            self._observations.write(result[0], self._obs, lane)
            self._masks.watch(result[1])
            if self._masks.on:
                self._masks.read(self._obs[MASK][lane], env, result[1])
        except Mismatch as error:
            raise LaneFault(lane, str(error), reason="bad_shape") from error
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise LaneFault(lane, "raised in action_masks", error) from error
        self._reward[lane] = 0.0
        self._terminated[lane] = self._truncated[lane] = self._ended[lane] = False

    def close(self) -> None:
        for env in self.envs:
            if env is not None:
                env.close()

    def get_state(self) -> dict[str, Any] | None:
        states = [None if env is None else env_state(env) for env in self.envs]
        if any(state is None for state in states):
            return None
        return {"lanes": states, "ended": list(self._ended)}

    def set_state(self, state: dict[str, Any]) -> None:
        for env, inner in zip(self.envs, state["lanes"], strict=True):
            assert env is not None
            restore_env(env, inner)
        self._ended = [bool(x) for x in state["ended"]]


def tell_lane(env: Any, number: int) -> None:
    """The number in the run of an environment, or of the first of a vector environment, if it wants to know."""
    tell = getattr(getattr(env, "unwrapped", None), "number_lanes", None)
    if tell is not None:
        tell(number)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name!r} in `info` at the end of an episode is not a number: {value!r}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_ | np.ndarray)


def _scalar(reward: Any) -> float:
    """A reward as float; arrays of one element are refused, since they hide broadcasting mistakes."""
    if np.shape(reward) == () and isinstance(reward, int | float | np.number | np.bool_ | np.ndarray):
        return float(reward)
    shape = np.shape(reward) if isinstance(reward, np.ndarray | list | tuple) else ()
    what = f"of shape {shape}" if shape else f"that is a {type(reward).__name__}"
    raise Mismatch(f"returned a reward {what}, expected a number")


def _flag(value: Any, name: str) -> bool:
    if type(value) is bool:
        return value
    if isinstance(value, np.bool_ | int | np.integer) or (isinstance(value, np.ndarray) and value.shape == ()):
        return bool(value)
    raise Mismatch(f"returned {name} that is a {type(value).__name__}, expected a bool")


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _odd_result(result: Any) -> str:
    expected = "expected (observation, reward, terminated, truncated, info)"
    hint = OLD_STEP if _count(result) == "4 values" else ""
    return f"returned {_count(result)} from step, {expected}{hint}"
