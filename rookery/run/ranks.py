"""A run of several ranks: who starts them, who watches them, and what one of them does.

`--ranks N` starts N processes here, or on the nodes of a Ray cluster (`supervise`). They meet at a store that this
process keeps; on one machine it listens on the loopback interface. This process is no rank itself: any of them may
die, and the group is started again from the last checkpoint. With torchrun (`as_rank`) the processes are started,
watched and restarted by torchrun.

One run folder: rank 0 writes it, and the others read it, so it must be on a file system that all of them see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rookery.algorithms.registry import encode_config, parents_config
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, EnvError, LearnerError, NumericError, RookeryError, StorageError
from rookery.core.errors import UsageError as Usage
from rookery.pipes.channel import ChannelClosed, ChannelTimeout, Listener
from rookery.pipes.collective import LOOPBACK, Collective, Place, RankLost, open_store
from rookery.processes.child import IDLE, heed
from rookery.processes.signals import SIGNAL, Signals, Stopped
from rookery.processes.worker import Restarts, Worker, stop_all
from rookery.run.history import Changed
from rookery.storage import checkpoint
from rookery.storage.files import step_name
from rookery.topologies.allreduce import check_same
from rookery.topologies.callbacks import of_paths

if TYPE_CHECKING:
    from rookery.storage.checkpoint import Checkpoint

MODULE = "rookery.run.rank_main"
LOOK = 0.5  # seconds between two looks at the processes
AFTER_FIRST = 6.0  # seconds for the others to end once a rank has failed: the first to speak may not be the cause
STOP = 20.0  # seconds for processes to end, once they have said that they are done or were asked to
ERRORS = {kind.exit_code: kind for kind in (Usage, EnvError, LearnerError, NumericError, CheckpointError, StorageError)}


# The process that starts the ranks


def supervise(
    config: RunConfig, folder: Path, saved: Checkpoint | None, notes: list[str], signals: Signals,
    tell: Callable[[str], None], launcher: RankLauncher, callbacks: Sequence[str] = (), resumed: Changed | None = None,
) -> int:  # fmt: skip
    """Start the ranks and wait for their end; a group that has lost a rank is started again. The exit code."""
    limits = config.supervisor
    restarts, attempt, step = Restarts(limits.restarts, limits.window), 0, None if saved is None else saved.env_steps
    while True:
        try:
            with Ranks(config, folder, step, attempt, notes, signals, launcher, callbacks, resumed) as ranks:
                return ranks.wait()
        except RankLost as error:
            if signals.requested is not None:  # it can be resumed from its last checkpoint
                error.exit_code = signals.requested
                raise
            before, step, attempt = step, newest_step(folder), attempt + 1
            resumed = None  # once is enough
            if step != before:
                restarts.worked()
            delay = restarts.next(error)  # raises the error itself once there were too many
            where = "from the start" if step is None else f"from step {step:,}"
            notes = [f"{error}; all ranks are started again in {delay:.1f} s, {where}"]
            tell(notes[0])
            time.sleep(delay)
            if signals.requested is not None:
                error.exit_code = signals.requested
                raise


def newest_step(folder: Path) -> int | None:
    """Environment steps of the newest checkpoint that can be loaded; None if there is none yet."""
    place = folder / "checkpoints"
    return checkpoint.newest(place)[0].env_steps if checkpoint.all_steps(place) else None


class RankLauncher(Protocol):
    """How the processes of the ranks are started and ended."""

    address: str  # of this machine, for the others

    def start(self, module: str, messages: Sequence[dict[str, Any]], logs: Path) -> list[Any]: ...
    def stop(self, workers: Sequence[Any], timeout: float) -> None: ...


class LocalRanks:
    """On this machine."""

    address = LOOPBACK

    def start(self, module: str, messages: Sequence[dict[str, Any]], logs: Path) -> list[Any]:
        workers: list[Any] = []
        try:
            for rank, message in enumerate(messages):
                message, log = message | {"here": len(messages), "local": rank}, logs / f"rank-{rank}.log"
                workers.append(Worker.start(module, f"rank {rank}", message, {}, log if rank else None))
        except BaseException:
            for worker in workers:
                worker.kill()
            self.stop(workers, STOP)
            raise
        return workers

    def stop(self, workers: Sequence[Any], timeout: float) -> None:
        stop_all(workers, timeout)


class Ranks:
    """The processes of one attempt, and the store that they meet at. Context manager: none of them outlives it."""

    def __init__(
        self, config: RunConfig, folder: Path, step: int | None, attempt: int, notes: list[str], signals: Signals,
        launcher: RankLauncher, callbacks: Sequence[str] = (), resumed: Changed | None = None,
    ):  # fmt: skip
        """`callbacks`: import paths, for rank 0. `resumed`: what the user's resume has changed."""
        self._config, self._folder, self._signals, self._launcher = config, folder, signals, launcher
        self._start = {
            "config": encode_config(config), "folder": str(folder), "step": step, "attempt": attempt, "notes": notes,
            "callbacks": list(callbacks), "resumed": resumed,
        }  # fmt: skip
        self._workers: list[Any] = []
        self._told = False  # that shutdown was requested
        self._failures: dict[int, RookeryError] = {}
        self._done: dict[int, int] = {}  # exit codes

    def __enter__(self) -> Ranks:
        size = self._config.ranks
        self._store = open_store(size, self._launcher.address)
        self._listener = Listener(self._signals.fileno())
        self._signals.kill = self.kill
        meet = {"size": size, "address": self._launcher.address, "port": self._store.port}
        messages = [self._start | meet | {"rank": rank} for rank in range(size)]
        try:
            self._workers = self._launcher.start(MODULE, messages, self._folder / "logs")
            for worker in self._workers:
                self._listener.add(worker.channel)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.kill()
        self._launcher.stop(self._workers, STOP)
        self._listener.close()
        del self._store

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def wait(self) -> int:
        """The exit code, or the error of the rank that is the cause."""
        until: float | None = None
        while len(self._done) + len(self._failures) < len(self._workers):
            self._listener.wait(LOOK)
            for rank, worker in enumerate(self._workers):
                self._hear(rank, worker)
            self._forward()
            if until is None and (self._failures or self._done):
                until = time.monotonic() + (AFTER_FIRST if self._failures else self._config.group.timeout)
            if until is not None and (time.monotonic() >= until or self._cause() is not None):
                break
        if self._failures:
            raise self._cause() or self._failures[min(self._failures)]
        if missing := [rank for rank in range(len(self._workers)) if rank not in self._done]:
            raise RankLost(f"rank {missing[0]} did not end within {self._config.group.timeout:g} s of the first one")
        return max(self._done.values())

    def _cause(self) -> RookeryError | None:
        """A failure that is not the loss of another rank."""
        causes = (error for error in self._failures.values() if not isinstance(error, RankLost) or not error.secondary)
        return next(causes, None)

    def _hear(self, rank: int, worker: Any) -> None:
        if rank in self._done or rank in self._failures:
            return
        try:
            while worker.channel.poll():
                message = worker.channel.recv(0.0)
                if message["op"] == "done":
                    self._done[rank] = message["exit_code"]
                    self._listener.remove(worker.channel)
                    return
                if message["op"] == "failed":
                    self._listener.remove(worker.channel)
                    self._failures[rank] = self._error(rank, message)
                    return
                if message["op"] == "lost":  # as the node that it was on says
                    self._listener.remove(worker.channel)
                    self._failures[rank] = _lost(rank, message["how"], message["log"])
                    return
        except (ChannelClosed, ChannelTimeout):
            self._listener.remove(worker.channel)
            worker.stop(STOP)
            self._failures[rank] = _lost(rank, worker.describe_exit(), worker.log_tail(20))

    def _forward(self) -> None:
        """A request to shut down goes to all ranks: they agree on the update after which they stop."""
        if self._told or self._signals.requested is None:
            return
        self._told = True
        for worker in self._workers:
            try:
                worker.channel.send({"op": "shutdown", "code": self._signals.requested}, timeout=1.0)
            except (ChannelClosed, ChannelTimeout):
                continue

    def _error(self, rank: int, message: dict[str, Any]) -> RookeryError:
        """The error that a rank has told of."""
        text, code = message["error"], message["exit_code"]
        if message["reason"] == RankLost.reason:
            lost = RankLost(text)
            lost.secondary = True
            return lost
        if code in SIGNAL:  # it was asked to stop before it had begun
            if self._start["attempt"] == 0 and self._start["step"] is None:
                return Stopped(code)
            stopped = LearnerError("asked to stop while the ranks were started")
            stopped.exit_code = code
            return stopped
        error = ERRORS.get(code, LearnerError)(text if text.startswith("rank ") else f"rank {rank}: {text}")
        if code not in ERRORS:
            error.add_note(message["traceback"])
        return error


def _lost(rank: int, how: str, log: str) -> RankLost:
    lost = RankLost(f"rank {rank} {how}")
    if log:
        lost.add_note(log)
    return lost


# The process of a rank


def serve_rank(channel: Any, start: dict[str, Any]) -> None:
    """Train as one rank of a group, and tell the parent how it ended."""
    from rookery.metrics.output import standard_streams
    from rookery.run import run

    config = parents_config(start["config"])
    place = Place(
        start["rank"], start["size"], start["address"], start["port"], here=start["here"], local=start["local"],
        attempt=start["attempt"], kept=True,
    )  # fmt: skip
    folder = Path(start["folder"])
    with Signals() as signals, standard_streams(run=True) as streams:
        heed(channel, signals)
        saved = None if start["step"] is None else checkpoint.load(folder / "checkpoints" / step_name(start["step"]))
        with joined(config, place) as group:
            callbacks = [] if place.rank else of_paths(start["callbacks"])
            code = run.execute(
                config, folder, saved, start["notes"], signals, group=group, callbacks=callbacks,
                resumed=start["resumed"],
            ).exit_code  # fmt: skip
        streams.finish()
    channel.send({"op": "done", "exit_code": code}, timeout=IDLE)


@contextmanager
def joined(config: RunConfig, place: Place) -> Iterator[Collective]:
    """The group that this process is a rank of; the other ranks are told if this one fails."""
    group = Collective(place, config.group.timeout, config.group.join, config.device)
    try:
        yield group
    except BaseException as error:
        if not isinstance(error, RankLost):
            group.report(error)
        raise
    finally:
        group.close()


def as_rank(
    config: RunConfig, place: Place, signals: Signals, prepare: Callable[[RunConfig, bool, Changed | None], Any],
    resumed: Changed | None = None, callbacks: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Train as a rank that torchrun has started. `prepare` makes the folder, on rank 0; it gives a context manager.

    `resumed`: what a resume has changed; None: the run is new.
    A group that torchrun has started again goes on from the newest checkpoint of its folder.
    """
    from rookery.run.run import execute

    with joined(config, place) as group:
        check_same(group, "run", facts(config))
        again = resumed is not None or place.attempt > 0
        with prepare(config, again, resumed) if place.rank == 0 else nullcontext() as folder:
            own = None if folder is None else (str(folder), newest_step(folder) if again else None)
            path, step = msgspec.json.decode(group.gather(msgspec.json.encode(own))[0])
            config, folder = replace(config, out=path), Path(path)
            saved = None if step is None else checkpoint.load(folder / "checkpoints" / step_name(step))
            own_callbacks = callbacks if place.rank == 0 else ()
            if place.attempt > 0:  # torchrun has started the group again: not the user's resume
                resumed = None
            return execute(config, folder, saved, [], signals, group=group, callbacks=own_callbacks, resumed=resumed)


def facts(config: RunConfig) -> dict[str, Any]:
    """What must be the same on every rank, besides the environment."""
    import torch

    from rookery import __version__

    versions = {"rookery": __version__, "torch": str(torch.__version__)}
    fields = msgspec.to_builtins(config)
    return {"version": versions, "config": {k: v for k, v in fields.items() if k not in ("out", "quiet", "history")}}
