"""A replay memory that is saved while it changes, in any order of operations: what is loaded is the memory then."""

import copy
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import REMOVERS, SPECS, Model, kinds, memories, operation
from support_parcels import replay
from support_replay_file import contents, same

from rookery.storage import replay_file
from rookery.storage.files import FileLayer
from rookery.tables.snapshot import Snapshot, _Part


class Busy(FileLayer):
    """The table goes on whenever something is written."""

    def __init__(self, go_on):
        self.go_on = go_on

    def write(self, path, data):
        self.go_on()
        super().write(path, data)

    def append(self, path, data):
        self.go_on()
        super().append(path, data)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replay_file, "SEGMENT", 300)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("remover", REMOVERS)
@settings(max_examples=40, deadline=None)
@given(
    memories, kinds, st.sampled_from(list(SPECS)), st.lists(operation, max_size=60),
    st.lists(st.lists(operation, min_size=1, max_size=6), max_size=20), st.integers(1, 300),
)  # fmt: skip
def test_what_is_loaded_is_the_memory_of_the_moment(remover, memory, kind, spec, before, after, chunk):
    """Operations come between any two writes, and before and after each copy of the thread that reads."""
    spec = SPECS["vector" if remover == "inverse" else spec]
    model = Model(replay(**kind, **memory, remover=remover), spec)
    for name, *arguments in before:
        getattr(model, name)(*arguments)
    moment, meanwhile = copy.deepcopy(contents(model.table)), iter(after)

    def go_on() -> None:
        for name, *arguments in next(meanwhile, ()):
            getattr(model, name)(*arguments)

    def read(part, number, buffer):
        go_on()
        chunk = copied(part, number, buffer)
        go_on()
        return chunk

    copied, folder = _Part.copy, Path(tempfile.mkdtemp())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Part, "copy", read)
            path = replay_file.save(folder, 5, Snapshot(model.table, chunk), Busy(go_on))
        loaded = model.new_table(9)
        replay_file.load(path, loaded)
        assert same(contents(loaded), moment)
        model.check()
    finally:
        shutil.rmtree(folder)
