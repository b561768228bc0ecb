"""One prioritised replay memory under the clock: Rookery's, cpprb's or torchrl's. Prints one JSON line.

    python rival_replay.py MEMORY DATA --items 1000000 --calls 600

Runs in the environment of the memory it measures (see `replay.py`), one thread. All go through the same loop, which is
a learner's: draw a batch, give it new priorities, add items now and then. Each is given what its interface asks for,
made before the clock starts, and asserted to hold what it should. A batch is dropped after the clock has stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from collections.abc import Iterator
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

BATCH, PARCEL, STACK, SIDE = 512, 50, 4, 84
ALPHA, BETA = 0.6, 0.4
ADD_EVERY = 2  # updates; about Ape-X's ratio of items in to items out
POOL = 2_000  # frames that differ
OPERATIONS = ("sample", "update", "pair", "add")

Rows = dict[str, np.ndarray]


class Stream:
    """One episode that never ends. Frames are random: a memory that looked for zeros would find none."""

    def __init__(self, data: str):
        self.frames, self._rng, self._at = data == "frames", np.random.default_rng(0), 0
        self._pool = self._rng.integers(1, 255, (POOL, SIDE, SIDE), np.uint8) if self.frames else None
        self._last = self._rng.random((1, 4), np.float32)

    def rows(self, count: int) -> tuple[np.ndarray, Rows]:
        """The next `count` steps: observations [count + 1, ...], the last of which comes again as the first; the rest.

        Images are [count + 1, side, side, stack], a view.
        """
        rng = self._rng
        rest = {"action": rng.integers(0, 3, count), "reward": rng.random(count, np.float32)}
        if self._pool is None:
            obs = np.concatenate([self._last, rng.random((count, 4), np.float32)])
            self._last = obs[-1:]
        else:
            which = np.arange(self._at, self._at + count + STACK) % POOL
            obs = np.lib.stride_tricks.sliding_window_view(self._pool[which], STACK, axis=0)
            self._at += count
        return obs, rest | {"done": np.zeros(count, np.float32)}


class Rookery:
    """`weights`: the largest importance weight is 1 in the batch (the default), or in the memory (as the rivals do)."""

    def __init__(self, stream: Stream, items: int, weights: str = "batch"):
        import torch

        from rookery.core.config import ReplayConfig
        from rookery.core.types import ActionSpec, DataPlan, EnvSpec, Leaf, Replay
        from rookery.core.unroll import Unroll
        from rookery.tables.builder import make_builder, parcel_shapes
        from rookery.tables.memory import Keys, ReplayMemory

        torch.set_num_threads(1)
        leaf = Leaf((4,), "float32", "vector")
        if stream.frames:
            leaf = Leaf((STACK, SIDE, SIDE), "uint8", "image", stack=STACK)
        spec = EnvSpec("stream", {"obs": leaf}, ActionSpec("discrete", choices=(3,), starts=(0,)))
        memory = ReplayConfig(
            capacity=items, min_size=1, batch=BATCH, samples_per_insert=0.0, sampler="proportional",
            alpha=ALPHA, beta=BETA, beta_end=None, weights=weights,
        )  # fmt: skip
        plan = DataPlan(PARCEL, PARCEL, Replay(memory, gamma=0.99))
        shapes = parcel_shapes(spec, plan, 1, {})
        self.table = ReplayMemory(plan.table, shapes, spec, 1, seed=1)
        self.building: list[int] = []  # ns
        self._builder, self._stream = make_builder(spec, plan, 1), stream
        self._parcel = {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
        self._keys, self._unroll = Keys, Unroll

    def parcels(self, items: int) -> Iterator[Rows]:
        for _ in range(0, items, PARCEL):
            yield self.parcel()

    def parcel(self) -> Rows:
        obs, rest = self._stream.rows(PARCEL)
        if self._stream.frames:
            obs = np.ascontiguousarray(obs.transpose(0, 3, 1, 2))
        never, zero = np.zeros((PARCEL, 1), bool), np.zeros(1, np.int64)
        unroll = self._unroll(
            obs={"obs": obs[:, None]}, action=rest["action"][:, None], reward=rest["reward"][:, None],
            terminated=never, truncated=never, live=~never, logp=np.zeros((PARCEL, 1), np.float32),
            state0={}, version=zero, lane=zero,
        )  # fmt: skip
        started = clock()
        self._builder.build(unroll, self._parcel)
        self.building.append(clock() - started)
        return self._parcel

    def add(self, parcel: Rows) -> None:
        self.table.insert(parcel, 0)

    def sample(self) -> Any:
        return self.table.sample()

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        self.table.update(drawn.keys, priorities)

    def update_at(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.table.update(self._keys(slots, self.table.store.ids[slots]), priorities)

    def priorities(self, values: np.ndarray) -> np.ndarray:
        return values

    def __len__(self) -> int:
        return len(self.table)

    def look(self, drawn: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        obs, after = drawn.batch.obs["obs"].numpy(), drawn.batch.next_obs["obs"].numpy()
        if self._stream.frames:
            obs, after = obs.transpose(0, 2, 3, 1), after.transpose(0, 2, 3, 1)
        return drawn.keys.slot, drawn.batch.weight.numpy(), obs, after


class Cpprb:
    """`compressed`: frames are kept once, as by Rookery; otherwise 56 kB an item."""

    def __init__(self, stream: Stream, items: int, compressed: bool = True):
        from cpprb import PrioritizedReplayBuffer

        obs = {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8} if stream.frames else {"shape": 4}
        columns = {"obs": obs, "action": {"dtype": np.int64}, "reward": {}, "done": {}}
        saving: dict[str, str] = {}
        if stream.frames and compressed:
            saving = {"next_of": "obs", "stack_compress": "obs"}
        else:
            columns["next_obs"] = obs
        self._buffer = PrioritizedReplayBuffer(items, columns, alpha=ALPHA, **saving)
        self._stream = stream

    def parcels(self, items: int) -> Iterator[Rows]:
        for _ in range(0, items, PARCEL):  # as large as later: a batch that goes around the end mixes priorities up
            yield self.parcel()

    def parcel(self) -> Rows:
        obs, rest = self._stream.rows(PARCEL)
        return {"obs": np.ascontiguousarray(obs[:-1]), "next_obs": np.ascontiguousarray(obs[1:]), **rest}

    def add(self, parcel: Rows) -> None:
        self._buffer.add(**parcel)

    def sample(self) -> Any:
        return self._buffer.sample(BATCH, beta=BETA)

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priorities(drawn["indexes"], priorities)

    def update_at(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._buffer.update_priorities(slots, priorities)

    def priorities(self, values: np.ndarray) -> np.ndarray:
        return values

    def __len__(self) -> int:
        return self._buffer.get_stored_size()

    def look(self, drawn: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return drawn["indexes"].astype(np.int64), drawn["weights"].copy(), drawn["obs"], drawn["next_obs"]


class TorchRL:
    """Its buffer of plain interface: TensorDictPrioritizedReplayBuffer is a little slower."""

    def __init__(self, stream: Stream, items: int):
        import torch

        # torchrl's wheels are compiled for other versions of torch: a symbol is missing that its trees do not use.
        flags = sys.getdlopenflags()
        sys.setdlopenflags(flags & ~os.RTLD_NOW | os.RTLD_LAZY)
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, PrioritizedReplayBuffer

        sys.setdlopenflags(flags)
        torch.set_num_threads(1)
        self._torch, self._make, self._stream = torch, TensorDict, stream
        self._buffer = PrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(items), batch_size=BATCH
        )

    def parcels(self, items: int) -> Iterator[Any]:
        for begin in range(0, items, 1_000):
            yield self.parcel(min(1_000, items - begin))

    def parcel(self, count: int = PARCEL) -> Any:
        obs, rest = self._stream.rows(count)
        if self._stream.frames:
            obs = np.ascontiguousarray(obs.transpose(0, 3, 1, 2))
        columns = {"obs": obs[:-1].copy(), "next_obs": obs[1:].copy(), **rest}
        return self._make({name: self._torch.from_numpy(column) for name, column in columns.items()}, [count])

    def add(self, parcel: Any) -> None:
        self._buffer.extend(parcel)

    def sample(self) -> Any:
        return self._buffer.sample(return_info=True)

    def update(self, drawn: Any, priorities: Any) -> None:
        self._buffer.update_priority(drawn[1]["index"], priorities)

    def update_at(self, slots: np.ndarray, priorities: Any) -> None:
        self._buffer.update_priority(self._torch.from_numpy(slots), priorities)

    def priorities(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(values)

    def __len__(self) -> int:
        return len(self._buffer)

    def look(self, drawn: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        items, info = drawn
        obs, after = items["obs"].numpy(), items["next_obs"].numpy()
        if self._stream.frames:
            obs, after = obs.transpose(0, 2, 3, 1), after.transpose(0, 2, 3, 1)
        return info["index"].numpy(), info["priority_weight"].numpy(), obs, after


MEMORIES = {
    "rookery": Rookery,
    "rookery-memory": lambda stream, items: Rookery(stream, items, weights="memory"),
    "cpprb": Cpprb,
    "cpprb-plain": lambda stream, items: Cpprb(stream, items, compressed=False),
    "torchrl": TorchRL,
}


def fill(memory: Any, items: int, rng: np.random.Generator) -> None:
    """Full, with a different priority for every item."""
    for parcel in memory.parcels(items):
        memory.add(parcel)
    assert len(memory) == items, (len(memory), items)
    values = rng.random(items, np.float32) + 0.01
    for begin in range(0, items, 10_000):
        part = slice(begin, min(begin + 10_000, items))
        memory.update_at(np.arange(part.start, part.stop), memory.priorities(values[part]))
    check(memory, values)


def check(memory: Any, values: np.ndarray) -> None:
    """Drawn by these priorities, weighted by them, and successors are what comes next."""
    batches = 20
    drawn = [memory.look(memory.sample())[:2] for _ in range(batches)]
    slots, weights = (np.concatenate(column) for column in zip(*drawn))
    mass = values.astype(np.float64) ** ALPHA
    expected = (mass * values).sum() / mass.sum()  # mean priority of what is drawn
    error = values[slots].std() / len(slots) ** 0.5
    assert abs(values[slots].mean() - expected) < 5 * error, (values[slots].mean(), expected, error)
    constant = weights * values[slots] ** (ALPHA * BETA)  # the same for all of one batch
    for one in np.split(constant, batches):
        assert np.ptp(one) < 0.01 * one.mean(), (one.min(), one.max())
    *_, obs, after = memory.look(memory.sample())
    if obs.ndim == 4:
        assert np.array_equal(obs[..., 1:], after[..., :-1]) and obs.any() and not np.array_equal(obs, after)


def measure(memory: Any, calls: int, rng: np.random.Generator) -> dict[str, list[int]]:
    """Nanoseconds of each call, after a warm-up of a quarter as many."""
    times: dict[str, list[int]] = {operation: [] for operation in OPERATIONS}
    for call in range(-(calls // 4), calls):
        if call == 0:
            for column in times.values():
                column.clear()
        priorities = memory.priorities(rng.random(BATCH, np.float32) + 0.01)
        begin = clock()
        drawn = memory.sample()
        middle = clock()
        memory.update(drawn, priorities)
        end = clock()
        del drawn
        times["sample"].append(middle - begin)
        times["update"].append(end - middle)
        times["pair"].append(end - begin)
        if call % ADD_EVERY == 0:
            parcel = memory.parcel()
            begin = clock()
            memory.add(parcel)
            times["add"].append(clock() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory", choices=list(MEMORIES))
    parser.add_argument("data", choices=["transitions", "frames"])
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    args = parser.parse_args()
    rng = np.random.default_rng(2)
    memory = MEMORIES[args.memory](Stream(args.data), args.items)
    fill(memory, args.items, rng)
    result = {operation: statistics.median(ns) / 1e3 for operation, ns in measure(memory, args.calls, rng).items()}
    result["gigabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if isinstance(memory, Rookery):
        result["build"] = statistics.median(memory.building) / 1e3
    print(json.dumps(result))


if __name__ == "__main__":
    main()
