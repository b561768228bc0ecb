"""Where records go: metrics.jsonl, the one source every viewer reads, and TensorBoard if it is installed.

A sink must never stop, slow or corrupt a run. Each has a thread of its own (`sink_thread.py`). A full disk makes it
keep records in memory and try again. A failure of one sink is warned of once, counted, and does not affect the others.
Records are plain dictionaries; tensors and numpy numbers become Python numbers here and nowhere else.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import math
import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from rookery.core.errors import CheckpointError, StorageError, UsageError
from rookery.metrics.sink_thread import LIMIT, SinkThread
from rookery.storage import folder as folders

Record = Mapping[str, Any]
MAX_LINE = 1 << 20  # bytes of one record; ours have a few thousand


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line, appended and handed to the system at once. NaN and infinities are written as null.

    While the file cannot be written, the last `ring` lines wait in memory; older ones are dropped and counted. Each new
    record tries again, so a disk that was full for a while costs nothing.
    """

    def __init__(self, path: Path, ring: int = 10_000):
        self.path = Path(path)
        self.name = self.path.name
        self.why = ""  # the last failure
        self.failures = 0  # writes that failed
        self.dropped = 0  # records lost because the ring was full
        self._waiting: deque[bytes] = deque(maxlen=ring)
        self._handle: int | None = None
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._flush()  # opens and mends the file, so that a bad path is known at the start

    @property
    def waiting(self) -> int:
        """Records in memory that are not in the file."""
        return len(self._waiting)

    @property
    def unwritten(self) -> int:
        return self.waiting + self.dropped

    def write(self, record: Record) -> None:
        line = self._encoder.encode(record) + b"\n"
        if len(self._waiting) == self._waiting.maxlen:
            self.dropped += 1
        self._waiting.append(line)
        self._flush()

    def close(self) -> None:
        self._flush()
        self._release()

    def _flush(self) -> None:
        try:
            if self._handle is None:
                self._handle = _open_mended(self.path, keep_whole=not self._waiting)
            while self._waiting:
                if os.write(self._handle, self._waiting[0]) < len(self._waiting[0]):
                    raise OSError("the disk took only part of a line")
                self._waiting.popleft()
        except OSError as error:
            self._release()  # to open it again is to mend it
            self.failures += 1
            self.why = error.strerror or str(error)
            if self.failures == 1:
                warnings.warn(
                    f"{self.path} cannot be written ({self.why}): training continues, and the last "
                    f"{self._waiting.maxlen} records are kept in memory until it can",
                    stacklevel=3,
                )

    def _release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class TensorBoardSink:
    """Scalars of a record as TensorBoard events: `train/return_mean`, `train/losses/policy`, … over env_steps."""

    def __init__(self, folder: Path):
        if not tensorboard_installed():
            raise UsageError(
                "TensorBoard is not installed: pip install 'rookery[tensorboard]', or leave the option out"
            )
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder, suffix = Path(folder), f".{secrets.token_hex(16)}"  # a name that cannot be there already
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folders.check_target(folder.parent, f"{folder.name}/events.out.tfevents")
        self.name = "tensorboard"
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=5, filename_suffix=suffix)
        for file in folder.glob(f"events.out.tfevents.*{suffix}"):
            file.chmod(0o600)

    def write(self, record: Record) -> None:
        kind = record.get("kind", "run")
        if kind == "resume":  # nothing in it is a curve
            return
        values = [self._summary.Value(tag=f"{kind}/{tag}", simple_value=value) for tag, value in scalars(record)]
        step = int(record.get("env_steps") or 0)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Several sinks as one, each on its own thread: one that is blocked or broken does not affect the others.

    For one producer, the thread of the learner. A record belongs to the sinks once it is written: it must not change.
    """

    patience = SinkThread.patience

    def __init__(self, sinks: list[Sink], limit: int = LIMIT):
        self.sinks = list(sinks)
        self._threads = [SinkThread(sink, limit) for sink in self.sinks]
        self._closed = False

    @classmethod
    def of_run(cls, folder: Path, tensorboard: bool | None = None, more: Sequence[Sink] = ()) -> Sinks:
        """The sinks of a run folder, and `more`. `tensorboard` None: if installed; True: UsageError if it is not."""
        sinks: list[Sink] = [JsonlSink(Path(folder) / "metrics.jsonl")]
        if tensorboard or (tensorboard is None and tensorboard_installed()):
            try:
                sinks.append(TensorBoardSink(Path(folder) / "tensorboard"))
            except OSError as error:  # TensorBoard must not stop a run
                warnings.warn(f"no TensorBoard events, training continues without: {error}", stacklevel=2)
        return cls([*sinks, *more])

    @property
    def failures(self) -> list[int]:
        """Of each sink, over the whole run."""
        return [thread.failures for thread in self._threads]

    @property
    def lost(self) -> dict[str, int]:
        """Records that are not written, by sink; after closing, that is final."""
        return {thread.name: lost for thread in self._threads if (lost := thread.lost)}

    def write(self, record: Record) -> None:
        for thread in self._threads:
            thread.put(record)

    def news(self) -> list[str]:
        """What the user should know of them and was not told yet."""
        return [text for thread in self._threads for text in thread.news()]

    def ended(self, summary: Record, exit_code: int) -> None:
        """How the run has ended, for those sinks that tell others. Before `close`."""
        for sink in self.sinks:
            if hasattr(sink, "ended"):
                sink.ended(summary, exit_code)

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits. After `timeout` seconds in all, sinks that are still blocked are abandoned."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.ask_to_close()
        in_time = [thread.join(until - time.monotonic()) for thread in self._threads]
        for thread in self._threads:
            thread.abandon()
        for thread, ended in zip(self._threads, in_time):
            if thread.lost:
                warnings.warn(f"{thread.name}: {thread.lost:,} records were not written ({thread.why})", stacklevel=2)
            elif not ended:
                warnings.warn(f"{thread.name}: the last records may be missing ({thread.why})", stacklevel=2)


def read_records(path: Path) -> list[dict[str, Any]]:
    return list(records(path))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl. A torn last line, of a run that is writing or was killed, is left out."""
    path = Path(path)
    try:
        with open(folders.open_regular(path.parent, path.name), "rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE + 1)
                if not line:
                    return
                record = _parsed(line) if len(line) <= MAX_LINE else None
                if record is not None:
                    yield record
                elif line.strip() and (line.endswith(b"\n") or len(line) > MAX_LINE):
                    raise StorageError(
                        f"{path}, line {number} is not a JSON object of up to {MAX_LINE:,} bytes: remove the line to "
                        "read the rest"
                    )
    except folders.Refused as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def tensorboard_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _open_mended(path: Path, keep_whole: bool) -> int:
    """A descriptor for appending, after a last line without its end was removed.

    With `keep_whole`, a line that lacks nothing but the newline gets it; else it is about to be written again.
    """
    handle = folders.open_regular(path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT, sole=True)
    try:
        tail, start = b"", os.fstat(handle).st_size
        while start > 0 and b"\n" not in tail:
            size = min(65536, start)
            start -= size
            tail = os.pread(handle, size, start) + tail
            if len(tail) > MAX_LINE + 65536:
                raise OSError(errno.EFBIG, f"its last line has more than {MAX_LINE:,} bytes and is not ours; remove it")
        end = tail.rfind(b"\n") + 1
        if end == len(tail):
            return handle
        if keep_whole and _parsed(tail[end:]) is not None:
            os.write(handle, b"\n")
        else:
            os.ftruncate(handle, start + end)
        return handle
    except OSError:
        os.close(handle)
        raise


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def scalars(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Finite numbers of a record by path; text, lists and the axes themselves are not curves."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
            continue
        value = _plain(value) if isinstance(value, np.generic | torch.Tensor) else value
        if isinstance(value, int | float) and math.isfinite(value) and f"{prefix}{key}" != "env_steps":
            yield f"{prefix}{key}", float(value)


def _plain(value: Any) -> Any:
    """What msgspec does not know: arrays and tensors become numbers or lists, anything else its text."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)
