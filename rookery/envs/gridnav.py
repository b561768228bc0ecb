"""GridNav: PointGoal navigation (Anderson et al. 2018) in mazes of cells, single and as a quick vector version.

The task of DD-PPO (Wijmans et al. 2020) without a simulator. Actions, reward and metrics are those of the paper: the
agent is told where the goal lies, sees the walls near it, and has to say `stop` at the goal. Each episode has a new
maze (`maze.py`). It has a compass and no GPS: the goal is told from where the episode began, so that the agent has to
remember how far it has walked. With GPS (`gps=True`, as in the paper) a policy without memory does nearly as well.

Steps can be made to take time (`delay.py`). Both versions can be restored exactly (`get_state`, `set_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs import maze
from rookery.envs.batch import Batch
from rookery.envs.delay import Delay
from rookery.envs.snapshot import generator_state, restored_generator

FORWARD, LEFT, RIGHT, STOP = range(4)
TURN = np.array([0, -1, 1, 0])  # [action] -> change of the heading
STEP_COST = 0.01
SPL_REWARD = 2.5
REACHED = 1  # cells from the goal within which `stop` is a success
METRICS = ("success", "spl")


@dataclass(frozen=True)
class Options:
    """The arguments of both versions."""

    size: int = 11  # cells per side, an odd number; a border of walls surrounds them
    view: int = 5  # cells per side of what the agent sees, 3, 5 or 7: view - 1 ahead, view // 2 to each side
    loops: float = 0.1  # share of the walls that a maze without loops would have which are open
    gps: bool = False  # the goal is told from where the agent is; False: from where it began
    max_steps: int = 0  # steps until an episode is truncated; 0: 4 * size * size
    delay: float = 0.0  # mean seconds that a step takes
    delay_spread: float = 0.0  # deviation of the logarithm of that time, between environments and between steps
    slow: float = 1.0  # environment 0 of a run takes this many times as long

    def __post_init__(self) -> None:
        if self.size < 5 or self.size % 2 == 0:
            raise ValueError(f"size={self.size}: an odd number from 5 on, such as 11 or 13")
        if self.view not in (3, 5, 7):
            raise ValueError(f"view={self.view}: 3, 5 or 7")
        if not 0.0 <= self.loops <= 1.0:
            raise ValueError(f"loops={self.loops}: a share, from 0 to 1")
        if self.max_steps < 0:
            raise ValueError(f"max_steps={self.max_steps}: at least 1, or 0 for 4 * size * size")

    @property
    def limit(self) -> int:
        """Twice what a depth-first search of every corridor takes: 208 steps on average at size 11, 230 at most (of 300
        mazes), turns included. So an agent that remembers where it has been is not cut off.
        """
        return self.max_steps or 4 * self.size * self.size

    def space(self) -> spaces.Dict:
        view = spaces.Box(0, maze.SEEN, (2, self.view, self.view), np.uint8)
        return spaces.Dict({"view": view, "goal": spaces.Box(-1.0, 1.0, (2,), np.float32)})


class GridNav(gymnasium.Env):
    """Reach the goal and say so. Actions: forward (0), turn left (1), turn right (2), stop (3).

    Observations: `view` [2, view, view], the cells in front of the agent, which stands in the middle of the last row:
    255 in channel 0 where a cell is seen to be open, in channel 1 where it is seen to be a wall, 0 in both where walls
    hide it. The goal is not in it. `goal`: cells ahead and to the right of the place where the episode began, or with
    `gps` of the agent, divided by the size; ahead is where the agent looks now.

    Reward: the decrease of the shortest path's length, -0.01 per step, and 2.5 SPL at a successful stop. `stop` ends
    the episode and is a success within one cell of the goal. SPL is success * optimal / max(optimal, walked), in cells:
    turning costs steps, but no length. At the end `info` has `success` and `spl`.
    """

    metadata = {"render_modes": [], "episode_metrics": METRICS}  # noqa: RUF012

    def __init__(self, **options: Any):
        self.options = Options(**options)
        self.observation_space, self.action_space = self.options.space(), spaces.Discrete(4)
        self.delay = Delay(1, self.options.delay, self.options.delay_spread, self.options.slow)
        self.maze: maze.Maze | None = None

    def number_lanes(self, first: int) -> None:
        """This is environment `first` of the run."""
        self.delay.number_lanes(first)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = maze.draw(self.np_random, self.options.size, self.options.loops)
        self._enter(drawn)
        (self.row, self.column), self.heading, self.start = drawn.start, drawn.heading, drawn.start
        self.optimal, self.walked, self.t = int(drawn.distance[drawn.start]), 0, 0
        return self._observe(), {}

    def _enter(self, drawn: maze.Maze) -> None:
        self.maze, self._views = drawn, maze.views(drawn.distance, self.options.view)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.maze is not None, "reset comes before step"
        self.delay.wait((0,))
        distance, action = self.maze.distance, int(action)
        before = int(distance[self.row, self.column])
        self.heading = (self.heading + int(TURN[action])) % 4
        if action == FORWARD:
            row, column = (self.row, self.column) + maze.AHEAD[self.heading]
            if distance[row, column] >= 0:
                self.row, self.column, self.walked = int(row), int(column), self.walked + 1
        self.t += 1
        left, stopped = int(distance[self.row, self.column]), action == STOP
        success = float(stopped and left <= REACHED)
        spl = success * self.optimal / max(self.optimal, self.walked)
        truncated = not stopped and self.t >= self.options.limit
        info = {"success": success, "spl": spl} if stopped or truncated else {}
        return self._observe(), before - left - STEP_COST + SPL_REWARD * spl, stopped, truncated, info

    def _observe(self) -> dict[str, np.ndarray]:
        assert self.maze is not None
        origin = (self.row, self.column) if self.options.gps else self.start
        south, east = self.maze.goal[0] - origin[0], self.maze.goal[1] - origin[1]
        goal = np.array(_turned(south, east, self.heading), np.float32) / np.float32(self.options.size)
        return {"view": self._views[self.row - 1, self.column - 1, self.heading].copy(), "goal": goal}

    _NUMBERS = ("row", "column", "heading", "optimal", "walked", "t")

    def get_state(self) -> dict[str, Any] | None:
        if self.maze is None:
            return None
        numbers = {name: getattr(self, name) for name in self._NUMBERS}
        where = {
            "distance": self.maze.distance.copy(), "goal": np.array(self.maze.goal), "start": np.array(self.start),
        }  # fmt: skip
        return {**numbers, **where, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        for name in self._NUMBERS:
            setattr(self, name, int(state[name]))
        row, column = (int(each) for each in state["goal"])
        self.start = int(state["start"][0]), int(state["start"][1])
        self._enter(maze.Maze(np.array(state["distance"]), (row, column), (self.row, self.column), self.heading))
        self._np_random = restored_generator(state["generator"])


class GridNavVector(Batch):
    """Its `info` is gymnasium's: arrays [B] of `success` and `spl`, and masks of the lanes that ended."""

    def __init__(self, num_envs: int, **options: Any):
        self.options = Options(**options)
        super().__init__(num_envs, self.options.space(), spaces.Discrete(4))
        self.metadata["episode_metrics"] = METRICS
        self.delay = Delay(num_envs, self.options.delay, self.options.delay_spread, self.options.slow)
        size, view = self.options.size, self.options.view
        self.distance = np.zeros((num_envs, size + 2, size + 2), np.int16)
        self.goal = np.zeros((num_envs, 2), np.int64)
        self.place = np.ones((num_envs, 2), np.int64)  # row and column, counted with the border
        self.start = np.ones((num_envs, 2), np.int64)
        self.heading, self.optimal, self.walked, self.t = (np.zeros(num_envs, np.int64) for _ in range(4))
        self._views = np.zeros((num_envs, size, size, 4, 2, view, view), np.uint8)
        self._lanes = np.arange(num_envs)

    def number_lanes(self, first: int) -> None:
        """These are the environments first, first + 1, ... of the run."""
        self.delay.number_lanes(first)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        drawn = maze.draw(generator, self.options.size, self.options.loops)
        self.distance[lane], self.goal[lane], self.place[lane] = drawn.distance, drawn.goal, drawn.start
        self.start[lane], self.heading[lane] = drawn.start, drawn.heading
        self.optimal[lane] = drawn.distance[drawn.start]
        self.walked[lane] = self.t[lane] = 0
        self._views[lane] = maze.views(drawn.distance, self.options.view)

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self.delay.wait(np.flatnonzero(~self.ended).tolist())
        row = super().step(actions)
        if self.ended.any():
            row[4].update(success=self._success, spl=self._spl, _success=self.ended, _spl=self.ended)
        return row

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        before = self._left()
        self.heading = (self.heading + TURN[action]) % 4
        there = self.place + maze.AHEAD[self.heading]
        moves = (action == FORWARD) & (self.distance[self._lanes, there[:, 0], there[:, 1]] >= 0)
        self.place[moves] = there[moves]
        self.walked += moves
        self.t += 1
        left, stopped = self._left(), action == STOP
        self._success = (stopped & (left <= REACHED)).astype(np.float64)
        self._spl = self._success * self.optimal / np.maximum(self.optimal, self.walked)
        reward = before - left - STEP_COST + SPL_REWARD * self._spl
        return reward.astype(np.float32), stopped, ~stopped & (self.t >= self.options.limit)

    def _left(self) -> np.ndarray:
        """[B] shortest path to the goal."""
        return self.distance[self._lanes, self.place[:, 0], self.place[:, 1]].astype(np.int64)

    def observe(self) -> dict[str, np.ndarray]:
        south, east = (self.goal - (self.place if self.options.gps else self.start)).T
        goal = np.stack(_turned(south, east, self.heading), axis=-1).astype(np.float32) / np.float32(self.options.size)
        return {
            "view": self._views[self._lanes, self.place[:, 0] - 1, self.place[:, 1] - 1, self.heading],
            "goal": goal,
        }

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("distance", "goal", "place", "start", "heading", "optimal", "walked", "t")
        return {name: getattr(self, name) for name in names}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for lane in range(self.num_envs):
            self._views[lane] = maze.views(self.distance[lane], self.options.view)


def _turned(south: Any, east: Any, heading: Any) -> tuple[Any, Any]:
    """A way in cells, as cells ahead and cells to the right of an agent with this heading."""
    ahead, right = maze.AHEAD[heading].T, maze.AHEAD[(heading + 1) % 4].T
    return south * ahead[0] + east * ahead[1], south * right[0] + east * right[1]
