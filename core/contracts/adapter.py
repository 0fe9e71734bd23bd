"""Adapters: what changes a model's arithmetic for some requests only. They own no rows and no caches.

A request names an adapter and never a path or code: either one that a plugin registered, or one that the section
``[adapters]`` of the configuration opens through a registered kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Adapter(Protocol):
    """Registered by name, and named by requests. All rows of a group share it."""

    name: str

    def enter(self, model: Any) -> Callable[[], None]:
        """Change ``model`` and return what changes it back.

        Called on the driving thread, before the first row is admitted that needs it; what it returns is called once,
        before another adapter's row is admitted or when the engine goes idle.
        """
        ...


class AdapterBank(Protocol):
    """The opened adapters of one kind on one model, from engine's start to its end."""

    per_row: frozenset[str]
    """The names that `applied` serves: their rows decode beside rows of any other. The rest go by `enter`."""
    identities: Mapping[str, str]
    """Digests of the weights, by name. States of rows whose adapter has none do not outlive the process."""

    def applied(self, names: Sequence[str]) -> AbstractContextManager[Any]:
        """Return a context in which line i of a forward is computed with adapter ``names[i]``, "" with none.

        Entered around every forward in which a line names one of `per_row`, while its graph is built and by the
        thread that builds it; outside, and for lines without a name, the model computes exactly what it does alone.
        """
        ...

    def enter(self, name: str) -> Callable[[], None]:
        """Change the model for all rows, as `Adapter.enter` does. Called for names that `per_row` does not hold."""
        ...

    def close(self) -> None:
        """Put the model back as it was when the bank was opened. Called once, by the engine's end."""
        ...


@runtime_checkable
class AdapterKind(Protocol):
    """Registered by name; opens what the configuration names, all of it at once."""

    name: str
    options: type
    """An attrs class: the options of one adapter in the config file. Unknown keys are refused."""

    def open(self, model: Any, adapters: Mapping[str, Any]) -> AdapterBank:
        """Return a bank of ``adapters``, options by name, or raise `errors.AdapterRefused` and leave the model alone.

        Arrays must be evaluated here: another thread may drive the engine.
        """
        ...
