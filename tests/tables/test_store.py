"""The bulk memory: what comes out is what went in, byte by byte, for as long as it is there and not longer."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_parcels import MIXED, SERIAL, STACKED, VECTOR, Maker, replay, shapes_of

from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Leaf, Replay
from rookery.tables.ring import NEVER
from rookery.tables.store import Store, frame_rows, physical_slots, record_dtype, store_bytes

ATARI = EnvSpec("atari", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, VECTOR.action)

PLANS = {"transitions": replay(n_step=2), "sequences": replay(sequence=3, burn_in=1, overlap=1)}


class Driver:
    """A store and the list of what must be in it: the part of a table that has nothing to do with drawing."""

    def __init__(self, spec: EnvSpec, plan: Replay, items: int = 4, frames: int = 6, actors: int = 2, reach: int = 9):
        self.spec, self.plan = spec, plan
        serials = [0]
        self.makers = [Maker(spec, plan, items, frames, seed, serials, reach) for seed in range(actors)]
        self.shapes = self.makers[0].shapes
        self.store = Store(plan, self.shapes, spec, actors)
        self.model: dict[int, dict] = {}  # id -> what the item looks like, and its slot

    def rows(self) -> int:
        return min(ring.rows for ring in self.store.rings.values())

    def put(self, actor: int, items: int, frames: int) -> None:
        parcel, looks = self.makers[actor].make(items, frames)
        self._put(parcel, looks, actor, frames)

    def _put(self, parcel: dict, looks: list[dict], actor: int, frames: int) -> None:
        store = self.store
        before = set(self.model)
        losing = store.losing(parcel)
        lost = set(store.ids[losing].tolist())
        store.free(losing)
        kept, keep = store.admit(parcel, actor)
        if keep is not None:
            kept = {path: column[keep] for path, column in kept.items()}
            looks = [look for look, good in zip(looks, keep) if good]
        slots = store.ahead(len(looks))
        first = store.next_id
        store.add(kept, slots)
        for column in parcel.values():
            column[...] = 77  # the parcel is used again: nothing may still look at it
        for offset, (look, slot) in enumerate(zip(looks, slots.tolist())):
            self.model[first + offset] = look | {"slot": slot}
        for id in lost:
            del self.model[id]
        for id in list(self.model):
            if self.plan.memory.remover != "inverse" and id < store.next_id - store.slots:
                del self.model[id]  # its slot was taken
        assert lost <= before

    def free(self, ids: list[int]) -> None:
        self.store.free(np.array([self.model.pop(id)["slot"] for id in ids], np.int64))

    def check(self) -> None:
        store = self.store
        assert sorted(store.ids[store.ids >= 0].tolist()) == sorted(self.model)
        if not self.model:
            return
        slots = np.array([look["slot"] for look in self.model.values()])
        assert store.ids[slots].tolist() == list(self.model)
        compare(store.read(slots), list(self.model.values()), self.plan)


def compare(columns: dict[str, np.ndarray], looks: list[dict], plan: Replay) -> None:
    for path, column in columns.items():
        by_time = plan.sequence and path.split("/")[0] not in ("state", "version")
        column = column.swapaxes(0, 1) if by_time else column
        wanted = np.stack([look[path] for look in looks])
        assert column.dtype == wanted.dtype and column.shape == wanted.shape, path
        np.testing.assert_array_equal(column, wanted, err_msg=path)


# Records


def test_a_record_has_every_field_aligned_and_nothing_twice():
    for plan in PLANS.values():
        for spec in (VECTOR, STACKED, MIXED):
            dtype = record_dtype(shapes_of(spec, plan, 4, 4), spec)
            taken = np.zeros(dtype.itemsize, int)
            for field, offset in dtype.fields.values():
                assert offset % field.base.alignment == 0
                taken[offset : offset + field.itemsize] += 1
            assert taken.max() == 1 and dtype.itemsize % 8 == 0
            assert (taken == 0).sum() < 8, "no gaps but the last"


def test_a_record_holds_the_columns_of_a_batch_and_no_others():
    dtype = record_dtype(shapes_of(MIXED, PLANS["transitions"], 4, 4), MIXED)
    obs = {f"{top}/{key}" for top in ("obs", "next_obs") for key in MIXED.obs}
    assert set(dtype.names) == obs | {"action", "reward", "discount", "version"}
    assert dtype["obs/eye"].base == np.int32 and dtype["obs/eye"].shape == (2,), "rows of the ring, not frames"


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("spec", [VECTOR, STACKED, MIXED], ids=lambda spec: spec.id)
@pytest.mark.parametrize("compress", [False, True])
def test_items_come_out_as_they_went_in(spec, kind, compress):
    plan = PLANS[kind]
    plan = replay(plan.n_step, plan.sequence, plan.burn_in, plan.overlap, compress=compress, capacity=7)
    driver = Driver(spec, plan)
    puts = [(0, 3, 5), (1, 4, 2), (0, 0, 0), (0, 0, 3), (1, 1, 0), (0, 4, 6), (1, 4, 1), (1, 2, 2)]
    for actor, items, frames in puts:
        driver.put(actor, items, frames)
        driver.check()
    assert driver.store.next_id == 18 and len(driver.model) == 7, "the ring went round twice, and is full"


def test_any_dtype_and_shape_of_vector_observation():
    leaves = {
        "a": Leaf((), "float32", "vector"), "b": Leaf((3,), "uint8", "vector"), "c": Leaf((2, 2), "float64", "vector"),
        "d": Leaf((5,), "bool", "vector"), "e": Leaf((1,), "int16", "vector"), "f": Leaf((), "int64", "discrete", n=4),
    }  # fmt: skip
    driver = Driver(EnvSpec("any", leaves, MIXED.action), replay())
    for _ in range(4):
        driver.put(0, 3, 0)
    driver.check()


def test_what_was_read_does_not_change_with_the_memory():
    """P61: a sample is a copy."""
    driver = Driver(STACKED, replay(capacity=4))
    driver.put(0, 4, 6)
    slots = np.arange(4)
    before, looks = driver.store.read(slots), list(driver.model.values())
    for _ in range(20):
        driver.put(0, 4, 6)
    compare(before, looks, driver.plan)


# Frames


def test_frames_are_stored_once_atari_takes_at_most_7300_bytes_a_transition():
    """A naive memory takes 28 kB (stacks) or 56 kB (stacks and successors)."""
    plan, million = replay(n_step=3, capacity=1_000_000), 1_000_000
    for actors, items, frames in [(1, 4, 16), (1, 32, 80), (8, 408, 1040)]:
        shapes = shapes_of(ATARI, plan, items, frames)
        assert store_bytes(plan, shapes, ATARI, actors) <= 7270 * million  # and 30 bytes for priorities and books
        assert frame_rows(plan, shapes, "obs", ATARI.obs["obs"], actors) >= million + million // 128 + actors * items


def test_a_soft_capacity_has_a_quarter_more_room():
    assert physical_slots(replay(capacity=10, remover="soft")) == 13
    assert physical_slots(replay(capacity=10, remover="fifo")) == 10
    shapes = shapes_of(ATARI, replay(), 4, 8)
    hard, soft = (
        store_bytes(replay(capacity=100_000, remover=remover), shapes, ATARI, 1) for remover in ("fifo", "soft")
    )
    assert soft == pytest.approx(1.25 * hard, rel=0.01)


@pytest.mark.parametrize("kind", PLANS)
def test_bytes_are_those_that_are_taken(kind):
    plan = PLANS[kind]
    for spec in (VECTOR, STACKED, MIXED):
        shapes = shapes_of(spec, plan, 4, 6)
        store = Store(plan, shapes, spec, 2)
        real = sum(array.nbytes for array in store.arrays().values()) + store.ids.nbytes
        assert store_bytes(plan, shapes, spec, 2) == real


def test_a_ring_of_sequences_has_room_for_the_rows_that_are_new_in_each():
    plan = replay(sequence=80, burn_in=40, overlap=40, capacity=1000)
    rows = frame_rows(plan, shapes_of(ATARI, plan, 8, 100), "obs", ATARI.obs["obs"], 2)
    assert 40_000 < rows <= 40_000 * (1 + 1 / 16) + 4096


parcels = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 6)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(parcels, st.sampled_from(["stacked", "mixed"]), st.sampled_from(list(PLANS)), st.booleans(), st.booleans())
def test_an_item_is_there_until_its_slot_or_one_of_its_frames_is_taken(puts, spec, kind, compress, soft):
    """Against a list of all frames: an item lives exactly as long as `rows` frames after its oldest one allow."""
    plan, spec = PLANS[kind], {"stacked": STACKED, "mixed": MIXED}[spec]
    remover = "soft" if soft else "fifo"
    plan = replay(1, plan.sequence, plan.burn_in, plan.overlap, capacity=30, compress=compress, remover=remover)
    driver = Driver(spec, plan)
    for key in driver.store.rings:  # too small on purpose: normally slots run out first
        ring = driver.store.rings[key]
        driver.store.rings[key] = type(ring)(key, 17, ring.shape, 9, ring.dtype)
    frames: list[tuple[int, int]] = []  # (actor, number) of every frame, in the order of all
    alive: dict[int, tuple[int, int]] = {}  # serial -> (oldest frame, order of arrival)
    arrived = 0
    for actor, items, count in puts:
        maker = driver.makers[actor]
        frames += [(actor, len(next(iter(maker.seen.values()))) + i) for i in range(count)]
        place = {frame: index for index, frame in enumerate(frames)}
        parcel, looks = maker.make(items, count)
        low = len(frames) - 17
        alive = {serial: entry for serial, entry in alive.items() if entry[0] >= low}
        for look in looks:
            numbers = np.concatenate([look[path].ravel() for path in look if path.endswith("#")])
            oldest = min((place[actor, n] for n in numbers.tolist() if n >= 0), default=NEVER)
            if oldest >= low:
                alive[int(look[SERIAL])] = (oldest, arrived)
                arrived += 1
        alive = {s: entry for s, entry in alive.items() if entry[1] >= arrived - driver.store.slots}
        driver._put(parcel, looks, actor, count)
        driver.check()
        assert sorted(int(look[SERIAL]) for look in driver.model.values()) == sorted(alive)


def test_a_slow_actor_loses_items_whose_frames_others_have_overwritten():
    driver = Driver(STACKED, replay(capacity=8), reach=100)
    driver.put(0, 0, 6)
    for _ in range(driver.rows() // 6 + 1):
        driver.put(1, 1, 6)
    parcel, _ = driver.makers[0].make(3, 2)
    for top in ("obs", "next_obs"):
        parcel[f"{top}/obs"][:3] = [[-1, 6, 7], [5, 6, 7], [-1, -1, 7]]  # the second needs one of the first six
    driver.store.free(driver.store.losing(parcel))
    _, keep = driver.store.admit(parcel, 0)
    assert keep.tolist() == [True, False, True]


@settings(max_examples=30, deadline=None)
@given(parcels)
def test_compressed_frames_come_out_byte_by_byte(puts):
    """P73: the same parcels to a plain and to a compressed memory."""
    plain, packed = Driver(MIXED, replay(capacity=9)), Driver(MIXED, replay(capacity=9, compress=True))
    for put in puts:
        for driver in (plain, packed):
            driver.put(*put)
            driver.check()
    assert plain.store.ids.tolist() == packed.store.ids.tolist()


# Slots


def test_freed_slots_are_used_again_with_the_inverse_remover():
    driver = Driver(VECTOR, replay(capacity=6, remover="inverse"))
    store = driver.store
    driver.put(0, 4, 0)
    assert store.room == 2
    driver.free([1, 3])
    assert store.room == 4
    slots = store.ahead(4)
    assert sorted(slots.tolist()) == [1, 3, 4, 5] and store.room == 4, "to look ahead takes nothing"
    driver.put(0, 4, 0)
    assert store.room == 0
    driver.check()
    with pytest.raises(AssertionError):
        store.ahead(1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.randoms(use_true_random=False)), max_size=30))
def test_the_oldest_items_are_found_around_holes(rounds):
    driver = Driver(VECTOR, replay(capacity=8, remover="soft"))
    for items, take, random in rounds:
        driver.put(0, items, 0)
        driver.free(random.sample(sorted(driver.model), min(len(driver.model), random.randint(0, 2))))
        wanted = sorted(driver.model)[:take]
        slots = driver.store.oldest(take)
        assert driver.store.ids[slots].tolist() == wanted
        driver.free(wanted)
        driver.check()


# Checkpoints


def copied(store: Store) -> dict[str, list[bytes]]:
    return {name: list(map(bytes, array[: array.shape[0]])) for name, array in store.arrays().items()}


@pytest.mark.parametrize(("remover", "compress"), [("fifo", False), ("soft", True), ("inverse", False)])
@settings(max_examples=30, deadline=None)
@given(parcels, parcels, st.data())
def test_rows_are_announced_before_they_are_overwritten(remover, compress, before, after, data):
    """Copy-on-write: the rows announced, as they were then, and the rest as it is now, are the memory then."""
    spec = VECTOR if remover == "inverse" else MIXED
    driver = Driver(spec, replay(capacity=9, remover=remover, compress=compress))

    def put(actor: int, items: int, frames: int) -> None:
        if driver.store.room < items:
            driver.free(data.draw(st.permutations(sorted(driver.model)))[: items - driver.store.room])
        driver.put(actor, items, frames)

    for args in before:
        put(*args)
    moment, aside = copied(driver.store), {}
    used = driver.store.used()

    def keep(name: str, rows) -> None:
        if name in moment:  # or a vector, see `test_memory_model.py`
            now = copied(driver.store)[name]
            for row in range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist():
                assert 0 <= row < len(now)
                aside.setdefault((name, row), now[row])

    driver.store.before_write = keep
    for args in after:
        put(*args)
    now = copied(driver.store)
    for (name, row), old in aside.items():
        now[name][row] = old
    for name, rows in moment.items():
        assert now[name] == rows, name
        assert not any(map(any, rows[used[name] :])), "rows beyond those in use are empty"


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("spec", [VECTOR, MIXED], ids=lambda spec: spec.id)
@settings(max_examples=20, deadline=None)
@given(parcels, parcels)
def test_a_store_goes_on_from_its_state_and_arrays(spec, compress, before, after):
    plan = replay(capacity=9, compress=compress)
    driver, other = Driver(spec, plan), Driver(spec, plan)
    for args in before:
        driver.put(*args)
        other.makers[args[0]].make(*args[1:])  # only to bring its makers to the same point
    for name, array in driver.store.arrays().items():
        used = driver.store.used()[name]
        other.store.arrays()[name][:used] = array[:used]
    other.store.load(driver.store.state())
    other.model = {id: dict(look) for id, look in driver.model.items()}
    other.check()
    for args in after:
        for each in (driver, other):
            each.put(*args)
            each.check()
        assert driver.store.ids.tolist() == other.store.ids.tolist()
    assert copied(driver.store) == copied(other.store)


def test_free_slots_are_part_of_the_state():
    plan = replay(capacity=6, remover="inverse")
    driver = Driver(VECTOR, plan)
    driver.put(0, 4, 0)
    driver.free([2, 0])
    other = Store(plan, driver.shapes, VECTOR, 1)
    other.load(driver.store.state())
    assert other.room == 4 and other.ahead(4).tolist() == driver.store.ahead(4).tolist()


def test_the_state_is_a_copy():
    driver = Driver(STACKED, replay())
    driver.put(0, 3, 5)
    state = driver.store.state()
    ids, head = state["ids"].tolist(), state["rings"]["obs"]["head"]
    driver.put(0, 4, 6)
    assert state["ids"].tolist() == ids and state["rings"]["obs"]["head"] == head


def test_the_state_of_another_memory_is_refused():
    driver = Driver(VECTOR, replay(capacity=6))
    with pytest.raises(CheckpointError, match="ids of items"):
        driver.store.load(Store(replay(capacity=7), driver.shapes, VECTOR, 1).state())


def test_arrays_are_views_of_bytes_and_hold_no_rows_but_the_rings_own():
    driver = Driver(MIXED, replay(capacity=6))
    arrays = driver.store.arrays()
    assert set(arrays) == {"records", "frames/eye", "frames/map"} == set(driver.store.used())
    for array in arrays.values():
        assert array.dtype == np.uint8 and array.ndim == 2
    assert arrays["frames/map"].shape[1] == 4 * prod(MIXED.obs["map"].shape)
    driver.put(0, 2, 3)
    assert driver.store.used() == {"records": 2, "frames/eye": 3, "frames/map": 3}
    assert arrays["records"][:2].any(axis=1).all() and not arrays["records"][2:].any()
