"""The live view of a run in the terminal: when it is drawn, and by which thread.

Fed by `update(snapshot)`, which only leaves the snapshot for the panel's thread: the newest replaces one that was not
drawn yet. The thread looks for it by itself, because waking a thread costs the learner time. It draws at most four
times a second, and not before the last drawing has been taken by the terminal or the pipe: one that is stopped or not
read does not delay the run. No alternate screen. Without a terminal it prints one plain line every few seconds; `quiet`
prints nothing. How it looks is `draw.py`. A viewer only: its own failure never stops a run.
"""

from __future__ import annotations

import contextlib
import math
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live

from rookery.metrics.draw import Snapshot, plain_line, render
from rookery.metrics.output import BestEffort, best_effort, text

PATIENCE = 1.0  # seconds for the last drawing
LOOK = 0.1  # seconds between two polls for a snapshot


class Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise  # Rich would end the process here; for a run, a lost viewer is no reason to stop


class Painter:
    """Draws snapshots that are due, on the thread that calls it."""

    def __init__(self, console: Console, writer: BestEffort | None = None, clock: Callable[[], float] = time.monotonic):
        self._console, self._writer, self._clock = console, writer, clock
        self._terminal = console.is_terminal and not console.is_dumb_terminal
        self._off = False
        self._live: Live | None = None
        self._latest: Snapshot | None = None  # not drawn yet
        self._next = -math.inf

    def update(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        taken = self._writer is None or not self._writer.waiting
        if not self._off and taken and self._clock() >= self._next:
            self._draw(snapshot)

    def close(self, timeout: float = 0.0) -> None:
        """Draw the last snapshot and leave it on the screen."""
        if self._latest is not None and not self._off:
            self._draw(self._latest)
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()
        if self._writer is not None:
            self._writer.drain(timeout)

    def _draw(self, snapshot: Snapshot) -> None:
        self._latest = None
        began = time.thread_time()
        try:
            if self._writer is not None and self._writer.error is not None:
                raise self._writer.error
            if self._terminal:
                if self._live is None:
                    self._live = Live(console=self._console, auto_refresh=False)
                    self._live.start()
                self._live.update(render(snapshot, self._console.width), refresh=True)
            else:
                print(plain_line(snapshot), file=self._console.file, flush=True)
        except Exception as error:  # a closed pipe, a terminal without Unicode: the run continues without the panel
            self._off = True
            self.close()
            with contextlib.suppress(Warning):  # a filter may turn it into an exception: not in this thread
                warnings.warn(f"the panel is off, training continues: {type(error).__name__}: {error}", stacklevel=3)
        # On a slow machine it draws less often, to stay below a hundredth of a core's time.
        pause = min(2.0, max(0.25, 150 * (time.thread_time() - began)))
        self._next = self._clock() + (pause if self._terminal else 5.0)


class Panel:
    """A painter on a separate thread. Neither `update` nor `close` waits for a terminal or a reader."""

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._quiet, self._console, self._clock = quiet, console, clock
        self._slot: Snapshot | None = None
        self._closing, self._deadline = threading.Event(), 0.0
        self._own: BestEffort | None = None  # a writer that only the panel uses
        self._standard = sys.stdout, sys.stderr
        self._thread: threading.Thread | None = None

    def update(self, snapshot: Snapshot) -> None:
        """The snapshot is drawn later: it must not be changed from now on."""
        if self._quiet or self._closing.is_set():
            return
        self._slot = snapshot
        if self._thread is None:
            self._begin()

    def close(self, timeout: float = PATIENCE) -> None:
        """Draw the last snapshot and leave it on the screen, if that can be done within `timeout` seconds."""
        thread, self._thread = self._thread, None
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        if thread is None:
            return
        thread.join(timeout + 0.1)
        if thread.is_alive():  # a stream that is not ours blocks: prints must not wait for the panel's lock
            for name, stream in zip(("stdout", "stderr"), self._standard):
                if isinstance(getattr(sys, name), FileProxy):
                    setattr(sys, name, stream)
        if self._own is not None:
            self._own.give_up()

    def _begin(self) -> None:
        console, writer = self._console, None
        if console is None:
            writer = best_effort(sys.stdout)
            if writer is not None and writer is not getattr(sys.stdout, "buffer", None):
                self._own = writer
                _flush_if_taken(sys.stdout)
            console = Terminal() if writer is None else Terminal(file=text(writer, sys.stdout))
        painter = Painter(console, writer, self._clock)
        thread = threading.Thread(target=self._work, args=(painter,), name="panel", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on threads: the run continues without the panel
            self._quiet = True
        else:
            self._thread = thread

    def _work(self, painter: Painter) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(LOOK)
            self._take(painter)
        painter.close(self._deadline - time.monotonic())

    def _take(self, painter: Painter) -> None:
        snapshot, self._slot = self._slot, None
        if snapshot is not None:
            painter.update(snapshot)


def _flush_if_taken(stream: TextIO) -> None:
    """What a script has printed before comes first, unless it is not read."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if poll.poll(0):
            stream.flush()
