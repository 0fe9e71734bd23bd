"""May a decode step take a preparation's chunk along in this composition? Decided once, at bind; it runs no request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

import attrs

from oarlock.core import rehearsal
from oarlock.core.attention import Swap
from oarlock.core.errors import MixedRefused
from oarlock.core.finding import Finding
from oarlock.core.probe import compare

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel


@attrs.frozen(kw_only=True)
class Mixing(Finding):
    """Whether steps are mixed, and why, or why not."""

    YES: ClassVar[str] = "decode steps take chunks along"
    NO: ClassVar[str] = "decode and prefill go apart"


def decide(bound: BoundModel) -> Mixing:
    """Return the fact. Raises `errors.MixedRefused` where the config asks for what the model or its layouts forbid."""
    wanted = bound.config.scheduler.mixed
    if wanted is False:
        return Mixing(reason="config scheduler.mixed")
    found = _known(bound)
    if found is None and not bound.config.scheduler.verify:
        found = Mixing(on=wanted is True, reason="not probed: scheduler.verify is off")
    elif found is None:
        found = _rehearsed(bound)
    if wanted is True and not found.on:
        raise MixedRefused(bound.model_type, found.reason, found.layer)
    return found


def _known(bound: BoundModel) -> Mixing | None:
    """Return what forbids it without a trial: groups are told apart in attention, so nothing else may keep a past."""
    if not bound.verdict.ragged:
        return Mixing(reason=f"rows of different length cannot share a forward: {bound.verdict.reason}")
    for layer in bound.layers:
        if not layer.info.attendable:
            reason = (
                f"layer {layer.info.path} ({layer.info.kind}) keeps a past that attention does not receive as it is"
            )
            return Mixing(reason=reason, layer=layer.info.path)
    return None


def _rehearsed(bound: BoundModel) -> Mixing:
    """Run decode steps beside chunks, in one forward and in two, and compare."""
    long, short = rehearsal.prompts(bound)

    def trial() -> None:
        compare(bound, *rehearsal.beside(bound, long, short), "a row in a mixed forward")

    with contextlib.closing(Swap(bound.model.modules())):
        return Mixing.tried(bound, trial, "a mixed forward", "bind probe")
