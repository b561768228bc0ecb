"""Ways to damage a file, for the tests that no damaged file is ever loaded."""

from __future__ import annotations

from pathlib import Path

KINDS = ("flip", "cut", "insert", "zero", "append", "swap", "remove")


def damage(path: Path, original: bytes, other: bytes, kind: str, where: float, bit: int, byte: bytes) -> bool:
    """Damage the file at `path`, `where` in [0, 1) of its length; whether it differs now from the original."""
    blob, at = bytearray(original), int(where * len(original))
    match kind:
        case "flip":
            blob[at] ^= 1 << bit
        case "cut":
            del blob[at:]
        case "insert":
            blob[at:at] = byte
        case "zero":
            blob[at:] = bytes(len(blob) - at)
        case "append":
            blob += b"\n"
        case "swap":
            blob = bytearray(other)
    if kind == "remove":
        path.unlink()
        return True
    path.write_bytes(blob)
    return blob != original  # zeros over zeros
