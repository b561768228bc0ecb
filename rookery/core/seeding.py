"""Random streams by name: one root seed, and a path that says whose stream it is.

A stream is a pure function of (root, path): a replaced worker or a resumed run draws the same numbers for the same
unroll, and no generator state has to travel or be saved.
"""

from __future__ import annotations

import hashlib


def seed_of(root: int, *path: str | int) -> int:
    """A 63-bit seed, different for every path."""
    text = "/".join(str(part) for part in (root, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
