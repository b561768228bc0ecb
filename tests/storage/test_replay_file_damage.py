"""Damaged, hostile and foreign replay memories: one clean error that names the file, and a table as it was."""

import itertools
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_damage import KINDS, damage
from support_replay_file import CASES, Life, contents, forge, same

from rookery.core.errors import CheckpointError
from rookery.storage import files, replay_file
from rookery.storage.files import MANIFEST, META, TENSORS
from rookery.tables.snapshot import Snapshot

ADVICE = "remove the folder to continue with an empty memory"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(replay_file, "SEGMENT", 1500)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def save(folder: Path, life: Life, steps: int = 20) -> Path:
    return replay_file.save(folder, steps, Snapshot(life.table, 400))


def refused(path: Path, table, words: str = "") -> str:
    """The message, after checking that the table is as it was."""
    before = contents(table)
    with pytest.raises(CheckpointError, match=ADVICE) as caught:
        replay_file.load(path, table)
    assert same(contents(table), before)
    assert words in str(caught.value) and path.name in str(caught.value) and caught.value.exit_code == 6
    return str(caught.value)


@pytest.fixture(scope="module", params=["mixed", "packed"])
def saved(request, tmp_path_factory):
    """A memory on disk, its files as they were written, and a table in use that it could be loaded into."""
    path = save(tmp_path_factory.mktemp("saved"), Life(request.param, 40))
    return path, {file.name: file.read_bytes() for file in path.iterdir()}, Life(request.param, 7).table


@settings(max_examples=150, deadline=None)
@given(
    which=st.floats(0, 1, exclude_max=True),
    where=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(KINDS),
    bit=st.integers(0, 7),
    byte=st.binary(min_size=1, max_size=3),
)
def test_no_damaged_memory_is_ever_loaded(saved, which, where, kind, bit, byte):
    path, original, table = saved
    order = sorted(original)
    name = order[int(which * len(order))]
    other = original[order[order.index(name) - 1]]
    if not damage(path / name, original[name], other, kind, where, bit, byte):
        return
    try:
        assert name in refused(path, table)
    finally:
        (path / name).write_bytes(original[name])


def test_what_was_repaired_loads(saved):
    path, _, table = saved
    assert replay_file.load(path, table) == 20 and len(table) > 0


def test_a_digest_that_was_damaged_with_its_file_does_not_help(tmp_path):
    """Two segments that change places, each with the other's name in a manifest that fits."""
    path = save(tmp_path, Life("mixed", 60))
    body = msgspec.json.decode((path / MANIFEST).read_bytes())["manifest"]
    pairs = itertools.combinations([name for name, part in body["segments"].items() if part["array"] == "records"], 2)
    first, second = next(p for p in pairs if body["files"][p[0]]["size"] == body["files"][p[1]]["size"])
    blobs = {first: (path / second).read_bytes(), second: (path / first).read_bytes()}
    forge(path, lambda body: None, blobs)
    refused(path, Life("mixed").table, "holds something else than rows")


def test_messages_say_what_is_wrong(tmp_path):
    path = save(tmp_path, Life("mixed", 40))
    cases = {
        "rows-00001.safetensors is missing": lambda p: (p / "rows-00001.safetensors").unlink(),
        "rows-00000.safetensors has 9 bytes instead of": lambda p: os.truncate(p / "rows-00000.safetensors", 9),
        "tensors.safetensors is missing": lambda p: (p / TENSORS).unlink(),
        "manifest.json is missing": lambda p: (p / MANIFEST).unlink(),
        "upgrade rookery": lambda p: forge(p, lambda body: body | {"schema": 3, "new field": 1}),
    }
    for number, (words, spoil) in enumerate(cases.items()):
        copied = shutil.copytree(path, tmp_path / f"copy-{number}")
        spoil(copied)
        refused(copied, Life("mixed").table, words)
    refused(tmp_path / "nowhere", Life("mixed").table, "is missing")


# Another table


@pytest.mark.parametrize("other", CASES)
@pytest.mark.parametrize("case", ["uniform", "mixed", "packed"])
def test_a_memory_of_another_table_is_refused_before_anything_is_touched(tmp_path, case, other):
    path = save(tmp_path, Life(case, 20))
    if other == case or (case, other) == ("uniform", "ratio"):  # the limits of a run are no part of its memory
        replay_file.load(path, Life(other, 20).table)
    else:
        refused(path, Life(other, 20).table, "it is of another memory")


def test_a_state_that_the_table_refuses_is_an_error_with_the_same_advice(tmp_path):
    life = Life("uniform", 20)
    path = save(tmp_path, life)

    def load(state):
        raise CheckpointError("the ids are odd")

    life.table.load = load
    with pytest.raises(CheckpointError, match=f"the ids are odd.*{ADVICE}"):
        replay_file.load(path, life.table)


# Hostile files: the digests fit, the content is malicious


def segment(body: dict, number: int = 0, **change) -> dict:
    name = f"rows-{number:05d}.safetensors"
    return {"segments": body["segments"] | {name: body["segments"][name] | change}}


def array(body: dict, **change) -> dict:
    return {"arrays": body["arrays"] | {"records": body["arrays"]["records"] | change}}


def renamed(body: dict, name: str) -> dict:
    old = "rows-00000.safetensors"
    swap = {old: name}
    return {part: {swap.get(key, key): body[part][key] for key in body[part]} for part in ("segments", "files")}


HOSTILE_BODIES = {
    "no files": lambda body: {"files": {}},
    "no segments": lambda body: {"segments": {}},
    "no arrays": lambda body: {"arrays": {}},
    "a file more": lambda body: {"files": body["files"] | {"rows-99999.safetensors": body["files"][META]}},
    "a segment more": lambda body: {"segments": body["segments"] | {META: body["segments"]["rows-00000.safetensors"]}},
    "an absolute path": lambda body: renamed(body, "/etc/passwd"),
    "a path upwards": lambda body: renamed(body, "../rows-00000.safetensors"),
    "rows there twice": lambda body: segment(body, 1, first=0),
    "rows missing": lambda body: segment(body, 0, first=1),
    "negative rows": lambda body: segment(body, 0, rows=-1),
    "no rows": lambda body: segment(body, 0, rows=0),
    "rows without end": lambda body: segment(body, 0, rows=2**62),
    "negative first": lambda body: segment(body, 0, first=-5),
    "unknown array": lambda body: segment(body, 0, array="os.system"),
    "more in use than there are": lambda body: array(body, used=10**6),
    "fewer in use than stored": lambda body: array(body, used=1),
    "negative use": lambda body: array(body, used=-1),
    "negative width": lambda body: array(body, width=-8),
    "huge width": lambda body: array(body, width=2**62),
    "other capacity": lambda body: array(body, rows=31),
    "negative size": lambda body: {"files": body["files"] | {META: {"size": -1, "blake2b": "0"}}},
    "huge size": lambda body: {"files": body["files"] | {META: {"size": 2**63, "blake2b": "0"}}},
    "few bytes": lambda body: {"files": body["files"] | {"rows-00000.safetensors": {"size": 8, "blake2b": "0"}}},
    "negative steps": lambda body: {"env_steps": -5},
    "text for a number": lambda body: {"env_steps": "5"},
    "old schema": lambda body: {"schema": 0},
    "unknown field": lambda body: {"run": "os.system('true')"},
}


@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_a_hostile_manifest_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, Life("mixed", 40))
    forge(path, lambda body: body | HOSTILE_BODIES[name](body))
    words = {"other capacity": "records", "negative size": META, "huge size": META}.get(name, MANIFEST)
    refused(path, Life("mixed", 3).table, words)
    assert replay_file._sound(path) is None or name == "other capacity"


HOSTILE_PACKED = {
    "not packed": lambda body: frames(body, packed=False),
    "packed without bytes": lambda body: segment(body, packed_segment(body), packed=None),
    "negative bytes": lambda body: segment(body, packed_segment(body), packed=-1),
    "huge bytes": lambda body: segment(body, packed_segment(body), packed=2**62),
    "a byte more": lambda body: segment(
        body,
        packed_segment(body),
        packed=body["segments"][f"rows-{packed_segment(body):05d}.safetensors"]["packed"] + 1,
    ),
}


def frames(body: dict, **change) -> dict:
    return {"arrays": body["arrays"] | {"frames/obs": body["arrays"]["frames/obs"] | change}}


def packed_segment(body: dict) -> int:
    return next(int(name[5:10]) for name, part in body["segments"].items() if part["array"] == "frames/obs")


@pytest.mark.parametrize("name", HOSTILE_PACKED)
def test_a_hostile_manifest_of_packed_rows_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, Life("packed", 40))
    forge(path, lambda body: body | HOSTILE_PACKED[name](body))
    refused(path, Life("packed", 3).table, MANIFEST)


@pytest.mark.parametrize("sizes", [(-1000, 1000), (2**62, -(2**62)), (10**9, 0)])
def test_hostile_sizes_of_packed_rows_are_a_clean_error(tmp_path, sizes):
    """The first two rows get other sizes; the digests fit."""
    path = save(tmp_path, Life("packed", 40))
    body = msgspec.json.decode((path / MANIFEST).read_bytes())["manifest"]
    name = f"rows-{packed_segment(body):05d}.safetensors"
    blob = (path / name).read_bytes()
    at = 8 + int.from_bytes(blob[:8], "little")
    before = np.frombuffer(blob, "<i8", 2, at)
    after = (before + sizes).astype("<i8").tobytes()
    forge(path, lambda body: None, {name: blob[:at] + after + blob[at + 16 :]})
    refused(path, Life("packed", 3).table, f"{name} has rows of sizes that do not fit")


def test_memories_of_the_older_schema_are_loaded_or_refused_with_a_reason(tmp_path):
    """Schema 1 had no packed rows: compressed frames were part of the state."""

    def older(body):
        arrays = {name: {k: entry[k] for k in ("rows", "used", "width")} for name, entry in body["arrays"].items()}
        segments = {name: {k: part[k] for k in ("array", "first", "rows")} for name, part in body["segments"].items()}
        return body | {"schema": 1, "arrays": arrays, "segments": segments}

    life = Life("mixed", 40)
    path, loaded = save(tmp_path / "mixed", life), Life("mixed", 3).table
    forge(path, older)
    replay_file.load(path, loaded)
    assert same(contents(loaded), contents(life.table))

    def without_frames(body):
        body = older(body)
        gone = [name for name, part in body["segments"].items() if part["array"] == "frames/obs"]
        for name in gone:
            del body["segments"][name], body["files"][name]
        del body["arrays"]["frames/obs"]
        return body

    path = save(tmp_path / "packed", Life("packed", 40))
    forge(path, without_frames)
    refused(path, Life("packed", 3).table, "written by an older Rookery, which stored compressed frames in another way")


HOSTILE_STATES = {
    "empty": b"",
    "list": b"[]",
    "number": b"3",
    "deep": b"[" * 10_000,
    "object": files.pretty({"store": {"$object": "os.system"}}),
    "no such array": files.pretty({"store": {"$array": "nope"}}),
    "other parts": files.pretty({"store": {}}),
}


@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_a_hostile_state_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, Life("mixed", 40))
    forge(path, lambda body: None, {META: HOSTILE_STATES[name]})
    refused(path, Life("mixed", 3).table)


def test_hostile_tensors_are_a_clean_error(tmp_path):
    path = save(tmp_path, Life("mixed", 40))
    for blob in (b"", b"\xff" * 16, (path / TENSORS).read_bytes()[:-8], (path / "rows-00000.safetensors").read_bytes()):
        forge(path, lambda body: None, {TENSORS: blob})
        refused(path, Life("mixed", 3).table)


@pytest.mark.parametrize("name", [MANIFEST, META, TENSORS, "rows-00000.safetensors", "rows-00003.safetensors"])
def test_links_pipes_and_folders_are_not_followed(tmp_path, name):
    life = Life("mixed", 40)
    path = save(tmp_path / "replay", life)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((path / name).read_bytes())
    for plant in (lambda p: p.symlink_to(elsewhere), os.mkfifo, Path.mkdir):
        copied = shutil.copytree(path, tmp_path / "copy")
        (copied / name).unlink()
        plant(copied / name)
        refused(copied, Life("mixed", 3).table, name)
        shutil.rmtree(copied)


def test_a_linked_folder_is_refused_and_not_found(tmp_path):
    path = save(tmp_path / "real", Life("mixed", 10))
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "step-000000000020"
    link.symlink_to(path)
    refused(link, Life("mixed", 3).table, "symbolic link")
    assert replay_file.find(tmp_path / "run", 20) is None


def test_a_damaged_memory_is_neither_removed_nor_passed_over(tmp_path):
    """It is the user who decides to go on without it."""
    life = Life("mixed", 10)
    damaged = save(tmp_path, life, 10)
    (damaged / META).write_bytes(b"{}")
    save(tmp_path, life, 30)
    assert replay_file.find(tmp_path, 20) == damaged
    refused(damaged, Life("mixed").table, META)
