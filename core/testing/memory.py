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
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the bytes that ``work`` needs beside what is there when it starts."""
    before = active_bytes()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return max(0, int(mx.get_peak_memory()) - before)  # the peak is 0 where nothing was allocated
