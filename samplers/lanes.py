"""Lines of scores spread over the cores of a CPU, which computes on one thread a stream. A GPU takes them all at once.

A model's products use all cores by themselves; what follows them over a whole vocabulary would leave all but one idle.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence

import mlx.core as mx

MOST = 4
"""Streams at most: beyond, memory is what they wait for."""
LEAST = 1 << 18
"""Scores of a part at least: a stream that waits for another costs some microseconds."""


def cores() -> int:
    """Return how many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Own(threading.local):
    """The streams of a thread beside its default one: MLX lends none of another thread's."""

    streams: tuple[mx.Stream, ...] = ()

    def get(self, count: int) -> Sequence[mx.Stream]:
        while len(self.streams) < count:
            self.streams = (*self.streams, mx.new_stream(mx.cpu))
        return self.streams[:count]


_own = _Own()


def spread(shape: Sequence[int], compute: Callable[[slice], mx.array]) -> mx.array:
    """Return the lines that ``compute`` gives for all lines of scores of this shape, ``[R, V]``, one behind the other.

    It is called for some of them at a time, and must give what it gives for all. Nothing is evaluated here.
    """
    lines, size = shape
    count = min(MOST, lines, lines * size // LEAST)
    if count > 1:
        count = min(count, cores()) if mx.default_device().type == mx.DeviceType.cpu else 1
    if count <= 1:
        return compute(slice(0, lines))
    bounds = [lines * part // count for part in range(count + 1)]
    slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
    parts = [compute(slices[0])]
    for part, stream in zip(slices[1:], _own.get(count - 1), strict=True):
        with mx.stream(stream):
            parts.append(compute(part))
    return mx.concatenate(parts)
