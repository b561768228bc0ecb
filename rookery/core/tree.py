"""Trees of arrays: an array, or a dict of trees. The only container code of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rookery.core.types import Tree


def map(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `fn` to every leaf (and the leaves at the same place of `others`)."""
    if isinstance(tree, dict):
        return {key: map(fn, value, *(other[key] for other in others)) for key, value in tree.items()}
    return fn(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    return [tree]


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Leaves by path, "a/b" for tree["a"]["b"]; a bare leaf has the path of its prefix."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}/{key}" if prefix else key)
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    return merged({}, flat)


def merged(tree: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """The tree with more leaves, each by its path; what is given stays as it is."""
    whole = map(lambda leaf: leaf, tree)
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = whole
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return whole


def to_torch(tree: Tree) -> Tree:
    """Torch views of numpy leaves; nothing is copied."""
    return map(torch.from_numpy, tree)


def concat(trees: Sequence[Tree], axis: int) -> Tree:
    return map(
        lambda *parts: torch.cat(parts, axis) if torch.is_tensor(parts[0]) else np.concatenate(parts, axis), *trees
    )


def map_fields(record: Any, fn: Callable[..., Any], *others: Any, skip: Sequence[str] = ()) -> Any:
    """Apply `fn` to every leaf of every field of a dataclass; None fields and those in `skip` stay as they are."""
    changed = {
        f.name: map(fn, getattr(record, f.name), *(getattr(other, f.name) for other in others))
        for f in dataclasses.fields(record)
        if f.name not in skip and getattr(record, f.name) is not None
    }
    return dataclasses.replace(record, **changed)


replace = dataclasses.replace
