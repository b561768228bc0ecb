"""Damaged and hostile checkpoints: never a partial load, always one clean error that says what to do (F10, S3)."""

import os
import shutil
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_damage import KINDS, damage

from rookery.core.errors import CheckpointError, StorageError
from rookery.storage import checkpoint, limits
from rookery.storage.checkpoint import MANIFEST, META, TENSORS, FileLayer, Manifest


def save(folder: Path, steps: int) -> Path:
    return checkpoint.save(folder, steps, {"w": torch.arange(12.0)}, {"rng": np.random.PCG64(1).state, "a": np.ones(3)})


def forge(path: Path, change, blobs: dict[str, bytes] | None = None) -> None:
    """Rewrite a checkpoint as a hostile author would: any content, and digests that fit it."""
    for name, blob in (blobs or {}).items():
        (path / name).write_bytes(blob)
    body = msgspec.json.decode((path / MANIFEST).read_bytes())["manifest"]
    for name in blobs or {}:
        body["files"][name] = {"size": len(blobs[name]), "blake2b": checkpoint._digest(blobs[name])}
    body = change(body) or body
    outer = {"digest": checkpoint._digest(msgspec.json.encode(body)), "manifest": body}
    (path / MANIFEST).write_bytes(checkpoint._pretty(outer))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints, and the second one's files as they were written."""
    folder = tmp_path_factory.mktemp("pair")
    save(folder, 10)
    path = save(folder, 20)
    return folder, path, {file.name: file.read_bytes() for file in path.iterdir()}


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from([MANIFEST, META, TENSORS]),
    where=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(KINDS),
    bit=st.integers(0, 7),
    byte=st.binary(min_size=1, max_size=3),
)
def test_no_damaged_file_is_ever_loaded(pair, name, where, kind, bit, byte):
    folder, path, original = pair
    for file, blob in original.items():
        (path / file).write_bytes(blob)
    other = original[META if name != META else TENSORS]
    if not damage(path / name, original[name], other, kind, where, bit, byte):
        return
    with pytest.raises(CheckpointError, match="Restore it from a copy, or use an earlier checkpoint"):
        checkpoint.load(path)
    found, skipped = checkpoint.newest(folder)
    assert found.env_steps == 10 and len(skipped) == 1 and path.name in skipped[0]


def test_every_bit_of_the_manifest_counts(pair):
    _, path, original = pair
    for file, blob in original.items():
        (path / file).write_bytes(blob)
    for at in range(len(original[MANIFEST])):
        blob = bytearray(original[MANIFEST])
        blob[at] ^= 1 << (at % 8)
        (path / MANIFEST).write_bytes(blob)
        assert checkpoint._sound(path) is None, at


def test_messages_say_what_is_wrong(tmp_path):
    path = save(tmp_path, 20)
    cases = {
        "tensors.safetensors is missing": lambda p: (p / TENSORS).unlink(),
        "bytes instead of": lambda p: os.truncate(p / TENSORS, 9),
        "manifest.json is missing": lambda p: (p / MANIFEST).unlink(),
        "upgrade rookery": lambda p: forge(p, lambda body: body | {"schema": 2, "new field": 1}),
        "no such checkpoint folder": shutil.rmtree,
    }
    for number, (words, spoil) in enumerate(cases.items()):
        copy = shutil.copytree(path, tmp_path / f"copy-{number}")
        spoil(copy)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(copy)


def test_no_checkpoint_at_all_is_an_error_that_lists_the_damaged_ones(tmp_path):
    with pytest.raises(CheckpointError, match="has not saved one yet"):
        checkpoint.newest(tmp_path)
    for steps in (10, 20):
        (save(tmp_path, steps) / META).unlink()
    with pytest.raises(CheckpointError, match=r"(?s)step-000000000020.*step-000000000010"):
        checkpoint.newest(tmp_path)


# Hostile files: the digests fit, the content is malicious (S3)

HOSTILE_BODIES = {
    "no files": lambda body: {"files": {}},
    "negative size": lambda body: {"files": body["files"] | {META: {"size": -1, "blake2b": "0"}}},
    "huge size": lambda body: {"files": body["files"] | {META: {"size": 2**63, "blake2b": "0"}}},
    "negative steps": lambda body: {"env_steps": -5},
    "text for a number": lambda body: {"env_steps": "5"},
    "true for a number": lambda body: {"schema": True},
    "old schema": lambda body: {"schema": 0},
    "unknown field": lambda body: {"run": "os.system('true')"},
}


@pytest.mark.parametrize("absolute", [True, False])
def test_a_file_outside_the_folder_is_not_read_even_if_its_digest_fits(tmp_path, absolute):
    path = save(tmp_path, 20)
    secret = tmp_path / "secret"
    secret.write_bytes((path / META).read_bytes())
    name = str(secret) if absolute else "../secret"
    forge(path, lambda body: body | {"files": body["files"] | {name: body["files"][META]}})
    with pytest.raises(CheckpointError, match="names other files"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_a_hostile_manifest_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, 20)
    forge(path, lambda body: body | HOSTILE_BODIES[name](body))
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


HOSTILE_MANIFESTS = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "torn": b"{",
    "deep list": b"[" * 100_000,
    "deep dict": b'{"a":' * 5000,
    "not text": b"\xff\xfe",
    "wrong type": b'{"digest": "x", "manifest": 3}',
    "repeated key": b'{"digest": 1, "digest": 1, "manifest": {}}',
    "half a surrogate pair": b'{"digest": "\\ud800", "manifest": {}}',
    "overflow": b"1e999",
    "many digits": b"9" * 10_000,
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_manifest_that_is_not_one_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, 20)
    (path / MANIFEST).write_bytes(HOSTILE_MANIFESTS[name])
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load(path)


HOSTILE_METAS = {
    "empty": b"",
    "list": b"[]",
    "number": b"3",
    "repeated key": b'{\n  "a": 1,\n  "a": 2\n}',
    "deep": b"[" * 10_000,
    "object": checkpoint._pretty({"a": {"$object": "os.system"}}),
    "no such array": checkpoint._pretty({"a": {"$array": "nope"}}),
}


@pytest.mark.parametrize("name", HOSTILE_METAS)
def test_a_hostile_meta_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, 20)
    forge(path, lambda body: None, {META: HOSTILE_METAS[name]})
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)


def entry(shape: str, offsets: str, dtype: str = "F32") -> str:
    return f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'


HOSTILE_HEADERS = {
    "torn": "{",
    "list": "[]",
    "deep": "[" * 9999,
    "product overflows": f'{{"a":{entry("9223372036854775807,4", "0,16")}}}',
    "negative shape": f'{{"a":{entry("-4", "0,16")}}}',
    "beyond the end": f'{{"a":{entry("4", "0,1600000000000")}}}',
    "overlap": f'{{"a":{entry("4", "0,16")},"b":{entry("2", "8,16")}}}',
    "hole": f'{{"a":{entry("2", "0,8")}}}',
    "unknown type": f'{{"a":{entry("4", "0,16", "OBJ")}}}',
}


@pytest.mark.parametrize("name", [*HOSTILE_HEADERS, "empty file", "huge header"])
def test_a_hostile_tensor_header_is_a_clean_error(tmp_path, name):
    path = save(tmp_path, 20)
    header = HOSTILE_HEADERS.get(name, "").encode()
    blob = {"empty file": b"", "huge header": b"\xff" * 7 + b"\x00" * 9}.get(
        name, struct.pack("<Q", len(header)) + header + bytes(16)
    )
    forge(path, lambda body: None, {TENSORS: blob})
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)


@pytest.mark.parametrize("name", [MANIFEST, META, TENSORS])
def test_links_pipes_and_folders_are_not_followed(tmp_path, name):
    path = save(tmp_path, 20)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((path / name).read_bytes())
    for plant in (lambda p: p.symlink_to(elsewhere), os.mkfifo, Path.mkdir):
        (path / name).unlink()
        plant(path / name)
        with pytest.raises(CheckpointError, match=name):
            checkpoint.load(path)
        shutil.rmtree(path)
        save(tmp_path, 20)


def test_a_linked_checkpoint_folder_is_refused_and_not_listed(tmp_path):
    path = save(tmp_path / "real", 20)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "step-000000000030"
    link.symlink_to(path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.load(link)
    assert checkpoint.all_steps(tmp_path / "run") == []


def test_a_linked_folder_of_checkpoints_is_neither_read_nor_swept_nor_written(tmp_path):
    real = tmp_path / "real"
    save(real, 20)
    (real / ".tmp-mine").mkdir()
    link = tmp_path / "run" / "checkpoints"
    link.parent.mkdir()
    link.symlink_to(real)
    for read in (checkpoint.newest, checkpoint.best, checkpoint.all_steps):
        with pytest.raises(CheckpointError, match="checkpoints: it is a symbolic link"):
            read(link)
    with (
        pytest.raises(StorageError, match="it is a symbolic link"),
        pytest.warns(UserWarning, match="could not be removed"),
    ):
        save(link, 30)
    assert sorted(path.name for path in real.iterdir()) == [".tmp-mine", "step-000000000020"]


def test_links_among_the_checkpoints_are_unlinked_and_not_followed(tmp_path):
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    folder = tmp_path / "checkpoints"
    save(folder, 10)
    for name in (".tmp-step-000000000020-00", ".old-step-000000000020", "step-000000000020", ".tmp-x"):
        (folder / name).symlink_to(mine if name != ".tmp-x" else tmp_path / "nowhere")
    (folder / ".tmp-file").write_text("")
    save(folder, 20)
    assert (mine / "deep").is_dir()
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000000010", "step-000000000020"]
    assert checkpoint.newest(folder)[0].env_steps == 20


def test_a_checkpoint_that_cannot_be_read_back_costs_no_older_one(tmp_path):
    class Lossy(FileLayer):
        """A disk that loses the end of a file and says nothing."""

        def fsync(self, path):
            if path.name == TENSORS:
                os.truncate(path, 10)

    for steps in (10, 20):
        save(tmp_path, steps)
    with pytest.raises(StorageError, match="could not be read back"):
        checkpoint.save(tmp_path, 30, {"w": torch.arange(12.0)}, {}, keep=1, files=Lossy())
    assert checkpoint.all_steps(tmp_path) == [10, 20, 30] and checkpoint.newest(tmp_path)[0].env_steps == 20


def test_what_is_above_the_limits_is_not_written(tmp_path, monkeypatch):
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="values besides arrays"):
        checkpoint.save(tmp_path, 20, {}, {"a": [[]] * (limits.MAX_ELEMENTS + 1)})
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_JSON", 200)
        with pytest.raises(CheckpointError, match=r"meta\.json has .* bytes, more than 200"):
            checkpoint.save(tmp_path, 20, {}, {"a": ["text"] * 50})
    monkeypatch.setattr(limits, "MAX_HEADER", 2000)
    with pytest.raises(CheckpointError, match=r"header of .* bytes, more than 2,000"):
        checkpoint.save(tmp_path, 20, {str(i): torch.zeros(1) for i in range(100)}, {})
    assert checkpoint.all_steps(tmp_path) == [10]


@pytest.mark.parametrize("limit", ["MAX_JSON", "MAX_ELEMENTS", "MAX_HEADER", "MAX_MANIFEST"])
def test_what_is_above_the_limits_is_not_read(tmp_path, monkeypatch, limit):
    path = save(tmp_path, 10)
    monkeypatch.setattr(limits, limit, 5)
    with pytest.raises(CheckpointError, match="more than 5"):
        checkpoint.load(path)


def test_a_file_larger_than_the_memory_is_not_read(tmp_path):
    path = save(tmp_path, 20)
    os.truncate(path / TENSORS, 1 << 42)  # all but nothing on disk
    huge = {"size": 1 << 42, "blake2b": "0"}
    forge(path, lambda body: body | {"files": body["files"] | {TENSORS: huge}})
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors has 4\.0 TiB, and there are .* to read it into"):
        checkpoint.load(path)


def test_bytes_that_are_no_booleans_are_damage(tmp_path):
    path = checkpoint.save(tmp_path, 20, {"flag": torch.tensor([True])}, {})
    blob = (path / TENSORS).read_bytes()
    forge(path, lambda body: None, {TENSORS: blob[:-1] + b"\xff"})
    with pytest.raises(CheckpointError, match="flag has bytes that are neither true nor false"):
        checkpoint.load(path)


def test_a_json_file_of_absurd_size_is_not_read(tmp_path):
    path = save(tmp_path, 20)
    os.truncate(path / MANIFEST, checkpoint.MAX_JSON + 1)  # sparse: nothing on disk
    with pytest.raises(CheckpointError, match="more than"):
        checkpoint.load(path)


def test_other_names_in_the_folder_are_ignored(tmp_path):
    save(tmp_path, 20)
    for name in ("step-5", "step-00000000002x", "notes", "step-000000000099.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000000098").write_text("a file")
    assert checkpoint.all_steps(tmp_path) == [20] and checkpoint.newest(tmp_path)[0].env_steps == 20


def test_the_manifest_type_is_closed():
    assert Manifest.__struct_config__.forbid_unknown_fields and Manifest.__struct_config__.frozen
