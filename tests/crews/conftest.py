"""What the tests of crews watch: every crew and training loop that a test starts, and that no process of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rookery.crews.process import ProcessCrew
from rookery.processes.worker import Worker
from rookery.topologies.loop import Loop


@pytest.fixture(autouse=True)
def crews(monkeypatch) -> Iterator[list[ProcessCrew]]:
    """Every crew of processes; at the end no process that anybody has started is left."""
    began: list[ProcessCrew] = []
    workers: list[Worker] = []
    enter, init = ProcessCrew.__enter__, Worker.__init__

    def enter_seen(crew: ProcessCrew) -> ProcessCrew:
        began.append(crew)
        return enter(crew)

    def init_seen(worker: Worker, *args, **kwargs) -> None:
        init(worker, *args, **kwargs)
        workers.append(worker)

    monkeypatch.setattr(ProcessCrew, "__enter__", enter_seen)
    monkeypatch.setattr(Worker, "__init__", init_seen)
    yield began
    assert not [worker.name for worker in workers if worker._process.returncode is None], "not ended, or not collected"


@pytest.fixture
def loops(monkeypatch) -> list[Loop]:
    """Every training loop: its job knows how far the run has come."""
    began: list[Loop] = []
    init = Loop.__init__

    def init_seen(loop: Loop, *args) -> None:
        init(loop, *args)
        began.append(loop)

    monkeypatch.setattr(Loop, "__init__", init_seen)
    return began
