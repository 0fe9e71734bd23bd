"""Named things that plugins registered, one `Registry` a kind. It does not know where they come from.

Names that differ in case, or in ``-`` and ``_``, are one name: the second of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import attrs

from oarlock.core.contracts.constraint import ConstraintFactory
from oarlock.core.contracts.layout import CacheLayout
from oarlock.core.contracts.loader import Loader
from oarlock.core.contracts.method import Method
from oarlock.core.contracts.policy import Policy
from oarlock.core.contracts.proposer import Proposer
from oarlock.core.contracts.sampler import Processor, Sampler
from oarlock.core.contracts.state_cache import StateCacheFactory
from oarlock.core.errors import DuplicateName, InvalidPlugin, RegistryFrozen, UnknownName

T = TypeVar("T")


def fold(name: str) -> str:
    """Return the form under which names are compared."""
    return name.lower().replace("-", "_")


@attrs.define(eq=False)
class Registry(Generic[T]):
    """Items of one kind, by name, in order of registration.

    ``contract`` is the protocol whose members every item must have; None asks for a ``name`` only.
    """

    kind: str
    contract: type | None = None
    _items: dict[str, tuple[T, str]] = attrs.field(factory=dict, init=False)
    _folded: dict[str, str] = attrs.field(factory=dict, init=False)
    _frozen: bool = attrs.field(default=False, init=False)

    def check(self, item: T, owner: str) -> str:
        """Return the item's name; raise what `add` would, and change nothing."""
        name = getattr(item, "name", None)
        if isinstance(item, type) or not isinstance(name, str) or not name.strip():
            raise InvalidPlugin(owner, self.kind, item, "an instance whose name is a non-empty string")
        missing = [member for member in _members(self.contract) if not hasattr(item, member)]
        if missing:
            raise InvalidPlugin(owner, self.kind, item, f"an object that has {', '.join(missing)} as well")
        if self._frozen:
            raise RegistryFrozen(self.kind, name)
        taken = self._folded.get(fold(name))
        if taken is not None and self._items[taken][0] is not item:
            raise DuplicateName(self.kind, name, self._items[taken][1], owner)
        return name

    def add(self, item: T, owner: str) -> None:
        """Register ``item`` under its name; ``owner`` is "distribution version (plugin)", for messages.

        The identical object twice is fine. Raises `InvalidPlugin`, `DuplicateName` and `RegistryFrozen`.
        """
        name = self.check(item, owner)
        self._items.setdefault(name, (item, owner))
        self._folded[fold(name)] = name

    def get(self, name: str) -> T:
        """Return the item; `UnknownName` suggests the nearest."""
        return self._entry(name)[0]

    def owner(self, name: str) -> str:
        """Return who registered the name."""
        return self._entry(name)[1]

    def names(self) -> tuple[str, ...]:
        """Return the names in order of registration."""
        return tuple(self._items)

    def freeze(self) -> None:
        """Refuse every later `add`: a model is bound."""
        self._frozen = True

    def _entry(self, name: str) -> tuple[T, str]:
        if name not in self._items:
            raise UnknownName(self.kind, name, self._items)
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


def _members(contract: type | None) -> list[str]:
    if contract is None:
        return []
    return [n for n in (*contract.__annotations__, *vars(contract)) if not n.startswith("_") and n != "name"]


@attrs.frozen(eq=False)
class Registries:
    """One registry a kind. The hook ``register_<attribute>`` fills it."""

    layouts: Registry[CacheLayout] = attrs.field(factory=lambda: Registry("layout", CacheLayout))
    methods: Registry[Method] = attrs.field(factory=lambda: Registry("method", Method))
    proposers: Registry[Proposer] = attrs.field(factory=lambda: Registry("proposer", Proposer))
    samplers: Registry[Sampler] = attrs.field(factory=lambda: Registry("sampler", Sampler))
    processors: Registry[Processor] = attrs.field(factory=lambda: Registry("processor", Processor))
    constraints: Registry[ConstraintFactory] = attrs.field(factory=lambda: Registry("constraint", ConstraintFactory))
    policies: Registry[Policy] = attrs.field(factory=lambda: Registry("policy", Policy))
    adapters: Registry[Any] = attrs.field(factory=lambda: Registry("adapter"))
    loaders: Registry[Loader] = attrs.field(factory=lambda: Registry("loader", Loader))
    state_caches: Registry[StateCacheFactory] = attrs.field(factory=lambda: Registry("state_cache", StateCacheFactory))
    commands: Registry[Any] = attrs.field(factory=lambda: Registry("command"))

    def __iter__(self) -> Iterator[Registry[Any]]:
        return (getattr(self, attribute.name) for attribute in attrs.fields(Registries))

    def of(self, kind: str) -> Registry[Any]:
        """Return the registry of a kind, named as in messages: "layout", "method", ..."""
        for registry in self:
            if registry.kind == kind:
                return registry
        raise UnknownName("kind of plugin", kind, [registry.kind for registry in self])

    def add_all(self, items: Mapping[str, Iterable[Any]], owner: str) -> None:
        """Register ``items`` by kind, all or none."""
        # Validate all, then mutate: they may clash with each other too, so they are tried in fresh registries.
        trial, pairs = Registries(), [(kind, item) for kind, some in items.items() for item in some]
        for kind, item in pairs:
            self.of(kind).check(item, owner)
            trial.of(kind).add(item, owner)
        for kind, item in pairs:
            self.of(kind).add(item, owner)

    def freeze(self) -> None:
        """Freeze every registry."""
        for registry in self:
            registry.freeze()
