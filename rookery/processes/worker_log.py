"""The file that a worker's output goes to: appended to by one process after another, and bounded.

The worker writes, the parent shortens. The worker's descriptor appends (O_APPEND), so that it goes on at the new end of
a file that has become shorter. What it writes during the cut may be lost; every other loss is noted in the log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rookery.core.printable import printable
from rookery.storage.folder import open_regular

LIMIT = 16 << 20  # bytes; above, the middle is cut out
HEAD = 1 << 20  # bytes that stay of the beginning,
END = 4 << 20  # and of the end
TAIL = 1 << 16  # bytes to look for the last lines in
NOTE = re.compile(rb"\n\[log shortened: (\d+) bytes were removed here\]\n")


class WorkerLog:
    def __init__(self, path: Path):
        self.path = path
        self._start = 0  # where the output of the present process begins

    def open(self) -> int | None:
        """A descriptor for the next process to append to. A log that cannot be opened does not stop a run."""
        try:
            self.path.parent.parent.mkdir(parents=True, exist_ok=True)
            fd = open_to_append(self.path)
        except OSError:
            return None
        self._start = os.fstat(fd).st_size
        return fd

    def tail(self, lines: int) -> str:
        """The last lines that the present process wrote, with control characters as escapes: they go to a terminal."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL))
                text = file.read(TAIL).decode(errors="replace")
        except OSError:
            return ""
        return printable("\n".join(text.splitlines()[-lines:]))

    def shorten(self) -> None:
        """Cut the middle out of a log that has become too long, and say so in its place."""
        try:
            if os.stat(self.path, follow_symlinks=False).st_size > LIMIT:
                fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    self._cut(fd)
                finally:
                    os.close(fd)
        except OSError:
            return  # a full disk, for one: the next look tries again

    def _cut(self, fd: int) -> None:
        seen = os.fstat(fd).st_size
        end = os.pread(fd, END, seen - END)
        middle = os.pread(fd, min(LIMIT, seen - END - HEAD), HEAD)
        notes = NOTE.finditer(middle)  # of earlier cuts: they go now, their numbers stay
        before = sum(int(note[1]) - len(note[0]) for note in notes)
        size = os.fstat(fd).st_size  # as late as possible: the worker goes on writing
        note = f"\n[log shortened: {before + size - HEAD - len(end)} bytes were removed here]\n".encode()
        os.ftruncate(fd, HEAD)
        os.write(fd, note + end)
        # The beginning of the present process has moved with the end, was cut out, or stays where it is.
        self._start = min(self._start, HEAD + len(note) + max(0, self._start - (seen - END)))


def open_to_append(path: Path) -> int:
    """A plain file, created if missing; OSError for a link or a special file, or a file that has another name."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return open_regular(path.parent.parent, f"{path.parent.name}/{path.name}", flags, sole=True)
