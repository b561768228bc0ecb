"""Copies of frames, large ones around the cache.

A batch of 512 stacks and as many successors is 29 MB. An ordinary store first reads the line that it is about to
overwrite, and leaves it in the cache, where it takes the place of the tree and of the learner's data. A streaming
store does neither: such a batch takes 2.1 ms instead of 3.3, and the update that follows finds its tree in the cache.
What is small and read at once should be in the cache, so small batches are copied the ordinary way.

numba has no word for such a store, nor for the fence behind the last one; `_instructions` adds the two.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rookery.tables.fast import kernel

LARGE = 4 << 20  # bytes; at 2 MB both ways take the same time, reading included, at 8 MB streaming wins
LINE = 16  # bytes that one instruction stores; where it stores them must be a multiple of it

_SIGNATURE = "void(uint8[::1], int64, int32[:,::1], uint8[::1])"
_store: Any = None  # (to, to_at, from, from_at): LINE bytes
_fence: Any = None  # (): what was stored is there for every thread


def copy(frames: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out[w * M + m] = frames[rows[w, m]], for frames [F, size] and rows [W, M] int32.

    Rows are clipped: no number that a file could contain makes this read elsewhere.
    """
    assert out.shape == (rows.size, frames.shape[1]), (out.shape, rows.shape, frames.shape)
    streaming = _streaming() if out.nbytes >= LARGE and out.ctypes.data % LINE == 0 else None
    if streaming is not None:
        streaming(frames.reshape(-1), frames.shape[1], rows, out.reshape(-1))
    else:
        frames.take(rows.ravel(), axis=0, out=out, mode="clip")  # any other mode makes a copy of `out` first


def prepare(nbytes: int) -> None:
    """Compile what a copy of that many bytes needs, now: not in the middle of a draw."""
    if nbytes >= LARGE:
        _streaming()


def _copy(frames, size, rows, out) -> None:
    """Frame by frame in all W: what an observation shares with its successor is read from memory once."""
    last = len(frames) // size - 1
    for m in range(rows.shape[1]):
        for w in range(rows.shape[0]):
            begin, to = min(max(np.int64(rows[w, m]), 0), last) * size, (w * rows.shape[1] + m) * size
            k, whole = 0, size - LINE
            while (to + k) % LINE and k < size:
                out[to + k] = frames[begin + k]
                k += 1
            while k <= whole:
                _store(out, to + k, frames, begin + k)
                k += LINE
            while k < size:
                out[to + k] = frames[begin + k]
                k += 1
    _fence()


def _streaming() -> Any:
    """The compiled `_copy`, or None."""
    if kernel.numba() is None:
        return None
    _instructions()
    return kernel.compiled(_copy, _SIGNATURE, nogil=True)  # the learner goes on while a loader copies


@functools.cache
def _instructions() -> None:
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    line = ir.VectorType(ir.IntType(8), LINE).as_pointer()

    def pointer(context, builder, kind, array, at):
        data = context.make_array(kind)(context, builder, array).data
        return builder.bitcast(builder.gep(data, [at]), line)

    @intrinsic
    def store(typing, to, to_at, source, source_at):
        def generate(context, builder, signature, args):
            what = builder.load(pointer(context, builder, signature.args[2], *args[2:]), align=1)
            stored = builder.store(what, pointer(context, builder, signature.args[0], *args[:2]), align=LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(to, to_at, source, source_at), generate

    @intrinsic
    def fence(typing):
        def generate(context, builder, signature, args):
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    global _store, _fence
    _store, _fence = store, fence
