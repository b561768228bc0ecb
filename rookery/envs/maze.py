"""The maze of one episode: random corridors, the distance of every cell to the goal, and the view from each cell.

Corridors are one cell wide. They form a random spanning tree over the cells with even coordinates (Kruskal's algorithm
with random weights), so that all open cells are connected; a share of the walls that are left is opened as well, which
makes loops. Everything is computed once per episode, so that a step only looks it up.

A maze is the array `distance` [size + 2, size + 2]: shortest path to the goal in cells, WALL in walls and on the
border around the maze. Headings are 0 north, 1 east, 2 south, 3 west; row 0 is the northern one.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

WALL = -1
AHEAD = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # [heading] -> rows and columns of one cell ahead
SEEN = 255


class Maze(NamedTuple):
    distance: np.ndarray  # [size + 2, size + 2] int16
    goal: tuple[int, int]  # row and column, both counted with the border
    start: tuple[int, int]
    heading: int


def draw(generator: np.random.Generator, size: int, loops: float) -> Maze:
    """A maze of size x size cells; the start is at least size // 2 steps away from the goal."""
    walls = _walls(generator, size, loops)
    cells = np.argwhere(~walls)
    row, column = cells[generator.integers(len(cells))].tolist()
    distance = distances(walls, (row, column))
    starts = np.argwhere(distance >= size // 2)
    start = starts[generator.integers(len(starts))].tolist()
    return Maze(distance, (row, column), (start[0], start[1]), int(generator.integers(4)))


def _walls(generator: np.random.Generator, size: int, loops: float) -> np.ndarray:
    """[size + 2, size + 2] bool, border included."""
    walls = np.ones((size + 2, size + 2), bool)
    walls[1:-1:2, 1:-1:2] = False
    between = _between(size)
    order = generator.random(len(between)).argsort().tolist()
    opened = (generator.random(len(between)) < loops).tolist()
    parent = list(range(((size + 1) // 2) ** 2))
    for each in order:
        row, column, one, other = between[each]
        while parent[one] != one:
            parent[one] = one = parent[parent[one]]
        while parent[other] != other:
            parent[other] = other = parent[parent[other]]
        if one != other or opened[each]:
            walls[row, column] = False
            parent[one] = other
    return walls


@cache
def _between(size: int) -> list[tuple[int, int, int, int]]:
    """Cells that separate two neighbouring cells of even coordinates: row, column, and the numbers of these two."""
    side = (size + 1) // 2
    east = [(2 * r + 1, 2 * c + 2, r * side + c, r * side + c + 1) for r in range(side) for c in range(side - 1)]
    south = [(2 * r + 2, 2 * c + 1, r * side + c, (r + 1) * side + c) for r in range(side - 1) for c in range(side)]
    return east + south


def distances(walls: np.ndarray, goal: tuple[int, int]) -> np.ndarray:
    """Steps from every cell to the goal by breadth-first search; WALL where there is no way."""
    width = walls.shape[1]
    found = np.where(walls, WALL, WALL - 1).ravel().tolist()
    open_ = WALL - 1
    wave, steps = [goal[0] * width + goal[1]], 0
    found[wave[0]] = 0
    while wave:
        steps += 1
        ahead = []
        for cell in wave:
            for near in (cell - width, cell + 1, cell + width, cell - 1):
                if found[near] == open_:
                    found[near] = steps
                    ahead.append(near)
        wave = ahead
    return np.maximum(np.array(found, np.int16).reshape(walls.shape), np.int16(WALL))


def views(distance: np.ndarray, view: int) -> np.ndarray:
    """What is seen from every cell in every heading: [size, size, heading, 2, view, view] uint8.

    The agent stands in the middle of the last row and looks up. Channel 0 shows the open cells that it sees, channel 1
    the walls; a cell that is hidden is 0 in both. A cell is seen if the cells of a path to it are open: diagonally and
    then straight, or straight and then diagonally.
    """
    size = len(distance) - 2
    walls = np.pad(distance < 0, view, constant_values=True)[_window(size, view)]  # [size, size, 4, view * view]
    bits = (walls @ _bits(view))[..., None]
    straight, diagonal = _paths(view)
    hidden = ((bits & straight) != 0) & ((bits & diagonal) != 0)
    seen = np.stack([~walls & ~hidden, walls & ~hidden], axis=3)
    return (seen * np.uint8(SEEN)).reshape(size, size, 4, 2, view, view)


@cache
def _window(size: int, view: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns, in a maze padded by `view`, of the cells in the window of each cell and heading."""
    far, side = (each.ravel() for each in np.mgrid[view - 1 : -1 : -1, -(view // 2) : view // 2 + 1])
    right = np.roll(AHEAD, -1, axis=0)
    offset = far[None, :, None] * AHEAD[:, None] + side[None, :, None] * right[:, None]  # [heading, cell, 2]
    cell = np.moveaxis(np.mgrid[:size, :size], 0, -1)[:, :, None, None] + view + 1
    where = cell + offset
    return where[..., 0], where[..., 1]


@cache
def _bits(view: int) -> np.ndarray:
    """One bit for each cell of a window."""
    return 1 << np.arange(view * view)


@cache
def _paths(view: int) -> np.ndarray:
    """[2, view * view] for both kinds of paths, the bits of the cells that lie between the agent and each cell."""
    paths, bits = np.zeros((2, view, view), np.int64), _bits(view).reshape(view, view)
    for far in range(view):
        for side in range(-(view // 2), view // 2 + 1):
            sign, both = (side > 0) - (side < 0), min(far, abs(side))
            slant = [(1, sign)] * both
            rest = [(1, 0)] * (far - both) + [(0, sign)] * (abs(side) - both)
            for kind, moves in enumerate((rest + slant, slant + rest)):
                for ahead, aside in np.cumsum(moves, axis=0).reshape(-1, 2)[:-1].astype(int):
                    paths[kind, -1 - far, view // 2 + side] |= bits[-1 - ahead, view // 2 + aside]
    return paths.reshape(2, -1)
