"""Keeps a large model wired in GPU memory while there is work. It does nothing on devices without such a limit."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

_SHARE = 0.5
"""The limit is raised where the weights exceed this share of what the device recommends."""

_scopes = 0
_before = 0
_guard = threading.Lock()


class Residency:
    """A re-enterable scope: the outermost raises the wired limit, the last to leave restores it."""

    def __init__(self, model: Any) -> None:
        self._limit = 0
        if mx.metal.is_available():
            recommended = int(mx.device_info()["max_recommended_working_set_size"])
            weights: int = tree_reduce(lambda total, array: total + array.nbytes, model.parameters(), 0)
            self._limit = recommended if weights > _SHARE * recommended else 0

    def __enter__(self) -> Residency:
        """Raise the limit where the model needs it."""
        global _scopes, _before  # noqa: PLW0603 - the limit is the process's, so is its count
        if self._limit:
            with _guard:
                if not _scopes:
                    _before = mx.set_wired_limit(self._limit)
                _scopes += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the limit on the last exit, after the device is done."""
        global _scopes  # noqa: PLW0603
        if self._limit:
            with _guard:
                _scopes -= 1
                if not _scopes:
                    mx.synchronize()
                    mx.set_wired_limit(_before)
