"""The bind probe: do rows keep their scores and their states in company? It compares; it repairs nothing.

A forward that raises for rows of different length, or that is seen to take one position for all of them, is allowed
to run them apart (`core.apart`), and the verdict names the model's line. Any other difference is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import structlog

from oarlock.core import rehearsal
from oarlock.core.errors import ModelNotBatchable
from oarlock.core.evidence import line_of, lines_run, one_position_for_all, shown
from oarlock.core.forward import ForwardFailed
from oarlock.core.rehearsal import Prompt, State, Trace

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest difference allowed, as a share of the spread: kernels may differ by rows, masks must not."""
_PACKED = 0.1
"""Share of packed integers that may differ: a value on the edge of two codes falls either way."""
_COARSE = 2e-1
"""Largest difference, as a share of the spread, behind such a value: all that follows is as coarse as its storage."""

_log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class Verdict:
    """What the probe found; the defaults are those of a model that nobody probed.

    ``honours_lengths``: padding stays out of the states of recurrent layers. ``ragged``: rows of different length
    share a forward; False with the reason and the line of the model in ``reason``. ``sensitive``: the probe would
    have seen one row's scores in place of another's.
    """

    probed: bool = False
    honours_lengths: bool = False
    recurrent: bool = False
    ragged: bool = True
    reason: str = ""
    sensitive: bool = True

    def explain(self) -> dict[str, str]:
        """Return the choice, a detail and its reason."""
        detail = ""
        if self.recurrent:
            detail = f"recurrent layers {'mind' if self.honours_lengths else 'do not mind'} the lengths of padded rows"
        if not self.ragged:
            return {"choice": "equal lengths share a forward", "detail": detail, "reason": self.reason}
        reason = "bind probe" if self.probed else "not probed: scheduler.verify is off"
        if not self.sensitive:
            reason += ", which proves little: the scores hardly depend on the past"
        return {"choice": "all lengths share a forward", "detail": detail, "reason": reason}


def probe(bound: BoundModel) -> BoundModel:
    """Return the composition as it may run, with its verdict.

    Rows run alone, three of one length (they share one offset), and some beside others of other lengths, where they
    are added empty, prefilled in company, and joined: kernels take another way in each case. Raises
    `errors.ModelNotBatchable` with the reason and the first layer whose state differs.
    """
    long, short = rehearsal.prompts(bound)
    try:
        alone = [rehearsal.together(bound, [prompt])[0] for prompt in (long, short)]
        equal = rehearsal.together(bound, [short] * 3)
        compare(bound, [alone[1]] * 3, equal, "a row among three of one length")
        verdict = Verdict(probed=True, sensitive=_moved(alone[0].scores[-1], alone[1].scores[-1]) > 1)
        expected = [alone[0], alone[1], alone[1]]
        reason = _forces_apart(bound, expected, long, short)
        if reason:
            verdict = attrs.evolve(verdict, ragged=False, reason=reason)
            bound = bound.apart(verdict)
            company = rehearsal.company(bound, long, short)
            compare(bound, expected, company, "a row beside others, those of one length together,")
        honours = _honours_lengths(bound, long, short)
    except ForwardFailed as failure:
        reason = f"a forward of rows raises {type(failure.cause).__name__}: {failure.cause}"
        raise ModelNotBatchable(bound.model_type, reason) from failure.cause
    if not verdict.sensitive:
        _log.warning("probe_proves_little", model=bound.model_type)
    verdict = attrs.evolve(verdict, recurrent=honours is not None, honours_lengths=bool(honours))
    return attrs.evolve(bound, verdict=verdict)


def _forces_apart(bound: BoundModel, expected: Sequence[Trace], long: Prompt, short: Prompt) -> str:
    """Return why rows of different length cannot share a forward, naming the line; "" where they can."""
    try:
        company = rehearsal.company(bound, long, short)
        compare(bound, expected, company, "a row beside others of other lengths")
    except ForwardFailed as failure:
        line = line_of(failure.cause, bound.model)
        if line is None:
            raise
        return f"{line} raises {type(failure.cause).__name__}"
    except ModelNotBatchable:
        with one_position_for_all(bound.model) as lines:
            rehearsal.company(bound, long, short)
        if lines:
            return f"{lines[0]} takes one position for all rows"
        if lines := _only_without_state(bound, long, short):
            return f"{', '.join(lines)}: run only for rows that have no state yet, and matter"
        raise
    return ""


def _only_without_state(bound: BoundModel, long: Prompt, short: Prompt) -> list[str]:
    """Return the lines that run only where there is no state, if a row with a state of zeros gets other scores."""
    runs = []
    for beside in (None, long):
        caches = rehearsal.beginning(bound, beside)
        with lines_run(bound.model) as lines:
            runs.append((rehearsal.prefill(bound, caches, [short]), lines))
    (alone, without), (begun, zeros) = runs
    return [shown(*line) for line in sorted(without - zeros)] if _moved(alone, begun) > 1 else []


def _honours_lengths(bound: BoundModel, long: Prompt, short: Prompt) -> bool | None:
    """Say whether the recurrent states of a padded row come out as alone; None without such layers."""
    if all(cache.rewinds for cache in bound.open_caches(slots=1, window=1)):
        return None
    alone = [rehearsal.window(bound, [row], [width])[0] for row, width in ((long, 3), (short, 1))]
    padded = rehearsal.window(bound, [long, short], [3, 1])
    return all(_first_differing(one, other) is None for one, other in zip(alone, padded, strict=True))


# --- comparing --------------------------------------------------------------------------------------------


def compare(bound: BoundModel, alone: Sequence[Trace], together: Sequence[Trace], who: str) -> None:
    """Raise `errors.ModelNotBatchable` where scores or recurrent states differ, naming the first layer that does."""
    for one, other in zip(alone, together, strict=True):
        worst, allowed = _moved(one.scores, other.scores), _allowed(one.scores)
        slack = _COARSE / allowed if _fell_either_way(one.states, other.states) else 1.0
        recurrent = [state for state in one.states if state.recurrent]
        theirs = [state for state in other.states if state.recurrent]
        if worst <= slack and _first_differing(recurrent, theirs, slack) is None:
            continue
        layer = _first_differing(one.states, other.states)
        reason = f"scores of {who} differ by {worst * allowed:.2g} of their spread (at most {slack * allowed:g})"
        reason += f"; the first state that differs is that of layer {layer}" if layer else "; no layer's state differs"
        raise ModelNotBatchable(bound.model_type, reason, layer)


def _fell_either_way(one: Sequence[State], other: Sequence[State]) -> bool:
    """Return whether few of the first packed numbers that differ do: then they may, and all that follows from them."""
    packed = ((mine, theirs) for _, mine, theirs in _twins(one, other) if not mx.issubdtype(mine.dtype, mx.floating))
    shares = (share for mine, theirs in packed if (share := _share(mine, theirs)))
    return next(shares, 1.0) <= _PACKED


def _first_differing(one: Sequence[State], other: Sequence[State], slack: float = 1.0) -> str | None:
    """Return the first layer whose state differs."""
    return next((layer for layer, mine, theirs in _twins(one, other) if _differs(mine, theirs, slack)), None)


def _twins(one: Sequence[State], other: Sequence[State]) -> Iterator[tuple[str, mx.array, mx.array]]:
    """Yield layer and arrays that both have, sorted: layouts may keep the tokens in any order."""
    for mine, theirs in zip(one, other, strict=True):
        for name, array in mine.arrays.items():
            twin = theirs.arrays.get(name)
            if twin is not None and twin.size == array.size > 0:
                yield mine.layer, mx.sort(array.flatten()), mx.sort(twin.flatten())


def _differs(one: mx.array, other: mx.array, slack: float) -> bool:
    if mx.issubdtype(one.dtype, mx.floating):
        return not _moved(one, other) <= slack
    return _share(one, other) > _PACKED


def _share(one: mx.array, other: mx.array) -> float:
    """Return the share of integers that differ."""
    share: float = mx.mean((one != other).astype(mx.float32)).item()  # type: ignore[assignment]
    return share


def _moved(one: mx.array, other: mx.array) -> float:
    """Return the largest difference as a multiple of what is allowed; NaN where something is not a number."""
    mine, theirs = one.astype(mx.float32), other.astype(mx.float32)
    spread = mx.max(mine) - mx.min(mine)
    worst: float = (mx.max(mx.abs(mine - theirs)) / mx.maximum(spread, 1e-6)).item()  # type: ignore[assignment]
    return worst / _allowed(one)


def _allowed(array: mx.array) -> float:
    return _TOLERANCE.get(str(array.dtype).rpartition(".")[2], _TOLERANCE["bfloat16"])
