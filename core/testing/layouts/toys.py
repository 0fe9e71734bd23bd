"""What a model's layer does with its cache, so small that the outcome can be computed beside it. It holds no rows.

A toy looks up what it stores and asks for by token id. Shapes: B rows, N tokens of one forward, F numbers a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx
import numpy as np

from oarlock.core.contracts.layout import KeyValues, LayerInfo

VOCABULARY = 64
PADDING = 63
"""The token behind a narrow row of a window: no row is given it."""
POISON = 62
"""The token whose numbers are not numbers, as those of a request that broke."""
KV_HEADS, QUERY_HEADS, KEY, VALUE = 2, 4, 64, 128
"""Key and value sizes differ on purpose; both can be packed in groups of 64."""
WINDOW, CHUNK = 8, 8
TAIL, STATE = 3, 4


class Toy(Protocol):
    """One layer of a model."""

    info: LayerInfo

    def mask(self, cache: Any, width: int) -> Any:
        """Return what the cache says of the coming forward, which serves every layer of its kind."""
        ...

    def forward(self, cache: Any, ids: np.ndarray, mask: Any) -> mx.array:
        """Give the cache ``ids`` [B, N] and return what the layer makes of them, float ``[B, N, F]``, unevaluated."""
        ...

    def expected(self, tokens: Sequence[int], n: int) -> np.ndarray:
        """Return what the last ``n`` of a row's ``tokens`` give, float64 ``[n, F]``."""
        ...


@attrs.define(eq=False)
class Attention:
    """Attention of any kind that sees positions up to its own: all, a window with sinks, or a block.

    ``arrays``: it asks for masks as arrays; ``together``: and makes of them one by which all tokens of a forward see
    what the first of them sees.
    """

    info: LayerInfo
    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    sinks: mx.array | None = None
    arrays: bool = False
    together: bool = False

    @classmethod
    def of(cls, info: LayerInfo, *, levels: bool) -> Attention:
        """Draw the tables ``[V, H, D]``. ``levels``: a token's numbers are all x or -x, which affine codes of 3 bits and more store exactly."""
        draw = np.random.default_rng(100 + info.index)
        sizes = ((info.kv_heads, info.key_dim), (info.kv_heads, info.value_dim))
        tables = [draw.normal(size=(VOCABULARY, *size)).astype(np.float32) for size in sizes]
        if levels:
            large = 2.0 ** draw.integers(-1, 2, size=(VOCABULARY, 1, 1))  # so that what tokens share shows
            tables = [(np.where(table > 0, 1, -1) * large).astype(np.float32) for table in tables]
        for table in tables:
            table[POISON] = np.nan
        queries = draw.normal(size=(VOCABULARY, QUERY_HEADS, info.key_dim)).astype(np.float32)
        return cls(info, tables[0], tables[1], queries)

    def mask(self, cache: Any, width: int) -> Any:
        """Ask the cache, after a chunked one dropped what no row needs."""
        if self.info.kind == "chunked":
            cache.maybe_trim_front()
        mask = cache.make_mask(width, return_array=self.arrays)
        return mx.broadcast_to(mask[..., :1, :], mask.shape) if self.together and mask is not None else mask

    def forward(self, cache: Any, ids: np.ndarray, mask: Any) -> mx.array:
        """Append and attend."""
        return self.attend(ids, *self.append(cache, ids), mask)

    def append(self, cache: Any, ids: np.ndarray) -> tuple[Any, Any]:
        """Give the cache keys and values, and return what it returns."""
        fetched: tuple[Any, Any] = cache.update_and_fetch(
            self.looked_up(self.keys, ids), self.looked_up(self.values, ids)
        )
        return fetched

    def attend(self, ids: np.ndarray, keys: Any, values: Any, mask: Any) -> mx.array:
        """Attend to what a fetch returned, ``[B, N, F]``."""
        queries, scale = self.looked_up(self.queries, ids), float(self.info.key_dim) ** -0.5
        if isinstance(keys, KeyValues) and self.info.attendable:  # elsewhere models take what is fetched for arrays
            seen = keys.attend(queries, scale, mask, self.sinks)
        else:
            seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=self.sinks)
        return seen.transpose(0, 2, 1, 3).reshape(*ids.shape, -1)

    def looked_up(self, table: np.ndarray, ids: np.ndarray) -> mx.array:
        """Return ``[B, H, N, D]``."""
        return mx.array(table[ids].transpose(0, 2, 1, 3)).astype(self.info.dtype)

    def expected(self, tokens: Sequence[int], n: int) -> np.ndarray:
        """Attend in float64."""
        held = np.array(tokens, dtype=int)
        keys, values = (
            np.repeat(table[held].astype(np.float64), QUERY_HEADS // self.info.kv_heads, axis=1)
            for table in (self.keys, self.values)
        )  # (T, QUERY_HEADS, D)
        queries = self.queries[held[-n:]].astype(np.float64)  # (n, QUERY_HEADS, D)
        scores = np.einsum("nhd,thd->hnt", queries, keys) * self.info.key_dim**-0.5
        places = np.arange(len(tokens))
        seen_from = places[-n:, None] if not self.together else places[-n]
        scores = np.where(self.visible(seen_from, places), scores, -np.inf)
        if self.sinks is not None:
            sink = np.broadcast_to(np.array(self.sinks, dtype=np.float64)[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        seen: np.ndarray = np.einsum("hnt,thd->nhd", weights[..., : len(tokens)], values)
        return seen.reshape(n, -1)

    def visible(self, query: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return which places a query sees, by the layer's kind."""
        seen: np.ndarray = place <= query
        if self.info.kind == "rotating":
            seen &= (place < self.info.keep) | (place > query - (self.info.window - self.info.keep))
        if self.info.kind == "chunked":
            seen &= place // self.info.chunk == query // self.info.chunk
        return seen


@attrs.define(eq=False)
class Recurrence:
    """A convolution over the last tokens and a decaying sum. It minds the lengths of padded rows.

    As in some models the convolution's tail is no longer than what was forwarded, and None before that.
    """

    info: LayerInfo
    table: np.ndarray

    @classmethod
    def of(cls, info: LayerInfo) -> Recurrence:
        """Draw the table ``[V, STATE]`` of small whole numbers, so that sums are exact."""
        table = np.random.default_rng(info.index).integers(-4, 5, size=(VOCABULARY, STATE)).astype(np.float32)
        table[POISON] = np.nan
        return cls(info, table)

    def mask(self, cache: Any, width: int) -> Any:
        """Ask which tokens are real; None: all."""
        return cache.make_mask(width)

    def forward(self, cache: Any, ids: np.ndarray, mask: Any) -> mx.array:
        """Advance both states token by token, past no row's last real one."""
        x = mx.array(self.table[ids])  # (B, N, STATE)
        rows, width = ids.shape
        tail = mx.zeros((rows, 0, STATE)) if cache[0] is None else cache[0]
        total = mx.zeros((rows, STATE)) if cache[1] is None else cache[1]
        out = []
        for n in range(width):
            real = mx.array(True) if mask is None else mask[:, n, None]
            out.append(mx.concatenate([tail.sum(axis=1) + x[:, n], total * 0.5 + x[:, n]], axis=-1))
            longer = mx.concatenate([tail, x[:, n, None]], axis=1)[:, -TAIL:]
            tail = mx.pad(tail, [(0, 0), (longer.shape[1] - tail.shape[1], 0), (0, 0)])
            tail = mx.where(real[..., None], longer, tail)
            total = mx.where(real, total * 0.5 + x[:, n], total)
        cache[0], cache[1] = tail, total
        cache.advance(width)
        return mx.stack(out, axis=1)

    def expected(self, tokens: Sequence[int], n: int) -> np.ndarray:
        """Fold in float64."""
        total, out = np.zeros(STATE), []
        x = self.table[np.array(tokens, dtype=int)].astype(np.float64)
        for place, one in enumerate(x):
            total = total * 0.5 + one
            out.append(np.concatenate([x[max(0, place - TAIL) : place + 1].sum(axis=0), total]))
        return np.stack(out[len(tokens) - n :])


@attrs.define(eq=False)
class Several:
    """A layer of several caches, which it reaches by index."""

    info: LayerInfo
    parts: Sequence[Toy]

    def mask(self, cache: Any, width: int) -> Any:
        """Ask every part."""
        return [part.mask(cache[i], width) for i, part in enumerate(self.parts)]

    def forward(self, cache: Any, ids: np.ndarray, mask: Any) -> mx.array:
        """Put what the parts give side by side."""
        return mx.concatenate([part.forward(cache[i], ids, mask[i]) for i, part in enumerate(self.parts)], axis=-1)

    def expected(self, tokens: Sequence[int], n: int) -> np.ndarray:
        """Put what the parts must give side by side."""
        seen: np.ndarray = np.concatenate([part.expected(tokens, n) for part in self.parts], axis=-1)
        return seen


def toy(info: LayerInfo, *, levels: bool) -> Toy:
    """Return the toy of a layer by its kind; what is no kind of ours is taken for full attention."""
    if info.parts:
        return Several(info, [toy(part, levels=levels) for part in info.parts])
    if info.kind == "recurrent":
        return Recurrence.of(info)
    return Attention.of(info, levels=levels)


def describe(kind: str, index: int = 0, **changes: Any) -> LayerInfo:
    """Return the `LayerInfo` of a toy layer: ``parts``, kinds, for a composite one; ``changes`` over what it has."""
    if kind == "composite":
        kinds = changes.pop("parts")
        parts = tuple(attrs.evolve(describe(part, index), path=f"{index}.{i}") for i, part in enumerate(kinds))
        return LayerInfo(index=index, path=str(index), kind=kind, parts=parts)
    if kind == "recurrent":
        bytes_ = 4 * STATE * (TAIL + 1)
        return LayerInfo(index=index, path=str(index), kind=kind, **{"slots": 2, "state_bytes": bytes_, **changes})
    settings = {
        "kv_heads": KV_HEADS, "key_dim": KEY, "value_dim": VALUE, "dtype": mx.float32,
        "window": WINDOW if kind == "rotating" else 0, "chunk": CHUNK if kind == "chunked" else 0,
    }  # fmt: skip
    return LayerInfo(index=index, path=str(index), kind=kind, **{**settings, **changes})


def by_part(toy: Toy, cache: Any, new: Sequence[Sequence[int]], ids: np.ndarray) -> np.ndarray:
    """Forward rows of one length at a time, as the core does for a `PartedCache`; no part is padded for another."""
    seen: dict[int, np.ndarray] = {}
    for part in cache.parts:
        width = max(len(new[place]) for place in part.places)
        rows = ids[part.places, :width]
        got = (
            number(toy.forward(part.cache, rows, toy.mask(part.cache, width))) if width else np.zeros((len(rows), 0, 0))
        )
        seen.update(zip(part.places, got, strict=True))
    size = max(got.shape[1] for got in seen.values())
    whole = np.zeros((*ids.shape, size))
    for place, got in seen.items():
        if len(got):
            whole[place, : len(got)] = got
    return whole


def number(array: mx.array) -> np.ndarray:
    """Return the array's numbers as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)
