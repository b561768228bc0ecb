"""Crews under test: small runs, environments that trouble a crew, and ways to catch a worker at a known moment.

Run as a module this file is an actor that misbehaves as the variable ROOKERY_TEST_ACTOR says.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np

import rookery
from rookery.crews.actor_main import body
from rookery.crews.process import ProcessCrew
from rookery.envs.scripted import Counter
from rookery.pipes.shm import Slots
from rookery.processes.child import serve

LONG = 120.0  # seconds: never reached unless something is broken
REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0}
PPO = {"quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "actors": 2, "envs_per_actor": 2}
APEX = PPO | {
    "algo": {"unroll": 10, "n_step": 1, "replay": REPLAY | {"samples_per_insert": 0.0, "save": False}},
    "topology": "local",
}
GORILA = PPO | {"algo": {"replay": REPLAY}, "topology": "async_grads"}
MODE = "ROOKERY_TEST_ACTOR"


class Secretive(Counter):
    """It has a get_state, and nothing to get by it."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def get_state(self) -> dict[str, Any]:
        if self.how == "raises":
            raise RuntimeError("not in the middle of an episode")
        if self.how == "exits":
            os._exit(9)
        if self.how == "hangs":
            hang()
        return {"handle": object()}


def secretive(how: str) -> gymnasium.Env:
    return Secretive(how)


class Bulky(Counter):
    """Its state is of many bytes."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"bulk": np.zeros(self.size, np.uint8)}


def bulky(size: int) -> gymnasium.Env:
    return Bulky(size)


def slow(calls: str, at: int) -> gymnasium.Env:
    """An environment whose construction has no end in the worker number `at`, and requests shutdown."""
    with open(calls, "a") as file:
        file.write("made\n")
    if len(Path(calls).read_text().splitlines()) == at:
        os.kill(os.getppid(), signal.SIGTERM)
        hang()
    return Counter()


def stuck() -> gymnasium.Env:
    """An environment whose first reset has no end, and requests shutdown."""
    env = Counter()

    def reset(**kwargs: Any) -> NoReturn:
        os.kill(os.getppid(), signal.SIGTERM)
        hang()

    env.reset = reset
    return env


def deaf(marker: str) -> gymnasium.Env:
    """At its first step, once: hears no SIGABRT, writes no stack, and gives no sign of life any more."""
    env = Counter()
    step = env.step

    def step_or_hang(action: Any) -> Any:
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return step(action)
        hang_deaf()

    env.step = step_or_hang
    return env


def hang() -> NoReturn:
    while True:
        select.select([], [], [])


def hang_deaf() -> NoReturn:
    """Only SIGKILL ends it."""
    faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    hang()


def train_ppo(tmp_path: Path, env: str, kwargs: dict[str, Any], **fields: Any) -> rookery.Run:
    settings = PPO | {"topology": "local", "preset": "vector", "out": str(tmp_path / "run")} | fields
    return rookery.train("ppo", env=f"support_crew:{env}", env_kwargs=kwargs, **settings)


def messages(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == "message"]


def balances(ledger: dict[str, Any]) -> bool:
    dropped, kept = sum(ledger["dropped"].values()), ledger.get("evicted", 0) + ledger["in_flight"]
    return ledger["collected"] == ledger["trained"] + dropped + kept


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        os.sched_yield()


def sleeps(pid: int) -> bool:
    """Whether a process waits for something, and does not run."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def idle(crew: ProcessCrew, index: int) -> bool:
    """Whether a worker has announced all it was told to fill, and waits for the next order."""
    filled = [crew._buffers.slots.stamp(slot).state == Slots.FULL for slot in crew._slots[index]]
    return bool(filled) and all(filled) and sleeps(crew.pool.places[index].worker.pid)


def kill(crew: ProcessCrew, index: int) -> None:
    """SIGKILL to a worker; comes back when it is dead, and its end of the channel closed."""
    worker = crew.pool.places[index].worker
    fd = os.pidfd_open(worker.pid)
    worker.kill()
    ended, _, _ = select.select([fd], [], [], LONG)
    os.close(fd)
    assert ended


def die_before_the_announcement() -> None:
    """In the first life, between a whole unroll and the announcement of it."""
    finish = Slots.finish

    def finish_and_die(slots: Slots, slot: int) -> None:
        finish(slots, slot)
        if slots.stamp(slot).incarnation == 0 and slots.stamp(slot).sequence == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Slots.finish = finish_and_die


def hang_as_a_spare() -> None:
    """A spare process does not take its work, and ends by SIGKILL only."""
    from rookery.crews import actor_process

    assigned = actor_process.assigned
    actor_process.assigned = lambda channel, start: hang_deaf() if start.get("spare") else assigned(channel, start)


if __name__ == "__main__":
    {"dies": die_before_the_announcement, "hangs": hang_as_a_spare}[os.environ[MODE]]()
    serve(body)
