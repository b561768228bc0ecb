"""Trees of state as JSON plus named tensors, and back, without pickle.

A tree here is nested dict/list/tuple of arrays, tensors, bytes, str, bool, None and numbers of any size, NaN and
infinities included: the states of random generators and environments as they come. What JSON cannot say is written as
a dictionary of one tagged key ("$int", "$array", …). Long text and long lists of numbers go to tensors too: JSON is
slow to read, and its size is limited. No objects: a tag names a shape of data, never a class.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import torch

from rookery.core.errors import CheckpointError
from rookery.storage.limits import MAX_ELEMENTS

MAX_DEPTH = 64  # nesting of a tree, far below the interpreter's recursion limit
LONG = 64  # numbers of a list, or of a list of lists, from which on they go to a tensor
MAX_AXES = 8  # of lists of lists that do
LONG_TEXT = 1024  # characters from which on text does
MAX_LISTED = 1 << 23  # numbers of a tree that may come back in lists, which take four times the memory of a tensor

_PLAIN = {bool: "b", int: "i", float: "f", np.bool_: "b", np.float16: "f", np.float32: "f", np.float64: "f"}
_PLAIN |= dict.fromkeys((np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32), "i")
_DTYPES = {"b": np.bool_, "i": np.int64, "f": np.float64}
_LISTED = (torch.bool, torch.int64, torch.float64)


def encode_tree(tree: Any, prefix: str = "tree") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree into JSON and tensors named `prefix/0`, `prefix/1`, …; numpy scalars become Python's."""
    writer = _Writer(prefix)
    return writer.encode(tree, 0), writer.tensors


def decode_tree(part: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `encode_tree` split; its arrays are views of `tensors`. CheckpointError if the two do not fit."""
    try:
        return _Reader(tensors).decode(part, 0)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"stored state cannot be decoded ({type(error).__name__}: {error})") from error


def host_copy(name: str, array: torch.Tensor | np.ndarray) -> torch.Tensor:
    """A private contiguous copy in host memory: views of one flat vector are stored each by itself."""
    if isinstance(array, torch.Tensor):
        return array.detach().to("cpu", copy=True).contiguous()
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))
    except (TypeError, AttributeError) as error:
        kind = getattr(array, "dtype", type(array).__name__)
        raise CheckpointError(f"{name}: {kind} cannot be stored in a checkpoint; use numbers or strings") from error


class _Writer:
    def __init__(self, prefix: str):
        self.prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}
        self._values = self._listed = 0

    def encode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.prefix}: nested deeper than {MAX_DEPTH}, or a tree that contains itself")
        self._values += 1
        if self._values > MAX_ELEMENTS:
            raise CheckpointError(f"{self.prefix}: more than {MAX_ELEMENTS:,} values besides arrays; use arrays")

        def inner(child: Any) -> Any:
            return self.encode(child, depth + 1)

        match node:
            case np.generic():
                return inner(node.item())
            case str():
                return node if len(node) < LONG_TEXT else {"$text": self._store(self._utf8(node))}
            case None | bool():
                return node
            case int():
                return node if abs(node) < 2**53 else {"$int": hex(node)}
            case float():
                return node if math.isfinite(node) else {"$float": repr(node)}
            case np.ndarray():
                return {"$array": self._store(node)}
            case torch.Tensor():
                return {"$tensor": self._store(node)}
            case bytes() | bytearray():
                return {"$bytes": self._store(np.frombuffer(node, np.uint8))}
            case list():
                return self._list(node, depth)
            case tuple():
                return {"$tuple": self._list(list(node), depth)}
            case dict():
                if all(isinstance(key, str) and not key.startswith("$") for key in node):
                    return {key: inner(value) for key, value in node.items()}
                return {"$dict": [[inner(key), inner(value)] for key, value in node.items()]}
        raise CheckpointError(f"{self.prefix}: {type(node).__name__} cannot be stored; use arrays, numbers and strings")

    def _list(self, node: list[Any], depth: int) -> Any:
        numbers = _numbers(node)
        if numbers is None:
            return [self.encode(item, depth + 1) for item in node]
        self._listed += numbers.size
        if self._listed > MAX_LISTED:
            raise CheckpointError(f"{self.prefix}: lists of more than {MAX_LISTED:,} numbers in all; use arrays")
        return {"$list": self._store(numbers)}

    def _store(self, array: np.ndarray | torch.Tensor) -> str:
        name = f"{self.prefix}/{len(self.tensors)}"
        self.tensors[name] = host_copy(name, array)
        return name

    def _utf8(self, text: str) -> np.ndarray:
        try:
            return np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{self.prefix}: text that is not Unicode cannot be stored ({error})") from error


def _numbers(node: list[Any]) -> np.ndarray | None:
    """A long list of numbers of one kind, or of such lists of one length, as an array; None for any other list."""
    shape: list[int] = []
    first: Any = node
    while type(first) is list and first and len(shape) < MAX_AXES:
        shape.append(len(first))
        first = first[0]
    if not LONG <= math.prod(shape) <= MAX_LISTED or type(first) not in _PLAIN:
        return None
    level = [node]
    for size in shape:
        if any(type(row) is not list or len(row) != size for row in level):
            return None
        level = list(chain.from_iterable(level))
    kinds = {_PLAIN.get(kind, "") for kind in set(map(type, level))}
    if len(kinds) > 1 or "" in kinds:
        return None
    try:
        return np.array(level, _DTYPES[kinds.pop()]).reshape(shape)
    except OverflowError:  # of more than 64 bits
        return None


class _Reader:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors
        self._used: set[str] = set()
        self._listed = 0

    def decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.decode(value, depth + 1) for key, value in node.items()}
        (body,) = node.values()
        return self._tagged(tag, body, depth)

    def _tagged(self, tag: str, body: Any, depth: int) -> Any:
        match tag:
            case "$int":
                return int(body, 16)
            case "$float":
                return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body]
            case "$array":
                return self._tensor(body).numpy()
            case "$tensor":
                return self._tensor(body)
            case "$bytes":
                return self._tensor(body).numpy().tobytes()
            case "$text":
                return self._tensor(body).numpy().tobytes().decode()
            case "$list":
                return self._list(self._tensor(body))
            case "$tuple" if isinstance(body, list):
                return tuple(self.decode(item, depth + 1) for item in body)
            case "$tuple" if isinstance(body, dict) and "$list" in body:
                return tuple(self.decode(body, depth))
            case "$dict":
                return {self.decode(key, depth + 1): self.decode(value, depth + 1) for key, value in body}
        raise ValueError(f"unknown tag {tag!r}, or not its contents")

    def _tensor(self, name: str) -> torch.Tensor:
        """Each tensor has one place in a tree: a small file must not become a large tree."""
        if name in self._used:
            raise ValueError(f"tensor {name!r} has two places")
        self._used.add(name)
        return self._tensors[name]

    def _list(self, numbers: torch.Tensor) -> list[Any]:
        self._listed += numbers.numel()
        if self._listed > MAX_LISTED or numbers.dtype not in _LISTED or not 1 <= numbers.dim() <= MAX_AXES:
            raise ValueError(f"a list of {numbers.numel()} numbers of {numbers.dtype}, {list(numbers.shape)}")
        return numbers.tolist()
