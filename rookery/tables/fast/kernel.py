"""Machine code for the hot loops of the replay memory, where numba (extra `fast`) is installed.

A kernel is a plain function of arrays and numbers; beside each stands numpy code with the same signature and the same
results, bit for bit. numba is imported when the first replay memory is made, not before: that costs 0.4 s. Compiled
code is kept on disk, in a directory of our own (`cache.py`), so that only the first run on a machine waits for the
compiler. Kernels are compiled here, for the types they are declared with, never in the middle of a draw.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rookery.tables.fast import cache

_SETTINGS = threading.Lock()  # numba's are global, and loaders may compile beside the learner


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
    module = numba()
    assert module is not None, "numba is not installed: `pick` chooses the numpy code"
    njit = functools.partial(module.njit, signature, error_model="numpy", nogil=nogil)
    folder = cache.directory()
    if folder is None:
        return njit()(function)
    try:
        with _kept_in(module.config, folder):
            return njit(cache=True)(function)
    except RuntimeError:  # numba cannot write there
        return njit()(function)


@contextmanager
def _kept_in(config: Any, folder: Path) -> Iterator[None]:
    """numba looks in this directory and in no other; the settings of the user's own kernels stay what they were."""
    with _SETTINGS:
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(folder), "UserProvidedCacheLocator"
        try:
            yield
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def plain(array: np.ndarray, dtype: type) -> np.ndarray:
    """A vector as kernels take it: of this type, contiguous, aligned and writable; a copy only if need be."""
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.behaved else array.copy()
