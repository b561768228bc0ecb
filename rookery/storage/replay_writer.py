"""Saves replay memories during a run: in a separate thread, one at a time. `replay_file.py` has the format."""

from __future__ import annotations

import threading
from pathlib import Path

from rookery.core.errors import RookeryError, StorageError
from rookery.storage.files import FileLayer
from rookery.storage.replay_file import save
from rookery.tables.snapshot import Snapshot


class Writer:
    """Saves snapshots in a separate thread, one at a time. After an error or on a full disk the run continues."""

    def __init__(self, files: FileLayer | None = None, keep: int = 1):
        self._files, self._keep = files, keep
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._errors: list[StorageError] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, folder: Path, env_steps: int, snapshot: Snapshot) -> bool:
        """Begin to save, and own the snapshot; False, and the snapshot closed, while another is being saved."""
        if self.busy:
            if snapshot is not self._snapshot:
                snapshot.close()
            return False
        self._snapshot = snapshot
        self._thread = threading.Thread(
            target=self._run, args=(folder, env_steps, snapshot), name="replay-writer", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit of threads is reached
            self._thread = None
            snapshot.close()
            self._errors.append(StorageError(f"replay memory of step {env_steps} was not saved: {error}"))
            return False
        return True

    def poll(self) -> StorageError | None:
        """The oldest error not yet reported; each is reported once."""
        return self._errors.pop(0) if self._errors else None

    def join(self, timeout: float) -> bool:
        """Wait at most so many seconds; whether nothing is being saved any more."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.busy

    def _run(self, folder: Path, env_steps: int, snapshot: Snapshot) -> None:
        try:
            save(folder, env_steps, snapshot, self._files, self._keep)
        except StorageError as error:
            self._errors.append(error)
        except Exception as error:  # whatever it is, it must not be lost with the thread
            what = str(error) if isinstance(error, RookeryError) else f"{type(error).__name__}: {error}"
            wrapped = StorageError(f"replay memory of step {env_steps} was not saved: {what}")
            wrapped.__cause__ = error
            self._errors.append(wrapped)
