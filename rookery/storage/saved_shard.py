"""A part of a replay memory that is saved and restored by itself, in its own folder (`replay_file.py` has the format).

The few numbers of the table in front (`tables/front.py`) are saved with each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.core.errors import CheckpointError
from rookery.roles.shard import Shard, ShardSetup
from rookery.storage import replay_file
from rookery.storage.replay_writer import Writer
from rookery.tables.front import Front, check_front
from rookery.tables.memory import ReplayMemory
from rookery.tables.shard import Answer, Saved
from rookery.tables.snapshot import Snapshot


class _Memory(ReplayMemory):
    """A memory whose saved state has the numbers of the table in front."""

    setup: ShardSetup
    front: dict[str, Any]

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"front": self.front}

    def check_state(self, state: dict[str, Any], used: dict[str, int]) -> None:
        super().check_state(state, used)
        check_front(state["front"], self.setup.plan.memory, self.setup.actors)

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.front = state["front"]


class SavedShard(Shard):
    memory: _Memory

    def __init__(self, setup: Mapping[str, Any]):
        """`setup`: a `ShardSetup` as plain values."""
        read = ShardSetup.read(setup)
        super().__init__(read, _Memory)
        self.memory.setup, self.memory.front = read, Front(read.plan.memory, read.actors, read.seed).state()
        self._writer = Writer()

    def save(self, folder: str, env_steps: int, front: dict[str, Any]) -> Answer:
        """Begin to write the memory as it is now, in a thread; `saved` says how far it is. One at a time."""
        if self._writer.busy:
            return self.answer(Saved(busy=True, error="the one before is still being written"))
        self.memory.front = front
        self._writer.start(Path(folder), env_steps, Snapshot(self.memory))
        return self.saved()

    def saved(self) -> Answer:
        busy = self._writer.busy  # first: an error is there when the thread has ended
        error = self._writer.poll()
        return self.answer(Saved(busy, "" if error is None else str(error)))

    def restore(self, folder: str, env_steps: int, version: int) -> Answer:
        """Load the memory saved at that step, or the nearest one, into this new shard. `version`: of the learner."""
        if self.memory.inserted:
            raise CheckpointError("a shard that has items already cannot be restored")
        found = replay_file.find(Path(folder), env_steps)
        if found is None:
            return self.answer(Saved())
        steps = replay_file.load(found, self.memory)
        self.memory.cap_versions(version)
        if steps != env_steps:  # its items count as they did for the books of another checkpoint
            self.memory.settle()
        return self.answer(Saved(name=found.name, steps=steps, front=self.memory.front))
