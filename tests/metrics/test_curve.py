"""The curve in characters: right size, right ends, nothing lost between two points."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rookery.metrics.curve import braille

floats = st.floats(-1e9, 1e9)


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(column, row from the bottom) of every dot."""
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    found = set()
    for row, line in enumerate(lines):
        for column, letter in enumerate(line):
            for x in range(2):
                for y in range(4):
                    if letter != " " and (ord(letter) - 0x2800) & bits[x][y]:
                        found.add((2 * column + x, 4 * (len(lines) - row) - 1 - y))
    return found


def test_a_straight_line_is_the_diagonal():
    lines, low, high = braille([(0, 0.0), (7, 7.0)], 4, 2)
    assert dots(lines) >= {(i, i) for i in range(8)} and (low, high) == (0.0, 7.0)
    assert all(y - x in (0, -1) for x, y in dots(lines))


def test_a_constant_is_one_level():
    lines, low, high = braille([(x, 5.0) for x in range(10)], 5, 2)
    assert (
        len({y for _, y in dots(lines)}) == 1 and {x for x, _ in dots(lines)} == set(range(10)) and low == high == 5.0
    )


def test_no_points_no_lines():
    for points in ([], [(1, None)], [(None, 1)], [(0, math.nan)], [(math.inf, 1.0)]):
        assert braille(points, 5, 2)[0] == []
    assert braille([(0, 1.0)], 0, 2)[0] == []


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=40), st.integers(1, 20), st.integers(1, 5))
def test_every_column_between_the_ends_has_a_dot(points, columns, rows):
    points = sorted(points)
    lines, low, high = braille(points, columns, rows)
    assert len(lines) == rows and {len(line) for line in lines} == {columns}
    filled = {x for x, _ in dots(lines)}
    assert filled == set(range(max(filled) + 1))
    assert low == min(y for _, y in points) and high == max(y for _, y in points)
