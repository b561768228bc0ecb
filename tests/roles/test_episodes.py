"""The open episodes of lanes: numbers, returns and lengths over any cut of the rows, and the address of a row."""

from __future__ import annotations

import numpy as np
import pytest
from support_lanes import columns

from rookery.roles.episodes import Episodes

ROWS = columns(40)  # [rows, lanes, (episode, t, live, terminated, truncated)]
ENDS, LIVE = (ROWS[..., 3] | ROWS[..., 4]).astype(bool), ROWS[..., 2].astype(bool)
POINTS = np.where(LIVE, np.arange(40)[:, None] + 1.0, 0.0)


@pytest.mark.parametrize("piece", [1, 3, 7, 40])
def test_episodes_do_not_depend_on_how_the_rows_are_cut(piece):
    whole, cut, found = Episodes(4, 8), Episodes(4, 8), []
    for row in range(0, 40, piece):
        part = slice(row, row + piece)
        found += cut.walk(ENDS[part], LIVE[part], POINTS[part])
    key = lambda each: (each.lane, each.length, each.total)  # noqa: E731
    assert sorted(found, key=key) == sorted(whole.walk(ENDS, LIVE, POINTS), key=key)
    assert {each.lane for each in found} == {8, 9, 10, 11}
    assert all(np.array_equal(cut.state()[name], column) for name, column in whole.state().items())


@pytest.mark.parametrize("begun", [0, 2, 5, 9])
def test_the_place_of_a_row_is_that_of_the_script(begun):
    episodes = Episodes(4, 0)
    if begun:
        episodes.walk(ENDS[:begun], LIVE[:begun], POINTS[:begun])
    for lane in range(4):
        for row in range(20):
            episode, t, live, *_ = ROWS[begun + row, lane]
            wanted = (episode, t) if live else (episode + 1, 0)  # a dead row resets the next one
            assert episodes.place(lane, row, ENDS[begun:]) == wanted


def test_a_recreated_environment_counts_from_0_and_the_others_go_on():
    episodes = Episodes(4, 0)
    episodes.walk(ENDS[:8], LIVE[:8], POINTS[:8])
    before = episodes.state()
    episodes.restart([0, 3])
    assert episodes.age.tolist() == [0, *np.where(before["live"], before["length"], -1)[1:3], 0]
    assert episodes.number[[0, 3]].tolist() == [0, 0] and episodes.number[1] == before["episode"][1]
    other = Episodes(4, 0)
    other.load(before)
    assert other.place(2, 3) == (before["episode"][2], before["length"][2] + 3)
