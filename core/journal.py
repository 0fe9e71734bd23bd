"""A log of what was asked of an engine, applied between steps: whoever applies the same log runs the same schedule.

It holds no engine; `journaled.JournaledEngine` is the one that is driven by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from oarlock.core.errors import UnsupportedFeature
from oarlock.core.request import Request, SamplingParams
from oarlock.core.row import Row

HERE = ("on_token", "on_admitted", "trace", "inputs", "sampling", "prompt", "messages")
"""Fields of a request that are not logged as they are: what stays where it was submitted, and what is logged otherwise."""

Record = Mapping[str, Any]
"""What one step begins with: ``time``, the clock of the whole step, and ``events``, in order. Plain data, as JSON has it."""


class Journal(Protocol):
    """Where an engine's events go, and where they come from. Called by the driving thread only, in one order on all ranks."""

    leads: bool
    """Whether events come from this process; the others are told."""

    def exchange(self, record: Record | None, digest: bytes) -> Record:
        """Give the next step's record (None where this process does not lead) and return what all ranks apply.

        Called before each step. ``digest`` says what was done so far. Raises `errors.ScheduleDiverged` where ranks
        differ in it, and `errors.RankLost` where one does not answer.
        """
        ...

    def share(self, text: str | None) -> str:
        """Return the text of the leading process; the others give None. Called inside a step."""
        ...


class Alone:
    """The journal of a process that is by itself."""

    leads = True

    def exchange(self, record: Record | None, digest: bytes) -> Record:
        """Return the record."""
        assert record is not None
        return record

    def share(self, text: str | None) -> str:
        """Return the text."""
        assert text is not None
        return text


@attrs.define(eq=False)
class Recorded:
    """Writes what goes through another journal into a file of JSON lines, for `Replayed`."""

    journal: Journal
    file: IO[str]

    @property
    def leads(self) -> bool:
        """Whether the other journal leads."""
        return self.journal.leads

    def exchange(self, record: Record | None, digest: bytes) -> Record:
        """Write and return what all ranks apply."""
        agreed = self.journal.exchange(record, digest)
        self._write({"step": agreed})
        return agreed

    def share(self, text: str | None) -> str:
        """Write and return what all ranks were told."""
        agreed = self.journal.share(text)
        self._write({"told": agreed})
        return agreed

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


class Replayed:
    """Reads what `Recorded` wrote. At its end the engine is closed, unless the log has done that."""

    leads = False

    def __init__(self, path: Path) -> None:
        self._lines: Iterator[str] = iter(path.read_text(encoding="utf-8").splitlines())
        self._time = 0.0

    def exchange(self, record: Record | None, digest: bytes) -> Record:
        """Return the next record."""
        line = next(self._lines, None)
        found: Record = {"time": self._time, "events": [{"close": True}]} if line is None else json.loads(line)["step"]
        self._time = found["time"]
        return found

    def share(self, text: str | None) -> str:
        """Return what was told next."""
        return str(json.loads(next(self._lines))["told"])


def fixed(request: Request, row: Row) -> dict[str, Any]:
    """Return a request as plain data in which nothing is left open: its tokens, its id and its seed are those of ``row``.

    Raises `errors.UnsupportedFeature` for what cannot be told to another process.
    """
    if request.inputs is not None:
        raise UnsupportedFeature("inputs", "prepared inputs are not logged, and this engine's other ranks need them")
    if callable(request.namespace):
        raise UnsupportedFeature("namespace", "a callable is not logged; give its value")
    fields = {each.name: getattr(request, each.name) for each in attrs.fields(Request) if each.name not in HERE}
    sampling = {each.name: getattr(request.sampling, each.name) for each in attrs.fields(SamplingParams)}
    whole = {**fields, "prompt_ids": row.prompt_ids, "id": row.id, "sampling": {**sampling, "seed": row.seed}}
    try:
        told: dict[str, Any] = json.loads(json.dumps(whole, default=_data))
    except TypeError as error:
        raise UnsupportedFeature("extra", f"it is not plain data, so it is not logged ({error})") from error
    return told


def _data(value: Any) -> Any:
    """Return what JSON has for a mapping that is no dict."""
    if isinstance(value, Mapping):
        return dict(value)
    msg = f"{type(value).__name__} is not JSON"
    raise TypeError(msg)
