"""One run of `ray_cluster.py`, in a process of its own. Prints one JSON line.

    ray_run.py train RECIPE FLAGS…                                   a training run
    ray_run.py plumbing ray|processes ACTORS UNROLLS LAG START_S     the loop alone, as in `plumbing.py`

Of a training run, the time from the first record behind an update to the last one counts. Processor time is that of
this process (the driver: the loop, the learner and Ray's threads) and of all that it has started, by what they are.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import children
import plumbing

import rookery
import rookery.crews.process as process_crew
import rookery.crews.ray as ray_crew
import rookery.run.run as training
from rookery.cli.configure import config_for
from rookery.crews.buffers import SharedBuffers
from rookery.crews.process import ProcessCrew
from rookery.metrics.journal import Journal
from rookery.pipes.ray_store import RayStore, RemoteBuffers
from rookery.processes.signals import Signals
from rookery.topologies import ray_cluster

KINDS = {"ray::": "actors", "actor_main": "actors", "raylet/raylet": "raylet", "gcs_server": "gcs"}


class TimedRemote(RemoteBuffers):
    """Says with each unroll which weights it was filled with, when the actor had them, and since when it was idle."""

    def __init__(self) -> None:
        super().__init__()
        self._idle, self._pulled = time.monotonic(), (-1, 0.0, 0.0)

    def pull(self, vector: Any, order: dict[str, Any]) -> int:
        version = super().pull(vector, order)
        if version != self._pulled[0]:
            self._pulled = version, time.monotonic(), self._idle
        return version

    def finish(self, slot: int) -> dict[str, Any]:
        more = super().finish(slot)
        self._idle = time.monotonic()
        return more | {"pulled": self._pulled}


class TimedHost(ray_crew.Host):
    def __init__(self) -> None:
        super().__init__()
        self._buffers = TimedRemote()


class TimedStore(RayStore):
    """Times of all publications, and of what became of them."""

    last: TimedStore

    def __init__(self) -> None:
        super().__init__()
        TimedStore.last = self
        self.publish_times: list[float] = []
        self.pull_times: list[float] = []  # from the beginning of a publication until an actor has the weights
        self.order_times: list[float] = []  # the part of it from its order on, without what it had to finish before
        self._began: dict[int, float] = {}  # publications
        self._sent: dict[tuple[int, int], float] = {}  # when an actor was ordered to use a version for the first time
        self._seen: dict[int, int] = {}  # newest version of each actor

    def publish(self, vector: Any, version: int) -> None:
        self._began[version] = began = time.monotonic()
        super().publish(vector, version)
        self.publish_times.append(time.monotonic() - began)

    def order(self, actor: int, slot: int) -> dict[str, Any]:
        more = super().order(actor, slot)
        if "weights" in more:
            self._sent[actor, more["version"]] = time.monotonic()
        return more

    def take(self, slot: int, actor: int, incarnation: int, sequence: int, message: dict[str, Any]) -> Any:
        version, pulled, idle = message["pulled"]
        if version != self._seen.get(actor):
            if actor in self._seen:  # the first weights wait for the start
                self.pull_times.append(pulled - self._began[version])
                self.order_times.append(pulled - max(self._sent.get((actor, version), 0.0), idle))
            self._seen[actor] = version
        return super().take(slot, actor, incarnation, sequence, message)


class TimedShared(SharedBuffers):
    last: TimedShared

    def __init__(self) -> None:
        super().__init__()
        TimedShared.last = self
        self.publish_times: list[float] = []

    def publish(self, vector: Any, version: int) -> None:
        began = time.monotonic()
        super().publish(vector, version)
        self.publish_times.append(time.monotonic() - began)


class TimedJournal(Journal):
    """Marks time, steps and processor time with each record behind an update."""

    marks: ClassVar[list[tuple[float, int, int, dict[str, float]]]] = []  # of the only run of this process

    def report(self, force: bool = False) -> None:
        before = self._logged_at
        super().report(force)
        if self._updates and not force and self._logged_at != before:
            self.marks.append((time.perf_counter(), self.env_steps, self._updates, processor_times()))


def processor_times() -> dict[str, float]:
    """Seconds of the driver, and of what it has started."""
    used = dict.fromkeys(("driver", *KINDS.values(), "other"), 0.0)
    for pid, stat in children.tree(os.getpid()).items():
        kind = next((kind for word, kind in KINDS.items() if word in stat["name"]), "other")
        used["driver" if pid == os.getpid() else kind] += stat["cpu"]
    return used


def train(recipe: str, flags: list[str]) -> dict[str, Any]:
    ray_crew.Host, ray_crew.RayStore, process_crew.SharedBuffers = TimedHost, TimedStore, TimedShared
    training.Journal = TimedJournal
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(recipe, [*flags, "--out", f"{folder}/run"], "ray_run")
        run = training.train(config)
    if run.exit_code:
        raise SystemExit(run.exit_code)
    marks = TimedJournal.marks
    if len(marks) < 2:
        raise SystemExit(f"the run wrote {len(marks)} records behind its first update: take more steps")
    (began, first, updates, before), (ended, last, more, after) = marks[0], marks[-1]
    seconds, steps = ended - began, last - first
    cpu = {kind: after[kind] - before[kind] for kind in after}
    remote = config.topology == "ray_cluster"
    store: Any = TimedStore.last if remote else TimedShared.last
    result = {
        "steps_per_s": steps / seconds, "seconds": seconds, "updates_per_s": (more - updates) / seconds, "cpu_s": cpu,
        "driver_share": cpu["driver"] / sum(cpu.values()), "driver_us_per_step": cpu["driver"] / steps * 1e6,
        "busy_cores": sum(cpu.values()) / seconds, "publications": len(store.publish_times),
        "publish_ms": spread(store.publish_times), "time_split": run.summary["time_split"],
        "lag_mean": run.summary.get("lag_mean"),
    }  # fmt: skip
    if remote:
        result |= {"pull_ms": spread(store.pull_times), "order_ms": spread(store.order_times)}
        result["bytes_per_step"] = store.bytes_in / run.summary["env_steps"]
    return result


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Milliseconds: median, and the 90th percentile."""
    if not seconds:
        return None
    ninth = sorted(seconds)[math.ceil(0.9 * len(seconds)) - 1]
    return {"median": statistics.median(seconds) * 1e3, "p90": ninth * 1e3}


def plumb(kind: str, actors: int, unrolls: int, lag: int, start_s: float) -> dict[str, Any]:
    """Environments and a learner that do nothing. All actors share the CPUs that there are, as Ray counts them."""
    remote = kind == "ray"
    config = rookery.configure(
        "ppo", "plumbing:make", preset="vector", actors=actors, envs_per_actor=1, env_steps=10**9,
        topology="ray_cluster" if remote else "local", net={"hidden": (8,)}, quiet=True, threads=1,
        algo={"unroll": plumbing.UNROLL, "epochs": 1, "minibatches": 1}, ray={"cpus_per_actor": min(1.0, 2 / actors)},
        supervisor={"spare": False, "start_deadline": start_s},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
        if not remote:
            with ProcessCrew(config, Path(folder), signals) as crew:
                rate, cost = plumbing.measure(config, crew, Path(folder), signals, lag, unrolls)
        else:
            with ray_cluster.joined(config), ray_crew.ray_crew(config, Path(folder), signals) as crew:
                rate, cost = plumbing.measure(config, crew, Path(folder), signals, lag, unrolls)
    return {"unrolls_per_s": rate, "driver_us": cost}


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "train":
        result = train(words[0], words[1:])
    else:
        kind, actors, unrolls, lag, start_s = words
        result = plumb(kind, int(actors), int(unrolls), int(lag), float(start_s))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
