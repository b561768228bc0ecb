"""Several ranks of one run, on `torch.distributed`: sums of tensors, and small messages from each to all.

gloo on the CPU, NCCL for tensors on CUDA. Every exchange has a timeout. If one fails, each remaining rank sets a key in
the store; ranks without a key after a few seconds are named in the error. With `--ranks` and torchrun the store runs in
the process that starts the ranks, so it survives the loss of any rank.

Messages are bytes; nothing is pickled. The group trusts its network: see docs/ranks.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from rookery.core.errors import LearnerError, RookeryError, UsageError
from rookery.core.reduce import Reduce
from rookery.core.wording import setting

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
REPORT = 3.0  # seconds for the ranks that are left to report, after an exchange has failed
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


class RankLost(LearnerError):
    """An exchange failed because a rank is gone, or did not come in time. The group can start again."""

    reason = "rank_lost"
    secondary = False  # whether it is only what another rank saw of it


@dataclass(frozen=True)
class Place:
    """One rank's place in its group, and where the group meets."""

    rank: int
    size: int
    address: str
    port: int
    here: int = 1  # ranks on this machine
    local: int = 0  # which of them this is
    attempt: int = 0  # how often the group was started again
    kept: bool = False  # whether the store runs in the process that started this one, and not in rank 0

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def place_of(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun (or a scheduler that sets the same variables) has given this process; None: none."""
    given = [name for name in NAMES if environ.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    if missing := [name for name in NAMES if name not in given]:
        raise UsageError(
            f"{', '.join(given)} are set and {', '.join(missing)} are not: start all ranks with torchrun, or unset "
            f"them to train alone (or use {setting('ranks')})"
        )
    numbers = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        if not environ[name].isdigit() or int(environ[name]) < least:
            raise UsageError(f"{name} is {environ[name]!r}; it must be a number, at least {least}")
        numbers[name] = int(environ[name])
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}: ranks count from 0 to {size - 1}")
    here, local = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Place(
        rank, size, environ["MASTER_ADDR"], numbers["MASTER_PORT"],
        here=int(here) if here.isdigit() else size, local=int(local) if local.isdigit() else rank,
        attempt=int(attempt) if attempt.isdigit() else 0,
        kept=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def open_store(size: int, address: str = LOOPBACK) -> dist.TCPStore:
    """A store for the ranks, kept by the calling process; it listens on this address of the machine only."""
    # The port is the system's choice. A store listens on every interface unless it is given a socket of our own.
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(size + 8)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


class Collective(Reduce):
    """The group that this process is a rank of. `close` it at the end."""

    def __init__(self, place: Place, timeout: float, join: float, device: str = "cpu"):
        self.place, self.rank, self.size, self.here = place, place.rank, place.size, place.here
        self._timeout, self._device = timedelta(seconds=timeout), device
        self.waited = 0.0  # seconds in exchanges since this was last set to 0
        if device == "cuda":  # NCCL needs a device for each rank
            torch.cuda.set_device(place.local % torch.cuda.device_count())
        if place.address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.store = self._join(join)
        if missing := self._missing("joined", join):
            raise LearnerError(
                f"rank {self.rank} of {self.size}: {_ranks(missing)} not at {place.where} after {join:g} s "
                f"({setting('group.join')}); is the process running, on the same network?"
            )
        backend = "nccl" if device == "cuda" else "gloo"
        self._group = self._start(backend)
        # Messages are on the CPU, whatever the gradients are on.
        self._talk = self._group if backend == "gloo" else dist.new_group(backend="gloo", timeout=self._timeout)

    def _join(self, seconds: float) -> dist.Store:
        place, until = self.place, timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(
                place.address,
                place.port,
                place.size,
                is_master=place.rank == 0 and not place.kept,
                timeout=until,
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            raise LearnerError(
                f"rank {place.rank} of {place.size} could not reach the group's store at {place.where} within "
                f"{seconds:g} s: {_first_line(error)}. Is the process that starts the ranks running, and the port open?"
            ) from error
        # Keys of an earlier attempt must not be found.
        return dist.PrefixStore(f"rookery/{place.attempt}", store)

    def _start(self, backend: str) -> dist.ProcessGroup:
        try:
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"rank {self.rank}: the group at {self.place.where} did not come together: {_first_line(error)}"
            ) from error
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    # Exchanges

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        group = self._group if x.device.type == self._device else self._talk
        self._told(lambda: dist.all_reduce(x, group=group))
        return x

    def gather(self, message: bytes) -> list[bytes]:
        """One message of every rank, in the order of ranks."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(message)
        self._told(lambda: dist.all_reduce(sizes, group=self._talk))
        lengths: list[int] = sizes.tolist()
        most = max(lengths)
        if not most:
            return [b""] * self.size
        own = torch.zeros(most, dtype=torch.uint8)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else own[:0]
        rows = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        self._told(lambda: dist.all_gather(rows, own, group=self._talk))
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths)]

    def _told(self, exchange: Callable[[], T]) -> T:
        """What the exchange gives; if it fails, the error says who is missing."""
        started = time.perf_counter()
        try:
            return exchange()
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self.waited += time.perf_counter() - started

    def _lost(self, error: RuntimeError) -> RookeryError:
        reason = self.reason()
        missing = self._missing("left")
        if reason:
            return RankLost(reason)
        who = f"{_ranks(missing)} gone" if missing else "a rank did not answer"
        return RankLost(f"rank {self.rank}: {who}: {_first_line(error)}")

    def _missing(self, name: str, seconds: float = REPORT) -> list[int]:
        """Ranks that do not report within so many seconds."""
        try:
            self.store.set(f"{name}/{self.rank}", "1")
            until = time.monotonic() + seconds
            while True:
                gone = [rank for rank in range(self.size) if not self.store.check([f"{name}/{rank}"])]
                if not gone or time.monotonic() >= until:
                    return gone
                time.sleep(0.05)
        except RuntimeError:  # the store is gone too
            return []

    # Notes on the store

    def report(self, error: BaseException) -> None:
        """Have the others know why this rank leaves, before they notice that it has."""
        try:
            if self.store.add("failures", 1) == 1:
                text = str(error) if isinstance(error, RookeryError) else f"{type(error).__name__}: {error}"
                self.store.set("failure", f"rank {self.rank}: {text}"[:4000])
        except RuntimeError:
            pass

    def reason(self) -> str:
        """Why the first rank that has failed did, if it could say so."""
        try:
            return self.store.get("failure").decode(errors="replace") if self.store.check(["failure"]) else ""
        except RuntimeError:
            return ""

    def count(self, key: str, more: int = 0) -> int:
        """A number that all ranks share, after adding to it. It does not wait for anyone."""
        try:
            return int(self.store.add(key, more))
        except RuntimeError as error:
            raise self._lost(error) from error

    def forget(self, key: str) -> None:
        try:
            self.store.delete_key(key)
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Leave the group. The others may be gone: nothing is exchanged."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _ranks(numbers: list[int]) -> str:
    some = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank {some} is" if len(numbers) == 1 else f"ranks {some} are"


def _first_line(error: BaseException) -> str:
    """Without the place in the library's source, and its advice."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip())
    return text.splitlines()[0].split(". This is typically")[0][:300] if text else type(error).__name__
