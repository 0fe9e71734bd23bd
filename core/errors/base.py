"""The root of the exception tree, and near misses for names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known name, or ``""`` when none is near."""
    folded = {other.lower().replace("-", "_"): other for other in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


class OarlockError(Exception):
    """Root of everything oarlock raises on purpose."""
