"""Resource limits of this process: memory, cores, and how often the out-of-memory killer ran.

Read from /proc and from cgroups of both versions, so that a container's limit counts and not the host's size; for
memory the limits of the process itself (`ulimit -v`, `ulimit -d`) count too.
Nothing here allocates or waits; where a file is missing (macOS) there is no known limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The two places to read; tests pass other folders."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def memory(self, shared: bool = False, processes: int = 1) -> tuple[int, str]:
        """Bytes available, and which limit that is: the least of free memory, every cgroup above us and our own limits.

        `shared`: for memory that is shared between processes. `processes`: by how many the bytes will be taken, each a
        part; what limits one process limits that many times as much then.
        """
        have, source = sys.maxsize, "no limit known"
        available = _field(self.proc / "meminfo", "MemAvailable:")
        if available is not None:
            have, source = available * 1024, "available memory of the machine"
        for folder in self._folders("memory"):
            # Unused file pages are reclaimed under pressure: they do not count as taken.
            for limit, usage, idle in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                cap, used = _number(folder / limit), _number(folder / usage)
                if cap is None or used is None:
                    continue
                left = max(0, cap - used + (_field(folder / "memory.stat", idle) or 0))
                if left < have:
                    have, source = left, f"limit of {folder / limit}"
        return min([(have, source), *self._own_limits(shared, processes)])

    def _own_limits(self, shared: bool, processes: int) -> list[tuple[int, str]]:
        """Soft limits of this process, less what counts towards them already."""
        left = []
        kinds = [("Max address space", "VmSize:", "ulimit -v, RLIMIT_AS")]
        if not shared:  # which is not counted as data
            kinds.append(("Max data size", "VmData:", "ulimit -d, RLIMIT_DATA"))
        for line in _text(self.proc / "self" / "limits").splitlines():
            for name, used, words in kinds:
                soft = line.removeprefix(name).split()[0] if line.startswith(name) else ""
                if soft.isdigit():
                    taken = 1024 * (_field(self.proc / "self" / "status", used) or 0)
                    left.append((processes * max(0, int(soft) - taken), f"limit of the process ({words})"))
        return left

    def cores(self) -> int:
        """Cores we may use: affinity, cut by the CPU quota of every cgroup above us."""
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1
        for folder in self._folders("cpu"):
            words = _text(folder / "cpu.max").split()
            if len(words) == 2 and words[0] != "max":
                quota, period = int(words[0]), int(words[1])
            else:
                quota = _number(folder / "cpu.cfs_quota_us") or -1
                period = _number(folder / "cpu.cfs_period_us") or 0
            if quota > 0 and period > 0:
                cores = min(cores, quota // period)
        return max(1, cores)

    def oom_kills(self) -> int:
        """How often the out-of-memory killer has struck in our cgroups so far."""
        counts = (
            _field(folder / file, "oom_kill") or 0
            for folder in self._folders("memory")
            for file in ("memory.events", "memory.oom_control")
        )
        return max(counts, default=0)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Folders whose limits apply, from our own cgroup up to the root; some may not exist in a container."""
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                roots = [self.cgroups, self.cgroups / "unified"]
            elif controller in controllers.split(","):
                roots = [self.cgroups / controller, self.cgroups / controllers]
            else:
                continue
            parts = [part for part in path.split("/") if part and part != ".."]
            for root in dict.fromkeys(roots):
                for depth in range(len(parts), -1, -1):
                    yield root.joinpath(*parts[:depth])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _field(path: Path, name: str) -> int | None:
    """The number behind `name` in a file of "name number" lines."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return None


def amount(count: float) -> str:
    """An amount of memory for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
