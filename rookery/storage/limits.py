"""How large the JSON and the tensor headers of a checkpoint may be, so that a forged one costs little.

The worst file within these limits is read, or refused, in less than a second and a few hundred megabytes. They hold
where files are written too: what could not be read back is not written.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager

MAX_MANIFEST = 2 << 20  # bytes; a replay memory of 1 TB has about 4,000 segments of 300 bytes each
MAX_JSON = 8 << 20  # bytes of meta.json
MAX_ELEMENTS = 300_000  # values in one JSON file; about 2 µs each to parse, check and decode
MAX_HEADER = 2 << 20  # bytes of the header of a safetensors file: about 20,000 tensors, 20 µs each

_WORD = struct.Struct("<Q")


def json_excess(blob: bytes) -> str:
    """Why JSON text is too much to parse, or nothing."""
    if len(blob) > MAX_JSON:
        return f"has {len(blob):,} bytes, more than {MAX_JSON:,}"
    # Every value but the first of a list or dictionary has a comma before it. Those inside strings count too.
    elements = blob.count(b",") + blob.count(b"[") + blob.count(b"{")
    return f"has {elements:,} values, more than {MAX_ELEMENTS:,}" if elements > MAX_ELEMENTS else ""


def header_excess(blob: bytes) -> str:
    """Why the header of a safetensors file is too much to parse, or nothing."""
    size = _WORD.unpack_from(blob)[0] if len(blob) >= _WORD.size else 0
    return f"has a header of {size:,} bytes, more than {MAX_HEADER:,}" if size > MAX_HEADER else ""


@contextmanager
def collector_paused() -> Iterator[None]:
    """While a large tree is made: garbage collection would find nothing, and takes longer than making the tree."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
