"""Lanes that follow a script, and a rig of actors, table and learner around them: what several test files share.

An observation says who (lane), which episode and which step; a reward is a known function of observation and action.
A row that is misplaced, or that mixes two episodes, is therefore visible.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.reduce import ALONE
from rookery.core.types import ActionSpec, ActorReport, Delivery, EnvSpec, Leaf
from rookery.core.unroll import Unroll, empty_unroll, unroll_shapes
from rookery.envs.lanes import LaneFault, Lanes
from rookery.roles.actor import Actor
from rookery.roles.learner import Learner
from rookery.tables.queue import RoundQueue

DISCRETE = ActionSpec("discrete", choices=(3,), starts=(0,))
MULTI = ActionSpec("multi", choices=(2, 3), starts=(0, 0))
BOX = ActionSpec("box", size=2, low=(-1.0, -1.0), high=(1.0, 1.0), box_shape=(2,))
ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}
RESET = -1  # the step number of a reset, in `faults`
# Lane by lane, lengths of the episodes (in a circle): of one step, of exactly one unroll of 6, across several unrolls.
LENGTHS = ((3, 5, 1, 2), (5, 6, 1, 1, 4), (13, 2, 4), (1,))
KINDS = (("terminated", "truncated"), ("truncated", "terminated", "both"), ("truncated",), ("terminated", "truncated"))


def action_code(action: np.ndarray) -> np.ndarray:
    """[..., *shape] -> [...]: a number that tells actions apart, with few digits."""
    action = np.asarray(action, np.float64)
    return action if action.ndim <= 1 else action @ (4.0 ** np.arange(action.shape[-1]))


def reward_of(obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """obs [B, 3] = (lane, episode, t), action [B, ...]; exact in float32 for integer actions."""
    return (64 * obs[:, 1] + 8 * obs[:, 2] + obs[:, 0] + action_code(action) / 16).astype(np.float32)


def script(lane: int):
    """The rows of one lane by the law of next-step reset: (episode, t, live, terminated, truncated), without end."""
    for episode in itertools.count():
        length = LENGTHS[lane][episode % len(LENGTHS[lane])]
        ends = ENDS[KINDS[lane][episode % len(KINDS[lane])]]
        for t in range(length):
            yield episode, t, True, *(ends if t == length - 1 else (False, False))
        yield episode, length, False, False, False  # the dead row: it shows the final observation


def columns(rows: int) -> np.ndarray:
    """[rows, lanes, 5] of the script."""
    return np.array([list(itertools.islice(script(lane), rows)) for lane in range(len(LENGTHS))]).transpose(1, 0, 2)


class ScriptedLanes(Lanes):
    """Next-step reset by the book. Returned arrays are overwritten by the next call, as the contract allows.

    faults: (lane, episode, step) -> "raise" | "nan_obs" | "inf_obs" | "nan_reward"; step RESET is the episode's reset.
    mendable: a lane that fails may be recreated; its episodes are numbered from 100 on then, from 200 on after that.
    """

    def __init__(
        self,
        count: int = 4,
        action: ActionSpec = DISCRETE,
        lengths: Sequence[Sequence[int]] = LENGTHS,
        ends: Sequence[Sequence[str]] = KINDS,
        faults: dict[tuple[int, int, int], str] | None = None,
        scored: bool = False,
        restorable: bool = True,
        offset: float = 0.0,
        mendable: bool = False,
    ):
        self.mendable = mendable
        self.rebuilt: list[tuple[int, int]] = []  # lane and seed
        self.spec = EnvSpec("scripted", {"obs": Leaf((3,), "float32", "vector")}, action)
        self.count, self.lengths, self.ends, self.faults = count, lengths, ends, faults or {}
        self.restorable, self.offset = restorable, offset
        self.score = np.zeros(count, np.float64) if scored else None
        self.seeds: list[list[int]] = []  # of every call of reset
        self.actions: list[np.ndarray] = []
        self.taken = 0  # real environment steps
        self.finished: list[tuple[int, float, int]] = []  # lane, return, length
        self._obs = np.zeros((count, 3), np.float32)

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        self.seeds.append(list(seeds))
        self.episode = np.full(self.count, -1)
        self.t, self.total = np.zeros(self.count, np.int64), np.zeros(self.count)
        self.over = np.ones(self.count, bool)
        self._reward = np.zeros(self.count, np.float32)
        for lane in range(self.count):
            self._begin(lane)
        return {"obs": self._shown()}

    def step(self, action: np.ndarray):
        assert action.shape == (self.count, *self.spec.action.shape), action.shape
        self.actions.append(np.array(action))
        reward = reward_of(self._obs, action)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        bad: list[tuple[int, float]] = []
        failed: list[LaneFault] = []
        for lane in range(self.count):
            if self.over[lane]:
                try:
                    bad += self._begin(lane)
                except LaneFault as fault:
                    failed += self._failing(fault)
                reward[lane] = 0.0
                continue
            fault = self.faults.get((lane, int(self.episode[lane]), int(self.t[lane])))
            if fault == "raise":
                failed += self._failing(LaneFault(lane, "raised in step", RuntimeError("on purpose")))
                continue
            if fault in ("nan_obs", "inf_obs"):
                bad.append((lane, np.nan if fault == "nan_obs" else np.inf))
            self.taken += 1
            self.total[lane] += reward[lane]
            self.t[lane] += 1
            self._obs[lane, 2] = self.t[lane]
            if self.t[lane] == self.lengths[lane % len(self.lengths)][self.episode[lane] % self._cycle(lane)]:
                kinds = self.ends[lane % len(self.ends)]
                terminated[lane], truncated[lane] = ENDS[kinds[self.episode[lane] % len(kinds)]]
                self.over[lane] = True
                if fault is None:
                    self.finished.append((lane, float(self.total[lane]), int(self.t[lane])))
            if fault == "nan_reward":
                reward[lane] = np.nan
        if self.score is not None:
            self.score[:] = 10.0 * reward
        shown = self._shown()
        for lane, value in bad:
            shown[lane, 1] = value
        self._reward[:] = reward  # the same memory each time
        if failed:
            failed[0].others, failed[0].row = failed[1:], ({"obs": shown}, self._reward, terminated, truncated)
            raise failed[0]
        return {"obs": shown}, self._reward, terminated, truncated

    def _failing(self, fault: LaneFault) -> list[LaneFault]:
        if not self.mendable:
            raise fault
        return [fault]

    def rebuild(self, lane: int, seed: int) -> dict[str, np.ndarray]:
        self.rebuilt.append((lane, seed))
        self.episode[lane] = 100 * (self.episode[lane] // 100 + 1) - 1
        if bad := self._begin(lane):
            self._obs[lane, 1] = bad[0][1]
        return {"obs": self._shown()}

    def _cycle(self, lane: int) -> int:
        return len(self.lengths[lane % len(self.lengths)])

    def _begin(self, lane: int) -> list[tuple[int, float]]:
        self.episode[lane] += 1
        fault = self.faults.get((lane, int(self.episode[lane]), RESET))
        if fault == "raise":
            raise LaneFault(lane, "raised in reset", RuntimeError("on purpose"))
        self.t[lane], self.total[lane], self.over[lane] = 0, 0.0, False
        self._obs[lane] = lane, self.episode[lane], 0
        return [(lane, np.nan)] if fault == "nan_obs" else []

    def _shown(self) -> np.ndarray:
        if not hasattr(self, "_out"):
            self._out = np.empty_like(self._obs)
        np.add(self._obs, self.offset, out=self._out)
        return self._out

    def close(self) -> None: ...

    def get_state(self):
        if not self.restorable:
            return None
        return {name: getattr(self, name).copy() for name in ("episode", "t", "total", "over", "_obs")}

    def set_state(self, state) -> None:
        for name, value in state.items():
            setattr(self, name, np.array(value))
        self._reward = np.zeros(self.count, np.float32)


class GuessLanes(Lanes):
    """Tasks to learn in seconds, episodes of `length` steps.

    "symbol": name the symbol that is shown (discrete). "cue": the symbol is shown in the first step only and counts
    in the last (discrete, needs memory). "target": be where the observation says (box).
    """

    def __init__(self, task: str, count: int = 8, symbols: int = 3, length: int = 5):
        self.task, self.count, self.symbols, self.length = task, count, symbols, length
        box = ActionSpec("box", size=1, low=(-1.0,), high=(1.0,), box_shape=(1,))
        self.action = box if task == "target" else ActionSpec("discrete", choices=(symbols,), starts=(0,))
        width = 1 if task == "target" else symbols
        self.spec = EnvSpec(task, {"obs": Leaf((width,), "float32", "vector")}, self.action)

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        self.rng = np.random.default_rng(list(seeds))
        self.t, self.over = np.zeros(self.count, np.int64), np.zeros(self.count, bool)
        self.goal = self._draw()
        return self._observe()

    def step(self, action: np.ndarray):
        reward = np.zeros(self.count, np.float32)
        playing = ~self.over
        if self.task == "target":
            reward[playing] = -np.square(action[playing, 0] - self.goal[playing])
        else:
            right = playing & (action == self.goal) & ((self.task == "symbol") | (self.t == self.length - 1))
            reward[right] = 1.0
        self.t = np.where(self.over, 0, self.t + 1)
        fresh = self.over if self.task == "cue" else np.ones(self.count, bool)
        self.goal = np.where(fresh, self._draw(), self.goal)
        self.over = playing & (self.t == self.length)
        return self._observe(), reward, self.over.copy(), np.zeros(self.count, bool)

    def _draw(self) -> np.ndarray:
        if self.task == "target":
            return self.rng.uniform(-0.8, 0.8, self.count).astype(np.float32)
        return self.rng.integers(self.symbols, size=self.count)

    def _observe(self) -> dict[str, np.ndarray]:
        if self.task == "target":
            return {"obs": self.goal[:, None].copy()}
        shown = np.eye(self.symbols, dtype=np.float32)[self.goal]
        if self.task == "cue":
            shown[self.t > 0] = 0.0
        return {"obs": shown}

    def close(self) -> None: ...


@dataclass
class Rig:
    """Actors, table and learner in one process, the way `topologies/serial.py` wires them."""

    algorithm: PPO
    learner: Learner
    actors: list[Actor]
    buffers: list[Unroll]
    table: RoundQueue
    reports: list[ActorReport] = field(default_factory=list)

    def collect(self) -> Unroll:
        """One unroll of every actor, as the learner gets it."""
        for actor, buffer in zip(self.actors, self.buffers):
            sequence = actor.sequence
            self.reports.append(actor.unroll(buffer, self.learner.version))
            self.table.ordered(actor.index, self.learner.version)
            self.table.insert(delivered(actor.index, sequence, buffer, self.reports[-1]))
        sample = self.table.next(self.learner.version, 0.0)
        assert sample is not None
        return sample.batch

    def update(self, progress: float = 0.0):
        return self.learner.step(self.collect(), progress)

    def prepared(self, batch: Unroll):
        return self.algorithm.prepare(self.learner.nets, batch, ALONE)


def delivered(actor: int, sequence: int, unroll: Unroll, report: ActorReport) -> Delivery:
    """An unroll of numpy arrays as a crew hands it over."""
    arrays = {path: leaf for path, leaf in tree.flatten(vars(unroll)).items() if isinstance(leaf, np.ndarray)}
    return Delivery(actor, sequence, arrays, report, lambda: None)


SMALL = PPOConfig(unroll=6, chunk=3, epochs=2, minibatches=2)
NETS = {
    "split": NetConfig(hidden=(8,)),
    "shared": NetConfig(hidden=(8,), shared=True),
    "gru": NetConfig(hidden=(8,), core="gru", core_size=5),
    "gru2": NetConfig(hidden=(8,), core="gru", core_size=5, core_layers=2),
    "lstm": NetConfig(hidden=(8,), core="lstm", core_size=5),
    "lstm2": NetConfig(hidden=(8,), core="lstm", core_size=5, core_layers=2),
}


def build(
    lanes: Callable[[], Lanes] = ScriptedLanes,
    config: PPOConfig = SMALL,
    net: NetConfig = NetConfig(hidden=(8,)),  # noqa: B008 - frozen
    actors: int = 1,
    seed: int = 7,
    shake: float = 0.3,
) -> Rig:
    """`shake` moves the weights away from their start, where biases are 0 and the policy is nearly uniform."""
    made = [lanes() for _ in range(actors)]
    algorithm = PPO(config, net, made[0].spec, sum(each.count for each in made))
    learner = Learner(algorithm, seed)
    shaken(learner, shake)
    workers = [Actor(algorithm, learner.nets, each, seed, index) for index, each in enumerate(made)]
    state = algorithm.initial_state(learner.nets, 1)
    shapes = unroll_shapes(made[0].spec, algorithm.plan(), made[0].count, state)
    for actor in workers:
        actor.reset()
    return Rig(algorithm, learner, workers, [empty_unroll(shapes) for _ in workers], RoundQueue(actors))


def shaken(learner: Learner, amount: float) -> None:
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in learner.nets.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=rng))


def frozen(unroll: Unroll) -> Unroll:
    """A copy that the next unroll cannot touch."""
    return copy.deepcopy(unroll)
