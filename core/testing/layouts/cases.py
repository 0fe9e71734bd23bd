"""Which layers a layout is tried on: every kind that it holds, with and without attention that takes handles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from oarlock.core.config import EngineConfig
from oarlock.core.contracts.composition import APART, AttendingLayout, BoundLayer
from oarlock.core.contracts.layout import CacheLayout, LayerInfo
from oarlock.core.errors import LayoutRefused
from oarlock.core.layout_choice import bind_layer
from oarlock.core.manager import PluginSet
from oarlock.core.testing.layouts.rows import Layers
from oarlock.core.testing.layouts.toys import WINDOW, describe, toy
from oarlock.core.testing.subjects import installed_with, name_of, resolved

DEPTH = 2
"""Layers of one case: what they share must serve both."""
SINKS = 3
APART_KINDS = ("full", "recurrent")
"""What a layout that keeps rows apart is put around."""

_VARIANTS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "full": (("", {"attendable": True}), ("-arrays", {})),
    "rotating": (("", {"attendable": True}), ("-sinks", {"keep": SINKS, "attendable": True}), ("-arrays", {})),
}
"""The last of each is for layouts that hand out handles where they may: there they must not."""


@attrs.frozen(eq=False)
class Case:
    """Layers of one kind, as `layers` binds them; ``large``: with a window of hundreds of tokens."""

    name: str
    kind: str
    changes: Mapping[str, Any]
    subject: Subject

    def layers(self, *, large: bool = False, **changes: Any) -> Layers:
        """Bind two layers anew, so that nothing is left of earlier ones. ``changes`` over what the case has."""
        wide = {"window": 500} if large and self.kind == "rotating" else {}
        infos = [describe(self.kind, index, **{**self.changes, **wide, **changes}) for index in range(DEPTH)]
        bound = [self.subject.bind(info) for info in infos]
        toys = [toy(info, levels=self.subject.levels) for info in infos]
        return Layers(bound, toys, self.subject.tolerance)

    def others(self) -> Iterator[Layers]:
        """Bind the same layers to each other installed layout that holds their kind."""
        for layout in self.subject.plugins().registries.layouts:
            if self.kind in layout.kinds and layout.name != self.subject.name:
                with contextlib.suppress(LayoutRefused):
                    yield attrs.evolve(self, subject=Subject(layout.name)).layers()

    def by(self, options: Mapping[str, Any], **changes: Any) -> Layers | None:
        """Bind the layers by other options; None where those refuse them, which must be said in one line."""
        try:
            return attrs.evolve(self, subject=attrs.evolve(self.subject, options=options)).layers(**changes)
        except LayoutRefused as error:
            if len(str(error).splitlines()) != 1:
                msg = f"a refusal is not one line: {error}"
                raise AssertionError(msg) from error
        return None

    def allowed(self) -> Iterator[Mapping[str, Any]]:
        """Yield the layout's options with each value of each option that names the values it allows."""
        for field in attrs.fields(self.subject.resolved().options):
            check = getattr(field.validator, "validator", field.validator)  # of what may be None as well
            for value in getattr(check, "options", ()):
                yield {**self.subject.options, field.name: value}

    @property
    def attends(self) -> bool:
        """Whether the caches are what one attention asks: no parts, and as mlx-lm has them."""
        return self.kind in ("full", "rotating") and APART not in self.subject.resolved().kinds

    @property
    def window(self) -> int:
        """A number of tokens past which something wraps, where anything does."""
        return WINDOW


@attrs.frozen(eq=False)
class Subject:
    """The layout under test, an object or a registered name, with its options, among the installed plugins."""

    layout: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)
    tolerance: float = 0.0
    levels: bool = True
    parts: Sequence[str] = ("recurrent", "full")

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return name_of(self.layout)

    def resolved(self) -> CacheLayout:
        """Return the layout itself."""
        found: CacheLayout = resolved("layout", self.layout)
        return found

    def plugins(self) -> PluginSet:
        """Return the installed plugins, the layout among them."""
        return installed_with("layout", self.layout)

    def bind(self, info: LayerInfo) -> BoundLayer:
        """Bind a layer as an engine does. Raises `errors.LayoutRefused`, or what options out of range raise."""
        plugins = self.plugins()
        layout = self.resolved()
        if APART in layout.kinds:
            inner = bind_layer(info, None, EngineConfig(), plugins)
            return attrs.evolve(inner, layout=layout.compose([inner]))  # type: ignore[attr-defined]
        chosen = {info.kind: {"name": self.name, **self.options}}
        return bind_layer(info, None, EngineConfig.load({"layouts": chosen}), plugins)

    def cases(self) -> list[Case]:
        """Return the cases that the layout does not refuse. Raises the refusal where it refuses all of a kind."""
        found: list[Case] = []
        for kind in sorted(self.resolved().kinds):
            named = [(f"{kind}-{inner}", inner) for inner in APART_KINDS] if kind == APART else [(kind, kind)]
            for name, each in named:
                found += self._of_kind(name, each)
        return found

    def _of_kind(self, name: str, kind: str) -> list[Case]:
        variants = _VARIANTS.get(kind, (("", {"parts": self.parts} if kind == "composite" else {}),))
        if not isinstance(self.resolved(), AttendingLayout):
            variants = [variant for variant in variants if variant[0] != "-arrays"]
        cases = [Case(name + suffix, kind, changes, self) for suffix, changes in variants]
        held, refusal = [], None
        for case in cases:
            try:
                case.layers()
            except LayoutRefused as error:
                refusal = error
            else:
                held.append(case)
        if not held and refusal is not None:
            raise refusal
        return held
