"""Which line of a model keeps rows of different length from sharing a forward. It is asked at bind only."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx


def line_of(error: BaseException, model: Any) -> str | None:
    """Return the line of the model's own files that raised, itself or in mlx or numpy; None where something else did."""
    files = _files(model)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename in files:
            return shown(frame.f_code.co_filename, line)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("mlx", "numpy"):
            return None
    return None


@contextlib.contextmanager
def one_position_for_all(model: Any) -> Iterator[list[str]]:
    """Collect the lines of the model that rotate several rows by one integer position, or count on from one.

    mlx offers no hook, so both are wrapped while the block runs; calls of other threads go through uncounted.
    """
    files, lines, mine, rope, arange = _files(model), [], threading.get_ident(), mx.fast.rope, mx.arange

    def note(position: Any) -> None:
        if threading.get_ident() != mine or not isinstance(position, int) or position <= 0:
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "mlx":
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename in files:
            lines.append(shown(frame.f_code.co_filename, frame.f_lineno))

    def rotating(x: mx.array, *args: Any, **named: Any) -> mx.array:
        if x.shape[0] > 1:
            note(named.get("offset", 0))
        return rope(x, *args, **named)

    def counting(*args: Any, **named: Any) -> mx.array:
        if len(args) > 1:
            note(args[0])
        return arange(*args, **named)

    setattr(mx.fast, "rope", rotating)  # noqa: B010 - its stub says that it never changes
    setattr(mx, "arange", counting)  # noqa: B010 - likewise
    try:
        yield lines
    finally:
        setattr(mx.fast, "rope", rope)  # noqa: B010 - likewise
        setattr(mx, "arange", arange)  # noqa: B010 - likewise


@contextlib.contextmanager
def lines_run(model: Any) -> Iterator[set[tuple[str, int]]]:
    """Collect the lines of the model's own files that this thread runs, each as its file and number."""
    files, seen = _files(model), set()

    def inside(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return inside

    def called(frame: FrameType, _event: str, _argument: Any) -> Any:
        return inside if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield seen
    finally:
        sys.settrace(before)


def shown(file: str, line: int) -> str:
    """Return a line with its place, as messages show it."""
    return f"{Path(file).name}:{line} ({linecache.getline(file, line).strip()})"


def _files(model: Any) -> set[str]:
    """Return the files of the modules that define the model's parts, those of mlx itself apart."""
    modules = {type(part).__module__ for part in model.modules()}
    found = (sys.modules.get(name) for name in modules if name.partition(".")[0] != "mlx")
    return {file for module in found if (file := getattr(module, "__file__", None))}
