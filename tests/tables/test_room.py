"""A replay memory must fit with all that saving it takes, or it is refused before anything is allocated."""

from __future__ import annotations

import re
from functools import partial

import pytest
from support_parcels import STACKED, VECTOR, replay, shapes_of

from rookery.core.errors import UsageError
from rookery.core.machine import Machine
from rookery.tables import factory
from rookery.tables.factory import check_room
from rookery.tables.memory import ReplayMemory
from rookery.tables.snapshot import BUFFERS

MILLION = 1_000_000


@pytest.fixture
def have(tmp_path, monkeypatch):
    """Says how many bytes the machine has."""
    monkeypatch.setattr(factory, "Machine", partial(Machine, tmp_path, tmp_path / "none"))

    def tell(count: float) -> None:
        (tmp_path / "meminfo").write_text(f"MemAvailable: {int(count) // 1024} kB")

    return tell


def bytes_of(plan, spec=VECTOR) -> tuple[int, int]:
    shapes = shapes_of(spec, plan, 4, 6)
    return ReplayMemory.bytes_needed(plan, shapes, spec), ReplayMemory.bytes_to_save(plan, shapes, spec)


def check(plan, spec=VECTOR, **more) -> None:
    check_room(plan, shapes_of(spec, plan, 4, 6), spec, **more)


@pytest.mark.parametrize("compress", [False, True])
def test_what_saving_takes_counts(have, compress):
    plan = replay(capacity=10 * MILLION, compress=compress, sampler="proportional")
    need, extra = bytes_of(plan, STACKED)
    assert extra > 240 * MILLION  # the copy of the vectors alone
    have((need + extra) / 0.9 + (100 << 20))
    check(plan, STACKED)
    have((need + extra) / 0.9)  # not enough for the buffers
    with pytest.raises(
        UsageError, match=r"10,000,000 items needs .* \(.* MiB of it to save it with checkpoints\), and"
    ):
        check(plan, STACKED)


def test_a_memory_that_is_not_saved_needs_no_more_than_itself(have):
    plan = replay(capacity=10 * MILLION)
    need, _ = bytes_of(plan)
    have(need / 0.9 + 4096)
    with pytest.raises(UsageError, match=r'or leave it out of checkpoints \(algo=\{"replay": \{"save": False\}\}\)'):
        check(plan)
    check(replay(capacity=10 * MILLION, save=False))
    check(plan, saved=False)
    have(need / 0.9 - 4096)
    with pytest.raises(UsageError) as caught:
        check(replay(capacity=10 * MILLION, save=False))
    assert "checkpoints" not in str(caught.value)


@pytest.mark.parametrize("memories", [1, 3])
@pytest.mark.parametrize("spec", [VECTOR, STACKED], ids=lambda spec: spec.id)
def test_the_capacity_that_is_advised_is_the_largest_that_fits(have, spec, memories):
    have(900 << 20)
    with pytest.raises(UsageError) as caught:
        check(replay(capacity=50 * MILLION), spec, memories=memories)
    fits = int(re.search(r'algo=\{"replay": \{"capacity": (\d+)\}\} or less', str(caught.value))[1])
    assert fits % memories == 0
    check(replay(capacity=fits // memories), spec, memories=memories)
    with pytest.raises(UsageError):
        check(replay(capacity=fits // memories + 1), spec, memories=memories)


def test_where_nothing_fits_no_capacity_is_advised(have):
    have(10 << 20)
    with pytest.raises(UsageError, match=r"there are 10\.0 MiB .*; free some"):
        check(replay(capacity=100))


def test_more_actors_need_more_frames(have):
    plan, spec = replay(capacity=2 * MILLION), STACKED
    shapes = shapes_of(spec, plan, 100, 200)
    one, many = (ReplayMemory.bytes_needed(plan, shapes, spec, actors) for actors in (1, 50))
    assert many > one + 100_000
    extra = ReplayMemory.bytes_to_save(plan, shapes, spec) + BUFFERS
    have((one + extra) / 0.9 + 50_000)
    check_room(plan, shapes, spec, actors=1)
    with pytest.raises(UsageError):
        check_room(plan, shapes, spec, actors=50)


def test_ranks_share_the_machine(have):
    plan = replay(capacity=10 * MILLION, save=False)
    need, _ = bytes_of(plan)
    have(need / 0.9 + 8192)
    check(plan)
    with pytest.raises(UsageError, match="for each of 2 ranks"):
        check(plan, ranks=2)
    have(2 * need / 0.9 + 8192)
    check(plan, ranks=2)
