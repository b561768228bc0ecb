"""A forger of run folders: changes values anywhere in a valid one and makes every digest fit again.

Everything it does comes from one seed. It changes what lies in checkpoints and replay memories (numbers, tensors, rows,
manifests) and the files beside them (config.json, spec.json), one to three things at a time, and says which.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from rookery.storage import files
from rookery.storage.files import MANIFEST, META, TENSORS

NASTY: tuple[Any, ...] = (
    -1, 0, 1, 2, 2**31, 2**53, 2**63, -(2**63), 10**12, 1e308, -1e308, 0.5, -0.0, True, False, None, "", "text", "$int",
    "\x1b[2J", [], {}, [[]], [1, 2, 3], [-1] * 200, {"a": 1}, {"$float": "nan"}, {"$float": "inf"}, {"$int": "-0x1"},
    {"$int": hex(2**200)}, {"$array": "meta:/0"}, {"$tuple": []}, {"$list": "meta:/1"}, {"$dict": [[1, 2]]},
    {"$bytes": "meta:/0"}, {"$unknown": 1},
)  # fmt: skip


class Forger:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def forge(self, run: Path) -> str:
        """Change a run folder; what was changed, in words."""
        places = [path.parent for path in sorted(run.glob("*/step-*/manifest.json"))]
        done = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            place = self.rng.choice([*places, *places, run])
            done.append(f"{place.name}: {self._beside(run) if place == run else self._sealed(place)}")
        return "; ".join(done)

    def _beside(self, run: Path) -> str:
        name = self.rng.choice(("config.json", "spec.json"))
        value = json.loads((run / name).read_bytes())
        what = self._change(value)
        (run / name).write_text(json.dumps(value))
        return f"{name} {what}"

    def _sealed(self, folder: Path) -> str:
        body = msgspec.json.decode((folder / MANIFEST).read_bytes())["manifest"]
        rows = sorted(name for name in body["files"] if name.startswith("rows-"))
        kind = self.rng.choice(("meta", "meta", "meta", "tensors", "tensors", "manifest", *(["rows"] * bool(rows))))
        if kind == "meta":
            value = msgspec.json.decode((folder / META).read_bytes())
            what = f"meta {self._change(value)}"
            (folder / META).write_bytes(files.pretty(value))
        elif kind == "tensors":
            tensors = safetensors.torch.load((folder / TENSORS).read_bytes())
            what = self._tensor(tensors)
            (folder / TENSORS).write_bytes(safetensors.torch.save(tensors))
        elif kind == "rows":
            what = self._rows(folder / self.rng.choice(rows))
        else:
            inner = {key: value for key, value in body.items() if key != "files"}
            what = f"manifest {self._change(inner)}"
            body = inner | {"files": body["files"]}
        seal(folder, body)
        return what

    def _change(self, tree: Any) -> str:
        """Change one value somewhere in parsed JSON, at any depth."""
        holder, key, path = self.rng.choice(list(_places(tree)))
        how = self.rng.choice(("replace", "replace", "replace", "remove", "add", "scale"))
        value = self.rng.choice(NASTY)
        if how == "remove":
            del holder[key]
        elif how == "add" and isinstance(holder, list):
            holder.insert(key, value)
        elif how == "add":
            holder[self.rng.choice(("new", "$new", "0", "1", ""))] = value
        elif how == "scale" and isinstance(holder[key], int | float):
            holder[key] = value = holder[key] + self.rng.choice((-1, 1, 1000, -1000))
        else:
            holder[key] = value
        return f"{path}: {how} {str(value)[:30]!r}"

    def _tensor(self, tensors: dict[str, torch.Tensor]) -> str:
        if not tensors:
            return "no tensor"
        name = self.rng.choice(sorted(tensors))
        tensor, how = (
            tensors[name],
            self.rng.choice(("value", "value", "value", "dtype", "shape", "remove", "rename", "add")),
        )
        if how == "value" and tensor.numel():
            value = self.rng.choice((-1, 0, 1, 127, 3e38, -3e38, float("nan"), float("inf"), 2**62, -(2**62)))
            if not tensor.is_floating_point():
                most = 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
                value = int(max(-most, min(most, value))) if value == value else -1
            at = self.rng.randrange(tensor.numel())
            flat = tensor.flatten().clone()
            flat[slice(None) if self.rng.random() < 0.3 else at] = value
            tensors[name] = flat.view(tensor.shape)
            how = f"value {value}"
        elif how == "dtype":
            tensors[name] = tensor.to(
                self.rng.choice((torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64))
            )
        elif how == "shape":
            shapes = ((), (0,), (1, *tensor.shape), (*tensor.shape, 1), (tensor.numel() + 1,), (2, 3, 4, 5))
            tensors[name] = torch.zeros(self.rng.choice(shapes), dtype=tensor.dtype)
        elif how == "remove":
            del tensors[name]
        elif how == "rename":
            tensors[self.rng.choice((name + "x", "nets/", "optimizer/all/other", "meta:/999"))] = tensors.pop(name)
        else:
            tensors[self.rng.choice(("nets/more", "optimizer/all/more", "more", "meta:/998"))] = torch.zeros(3)
        return f"tensor {name} {how}"

    def _rows(self, path: Path) -> str:
        blob = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(blob[:8], "little")
        if begin < len(blob):
            at = self.rng.randrange(begin, len(blob))
            length = self.rng.choice((1, 8, len(blob)))
            blob[at : at + length] = bytes([self.rng.choice((0, 1, 127, 255))]) * len(blob[at : at + length])
        path.write_bytes(blob)
        return f"{path.name} bytes"


def seal(folder: Path, body: Any = None) -> None:
    """Write a manifest that fits the files in a folder as they are, as a hostile author would."""
    if body is None:
        body = msgspec.json.decode((folder / MANIFEST).read_bytes())["manifest"]
    body["files"] = {
        name: {"size": (folder / name).stat().st_size, "blake2b": files.digest((folder / name).read_bytes())}
        for name in body["files"]
    }
    outer = {"digest": files.digest(msgspec.json.encode(body)), "manifest": body}
    (folder / MANIFEST).write_bytes(files.pretty(outer))


def edit_meta(folder: Path, change: Any) -> None:
    """Change the parsed meta.json of a sealed folder in place, by a function; the digests fit afterwards."""
    value = msgspec.json.decode((folder / META).read_bytes())
    change(value)
    (folder / META).write_bytes(files.pretty(value))
    seal(folder)


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = safetensors.torch.load((folder / TENSORS).read_bytes())
    change(tensors)
    (folder / TENSORS).write_bytes(safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()}))
    seal(folder)


def edit_json(path: Path, change: Any) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def _places(tree: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key, f"{path}/{key}"
        if isinstance(value, dict | list):
            yield from _places(value, f"{path}/{key}")


__all__ = ["NASTY", "Forger", "edit_json", "edit_meta", "edit_tensors", "seal"]
