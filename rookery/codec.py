"""Trees of state as JSON plus named tensors, and back, without pickle.

A tree here is nested dict/list/tuple of arrays, tensors, bytes, str, bool, None and numbers of any size, NaN and
infinities included: the states of random generators and environments as they come. What JSON cannot say is written as
a dictionary of one tagged key ("$int", "$array", …). No objects: a tag names a shape of data, never a class.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rookery.errors import CheckpointError

MAX_DEPTH = 64  # nesting of a tree, far below the interpreter's recursion limit


def encode_tree(tree: Any, prefix: str = "tree") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree into JSON and tensors named `prefix/0`, `prefix/1`, …; numpy scalars become Python's."""
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, prefix, tensors, 0), tensors


def decode_tree(part: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `encode_tree` split; its arrays are views of `tensors`. CheckpointError if the two do not fit."""
    try:
        return _decode(part, tensors, 0)
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


def _encode(node: Any, prefix: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{prefix}: nested deeper than {MAX_DEPTH}, or a tree that contains itself")

    def store(array: np.ndarray | torch.Tensor) -> str:
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = host_copy(name, array)
        return name

    def inner(child: Any) -> Any:
        return _encode(child, prefix, tensors, depth + 1)

    match node:
        case np.generic():
            return inner(node.item())
        case None | bool() | str():
            return node
        case int():
            return node if abs(node) < 2**53 else {"$int": hex(node)}
        case float():
            return node if math.isfinite(node) else {"$float": repr(node)}
        case np.ndarray():
            return {"$array": store(node)}
        case torch.Tensor():
            return {"$tensor": store(node)}
        case bytes() | bytearray():
            return {"$bytes": store(np.frombuffer(node, np.uint8))}
        case list():
            return [inner(item) for item in node]
        case tuple():
            return {"$tuple": [inner(item) for item in node]}
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: inner(value) for key, value in node.items()}
            return {"$dict": [[inner(key), inner(value)] for key, value in node.items()]}
    raise CheckpointError(f"{prefix}: a {type(node).__name__} cannot be stored; use arrays, numbers and strings")


def _decode(node: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")

    def inner(child: Any) -> Any:
        return _decode(child, tensors, depth + 1)

    if isinstance(node, list):
        return [inner(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: inner(value) for key, value in node.items()}
    (body,) = node.values()
    match tag:
        case "$int":
            return int(body, 16)
        case "$float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body]
        case "$array":
            return tensors[body].numpy()
        case "$tensor":
            return tensors[body]
        case "$bytes":
            return tensors[body].numpy().tobytes()
        case "$tuple":
            return tuple(inner(item) for item in body)
        case "$dict":
            return {inner(key): inner(value) for key, value in body}
    raise ValueError(f"unknown tag {tag!r}")
