"""What MLX has allocated, and what some work needs beside it. Peaks need no clock."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx

SMALL = 1 << 16
"""Bytes below which nobody calls it a copy of a cache, or a leak."""


def active_bytes() -> int:
    """Return the bytes in use, once what is garbage is gone and the pool is empty."""
    gc.collect()
    return _in_use()


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the bytes that ``work`` needs beside what is there when it starts.

    What is garbage then stays until it is over: to collect it takes long where much lives, and would change neither.
    """
    before, collects = _in_use(), gc.isenabled()
    gc.disable()
    try:
        mx.reset_peak_memory()
        work()
        mx.synchronize()
    finally:
        if collects:
            gc.enable()
    return max(0, int(mx.get_peak_memory()) - before)  # the peak is 0 where nothing was allocated


def _in_use() -> int:
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())
