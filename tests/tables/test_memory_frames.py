"""The replay table with images: stacks rebuilt from frames, by real builders too; how much memory it takes; P73."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_memory import REMOVERS, SAMPLERS, SPECS, Model, table_of, tensors_of
from support_parcels import MIXED, STACKED, VECTOR, Maker, replay, shapes_of

from rookery.core.types import DataPlan, EnvSpec, Leaf, Sequences, Transitions
from rookery.core.unroll import empty_unroll, unroll_shapes
from rookery.tables.builder import make_builder, parcel_shapes
from rookery.tables.memory import ReplayMemory
from rookery.tables.snapshot import allowance


@pytest.mark.parametrize("compress", [False, True])
def test_images_come_as_bytes_and_stacks_whole(compress):
    """P73."""
    plan = replay(capacity=16, batch=9, compress=compress)
    model = Model(plan, STACKED)
    for actor in (0, 1, 0, 0, 1):
        model.insert(actor, 4, 6, [1.0] * 4)
        batch = model.sample(0.0).batch
        assert batch.obs["obs"].shape == (9, 3, 2, 5) and batch.next_obs["obs"].dtype == torch.uint8
        assert batch.obs["obs"].is_contiguous()
    model.check()


def test_a_batch_owns_its_memory():
    model = Model(replay(capacity=8, batch=6), MIXED)
    model.insert(0, 4, 6, [1.0] * 4)
    batch, other = model.sample(0.0).batch, model.sample(0.0).batch
    before = [leaf.clone() for leaf in tensors_of(other)]
    for leaf in tensors_of(batch):
        leaf.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(other), strict=True))
    model.sample(0.0)  # compares with what went in


def test_a_million_atari_transitions_fit_into_7_3_gigabytes():
    leaf = Leaf((4, 84, 84), "uint8", "image", stack=4)
    spec = EnvSpec("atari", {"obs": leaf}, VECTOR.action)
    for unroll, lanes, actors in [(4, 1, 1), (4, 8, 1), (50, 8, 8), (20, 16, 4)]:
        for sampler in SAMPLERS:
            plan = replay(n_step=3, capacity=1_000_000, sampler=sampler)
            shapes = parcel_shapes(spec, DataPlan(unroll, unroll, plan), lanes, {})
            assert 7056 * 1_000_000 < ReplayMemory.bytes_needed(plan, shapes, spec, actors) <= 7300 * 1_000_000


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_needed_are_about_those_taken(spec):
    for sampler in SAMPLERS:
        for remover in REMOVERS if spec == "vector" else REMOVERS[:2]:
            plan = replay(capacity=5_000, sampler=sampler, remover=remover)
            table, shapes = table_of(plan, SPECS[spec]), shapes_of(SPECS[spec], plan, 4, 6)
            real = held(table, set())
            assert ReplayMemory.bytes_needed(plan, shapes, SPECS[spec], 2) == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_to_save_are_the_vectors_and_what_may_be_held_aside(spec):
    for sampler in SAMPLERS:
        for remover in REMOVERS if spec == "vector" else REMOVERS[:2]:
            plan = replay(capacity=60, sampler=sampler, remover=remover)
            maker = Maker(SPECS[spec], plan, 20, 20, 0, [0], 5)
            table = ReplayMemory(plan, maker.shapes, SPECS[spec], 2, 0)
            for _ in range(5):
                table.insert(maker.make(20, 20)[0], 0)
                vectors = sum(vector.nbytes for vector in table.vectors().values())
                extra = ReplayMemory.bytes_to_save(plan, maker.shapes, SPECS[spec], 2) - allowance(0)
                assert 0.5 * extra < vectors <= extra
            memory = replay(capacity=10**9, sampler=sampler, remover=remover)
            arrays = ReplayMemory.bytes_needed(memory, maker.shapes, SPECS[spec], 2)
            assert ReplayMemory.bytes_to_save(memory, maker.shapes, SPECS[spec], 2) > arrays / 25


def held(thing: object, seen: set[int]) -> int:
    """Bytes of all arrays that can be reached from there through objects of ours (compiled kernels keep more)."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None else held(thing.base, seen)
    if isinstance(thing, dict):
        return sum(held(part, seen) for part in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held(part, seen) for part in thing)
    ours = type(thing).__module__.startswith("rookery") and hasattr(thing, "__dict__")
    return held(vars(thing), seen) if ours else 0


class Film:
    """An environment whose every frame says lane, episode and step; unrolls of it, next-step resets included."""

    def __init__(self, plan: DataPlan, spec: EnvSpec, lanes: int, first_lane: int, lengths: tuple[int, ...]):
        self.plan, self.spec, self.lanes, self.first, self.lengths = plan, spec, lanes, first_lane, lengths
        self.out = empty_unroll(unroll_shapes(spec, plan, lanes, {}))
        self.episode, self.step = np.zeros(lanes, int), np.zeros(lanes, int)
        self.dead = np.zeros(lanes, bool)
        self.stack = np.zeros((lanes, *spec.obs["obs"].shape), np.uint8)
        for lane in range(lanes):
            self._begin(lane)

    def _frame(self, lane: int) -> np.ndarray:
        step = self.step[lane]
        return np.array([self.first + lane + 1, self.episode[lane] % 256, step // 256, step % 256], np.uint8)[:, None]

    def _begin(self, lane: int) -> None:
        self.step[lane], self.dead[lane] = 0, False
        self.stack[lane] = 0
        self.stack[lane, -1] = self._frame(lane)

    def unroll(self):
        out = self.out
        out.obs["obs"][0] = self.stack
        for row in range(self.plan.unroll):
            out.live[row] = ~self.dead
            for lane in range(self.lanes):
                end = False
                if self.dead[lane]:
                    self.episode[lane] += 1
                    self._begin(lane)
                else:
                    self.step[lane] += 1
                    self.stack[lane, :-1] = self.stack[lane, 1:]
                    self.stack[lane, -1] = self._frame(lane)
                    end = self.dead[lane] = self.step[lane] == self.lengths[self.episode[lane] % len(self.lengths)]
                out.terminated[row, lane], out.truncated[row, lane] = end, False
            out.obs["obs"][row + 1] = self.stack
        return out


@pytest.mark.parametrize("actors, lanes, unroll, n_step", [(1, 1, 4, 3), (1, 8, 1, 1), (3, 4, 16, 5), (4, 2, 3, 3)])
@pytest.mark.parametrize("remover", ["fifo", "soft"])
def test_a_memory_of_frames_holds_all_the_items_it_was_made_for(actors, lanes, unroll, n_step, remover):
    """With real builders and episodes of 128 steps and more, no item goes before its turn; and stacks are right."""
    spec = EnvSpec("film", {"obs": Leaf((4, 4, 1), "uint8", "image", stack=4)}, VECTOR.action)
    memory = replay(n_step=n_step, capacity=700, batch=64, remover=remover)
    plan, lengths = DataPlan(unroll, unroll, memory), (128, 131, 300)
    shapes = parcel_shapes(spec, plan, lanes, {})
    table = ReplayMemory(memory, shapes, spec, actors, seed=3)
    films = [Film(plan, spec, lanes, index * lanes, lengths) for index in range(actors)]
    builders = [make_builder(spec, plan, lanes) for _ in range(actors)]
    parcel = {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
    room = table.store.slots
    while table.inserted < 3 * room:
        for actor in range(actors):
            builders[actor].build(films[actor].unroll(), parcel)
            table.insert(parcel, actor)
            assert len(table) == min(table.inserted, room)
        check_film(table.sample().batch, n_step, lengths)


def check_film(batch: Transitions, n_step: int, lengths: tuple[int, ...]) -> None:
    obs, behind = batch.obs["obs"][..., 0].long(), batch.next_obs["obs"][..., 0].long()  # [N, 4 frames, 4 numbers]
    steps = [stack[:, -1, 2] * 256 + stack[:, -1, 3] for stack in (obs, behind)]
    ends = torch.tensor(lengths)[obs[:, -1, 1] % len(lengths)]
    assert torch.equal(steps[1], torch.minimum(steps[0] + n_step, ends))
    for stack, step in zip((obs, behind), steps):
        for age in range(4):
            frame, there = stack[:, 3 - age], step >= age
            assert not frame[~there].any(), "zero before the episode's start"
            assert torch.equal(frame[there][:, :2], obs[there][:, -1, :2]), "same lane, same episode"
            assert torch.equal(frame[there][:, 2] * 256 + frame[there][:, 3], step[there] - age)


@pytest.mark.parametrize("actors, lanes, unroll", [(1, 1, 1), (2, 3, 7), (3, 2, 20)])
def test_sequences_of_frames_are_rebuilt_row_by_row(actors, lanes, unroll):
    spec = EnvSpec("film", {"obs": Leaf((4, 4, 1), "uint8", "image", stack=4)}, VECTOR.action)
    memory = replay(sequence=8, burn_in=4, overlap=4, capacity=60, batch=16)
    plan, lengths = DataPlan(unroll, 1, memory), (97, 3, 150)
    shapes = parcel_shapes(spec, plan, lanes, {})
    table = ReplayMemory(memory, shapes, spec, actors, seed=3)
    films = [Film(plan, spec, lanes, index * lanes, lengths) for index in range(actors)]
    builders = [make_builder(spec, plan, lanes) for _ in range(actors)]
    parcel = {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
    steps = pending = trained = 0
    while table.inserted < 200:
        for actor in range(actors):
            out = films[actor].unroll()
            builders[actor].build(out, parcel)
            table.insert(parcel, actor)
            steps += int(out.live.sum())
        assert len(table) == min(table.inserted, 60)
        if table.can_sample():
            sample = table.sample()
            trained += sample.fresh
            check_film_rows(sample.batch)
    pending = sum(builder.pending for builder in builders)
    assert steps == trained + table.steps_waiting + table.steps_evicted + pending, "the ledger balances"


def check_film_rows(batch: Sequences) -> None:
    obs = batch.obs["obs"][..., 0].long()  # [13, 16 items, 4 frames, 4 numbers]
    assert obs.shape == (13, 16, 4, 4) and batch.live.shape == (12, 16)
    step = obs[..., 2] * 256 + obs[..., 3]
    live, alive_next = batch.live, obs[1:, :, -1, 0] > 0
    assert torch.equal(alive_next | ~live, torch.ones_like(live)), "a live row has a successor"
    assert torch.equal(step[1:, :, -1][live], step[:-1, :, -1][live] + 1)
    assert torch.equal(obs[1:, :, :-1][live], obs[:-1, :, 1:][live]), "a stack is the next one's, one older"


def test_a_memory_that_frames_fill_before_items_is_full():
    """min_size is the capacity, and every item brings more frames than there is room for."""
    plan = replay(capacity=8, min_size=8, batch=2, samples_per_insert=1.0)
    model = Model(plan, STACKED)
    for _ in range(40):
        model.insert(0, 1, 6, [1.0] * 4)
    assert len(model.table) < 8 and model.table.can_sample() and not model.table.can_insert()
    model.table.sample()


def test_a_new_life_of_an_actor_does_not_touch_its_old_items():
    model = Model(replay(capacity=12, batch=8), STACKED)
    model.insert(0, 4, 6, [1.0] * 4)
    model.forget(0)
    model.insert(0, 4, 2, [1.0] * 4)
    model.sample(0.0)
    model.check()
    with pytest.raises(ValueError, match="forget"):
        model.makers[0].restart()
        model.table.insert(model.makers[0].make(1, 1)[0], 0)


def test_items_of_a_slow_actor_that_lack_frames_count_as_evicted():
    """Others have overwritten frames that its late items refer to: those never become items of the memory."""
    model = Model(replay(capacity=12, batch=8), STACKED)
    model.insert(0, 4, 6, [1.0] * 4)
    for _ in range(5):
        model.insert(1, 1, 6, [1.0] * 4)
    assert model.table.store.next_id == model.table.inserted
    lost = model.table.steps_evicted
    model.insert(0, 4, 1, [1.0] * 4)
    assert model.table.store.next_id < model.table.inserted and model.table.steps_evicted > lost
    model.check()
    model.sample(0.0)


def test_items_that_never_came_in_do_not_end_the_warm_up():
    model = Model(replay(capacity=12, min_size=12, batch=2), STACKED)
    table = model.table
    table.evicted += 3  # as `insert` counts items that lack frames
    model.insert(0, 4, 2, [1.0] * 4)
    assert 0 < len(table) < 12 and not table.can_sample()
