"""The open episodes of an actor's lanes: which each is, how far it has come, what it has brought.

Counts go on over unrolls, given-up ones too: a return and a length are those of the whole episode, whatever of it was
trained on. Not here: rows and what is in them (`actor.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rookery.core.types import Episode

Infos = list[list[dict[str, float]]] | None


class Episodes:
    def __init__(self, count: int, first_lane: int, take_infos: Callable[[], Infos] = lambda: None):
        """`take_infos`: what the environments told of the episodes that have ended since the last walk, by lane."""
        self.count, self.first_lane, self._take_infos = count, first_lane, take_infos
        self.number = np.zeros(count, np.int64)  # episodes that this environment has finished
        self.total = np.zeros(count, np.float64)  # return and length of the open one
        self.length = np.zeros(count, np.int64)
        self.live = np.ones(count, bool)  # whether the next row is a step of it; a dead one resets

    @property
    def age(self) -> np.ndarray:
        """[B] rows of each lane's episode before its next row; -1: that row will be a dead one."""
        return np.where(self.live, self.length, -1)

    def walk(self, ends: np.ndarray, live: np.ndarray, points: np.ndarray) -> list[Episode]:
        """Take these rows [R, B] in; the episodes that end in them."""
        found, infos = [], self._take_infos()
        total = self.total + np.cumsum(points, axis=0, dtype=np.float64)
        length = self.length + np.cumsum(live, axis=0)
        for lane in range(self.count):
            spent, walked = 0.0, 0
            for index, row in enumerate(np.flatnonzero(ends[:, lane])):
                points_of, steps = float(total[row, lane] - spent), int(length[row, lane] - walked)
                info = {} if infos is None else infos[lane][index]
                found.append(Episode(self.first_lane + lane, points_of, steps, info))
                spent, walked = total[row, lane], length[row, lane]
                self.number[lane] += 1
            self.total[lane], self.length[lane] = total[-1, lane] - spent, length[-1, lane] - walked
        self.live = ~ends[-1]
        return found

    def restart(self, lanes: list[int]) -> None:
        """Of these lanes, the environment is recreated: its episodes count from 0."""
        self.number[lanes] = self.total[lanes] = self.length[lanes] = 0
        self.live[lanes] = True

    def place(self, lane: int, row: int, ends: np.ndarray | None = None) -> tuple[int, int]:
        """Number of the episode and step that is taken in `row` from here; `ends` [R, B] of the rows before it."""
        if ends is not None and len(before := np.flatnonzero(ends[:row, lane])):
            return int(self.number[lane]) + len(before), max(0, row - int(before[-1]) - 2)
        return int(self.number[lane]), max(0, int(self.length[lane]) + row - (not self.live[lane]))

    def state(self) -> dict[str, Any]:
        columns = {"episode": self.number, "total": self.total, "length": self.length, "live": self.live}
        return {name: column.copy() for name, column in columns.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.number, self.total, self.length = (np.array(state[name]) for name in ("episode", "total", "length"))
        self.live = np.array(state["live"], bool)
