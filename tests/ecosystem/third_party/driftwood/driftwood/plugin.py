"""The plugin: a layout that stores what `full` stores, and an observer that counts what ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from oarlock.core import hookimpl
from oarlock.layouts.full import FullLayout

OARLOCK_API = 1
ended: Counter[str] = Counter()


class Driftwood:
    """`full` under another name: what counts here is how it is found."""

    name = "driftwood"

    def __init__(self) -> None:
        self._full = FullLayout()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)


@hookimpl
def register_layouts(register: Callable[[Any], None]) -> None:
    """Offer the layout."""
    register(Driftwood())


@hookimpl
def request_finished(reason: str) -> None:
    """Count endings by reason."""
    ended[str(reason)] += 1
