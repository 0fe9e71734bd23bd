"""What a step that was built and not evaluated will do: its operations by kind, and the bytes that `paged` gathers."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from oarlock.layouts.pages import Pages

VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten",
}  # fmt: skip
"""Operations that give another shape to the same bytes: no kernel runs, unless a reshape has to copy."""


def operations(*outputs: mx.array) -> Counter[str]:
    """Count the operations that ``outputs`` wait for, by kind."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return Counter(re.findall(r'label ="(\w+)"', text.getvalue()))


def dispatches(outputs: list[mx.array]) -> int:
    """Return how many of them run a kernel."""
    return sum(count for kind, count in operations(*outputs).items() if kind not in VIEWS)


@contextmanager
def gathered() -> Iterator[list[int]]:
    """Yield a list that fills with the bytes of every gather of blocks, each read once and written once."""
    copies: list[int] = []
    gather = Pages._gather

    def counted(self: Pages, *rest: Any) -> mx.array:
        copy = gather(self, *rest)
        copies.append(copy.nbytes)
        return copy

    Pages._gather = counted  # type: ignore[method-assign]
    try:
        yield copies
    finally:
        Pages._gather = gather  # type: ignore[method-assign]
