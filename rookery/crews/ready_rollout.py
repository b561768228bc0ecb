"""A rollout in which each environment takes its steps in its own time: rows, recurrent states, episodes.

It knows no processes: it is told which environments have answered, and says what to do next. Rows are written where
they will travel. What is under way when a rollout ends is carried over: the first row of its lane in the next one, with
the action, the log-probability and the state of the weights that chose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rookery.algorithms.base import Algorithm
from rookery.core import tree
from rookery.core.seeding import seed_of
from rookery.core.types import MASK, ActorReport, ActOutput, Explore
from rookery.core.unroll import Unroll
from rookery.crews.ready_memory import LaneMemory
from rookery.envs.gate import check_actions, check_legal
from rookery.nets.modules import Nets
from rookery.roles.episodes import Episodes

READY, FLYING, DOWN = 0, 1, 2  # has an observation; was given an action; has no environment at present


class Rollout:
    out: Unroll  # what is being filled, or was filled last
    open = False  # whether it is being filled

    def __init__(self, algorithm: Algorithm, nets: Nets, lanes: int, seed: int, actor: int, metrics: Sequence[str]):
        """`actor`: its number in the whole run; `metrics`: names of the numbers at the end of an episode."""
        self.algorithm, self.nets, self.plan, self.count = algorithm, nets, algorithm.plan(), lanes
        self.seed, self.actor, self.first = seed, actor, actor * lanes
        self._metrics = tuple(metrics)
        self.rows = np.zeros(lanes, np.int64)  # that each lane has filled
        self.status = np.full(lanes, DOWN, np.int8)
        self.live = np.ones(lanes, bool)  # whether the next row of a lane is a step; a reset otherwise
        self._stale = np.zeros(lanes, bool)  # its action is of an earlier rollout
        self._state = tree.map(lambda x: x.numpy().copy(), algorithm.initial_state(nets, lanes))
        self._fed = tree.map(np.copy, self._state)  # the state that the last action was chosen with
        self._rng, self._lanes = torch.Generator(), np.arange(lanes)
        self._infos: list[list[dict[str, float]]] = [[] for _ in range(lanes)]
        self.episodes = Episodes(lanes, self.first, self._take_infos if metrics else lambda: None)
        self.obs: dict[str, np.ndarray] = {}  # of each lane's next row, between two rollouts
        self._carried: dict[str, np.ndarray] = {}  # action, logp and extras of what is under way

    @property
    def steps(self) -> int:
        """Rows that lanes fill on average."""
        return self.plan.steps or self.plan.unroll

    # One rollout

    def begin(self, out: Unroll, version: int, sequence: int) -> None:
        self.out, self.open = out, True
        self.rows[:], self._told_stale = 0, 0
        self._points = np.zeros(out.reward.shape, np.float64)
        self._rng.manual_seed(seed_of(self.seed, "act", self.actor, sequence))
        out.version[:], out.lane[:] = version, self.first + self._lanes
        for column in (out.reward, out.live, out.terminated, out.truncated):
            column[:] = 0
        for name, rows in out.obs.items():
            rows[0] = self.obs[name]
        self._stale = self.status == FLYING
        under_way = np.flatnonzero(self._stale)
        if len(under_way):
            for path, column in self._columns().items():
                column[0, under_way] = self._carried[path][under_way]
            tree.map(lambda to, fed: np.copyto(to[0], fed), out.state0, self._fed)

    def _columns(self) -> dict[str, np.ndarray]:
        """What the policy writes, by path."""
        extras = {f"extras/{name}": column for name, column in self.out.extras.items()}
        return {"action": self.out.action, "logp": self.out.logp} | extras

    def actable(self) -> np.ndarray:
        """Lanes that have an observation, and room for a row."""
        return np.flatnonzero((self.status == READY) & (self.rows < self.plan.unroll))

    def act(self, lanes: np.ndarray) -> np.ndarray:
        """Choose an action for each of these lanes; they are under way then."""
        rows, chunk = self.rows[lanes], self.plan.chunk
        state = tree.map(lambda x: x[lanes], self._state)
        output = self._chosen(lanes, rows, state)
        if state:
            starts = rows % chunk == 0
            at, who = rows[starts] // chunk, lanes[starts]
            tree.map(lambda to, now: to.__setitem__((at, who), now[starts]), self.out.state0, state)
            tree.map(lambda to, now: to.__setitem__(lanes, now), self._fed, state)
            live = self.live[lanes]  # a dead row's state is spent: the row after it starts an episode
            tree.map(lambda to, new: to.__setitem__(lanes, _kept(new.numpy(), live)), self._state, output.state)
        self.status[lanes] = FLYING
        return self.out.action[rows, lanes]

    def _chosen(self, lanes: np.ndarray, rows: np.ndarray, state: Any) -> ActOutput:
        """Ask the policy, and write what it says into these rows."""
        obs = {name: torch.from_numpy(column[rows, lanes]) for name, column in self.out.obs.items()}
        explore = Explore(self._rng, self.first + lanes)
        with torch.inference_mode():
            output = self.algorithm.act(self.nets, obs, tree.map(torch.from_numpy, state), explore)
        self.out.action[rows, lanes] = np.asarray(output.action)
        self.out.logp[rows, lanes] = np.asarray(output.logp)
        for name, value in output.extras.items():
            self.out.extras[name][rows, lanes] = value.numpy()
        return output

    def take(self, lanes: np.ndarray, memory: LaneMemory) -> None:
        """These lanes have answered: each fills a row."""
        out, rows, columns = self.out, self.rows[lanes], memory.columns
        terminated, truncated = columns["terminated"][lanes], columns["truncated"][lanes]
        out.reward[rows, lanes] = columns["reward"][lanes]
        out.terminated[rows, lanes], out.truncated[rows, lanes] = terminated, truncated
        out.live[rows, lanes] = self.live[lanes]
        self._points[rows, lanes] = columns["score"][lanes]
        for name, column in out.obs.items():
            column[rows + 1, lanes] = memory.obs[name][lanes]
        self._told_stale += int((self._stale & self.live)[lanes].sum())
        ended = terminated | truncated
        for lane in lanes[ended].tolist() if self._metrics else ():
            self._infos[lane].append(dict(zip(self._metrics, columns["info"][lane].tolist())))
        self.live[lanes], self._stale[lanes], self.status[lanes] = ~ended, False, READY
        self.rows[lanes] = rows + 1

    def finish(self) -> ActorReport:
        """The rows behind each lane's last one, what is carried over, and the report."""
        out, rows, plan = self.out, self.rows, self.plan
        self._bootstrap()
        chunk = plan.chunk if tree.leaves(out.state0) else 1
        used = min(plan.unroll, max(self.steps, -(-int(rows.max()) // chunk) * chunk))
        at = np.minimum(rows, plan.unroll - 1)  # a lane without room for another row has nothing under way
        columns = self._columns()
        self._carried = {path: column[at, self._lanes].copy() for path, column in columns.items()}
        self.obs = {name: column[rows, self._lanes].copy() for name, column in out.obs.items()}
        for lane, row in enumerate(rows.tolist()):
            for column in columns.values():
                column[row + 1 : used, lane] = column[min(row, plan.unroll - 1), lane]
            for column in out.obs.values():
                column[row + 1 : used + 1, lane] = column[row, lane]
            for states in tree.leaves(out.state0):
                states[-(-row // chunk) :, lane] = 0.0
        check_actions(out.action[:used], self.algorithm.spec.id, self.actor, self.first, 0)
        if self.algorithm.spec.masked:
            check_legal(out.obs[MASK], out.action[:used], out.live[:used], self.algorithm.spec, self.first)
        ends = (out.terminated | out.truncated)[:used]
        episodes = self.episodes.walk(ends, out.live[:used], self._points[:used])
        self.episodes.live, self.open = self.live.copy(), False
        cut = int(rows.sum()) < self.steps * self.count
        return ActorReport(int(out.live.sum()), episodes, cut=cut, stale=self._told_stale)

    def _bootstrap(self) -> None:
        """Where values are stored, that of the observation behind the last row, if no action was chosen on it yet."""
        lanes = self.actable()
        if len(lanes) and self.plan.extras:
            self._chosen(lanes, self.rows[lanes], tree.map(lambda x: x[lanes], self._state))

    def _take_infos(self) -> list[list[dict[str, float]]]:
        infos, self._infos = self._infos, [[] for _ in range(self.count)]
        return infos

    # Environments that come and go

    def restart(self, lanes: Sequence[int], obs: dict[str, np.ndarray]) -> None:
        """These lanes have new environments, with these observations [B, ...], and begin episodes."""
        self.obs = self.obs or {name: np.zeros_like(column) for name, column in obs.items()}
        for name, column in obs.items():
            self.obs[name][lanes] = column[lanes]
            if self.open:
                self.out.obs[name][0, lanes] = column[lanes]
        for leaf in (*tree.leaves(self._state), *tree.leaves(self._fed)):
            leaf[lanes] = 0.0
        self.status[lanes], self.live[lanes], self._stale[lanes] = READY, True, False

    def drop(self, lanes: Sequence[int]) -> int:
        """The environments of these lanes are gone, and their rows with them: how many steps these were."""
        steps = 0
        if self.open:
            steps = sum(int(self.out.live[: self.rows[lane], lane].sum()) for lane in lanes)
            for column in (self.out.reward, self.out.live, self.out.terminated, self.out.truncated, self._points):
                column[:, lanes] = 0
        for lane in lanes:
            self._infos[lane] = []
        self.rows[lanes], self.status[lanes] = 0, DOWN
        self.episodes.restart(list(lanes))
        return steps

    # Checkpoints

    def snapshot(self, memory: LaneMemory) -> dict[str, Any]:
        """As if what is under way, and has been answered, were a step of the past: its observation is the next."""
        books, live, obs = self.episodes.state(), self.live.copy(), {k: v.copy() for k, v in self.obs.items()}
        columns = memory.columns
        for lane in np.flatnonzero(self.status == FLYING).tolist():
            ended = bool(columns["terminated"][lane] | columns["truncated"][lane])
            books["total"][lane] += columns["score"][lane]
            books["length"][lane] += int(live[lane])
            if ended:
                books["episode"][lane] += 1
                books["total"][lane] = books["length"][lane] = 0
            live[lane] = not ended
            for name, column in memory.obs.items():
                obs[name][lane] = column[lane]
        return books | {"live": live, "obs": obs, "state": tree.map(np.copy, self._state)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.obs = {name: np.array(column) for name, column in snapshot["obs"].items()}
        self._state = tree.map(np.array, snapshot["state"])
        self.live = np.array(snapshot["live"], bool)
        self.episodes.load(snapshot)
        self.status[:] = READY


def _kept(state: np.ndarray, live: np.ndarray) -> np.ndarray:
    return state * live.reshape(-1, *[1] * (state.ndim - 1))
