"""What a checkpoint of a replay memory costs those who train meanwhile: time under the lock, memory, slower calls.

    .venv/bin/python benchmarks/replay_checkpoint.py [case ...] [--items 2000000] [--frames 300000] [--packed 2000000]

Each case is a full memory in a process of its own; a learner's loop (insert 50 items, draw 512, write 512 priorities
back, all under one lock) runs beside the thread that writes the snapshot. "snapshot" is what `ReplayTable.snapshot`
does under the lock, "stats" what is asked of the table beside; "extra" is how far the process grows meanwhile. One
round of the loop is three calls (medians), each of which holds the lock once; the longest is that by the thread's CPU
time, since on a machine with other work the longest by the clock is that of the scheduler. Prints a Markdown table;
`--json` prints one case's numbers as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rookery.core.config import ReplayConfig
from rookery.core.types import ActionSpec, DataPlan, EnvSpec, Leaf, Replay
from rookery.storage import replay_file, replay_writer
from rookery.tables.builder import parcel_shapes
from rookery.tables.memory import ReplayMemory
from rookery.tables.snapshot import Snapshot

ACTION = ActionSpec("discrete", choices=(6,), starts=(0,))
VECTOR = EnvSpec("vector", {"obs": Leaf((4,), "float32", "vector")}, ACTION)
ATARI = EnvSpec("atari", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, ACTION)
CASES = {
    f"{sampler}, {remover}": (VECTOR, {"sampler": sampler, "remover": remover})
    for sampler in ("uniform", "proportional", "rank")
    for remover in ("fifo", "soft", "inverse")
}
CASES["frames"] = (ATARI, {"sampler": "proportional"})
CASES["frames, compressed"] = (ATARI, {"sampler": "proportional", "compress": True})
BATCH, PARCEL, POOL = 512, 50, 500
COLUMNS = {
    "snapshot": "snapshot, ms: median (max)", "stats": "stats, ms", "extra": "extra, MiB", "size": "on disk, MiB",
    "write": "write, s", "alone": "loop alone, µs", "beside": "loop beside, µs",
    "longest": "longest call, CPU ms: alone (beside)",
}  # fmt: skip


class Feeder:
    """Parcels of one endless episode. Frames are a picture with a few things that move, as a game has them."""

    def __init__(self, spec: EnvSpec, plan: DataPlan):
        rng = self.rng = np.random.default_rng(0)
        self.shapes = parcel_shapes(spec, plan, 1, {})
        self.parcel = {path: np.zeros(shape, dtype) for path, (shape, dtype) in self.shapes.items()}
        self.parcel["steps"][:] = 1
        self.parcel["priority"][:] = np.nan
        self.next = 0
        if spec is not ATARI:
            return
        scene = np.kron(rng.integers(0, 200, (12, 12)), np.ones((7, 7))).astype(np.uint8)
        self.pool = np.repeat(scene[None], POOL, axis=0)
        for frame in self.pool:
            for x, y in rng.integers(0, 76, (12, 2)):
                frame[y : y + 8, x : x + 6] = rng.integers(0, 255, (1, 6))

    def __call__(self) -> dict[str, np.ndarray]:
        parcel = self.parcel
        parcel["count"][:] = PARCEL, 0
        if "frames/obs" in parcel:
            parcel["count"][1] = PARCEL
            parcel["frames/obs"][:PARCEL] = self.pool[(self.next + np.arange(PARCEL)) % POOL]
            parcel["first_frame/obs"][0] = self.next
            newest = self.next + np.arange(PARCEL)[:, None] - np.arange(4)[::-1]
            parcel["next_obs/obs"][:PARCEL] = np.maximum(newest, 0)
            parcel["obs/obs"][:PARCEL] = np.maximum(newest - 1, 0)
        else:
            for path in ("obs/obs", "next_obs/obs"):
                parcel[path][:PARCEL] = self.rng.random((PARCEL, 4), np.float32)
        self.next += PARCEL
        return parcel


class Clock:
    """Milliseconds of what it stands around, by the clock and by the thread's CPU time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu = 0.0  # longest

    def __enter__(self) -> None:
        self.started, self.worked = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.times.append(1e3 * (time.perf_counter() - self.started))
        self.cpu = max(self.cpu, 1e3 * (time.thread_time() - self.worked))

    @property
    def summary(self) -> list[float]:
        return [statistics.median(self.times), max(self.times)]

    @property
    def round(self) -> float:
        """Microseconds of insert, draw and update together: they take turns."""
        return 1e3 * sum(statistics.median(self.times[call::3]) for call in range(3))


class Learner:
    """What the threads of a run do with the table; each call holds the lock once."""

    def __init__(self, table: ReplayMemory, feed: Feeder):
        self.table, self.feed, self.rng = table, feed, np.random.default_rng(1)

    def calls(self, clock: Clock) -> None:
        parcel = self.feed()
        with clock:
            self.table.insert(parcel, 0)
        with clock:
            sample = self.table.sample()
        priorities = self.rng.random(BATCH, np.float32) + np.float32(0.1)
        with clock:
            self.table.update(sample.keys, priorities)
        if self.table.memory.remover == "soft" and self.feed.next // PARCEL % 100 == 0:
            self.table.remove_to_fit()


def measure(case: str, items: int, snapshots: int, folder: Path) -> dict:
    spec, settings = CASES[case]
    memory = ReplayConfig(capacity=items, min_size=1, batch=BATCH, samples_per_insert=0.0, **settings)
    plan = DataPlan(PARCEL, PARCEL, Replay(memory, gamma=0.99))
    feed = Feeder(spec, plan)
    table = ReplayMemory(plan.table, feed.shapes, spec, 1, seed=1)
    learner, alone, beside, taken, stats = Learner(table, feed), Clock(), Clock(), Clock(), Clock()
    while table.inserted < 1.05 * items:  # full, and somewhere in the middle of the ring
        table.insert(feed(), 0)
        if table.inserted % (1000 * PARCEL) == 0:
            table.remove_to_fit()
    learner.calls(Clock())
    started = time.perf_counter()
    while len(alone.times) < 3000 and time.perf_counter() - started < 20:
        learner.calls(alone)
    writer, writing, extra = replay_writer.Writer(), [], []
    for number in range(snapshots):
        before = peak(reset=True)
        with stats:
            table.stats()
        started = time.perf_counter()
        with taken:
            snapshot = Snapshot(table)
        writer.start(folder, number, snapshot)
        while writer.busy:
            learner.calls(beside)
        writing.append(time.perf_counter() - started)
        extra.append((peak() - before) / 2**20)
        if error := writer.poll():
            raise error
    size = sum(file.stat().st_size for file in replay_file.find(folder, snapshots).iterdir())
    return {
        "items": items, "snapshot": taken.summary, "stats": stats.summary, "extra": [max(extra)],
        "size": [size / 2**20], "write": [statistics.median(writing)],
        "alone": [alone.round], "beside": [beside.round], "longest": [alone.cpu, beside.cpu],
    }  # fmt: skip


def peak(reset: bool = False) -> int:
    """Most bytes resident since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def row(case: str, numbers: dict) -> str:
    cells = []
    for column in COLUMNS:
        first, *rest = numbers[column]
        cells.append(f"{first:,.1f}" + (f" ({rest[0]:,.1f})" if rest else ""))
    return f"| {case}, {numbers['items']:,} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"default: all of {', '.join(map(repr, CASES))}")
    parser.add_argument("--items", type=int, default=2_000_000, help="small transitions")
    parser.add_argument("--frames", type=int, default=300_000, help="items with frames")
    parser.add_argument("--packed", type=int, default=2_000_000, help="items with compressed frames")
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.json:
        (case,) = args.cases
        items = {"frames": args.frames, "frames, compressed": args.packed}.get(case, args.items)
        folder = Path(tempfile.mkdtemp(prefix="replay-", dir=args.folder))
        try:
            print(json.dumps(measure(case, items, args.snapshots, folder)))
        finally:
            shutil.rmtree(folder)
        return
    print("| memory, items | " + " | ".join(COLUMNS.values()) + " |\n|---" + "|---" * len(COLUMNS) + "|", flush=True)
    for case in args.cases or CASES:
        options = [word for word in sys.argv[1:] if word not in args.cases]
        done = subprocess.run([sys.executable, __file__, case, "--json", *options], stdout=subprocess.PIPE, text=True)
        print(row(case, json.loads(done.stdout)) if done.returncode == 0 else f"| {case} | failed |", flush=True)


if __name__ == "__main__":
    main()
