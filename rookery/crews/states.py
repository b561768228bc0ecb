"""States of actors in messages: the tree as a checkpoint stores it (`storage/codec.py`), its tensors as bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rookery.storage.codec import decode_tree, encode_tree

KINDS = "biufc"  # dtypes that are plain numbers


def pack_state(state: Any) -> dict[str, Any]:
    part, tensors = encode_tree(state)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return {"tree": part, "arrays": {name: (x.dtype.str, x.shape, x.tobytes()) for name, x in arrays.items()}}


def unpack_state(packed: dict[str, Any]) -> Any:
    """The state; its arrays are writable. ValueError or CheckpointError for what `pack_state` would not write."""
    arrays = packed["arrays"].items()
    return decode_tree(packed["tree"], {name: torch.from_numpy(_array(name, *body)) for name, body in arrays})


def _array(name: str, dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
    if kind.kind not in KINDS or any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{name}: {len(data)} bytes are not {dtype}{list(shape)}")
    return np.frombuffer(data, kind).reshape(shape).copy()
