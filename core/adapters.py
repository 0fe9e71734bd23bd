"""The adapters that requests of an engine may name: which are applied per row, and which one the group has entered.

It changes no model itself: adapters and their kinds do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from oarlock.core.choices import Choice, parse_options
from oarlock.core.contracts.adapter import AdapterBank, AdapterKind
from oarlock.core.errors import InvalidConfigValue, UnknownName
from oarlock.core.manager import PluginSet
from oarlock.core.row import Row

Options = dict[str, dict[str, Any]]


class Adapters:
    """Registered adapters, and those of the configuration once `open` has put them onto the model."""

    def __init__(self, model: Any, named: Mapping[str, Choice], plugins: PluginSet) -> None:
        """Look kinds and options up. Raises `errors.InvalidConfigValue`, or what resolving a kind's name raises."""
        self._model, self._plugins, self._named = model, plugins, named
        self._kinds: list[tuple[AdapterKind, dict[str, Any]]] = []
        self._banks: list[AdapterBank] = []
        self._of: dict[str, AdapterBank] = {}
        self._entered = ""
        self._leave: Callable[[], None] | None = None
        by_kind: Options = {}
        for name, choice in named.items():
            kind = plugins.resolve("adapter", choice.name)
            if not isinstance(kind, AdapterKind):
                raise InvalidConfigValue(choice.key, choice.name, "kinds of adapters; requests name this one by itself")
            if name in plugins.registries.adapters:
                raise InvalidConfigValue("adapters", name, "names that no plugin registered")
            by_kind.setdefault(choice.name, {})[name] = parse_options(kind.options, choice.options, choice.key)
        self._kinds = [(plugins.resolve("adapter", kind), options) for kind, options in by_kind.items()]

    def open(self) -> None:
        """Put the configured adapters onto the model. Raises `errors.AdapterRefused` with the model as it was."""
        try:
            for kind, options in self._kinds:
                bank = kind.open(self._model, options)
                self._banks.append(bank)
                self._of.update(dict.fromkeys(options, bank))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take them off again, the last first. Idempotent."""
        with contextlib.ExitStack() as stack:
            banks, self._banks = self._banks, []
            for bank in banks:
                stack.callback(bank.close)

    def group(self, name: str) -> str:
        """Return what rows of adapter ``name`` have to share: the name, or "" where it is applied per row.

        Raises `errors.UnknownName` with close matches, or what resolving a plugin's adapter raises.
        """
        bank = self._of.get(name)
        if bank is not None:
            return "" if name in bank.per_row else name
        try:
            known = not name or not isinstance(self._plugins.resolve("adapter", name), AdapterKind)
        except UnknownName:
            known = False
        if not known:
            own = (item.name for item in self._plugins.registries.adapters if not isinstance(item, AdapterKind))
            raise UnknownName("adapter", name, [*self._named, *own])
        return name

    def identity(self, name: str) -> str:
        """Return what names the weights of an adapter, "" for none; where its kind does not say, that is its name."""
        known = getattr(self._of.get(name), "identities", {}).get(name, "")
        return f"{name}:{known}" if known else name

    def lasting(self, name: str) -> bool:
        """Return whether `identity` holds in any process."""
        return not name or self.identity(name) != name

    def applied(self, lines: Sequence[Row]) -> AbstractContextManager[Any]:
        """Return a context in which line i of a forward is computed with the adapter of ``lines[i]``.

        A row may stand for several lines, and no lines at all are the bare model.
        """
        if not self._banks or not any(row.request.adapter for row in lines):
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for bank in self._banks:
            names = [row.request.adapter or "" for row in lines]
            mine = [name if name in bank.per_row else "" for name in names]
            if any(mine):
                stack.enter_context(bank.applied(mine))
        return stack

    def switch(self, name: str) -> None:
        """Leave the adapter that the group entered and enter ``name``; if that raises, none is entered."""
        if name == self._entered:
            return
        leave, self._leave, self._entered = self._leave, None, ""
        if leave is not None:
            leave()
        if name:
            bank = self._of.get(name)
            entered = bank.enter(name) if bank is not None else self._enter(name)
            self._leave, self._entered = entered, name

    def _enter(self, name: str) -> Callable[[], None]:
        leave: Callable[[], None] = self._plugins.resolve("adapter", name).enter(self._model)
        return leave

    def explain(self) -> list[dict[str, str]]:
        """Return one line for each adapter of the configuration."""
        return [
            {
                "part": f"adapter {name}",
                "kind": choice.name,
                "choice": ("by group" if self.group(name) else "per row") if name in self._of else "not opened",
                "detail": "",
                "reason": f"config {choice.key}",
            }
            for name, choice in self._named.items()
        ]
