"""States of environments in messages, without torch (`states.py` is for those who have loaded it anyway).

Trees of dicts, lists, tuples, arrays, text, bytes and numbers of any size. What a message cannot say is a list with
its kind first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = "biufc"  # dtypes that are plain numbers


def pack(node: Any) -> Any:
    match node:
        case np.generic():
            return pack(node.item())
        case None | bool() | float() | str() | bytes():
            return node
        case int():
            return node if abs(node) < 2**63 else ["int", hex(node)]
        case np.ndarray() if node.dtype.kind in KINDS:
            return ["array", node.dtype.str, list(node.shape), np.ascontiguousarray(node).tobytes()]
        case list() | tuple():
            return ["list" if isinstance(node, list) else "tuple", [pack(item) for item in node]]
        case dict():
            return ["dict", [[pack(key), pack(value)] for key, value in node.items()]]
    raise ValueError(f"{type(node).__name__} cannot be stored; use arrays, numbers and strings")


def unpack(node: Any) -> Any:
    if not isinstance(node, list):
        return node
    kind, *body = node
    if kind == "int":
        return int(body[0], 16)
    if kind == "array":
        dtype, shape, data = body
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    if kind == "dict":
        return {unpack(key): unpack(value) for key, value in body[0]}
    items = [unpack(item) for item in body[0]]
    return tuple(items) if kind == "tuple" else items
