"""May a decode step take a preparation's chunk along in this composition? Decided once, at bind; it runs no request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

import attrs
import mlx.core as mx

from oarlock.core import rehearsal
from oarlock.core.attention import Swap
from oarlock.core.errors import MixedRefused, ModelNotBatchable
from oarlock.core.finding import Finding
from oarlock.core.forward import forward
from oarlock.core.head import Trimmed, only
from oarlock.core.probe import compare
from oarlock.core.rehearsal import Trace
from oarlock.core.tap import LISTENED

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_TRIED = 3
"""Lines of the forwards that are compared where a model is cut."""


@attrs.frozen(kw_only=True)
class Mixing(Finding):
    """Whether steps are mixed, and why, or why not.

    ``body``: the path of the part of the model that is cut to the lines that need scores, "" where none was found.
    """

    YES: ClassVar[str] = "decode steps take chunks along"
    NO: ClassVar[str] = "decode and prefill go apart"

    body: str = ""


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
        found = attrs.evolve(found, body=find_body(bound)) if found.on else found
    if wanted is True and not found.on:
        raise MixedRefused(bound.model_type, found.reason, found.layer)
    return found


def _known(bound: BoundModel) -> Mixing | None:
    """Return what forbids it without a trial: groups are told apart in attention, so nothing else may keep a past."""
    if not bound.verdict.ragged:
        return Mixing(reason=f"rows of different length cannot share a forward: {bound.verdict.reason}")
    if bound.tap.path:
        return Mixing(reason=LISTENED)
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


def find_body(bound: BoundModel) -> str:
    """Return the path of the part of a model that can be cut, found by trial; "" where there is none."""
    inner: list[str] = [path for path, module in bound.model.named_modules() if path and hasattr(module, "layers")]
    for path in sorted(inner, key=lambda path: -path.count(".")):
        # Whatever a model does with fewer lines than it was given, it is not cut then.
        with contextlib.suppress(Exception), contextlib.closing(Trimmed(bound.model, path)):
            _cut(bound)
            return path
    return ""


def _cut(bound: BoundModel) -> None:
    """Raise where the scores of some lines are not those among all lines."""
    lines = [_TRIED - 1, 0]
    whole = _scores(bound)
    with only(lines):
        some = _scores(bound)
    if some.shape != (len(lines), *whole.shape[1:]):
        raise ModelNotBatchable(bound.model_type, f"{some.shape} for {len(lines)} lines of {whole.shape}", None)
    compare(bound, [Trace(whole[line], ()) for line in lines], [Trace(each, ()) for each in some], "some lines")


def _scores(bound: BoundModel) -> mx.array:
    caches = bound.open_caches(slots=_TRIED, window=1)
    for cache in caches:
        cache.add(_TRIED)
    ids = mx.array([[line % bound.vocabulary] for line in range(1, _TRIED + 1)], dtype=mx.uint32)
    scores = forward(bound, caches, ids, [1] * _TRIED)
    mx.eval(scores)
    for cache in caches:
        cache.commit([0] * _TRIED)
    return scores
