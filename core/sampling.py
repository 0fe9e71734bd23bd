"""Sampling for the rows of a group: keys, the unread draw, and blame for a sampler that raises.

Which distribution is drawn from is the samplers' business, and the processors' before. A key is (seed, position) and
nothing else.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from oarlock.core.constraints import masked
from oarlock.core.contracts.method import Draw, Drawn
from oarlock.core.contracts.sampler import Processor, Sampler, SamplerRows
from oarlock.core.errors import UnsupportedFeature
from oarlock.core.lines import Lines
from oarlock.core.processing import ProcessorGroup, same
from oarlock.core.recording import Times
from oarlock.core.request import SamplingParams
from oarlock.core.result import Logprob
from oarlock.core.row import Row


def key_words(seed: int) -> tuple[int, int]:
    """Mix a 64-bit seed into two uint32 words, so that neighbouring seeds share nothing (splitmix64 finaliser)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def specialised_first(samplers: Iterable[Sampler]) -> tuple[Sampler, ...]:
    """Order samplers: one that handles less goes first, since it takes the shorter way; ties keep their order."""
    probes = (SamplingParams(), SamplingParams(temperature=1.0))
    return tuple(sorted(samplers, key=lambda sampler: sum(map(sampler.handles, probes))))


def choose(samplers: Sequence[Sampler], params: SamplingParams) -> Sampler:
    """Return the first sampler that handles ``params``. Raises `errors.UnsupportedFeature`."""
    for sampler in samplers:
        if sampler.handles(params):
            return sampler
    raise UnsupportedFeature("sampling", f"no registered sampler handles {params!r}")


@attrs.define(kw_only=True)
class PendingDraw:
    """Tokens sampled but not yet read. Everything here is one evaluation; `read` is the step's only sync."""

    tokens: mx.array  # (B,) uint32
    best: mx.array  # (B,) the best score; isfinite would be six kernels on the device for one test on the host
    real: list[bool]
    errors: list[BaseException | None]
    wants: list[int | None]
    chosen: mx.array | None = None  # (B,)
    top_ids: mx.array | None = None  # (B, n)
    top_values: mx.array | None = None  # (B, n)
    times: Times = attrs.field(factory=Times)

    def arrays(self) -> list[mx.array]:
        """Return what one evaluation must cover."""
        optional = (self.chosen, self.top_ids, self.top_values)
        return [self.tokens, self.best, *(array for array in optional if array is not None)]

    def read(self) -> list[Drawn]:
        """Block until the tokens are there."""
        before = time.perf_counter()
        tokens: list[int] = self.tokens.tolist()  # type: ignore[assignment]
        best: list[float] = self.best.tolist()  # type: ignore[assignment]
        logprobs = self._read_logprobs(tokens)
        self.times.read += time.perf_counter() - before
        return [
            Drawn(token, math.isfinite(score), real, error, logprob)
            for token, score, real, error, logprob in zip(tokens, best, self.real, self.errors, logprobs, strict=True)
        ]

    def keep(self, indices: Sequence[int]) -> None:
        """Make old line ``indices[i]`` the new line i."""
        at = mx.array(list(indices), dtype=mx.int32)
        self.tokens, self.best = self.tokens[at], self.best[at]
        self.real = [self.real[i] for i in indices]
        self.errors = [self.errors[i] for i in indices]
        self.wants = [self.wants[i] for i in indices]
        if self.chosen is not None:
            self.chosen = self.chosen[at]
        if self.top_ids is not None and self.top_values is not None:
            self.top_ids, self.top_values = self.top_ids[at], self.top_values[at]

    def _read_logprobs(self, tokens: Sequence[int]) -> list[Logprob | None]:
        if self.chosen is None:
            return [None] * len(tokens)
        chosen: list[float] = self.chosen.tolist()  # type: ignore[assignment]
        ids: Any = self.top_ids.tolist() if self.top_ids is not None else [[]] * len(tokens)
        values: Any = self.top_values.tolist() if self.top_values is not None else [[]] * len(tokens)
        read: list[Logprob | None] = []
        for i, want in enumerate(self.wants):
            if want is None:
                read.append(None)
                continue
            best = sorted(zip(ids[i], values[i], strict=True), key=lambda pair: (-pair[1], pair[0]))[:want]
            read.append(Logprob(token=tokens[i], logprob=chosen[i], top=tuple(best)))
        return read


class SamplerGroup:
    """The samplers and processors opened for the rows of a group; reopened at membership changes only."""

    def __init__(self, samplers: Sequence[Sampler], vectorised: bool, processors: Sequence[Processor] = ()) -> None:
        self._samplers = samplers
        self._processors = ProcessorGroup(processors)
        self._vectorised = vectorised
        self._rows: list[Row] = []
        self._opened: SamplerRows | None = None
        self._words: mx.array | None = None
        self._wants: list[int | None] = []
        self._next: Sequence[tuple[int, int]] = ()  # the lines of a step: each row's next token
        self._draws = True
        self._drawn: mx.array | None = None  # (B, W), of a window that nobody has taken yet

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Open for ``rows`` in this order, unless it is open for them already."""
        self._processors.set_rows(rows)
        if same(rows, self._rows):
            return
        self._rows = list(rows)
        self._words = mx.array([key_words(row.seed) for row in rows], dtype=mx.uint32) if rows else None  # (B, 2)
        self._wants = [row.request.sampling.logprobs for row in rows]
        self._next = [(row, 0) for row in range(len(rows))]
        self._opened, self._draws = None, True
        params = [row.request.sampling for row in rows]
        if rows and self._vectorised:
            shared = next((s for s in self._samplers if all(self._serves(s, p) for p in params)), None)
            with contextlib.suppress(Exception):  # the row by row repetition finds whose it is
                self._opened = shared.open(params) if shared is not None else None
            still = shared is not None and shared.is_argmax_invariant and all(row.greedy for row in params)
            self._draws = not still

    def keep(self, rows: Sequence[Row]) -> None:
        """Go on with ``rows`` of those that it is open for: what processors know of their unread tokens stays."""
        self._processors.keep(rows)
        if not rows:
            self.set_rows(())

    def push(self, draw: Draw) -> None:
        """Let processors know the unread tokens of a draw that was made elsewhere."""
        if self._processors.active:
            self._processors.push(draw.tokens[:, None], [1] * len(self._rows), [None] * len(self._rows))

    def _serves(self, sampler: Sampler, params: SamplingParams) -> bool:
        """Return whether ``sampler`` gives a row its own sampler's tokens: company must not choose another."""
        own = next((each for each in self._samplers if each.handles(params)), None)
        alike = params.greedy and own is not None and own.is_argmax_invariant and sampler.is_argmax_invariant
        return sampler is own or (alike and sampler.handles(params))

    def verify(self, logits: mx.array, ids: mx.array, widths: Sequence[int], times: Times | None = None) -> PendingDraw:
        """Sample what row i draws behind each of its ``widths[i]`` tokens of ``ids`` [B, W]; ``logits`` are [B, W, V]."""
        lines = Lines(ids, widths)
        scores, window = logits.reshape(-1, logits.shape[-1]), ids.shape[1]
        if len(lines.places) < len(scores):
            scores = scores[mx.array([row * window + place for row, place in lines.places], dtype=mx.int32)]
        return self.draw(scores, [True] * len(lines.places), times, lines)

    def draw(
        self, logits: mx.array, live: Sequence[bool], times: Times | None = None, lines: Lines | None = None
    ) -> PendingDraw:
        """Sample a token per line of ``logits`` [R, V] and start the evaluation. No sync, but for constraints' masks.

        Without ``lines``, line i is row i's next token.
        """
        places = lines.places if lines is not None else self._next
        errors: list[BaseException | None] = [None] * len(places)
        keys, scores = self._keys(places, lines), self._processors.apply(logits, errors, lines)
        scores = masked(self._rows, scores, live, errors, lines)  # last: nothing gives back what a constraint forbids
        rows = lines.rows if lines is not None else None
        if self._opened is not None:
            try:
                tokens = self._opened.sample(scores, keys, rows)
            except Exception:  # noqa: BLE001 - the row by row repetition finds whose it is
                tokens = self._row_by_row(scores, keys, live, errors, places)
        else:
            tokens = self._row_by_row(scores, keys, live, errors, places)
        real = [on and error is None for on, error in zip(live, errors, strict=True)]
        draw = PendingDraw(
            tokens=tokens,
            best=mx.max(scores, axis=-1),  # NaN where any score is, and minus infinity only where all are
            real=real,
            errors=errors,
            wants=self._wants if lines is None else [self._wants[row] for row in lines.whose],
            times=times or Times(),
        )
        self._add_logprobs(draw, logits)
        mx.async_eval(draw.arrays())
        if self._processors.active:  # last, since a step that raises before is taken once more
            if lines is None:
                self._processors.push(tokens[:, None], [int(each) for each in real], errors)
            else:
                self._drawn = lines.table(tokens)
        return draw

    def accept(self, taken: Sequence[int]) -> None:
        """Let processors know the first ``taken[i]`` tokens that row i drew of the last window."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            self._processors.push(drawn, taken)

    def _keys(self, places: Sequence[tuple[int, int]], lines: Lines | None) -> mx.array:
        """Return uint32 ``[R, 2]`` of (seed, position); the position is the count of samples before this one."""
        assert self._words is not None
        words = self._words if lines is None else self._words[lines.rows]
        if not self._draws:  # nobody reads them, and making an array each step is dear beside a tiny model
            return words
        positions = mx.array([[0, self._rows[row].sampled + ahead] for row, ahead in places], dtype=mx.uint32)
        return words ^ positions

    def _row_by_row(
        self,
        logits: mx.array,
        keys: mx.array,
        live: Sequence[bool],
        errors: list[BaseException | None],
        places: Sequence[tuple[int, int]],
    ) -> mx.array:
        """Sample each live line on its own; one whose sampler raises gets the error and a placeholder."""
        lines = []
        for i, (row, _) in enumerate(places):
            line, params = mx.zeros((1,), dtype=mx.uint32), self._rows[row].request.sampling
            if live[i]:
                try:
                    opened = choose(self._samplers, params).open([params])
                    line = opened.sample(logits[i : i + 1], keys[i : i + 1])
                except Exception as error:  # noqa: BLE001 - rejected with it, alone
                    errors[i] = error
            lines.append(line)
        return mx.concatenate(lines).astype(mx.uint32)

    def _add_logprobs(self, draw: PendingDraw, logits: mx.array) -> None:
        most = max((want for want in draw.wants if want is not None), default=None)
        if most is None:
            return
        scores = logits.astype(mx.float32)
        logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)  # (B, V)
        draw.chosen = mx.take_along_axis(logprobs, draw.tokens[:, None].astype(mx.int32), axis=-1)[:, 0]
        most = min(most, logits.shape[-1])
        if most:
            draw.top_ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
            draw.top_values = mx.take_along_axis(logprobs, draw.top_ids, axis=-1)
