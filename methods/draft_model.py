"""The proposer `draft_model`: what a smaller model of the same vocabulary would say next, greedily.

Its caches hold what each row has said but for the last token, and nothing else: drafts are forwarded behind that and
taken back at once, so whatever is accepted, nothing has to be undone, in layers of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from oarlock.core import hookimpl
from oarlock.core.contracts.composition import on_every_layer

if TYPE_CHECKING:
    from oarlock.core.contracts.layout import BatchCache
    from oarlock.core.contracts.loader import Tokenizer
    from oarlock.core.contracts.proposer import Companion
    from oarlock.core.row import Row

OARLOCK_API = 1
CHUNK = 256
"""Tokens of one forward that takes a prompt in."""
DEEPEST = 16
"""The most drafts of a row: caches are opened for so many tokens to be taken back."""
SAMPLE = "The naïve café sells 3,141 crêpes a day.\n\n\tif (x != 0) { return x; }  日本語 — Ω 🙂"
TOKENS = 256
"""How many token ids are decoded to tell two tokenizers apart."""


@attrs.frozen(kw_only=True)
class DraftModelOptions:
    """``model``: the path or name of the smaller model, for any loader."""

    model: str = ""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            msg = f"model is {self.model!r}; the path or name of a model is allowed"
            raise ValueError(msg)


@attrs.define
class _Said:
    """What was drafted last for a row that had so many tokens."""

    tokens: int
    draft: list[int]


class DraftModelRows:
    """The rows that were asked about, and the smaller model's caches in the same order."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        companion.enter()
        self._rows: list[Row] = []
        self._caches: list[BatchCache] = []
        self._said: dict[Row, _Said] = {}
        self._limit: int | None = None

    def beside(self, tokens: Sequence[int]) -> int:
        """Return what the caches come to at most, with drafts behind ``tokens`` and a chunk of a prompt beside them."""
        if not tokens:
            return 0
        longest = max(tokens)
        longest += max(DEEPEST, min(CHUNK, longest))  # a window is as wide in the longest row as in any
        caches = self._caches or self._companion.open_caches(window=DEEPEST)
        return sum(cache.projected([longest] * max(len(tokens), len(self._rows))) for cache in caches)

    def spare(self, limit: int) -> None:
        """Hold no more than ``limit`` bytes: all rows, or none."""
        self._limit = limit
        if not self._fits(self._rows):
            self.drop(self._rows)

    def propose(self, rows: Sequence[Row], depths: Sequence[int]) -> list[list[int]]:
        """Return drafts, computed in one forward a place for all rows that want one. One read."""
        depths = [min(depth, DEEPEST) for depth in depths]
        wanted = {row: depth for row, depth in zip(rows, depths, strict=True) if depth and self._asks(row, depth)}
        if wanted and not self._fits({**dict.fromkeys(self._rows), **wanted}):
            self.drop(self._rows)
        elif wanted:
            self._join(wanted)
            self._draft([wanted.get(row, 0) for row in self._rows])
        return [
            self._said[row].draft[:depth] if depth and row in self._said else []
            for row, depth in zip(rows, depths, strict=True)
        ]

    def commit(self, row: Row, accepted: int) -> None:
        """Do nothing: what the row took is among its tokens."""

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows, and give their states back."""
        gone = set(rows)
        stay = [place for place, row in enumerate(self._rows) if row not in gone]
        if len(stay) < len(self._rows):
            self._rows = [self._rows[place] for place in stay]
            self._caches = self._caches if stay else []
            for cache in self._caches:
                cache.keep(stay)
        for row in gone:
            self._said.pop(row, None)

    def close(self) -> None:
        """Let go of the model."""
        self.drop(self._rows)
        self._companion.leave()

    def _fits(self, rows: Iterable[Row]) -> bool:
        """Return whether what rows come to is allowed."""
        tokens = [row.prompt_tokens + len(row.token_ids) for row in rows]
        return self._limit is None or self.beside(tokens) <= self._limit

    def _asks(self, row: Row, depth: int) -> bool:
        """Return whether something has to be computed for a row; what its positions do not reach is not."""
        tokens, said = row.prompt_tokens + len(row.token_ids), self._said.get(row)
        most = self._companion.positions
        if most is not None and tokens + depth > most:
            self._said.pop(row, None)
            return False
        return said is None or said.tokens != tokens or len(said.draft) < depth

    def _join(self, rows: Iterable[Row]) -> None:
        """Add empty rows for those that are new, on every layer or on none."""
        new = [row for row in rows if row not in self._rows]
        if not new:
            return
        caches = self._caches or self._companion.open_caches(window=DEEPEST)
        on_every_layer(caches, len(self._rows), lambda cache, count: cache.add(count), [len(new)] * len(caches))
        self._caches = caches
        self._rows += new

    def _draft(self, depths: Sequence[int]) -> None:
        """Draft for the rows with a depth; the others stand by."""
        self._take_in(depths)
        last = [_token(row, -1) if depth else 0 for row, depth in zip(self._rows, depths, strict=True)]
        ids, most = mx.array(last, dtype=mx.uint32)[:, None], max(depths)
        for place in range(1, most + 1):
            widths = [place if depth >= place else 0 for depth in depths]
            logits = self._companion.forward(self._caches, ids, widths)  # (B, place, V)
            self._companion.settle(self._caches, ids, widths, [0] * len(widths))
            ids = mx.concatenate([ids, mx.argmax(logits[:, -1:], axis=-1).astype(mx.uint32)], axis=1)
        drafts: Any = ids[:, 1:].tolist()
        for row, depth, draft in zip(self._rows, depths, drafts, strict=True):
            if depth:
                self._said[row] = _Said(row.prompt_tokens + len(row.token_ids), draft[:depth])

    def _take_in(self, depths: Sequence[int]) -> None:
        """Forward what rows with a depth have said since, but for their last token, in chunks."""
        while True:
            held = self._caches[0].tokens
            left = [
                row.prompt_tokens + len(row.token_ids) - 1 - count if depth else 0
                for row, count, depth in zip(self._rows, held, depths, strict=True)
            ]
            widths = [min(CHUNK, n) for n in left]
            widest = max(widths)
            if not widest:
                return
            lines = [
                [_token(row, at) for at in range(count, count + width)] + [0] * (widest - width)
                for row, count, width in zip(self._rows, held, widths, strict=True)
            ]
            ids = mx.array(lines, dtype=mx.uint32)
            self._companion.forward(self._caches, ids, widths)
            self._companion.settle(self._caches, ids, widths, widths)
            if widest > DEEPEST:  # a prompt; what follows a few tokens is computed with them
                mx.eval([array for cache in self._caches for array in cache.arrays()])


def _token(row: Row, at: int) -> int:
    """Return a row's token at a position, or counted from its end."""
    if at < 0:
        at += row.prompt_tokens + len(row.token_ids)
    return row.prompt_ids[at] if at < row.prompt_tokens else row.token_ids[at - row.prompt_tokens]


def _difference(theirs: Tokenizer | None, ours: Tokenizer | None, vocabulary: int) -> str | None:
    """Return how the draft model's tokenizer differs from the model's, or None; where one has none, nobody can tell."""
    if theirs is None or ours is None:
        return None
    if theirs.encode(SAMPLE) != ours.encode(SAMPLE):
        return "its tokenizer cuts text into other tokens"
    ids = range(0, vocabulary, max(1, vocabulary // TOKENS))
    different = next((i for i in ids if theirs.decode([i]) != ours.decode([i])), None)
    if different is not None:
        return f"its token {different} is {theirs.decode([different])!r}, the model's is {ours.decode([different])!r}"
    return None


@attrs.frozen
class DraftModel:
    """Registers as ``draft_model``."""

    name: str = "draft_model"
    options: type = DraftModelOptions

    def refuses(self, bound: Any, options: DraftModelOptions) -> str | None:
        """Return why tokens of the smaller model are not those of the bound one, or None."""
        companion: Companion = bound.companion(options.model)
        if companion.vocabulary != bound.vocabulary:
            return f"{options.model!r} has a vocabulary of {companion.vocabulary} tokens, the model one of {bound.vocabulary}"
        different = _difference(companion.tokenizer, bound.tokenizer, bound.vocabulary)
        return f"{options.model!r} cannot be understood: {different}" if different else None

    def open(self, bound: Any, options: DraftModelOptions) -> DraftModelRows:
        """Return a proposer without rows."""
        return DraftModelRows(bound.companion(options.model))


@hookimpl
def register_proposers(register: Callable[[object], None]) -> None:
    """Register `draft_model`."""
    register(DraftModel())
