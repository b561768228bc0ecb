"""The replay memory of a run beside its checkpoints: saved in the background, and found again when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

from rookery.processes.signals import Patience, Signals
from rookery.storage import replay_file
from rookery.storage.replay_writer import Writer
from rookery.tables.memory import ReplayMemory
from rookery.tables.snapshot import Snapshot

LAST_SAVE = 3600.0  # seconds the memory of a finished run may take to reach the disk
LOOK = 0.1  # seconds between two looks at the signals meanwhile


class Saver(Protocol):
    """Saves a memory beside the checkpoints, and restores it."""

    def restore(self, resumed_at: int, version: int, warn: Callable[[str], None]) -> bool:
        """Load the memory saved with the checkpoint, or the nearest one. Whether it is that of the checkpoint.

        `version`: of the learner's weights. `warn` is told what cannot be used as it was.
        """
        ...

    def save(self, env_steps: int, signals: Signals, grace: float, last: bool) -> None:
        """Have the memory written in the background; wait for it only if the run is over."""
        ...

    def complain(self) -> None:
        """Say what went wrong in the background, if anything did."""
        ...


class ReplaySaver:
    """`say` takes what the user should know; it does not stop the run."""

    def __init__(
        self, folder: Path, memory: ReplayMemory, snapshot: Callable[[], Snapshot], say: Callable[[str], None]
    ):
        self._folder, self._memory, self._snapshot, self._say = folder / "replay", memory, snapshot, say
        self._writer = Writer()

    def restore(self, resumed_at: int, version: int, warn: Callable[[str], None]) -> bool:
        found = replay_file.find(self._folder, resumed_at)
        if found is None:
            say = warn if self._memory.memory.save else self._say
            say("no replay memory was saved with this checkpoint: it is filled again from empty")
            return False
        steps = replay_file.load(found, self._memory)
        self._memory.cap_versions(version)
        if steps != resumed_at:  # its items count as they did for the books of another checkpoint
            self._memory.settle()
            age = "older" if steps < resumed_at else "newer"
            warn(f"the replay memory is that of {found.name}, {age} than the checkpoint (step {resumed_at})")
        return steps == resumed_at

    def save(self, env_steps: int, signals: Signals, grace: float, last: bool) -> None:
        if not self._memory.memory.save:
            return
        patience = Patience(signals, LAST_SAVE, grace, since=monotonic())
        if last:
            self._written(patience)
            self.complain()
        started = not self._writer.busy and self._writer.start(self._folder, env_steps, self._snapshot())
        if not started:
            self._say("the replay memory of the last checkpoint is still being written: this one goes without")
        if last and not self._written(patience):
            self._say("the replay memory could not be saved in time; an older one, if any, stays")
        if last and (error := self._writer.poll()):
            raise error

    def _written(self, patience: Patience) -> bool:
        """Wait for the writer; it cannot be woken by a signal, so the signals are looked at now and then."""
        while not self._writer.join(min(LOOK, patience.left())):
            if patience.left() == 0.0:
                return False
        return True

    def complain(self) -> None:
        if error := self._writer.poll():
            self._say(f"the replay memory was not saved, training goes on: {error}")
