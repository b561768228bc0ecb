"""Machine code for the hot loops of the replay memory, where numba (extra `fast`) is installed.

A kernel is a plain function of arrays and numbers; beside each stands numpy code with the same signature and the same
results, bit for bit. numba is imported when the first replay memory is made, not before: that costs 0.4 s. Compiled
code is kept on disk, so that only the first run on a machine waits for the compiler. Kernels are compiled here, for
the types they are declared with, never in the middle of a draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


@functools.cache
def numba() -> ModuleType | None:
    try:
        import numba
    except ImportError:  # not installed, or not made for this numpy
        return None
    return numba


def pick(function: Callable[..., Any], signature: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for `signature`, or the numpy code that stands in for it."""
    return compiled(function, signature) if numba() else otherwise


@functools.cache
def compiled(function: Callable[..., Any], signature: str, nogil: bool = False) -> Callable[..., Any]:
    """With `nogil` other threads go on meanwhile: for work that is long beside the wait for the lock."""
    njit = functools.partial(numba().njit, signature, error_model="numpy", nogil=nogil)
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # numba finds no directory that it could keep the code in
        return njit()(function)


def plain(array: np.ndarray, dtype: type) -> np.ndarray:
    """A vector as kernels take it: of this type, contiguous, aligned and writable; a copy only if need be."""
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.behaved else array.copy()
