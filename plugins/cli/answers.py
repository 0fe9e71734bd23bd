"""The file of answers: one JSON object a line, whole lines only, whatever ends the process. It runs nothing.

A record with ``error`` is no answer: a resumed run drops it and asks again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from oarlock.plugins.cli.console import to_json
from oarlock.plugins.cli.failures import Failure

STDOUT = "-"

_BEGINNING = b'{"id": '
"""How every record begins: a torn line that does not is none of ours."""


class Answers:
    """Opens the file at once, so that a wrong path is noticed before a model is loaded; changes nothing in it yet.

    ``answered``: names that a resumed run need not ask again.
    """

    def __init__(self, path: str, *, resume: bool, overwrite: bool) -> None:
        self.path = Path(path)
        self.answered: set[str] = set()
        self._overwrite = overwrite
        self._file: Any  # binary, written to only
        if path == STDOUT:
            self._file = sys.stdout.buffer
            return
        self._file = self._guarded(self._open, self.path)
        try:
            if resume:
                self._guarded(self._resume)
            elif self.path.stat().st_size and not overwrite and self.path.is_file():
                msg = f"{path} has answers in it: --resume goes on with them, --overwrite drops them"
                raise Failure(msg)
        except BaseException:
            self._file.close()
            raise

    def begin(self) -> None:
        """Drop what is to be overwritten: called when the model is there."""
        if self._overwrite and self.path.is_file():
            self._guarded(self._file.truncate, 0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and flush it."""
        self._guarded(self._append, f"{to_json(record)}\n".encode())

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:  # the file is unbuffered: what is written is out, and closing has nothing left to fail with
            rest = rest[self._file.write(rest) :]
        self._file.flush()

    def _guarded(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            msg = f"cannot write {self.path}: {error.strerror or error}; when that is mended, go on with --resume"
            raise Failure(msg) from error

    def _open(self, path: Path) -> Any:
        regular = path.is_file() or not path.exists()
        file = path.open("ab" if regular else "wb", buffering=0)  # pipes and devices have no end to append to
        if regular:
            import fcntl  # not on Windows, where MLX is not either

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                msg = f"another run is writing {path}; wait for it, or name another file"
                raise Failure(msg) from None
        return file

    def _resume(self) -> None:
        """Read what is answered. Where the file holds errors or a torn last line, replace it by one without them."""
        useless = 0
        for name, _ in self._records():
            if name is None:
                useless += 1
            else:
                self.answered.add(name)
        if not useless:
            return
        target = self.path.resolve()  # a link stays one
        part = target.with_name(f"{target.name}.part")
        part.unlink(missing_ok=True)
        old, self._file = self._file, self._open(part)
        with old:  # its lock is kept until the new file, locked as well, stands in its place
            for name, line in self._records():
                if name is not None:
                    self._append(line)
            os.fsync(self._file.fileno())
            shutil.copymode(target, part)
            part.replace(target)

    def _records(self) -> Iterator[tuple[str | None, bytes]]:
        """Yield each line with the name that it answers, or None."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield self._name(number, line), line

    def _name(self, number: int, line: bytes) -> str | None:
        """Return whom a line answers; None for an error, and for what a crash left of a line."""
        try:
            if not line.endswith(b"\n") and line.startswith(_BEGINNING[: len(line)]):
                return None
            record = json.loads(line)
            return None if "error" in record else str(record["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            msg = f"line {number} of {self.path} is no answer of `oarlock batch`: is it the right file to resume?"
            raise Failure(msg) from None


def check_paths(source: str, output: str) -> None:
    """Refuse to read and write one file."""
    if STDOUT in (source, output) or not (Path(source).exists() and Path(output).exists()):
        return
    if Path(source).samefile(output):
        msg = "IN.jsonl and OUT.jsonl are one file"
        raise click.UsageError(msg)
