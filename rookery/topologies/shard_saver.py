"""The parts of a replay memory beside the checkpoints: each saves itself, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from time import monotonic
from typing import Any

from rookery.core.errors import CheckpointError, StorageError
from rookery.processes.signals import Patience, Signals
from rookery.tables.service import ServiceLost
from rookery.tables.shard import Answer, Saved
from rookery.tables.shards import ShardedReplay
from rookery.topologies.replay_saver import LAST_SAVE, LOOK


class ShardSaver:
    """`say` takes what the user should know; it does not stop the run."""

    def __init__(self, folder: Path, table: ShardedReplay, say: Callable[[str], None]):
        self._folder, self._table, self._say = folder / "replay", table, say
        self._asked: list[Future[Answer]] = []  # how far the shards are, since the last save
        self._told: set[str] = set()  # errors that were said

    def _own(self, index: int) -> str:
        return str((self._folder / f"shard-{index}").absolute())

    def restore(self, resumed_at: int, version: int, warn: Callable[[str], None]) -> bool:
        table = self._table
        asked = table.ask_each("restore", lambda index: (self._own(index), resumed_at, version))
        if wait(asked, LAST_SAVE).not_done:
            raise CheckpointError(f"the replay memory in {self._folder} was not read in {LAST_SAVE:g} s")
        table.hear()
        found: list[Saved] = [answer.result().value for answer in asked]
        missing = [index for index, saved in enumerate(found) if saved.steps is None]
        if len(missing) == len(found):
            say = warn if table.config.save else self._say
            say("no replay memory was saved with this checkpoint: it is filled again from empty")
            return False
        other = [saved.name for saved in found if saved.steps not in (None, resumed_at)]
        if missing:
            warn(f"{len(missing)} of {len(found)} parts of the replay memory were not saved: they start empty")
        if other:
            warn(f"the replay memory is that of {other[0]}, and the checkpoint is of step {resumed_at}")
        fronts = [saved.front for saved in found if saved.steps == resumed_at]
        if fronts and fronts[0] is not None:
            table.front.load(fronts[0])
        return not missing and not other

    def save(self, env_steps: int, signals: Signals, grace: float, last: bool) -> None:
        if not self._table.config.save:
            return
        patience = Patience(signals, LAST_SAVE, grace, since=monotonic())
        if last:
            self._written(patience)
            self.complain()
        elif self._busy():
            self._say("the replay memory of the last checkpoint is still being written: this one goes without")
            return
        front: dict[str, Any] = self._table.front.state()
        self._told.clear()
        self._asked = self._table.ask_each("save", lambda index: (self._own(index), env_steps, front))
        if not last:
            return
        if not self._written(patience):
            self._say("the replay memory could not be saved in time; older parts, if any, stay")
        if errors := self._errors():
            raise StorageError(errors[0])

    def complain(self) -> None:
        for error in self._errors():
            if error not in self._told:
                self._told.add(error)
                self._say(f"the replay memory was not saved, training goes on: {error}")
        self._busy()

    def _answers(self) -> list[Saved]:
        """Those that have come. A lost shard has said that by other ways."""
        done = [answer for answer in self._asked if answer.done()]
        return [answer.result().value for answer in done if not isinstance(answer.exception(), ServiceLost)]

    def _errors(self) -> list[str]:
        return [saved.error for saved in self._answers() if saved.error]

    def _busy(self) -> bool:
        """Whether a shard is still writing; if it was at the last answer, it is asked again."""
        if not all(answer.done() for answer in self._asked):
            return True
        if any(saved.busy for saved in self._answers()):
            self._asked = self._table.ask_each("saved", lambda index: ())
            return True
        return False

    def _written(self, patience: Patience) -> bool:
        while self._busy():
            if patience.left() == 0.0:
                return False
            wait(self._asked, min(LOOK, patience.left()))
            self._table.hear()
        return True
