"""May decode steps be compiled in this composition? Decided once, at bind; it runs no request."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from oarlock.core import rehearsal
from oarlock.core.compiled import MAX_ROWS, CompiledStep
from oarlock.core.contracts.composition import TraceableCache
from oarlock.core.errors import CompiledRefused
from oarlock.core.finding import Finding
from oarlock.core.probe import compare
from oarlock.core.tap import LISTENED

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_ASKED_FOR = 'config scheduler.compiled is "auto": the first steps wait for a compiler, so true must ask for them'


@attrs.frozen(kw_only=True)
class Compiling(Finding):
    """Whether decode steps are compiled, and why, or why not."""

    YES: ClassVar[str] = f"decode steps of up to {MAX_ROWS} rows"
    NO: ClassVar[str] = "no step is compiled"


def decide(bound: BoundModel) -> Compiling:
    """Return the fact. Raises `errors.CompiledRefused` where the config asks for what the model or a layout forbids."""
    wanted = bound.config.scheduler.compiled
    if wanted is not True:
        return Compiling(reason="config scheduler.compiled" if wanted is False else _ASKED_FOR)
    found = _known(bound)
    if found is None and not bound.config.scheduler.verify:
        found = Compiling(on=True, reason="not probed: scheduler.verify is off")
    elif found is None:
        found = _rehearsed(bound)
    if not found.on:
        raise CompiledRefused(bound.model_type, found.reason, found.layer)
    return found


def _known(bound: BoundModel) -> Compiling | None:
    """Return what forbids it without a trial."""
    if not bound.verdict.ragged:
        return Compiling(reason=f"its forward takes no array of positions: {bound.verdict.reason}")
    if bound.tap.path:
        return Compiling(reason=LISTENED)
    for layer, cache in zip(bound.layers, bound.open_caches(slots=1, window=1), strict=True):
        if not isinstance(cache, TraceableCache):
            path, kind = layer.info.path, layer.info.kind
            reason = f"layer {path} ({kind}) is held by layout {layer.layout.name!r}, whose steps cannot be replayed"
            return Compiling(reason=reason, layer=path)
    return None


def _rehearsed(bound: BoundModel) -> Compiling:
    """Decode a token of a lone row and of two rows, ordinarily and compiled, and compare."""

    def trial() -> None:
        compare(bound, *rehearsal.again(bound, CompiledStep(bound.model)), "a compiled step")

    return Compiling.tried(bound, trial, "a compiled step", "bind probe, config scheduler.compiled")
