"""Attention over blocks where they lie: row by row, and once over a prefix for all rows that share it.

It writes nothing and copies no more than it must. `docs/decisions/paged-reads.md` says what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

from oarlock.layouts.masks import of_row, shared_mask
from oarlock.layouts.packed import attended, multiplies
from oarlock.layouts.pages import Pages
from oarlock.layouts.planes import Planes
from oarlock.layouts.tables import Plan, Prefix

MERGED_WIDTH = 8
"""Up to so many tokens a row, reading a prefix once for its rows saves more than a fused attention does."""


Product: TypeAlias = Callable[[mx.array, str], mx.array]
"""Multiplies queries by "keys", or weights of any precision by "values" in theirs."""


class RowReads:
    """What `paged` returns as keys and as values: attention over each row's own blocks.

    It stands for ``[B, H, S, D]``, rows aligned left. No padding is read, and a row sees exactly the columns that it
    would see alone.
    """

    def __init__(self, pages: Pages, plan: Plan, name: str) -> None:
        """Stand for the "keys" or the "values"."""
        heads, size, self.dtype = pages.outline(name)
        self.shape = (len(plan.rows), heads, plan.starts.longest + plan.width, size)
        self._pages, self._plan = pages, plan

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` [B, heads, N, D]; columns beyond a row's own are never looked at."""
        plan = self._plan
        plain = mask is None or isinstance(mask, str)
        if mask is shared_mask(plan.starts, plan.width, None, as_array=False) and not plain:
            plain, mask = True, "causal"
        seen: dict[int, mx.array] = {}
        for prefix in plan.prefixes() if plain and plan.width <= MERGED_WIDTH else ():
            merged = self._merged(prefix, queries, scale, sinks)
            if len(prefix.rows) == len(plan.rows):
                return merged
            seen.update(zip(prefix.rows, mx.split(merged, len(prefix.rows)), strict=True))
        split = mx.split(queries, len(plan.rows)) if len(plan.rows) > 1 else [queries]
        for row, q in enumerate(split):
            if row not in seen:
                own = mask if plain else of_row(mask, row, plan.widths[row], plan.starts[row] + plan.widths[row])
                seen[row] = self._alone(row, q, scale, own if plan.widths[row] > 1 or not plain else None, sinks)
        return mx.concatenate([seen[row] for row in range(len(split))]) if len(split) > 1 else seen[0]

    def _alone(self, row: int, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of one row's window [1, heads, N, D]: the serial graph over a slice of the planes."""
        plan, pages = self._plan, self._pages
        width = plan.widths[row]
        if not width:
            return mx.zeros((*queries.shape[:3], pages.outline("values")[1]), queries.dtype)
        first, tokens = plan.rows[row].first, plan.starts[row] + width
        planes = pages.run(first, tokens) if first is not None else pages.apart(plan.row(row), tokens)
        own = queries if width == plan.width else queries[:, :, :width]
        seen = attended(own, *pages.handed(planes), scale, mask, sinks)
        return mx.pad(seen, [(0, 0), (0, 0), (0, plan.width - width), (0, 0)]) if width < plan.width else seen

    def _merged(self, prefix: Prefix, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of rows that share ``prefix`` [R, heads, N, D]: once over it for all, then each over its own rest.

        Two softmaxes over parts of the columns make one by weighing them with the sums of their exponentials, as
        flash attention does (Dao et al. 2022, section 3.1).
        """
        pages, size = self._pages, self._pages.blocks.size
        rows, kv_heads, width = len(prefix.rows), pages.outline("keys")[0], queries.shape[2]
        heads = queries.shape[1]
        mine = queries if rows == queries.shape[0] else mx.take(queries, mx.array(prefix.rows), axis=0)
        grouped = (mine * scale).reshape(rows, kv_heads, -1, mine.shape[3])  # (R, KV, G * N, D)
        stacked = grouped.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, mine.shape[3])  # (1, KV, R * G * N, D)
        total, seen = _part(stacked, self._unpacked(pages.run(prefix.first, prefix.blocks * size)), None)
        total, seen = (x.reshape(kv_heads, rows, heads // kv_heads * width, -1).swapaxes(0, 1) for x in (total, seen))
        product = self._packed if pages.format is not None and multiplies(queries, width) else self._unpacked
        rests = [
            _part(q, product(self._rest(prefix, row)), self._causal(row, prefix.blocks * size))
            for row, q in zip(prefix.rows, mx.split(grouped, rows), strict=True)
        ]
        own_total, own_seen = (mx.concatenate(list(parts)) for parts in zip(*rests, strict=True))
        both = mx.logaddexp(total, own_total)
        if sinks is not None:
            sink = mx.repeat(sinks.astype(mx.float32), width).reshape(1, kv_heads, -1, 1)
            both = mx.logaddexp(both, sink)
        out = seen * mx.exp(total - both) + own_seen * mx.exp(own_total - both)
        return out.astype(queries.dtype).reshape(rows, heads, width, -1)

    def _rest(self, prefix: Prefix, row: int) -> Planes:
        """Return what a row has behind the prefix [1, KV, T, D]."""
        plan, pages = self._plan, self._pages
        tokens = plan.starts[row] + plan.widths[row] - prefix.blocks * pages.blocks.size
        first = prefix.rests[row]
        return pages.run(first, tokens) if first is not None else pages.apart(plan.row(row, prefix.blocks), tokens)

    def _unpacked(self, planes: Planes) -> Product:
        keys, values = self._pages.decode(planes)
        keys = keys.swapaxes(-1, -2)
        return lambda left, name: left @ keys if name == "keys" else left.astype(values.dtype) @ values

    def _packed(self, planes: Planes) -> Product:
        assert self._pages.format is not None
        product, dtype = self._pages.format.product, planes["values.scales"].dtype
        return lambda left, name: product(left if name == "keys" else left.astype(dtype), name, planes)

    def _causal(self, row: int, skipped: int) -> mx.array | None:
        """Return which columns behind ``skipped`` each token of a window sees [N, T]; None where it is one token."""
        plan = self._plan
        if plan.width == 1:
            return None
        start = plan.starts[row] - skipped
        ends = mx.arange(start, start + plan.width)
        return ends[:, None] >= mx.arange(start + plan.widths[row])


def _part(queries: mx.array, product: Product, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Attend over a part of the columns: log of the sum of exponentials [B, KV, M, 1], and what is seen [B, KV, M, D].

    ``queries`` [B, KV, M, D], M being heads of a group times tokens; ``mask`` [N, T].
    """
    scores = product(queries, "keys").astype(mx.float32)
    if mask is not None:
        by_token = scores.reshape(*scores.shape[:2], -1, *mask.shape)
        scores = mx.where(mask, by_token, mx.finfo(mx.float32).min).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1)
    # The largest weight is exp(0) over the sum: the logarithm of the sum, without the exponentials once more.
    total = mx.max(scores, axis=-1, keepdims=True) - mx.log(mx.max(weights, axis=-1, keepdims=True))
    return total, product(weights, "values")
