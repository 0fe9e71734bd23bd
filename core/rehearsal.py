"""Rows run alone and in company at bind, a few tokens each, for whoever compares them. It judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from oarlock.core import mixed
from oarlock.core.contracts.layout import BatchCache, LayerInfo, Positions
from oarlock.core.forward import forward, settle
from oarlock.core.mixed import Side

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel

_SHORT = 3
_SMALL = 64
"""Windows and chunks up to this many tokens are run past, and so is what chooses among keys that have no values."""
_STEPS = 2
_FED = [1, 2, 3]
"""Tokens fed after the prompts, to all rows alike: only their pasts differ."""

Prompt = Sequence[int]


@attrs.frozen
class State:
    """One layer's state of one row. ``recurrent``: it cannot be cut, so padding would have entered it."""

    layer: str
    recurrent: bool
    arrays: dict[str, mx.array]


@attrs.frozen
class Trace:
    """One row's scores ``[steps, V]`` and its states, layer by layer."""

    scores: mx.array
    states: Sequence[State]


def prompts(bound: BoundModel) -> list[Prompt]:
    """Return a long prompt, past one chunk, one window and one stop where these are small, and a short one."""
    infos = list(_single(layer.info for layer in bound.layers))
    sizes = [size for info in infos for size in (info.window, info.chunk)]
    sizes += [_SMALL for info in infos if info.key_dim and not info.value_dim]
    small = [size for size in (*sizes, bound.config.scheduler.prefill_chunk, *bound.stops) if 0 < size <= _SMALL]
    most = bound.positions - len(_FED) if bound.positions is not None else 2 * _SMALL
    lengths = (max(_SHORT + 2, min(most, max(small, default=2) + _SHORT)), _SHORT)
    return [[(7919 * i + 13 * row + 1) % bound.vocabulary for i in range(n)] for row, n in enumerate(lengths)]


def _single(infos: Any) -> Iterator[LayerInfo]:
    for info in infos:
        yield info
        yield from _single(info.parts)


def together(bound: BoundModel, rows: Sequence[Prompt]) -> list[Trace]:
    """Prefill prompts of one length together, and decode."""
    caches = _opened(bound, len(rows))
    return _decoded(bound, caches, prefill(bound, caches, rows))


def company(bound: BoundModel, long: Prompt, short: Prompt) -> list[Trace]:
    """Let the short prompt begin empty beside the long one's last tokens, and join it once more, prefilled."""
    caches = _opened(bound, 1)
    prefill(bound, caches, [long[:-_SHORT]])
    for cache in caches:
        cache.add(1)
    shared = prefill(bound, caches, [long[-_SHORT:], short])
    others = _opened(bound, 1)
    joined = prefill(bound, others, [short])
    _join(caches, others)
    return _decoded(bound, caches, mx.concatenate([shared, joined]))


def beginning(bound: BoundModel, beside: Prompt | None = None) -> list[BatchCache]:
    """Return caches of one empty row: new ones, or those in which it was added beside another row, now gone."""
    caches = _opened(bound, 1)
    if beside is not None:
        prefill(bound, caches, [beside])
        for cache in caches:
            cache.add(1)
            cache.keep([1])
    return caches


def window(bound: BoundModel, rows: Sequence[Prompt], widths: Sequence[int]) -> list[list[State]]:
    """Prefill rows alone, join them, forward one window where row i has ``widths[i]`` tokens; return the states."""
    caches = _opened(bound, 0)
    for row in rows:
        others = _opened(bound, 1)
        prefill(bound, others, [row])
        _join(caches, others)
    fed = [_FED[:width] + [0] * (max(widths) - width) for width in widths]
    forward(bound, caches, mx.array(fed, dtype=mx.uint32), widths)
    for cache in caches:
        cache.commit(widths)
    return [_states(bound, caches, row) for row in range(len(rows))]


def beside(bound: BoundModel, long: Prompt, short: Prompt) -> tuple[list[Trace], list[Trace]]:
    """Decode two rows beside two chunks of another: the last of the long prompt, and its end with the short one.

    Return all scores of forwards of their own, and of one forward for both. Layers must rewind.
    """
    head, chunk = long[:-_SHORT], bound.config.scheduler.prefill_chunk
    running, joiner, cohort = _opened(bound, 1), _opened(bound, 1), _opened(bound, 1)
    prefill(bound, running, [head])
    prefill(bound, joiner, [short])
    _join(running, joiner)
    at = 0
    while (size := bound.longest_append(at, chunk)) < len(head) - at:
        _step(bound, cohort, [list(head[at : at + size])])
        at += size
    first = _both(bound, running, cohort, [head[at:]])
    for cache in cohort:
        cache.add(1)
    last = _both(bound, running, cohort, [row[:chunk] for row in (long[-_SHORT:], short)])
    return first[0] + last[0], first[1] + last[1]


def again(
    bound: BoundModel, step: Callable[[Sequence[Any], mx.array, Positions], mx.array]
) -> tuple[list[Trace], list[Trace]]:
    """Feed a token to a lone row, and to two: ordinarily, which is rolled back, and by ``step``. Return all scores."""
    (long, short), caches, other = prompts(bound), _opened(bound, 1), _opened(bound, 1)
    prefill(bound, caches, [long])
    prefill(bound, other, [short])
    apart, by_step = [], []
    for rows in (1, 2):
        ids, widths, starts = mx.array(_FED[:1] * rows, dtype=mx.uint32)[:, None], [1] * rows, caches[0].tokens
        apart.append(Trace(forward(bound, caches, ids, widths).flatten(0, 1), ()))
        mx.eval(apart[-1].scores)
        for cache in caches:
            cache.commit([0] * rows)
            cache.begin(widths, Positions(starts))
        by_step.append(Trace(step(caches, ids, Positions(starts)).flatten(0, 1), ()))
        for cache in caches:
            cache.commit(widths)
        if rows == 1:
            _join(caches, other)
    return apart, by_step


def _both(
    bound: BoundModel, running: Sequence[BatchCache], cohort: Sequence[BatchCache], chunks: Sequence[Prompt]
) -> tuple[list[Trace], list[Trace]]:
    """Feed a token to each running row and a chunk to each of the others: apart, which is rolled back, then together."""
    feeds = (running, [[_FED[0]]] * 2), (cohort, [list(chunk) for chunk in chunks])
    sides = [Side(caches, mx.array(ids, dtype=mx.uint32), [*map(len, ids)]) for caches, ids in feeds]
    apart = []
    for side in sides:
        apart.append(forward(bound, side.caches, side.ids, side.widths))
        for cache in side.caches:
            cache.commit([0] * len(side.widths))
    together = mixed.forward(bound, sides)
    for side in sides:
        for cache in side.caches:
            cache.commit(side.widths)
    seen, other = ([Trace(logits.flatten(0, 1), ()) for logits in each] for each in (apart, together))
    return seen, other


def _opened(bound: BoundModel, rows: int) -> list[BatchCache]:
    caches = bound.open_caches(slots=1, window=1)
    for cache in caches:
        cache.add(rows)
    return caches


def _join(caches: Sequence[BatchCache], others: Sequence[BatchCache]) -> None:
    mx.eval([array for cache in (*caches, *others) for array in cache.arrays()])
    for cache, other in zip(caches, others, strict=True):
        cache.join(other, range(cache.rows, cache.rows + other.rows))


def prefill(bound: BoundModel, caches: Sequence[BatchCache], rows: Sequence[Prompt]) -> mx.array:
    """Forward prompts of one length, chunk by chunk; return the last scores ``[rows, V]``."""
    at, scores = 0, mx.zeros(0)
    while at < len(rows[0]):
        size = min(bound.longest_append(n, bound.config.scheduler.prefill_chunk) for n in caches[0].tokens)
        scores = _step(bound, caches, [list(row[at : at + size]) for row in rows])
        at += size
    return scores


def _decoded(bound: BoundModel, caches: Sequence[BatchCache], first: mx.array) -> list[Trace]:
    rows = first.shape[0]
    steps = [_step(bound, caches, [[token]] * rows) for token in _FED[:_STEPS]]
    scores = mx.stack([first, *steps], axis=1)  # (rows, steps, V)
    return [Trace(scores[row], _states(bound, caches, row)) for row in range(rows)]


def _states(bound: BoundModel, caches: Sequence[BatchCache], row: int) -> list[State]:
    return [
        State(layer.info.path, not cache.rewinds, cache.extract(row).arrays())
        for layer, cache in zip(bound.layers, caches, strict=True)
    ]


def _step(bound: BoundModel, caches: Sequence[BatchCache], tokens: list[list[int]]) -> mx.array:
    ids = mx.array(tokens, dtype=mx.uint32)
    widths = [ids.shape[1]] * ids.shape[0]
    logits = forward(bound, caches, ids, widths)
    settle(bound, caches, ids, widths, widths)
    return logits[:, -1]
