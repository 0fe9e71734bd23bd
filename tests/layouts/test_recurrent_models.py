"""Kind C: real recurrent and hybrid models keep every row's state its own, in padded windows and in crowds.

Drafts come from an oracle that is wrong now and then, so that rows are cut in the middle of a window: what `settle`
does then is what a speculative method rests on.
"""

import random

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models import ssm

from oarlock.core import Request
from oarlock.core.bind import bind
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.forward import forward, settle
from oarlock.core.manager import build
from oarlock.core.testing import models
from oarlock.layouts.recurrent import RecurrentCache

HONOURS = ("mamba2", "falcon_h1", "qwen3_next", "lfm2", "kimi_linear", "granitemoehybrid", "qwen3_5_moe", "lfm2_moe")
IGNORES = ("mamba", "nemotron_h", "rwkv7", "bailing_moe_linear", "jamba")
QUICK = {"mamba2", "falcon_h1", "qwen3_next", "mamba", "nemotron_h"}
SMALLER = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32},
    "jamba": {"mamba_expand": 2, "mamba_d_state": 16, "num_hidden_layers": 4},
    "lfm2": {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000},
}
LENGTHS, TOKENS = (7, 3, 10, 1), 14
_made = {}


def made(name):
    """The model, bound, with prompts and mlx-lm's tokens for them; each once."""
    if name not in _made:
        model = models.build(name, **SMALLER.get(name, {}))
        settings = EngineConfig()
        bound = bind(model, settings, build(settings))
        prompts = models.prompts(LENGTHS, min(97, bound.vocabulary))
        _made[name] = bound, prompts, [models.serial(model, prompt, TOKENS) for prompt in prompts]
    return _made[name]


def trusting(bound, honours):
    """The same composition with another belief about its model."""
    return attrs.evolve(bound, verdict=attrs.evolve(bound.verdict, honours_lengths=honours))


class Speculation:
    """Rows whose drafts are mlx-lm's own tokens, one in four replaced; depths differ, and rows sit out now and then."""

    def __init__(self, bound, prompts, serial, seed=5):
        self.bound, self.serial, self.draw = bound, serial, random.Random(seed)
        self.caches = bound.open_caches(slots=1, window=4)
        self.rows, self.cut, self.forwards = [], 0, 0
        for place, prompt in enumerate(prompts):
            alone = bound.open_caches(slots=1, window=1)
            for cache in alone:
                cache.add(1)
            ids = mx.array([prompt], dtype=mx.uint32)
            logits = forward(bound, alone, ids, [len(prompt)])
            settle(bound, alone, ids, [len(prompt)], [len(prompt)])
            self.rows.append([mx.argmax(logits[0, -1]).item()])
            for cache, other in zip(self.caches, alone, strict=True):
                cache.join(other, [place])

    def run(self):
        while min(map(len, self.rows)) < TOKENS:
            self._round()
        return [row[:TOKENS] for row in self.rows]

    def _round(self):
        fed = [self._fed(row, alone.tokens) for row, alone in zip(self.rows, self.serial, strict=True)]
        widths = list(map(len, fed))
        if not any(widths):
            return
        ids = mx.array([tokens + [0] * (max(widths) - len(tokens)) for tokens in fed], dtype=mx.uint32)
        said = mx.argmax(forward(self.bound, self.caches, ids, widths), axis=-1).tolist()
        kept = []
        for row, tokens, answers in zip(self.rows, fed, said, strict=True):
            right = 0
            while right + 1 < len(tokens) and tokens[right + 1] == answers[right]:
                right += 1
            kept.append(right + 1 if tokens else 0)
            row.extend(answers[: kept[-1]])
        self.cut += sum(0 < k < w for k, w in zip(kept, widths, strict=True))
        settle(self.bound, self.caches, ids, widths, kept)

    def _fed(self, row, oracle):
        if self.draw.random() < 0.15 or len(row) >= TOKENS:
            return []
        drafts = oracle[len(row) : len(row) + self.draw.randrange(4)]
        return [row[-1], *(token if self.draw.random() < 0.75 else (token + 1) % 89 for token in drafts)]


def check_speculation(name, honours=None):
    """Every row says what it says alone, though rows are cut, padded and left out."""
    bound, prompts, serial = made(name)
    run = Speculation(bound if honours is None else trusting(bound, honours), prompts, serial)
    said = run.run()
    models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])
    assert run.cut > 4
    arrays = [array for cache in run.caches for array in cache.arrays()]
    assert all(bool(mx.all(mx.isfinite(array))) for array in arrays)


def slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.fault("C-01", "C-02", "C-04")
@pytest.mark.parametrize("name", slow(HONOURS))
def test_padded_rows_and_cut_rows_are_settled_in_one_more_forward(name):
    assert made(name)[0].honours_lengths
    check_speculation(name)


@pytest.mark.fault("C-01")
@pytest.mark.parametrize("name", slow(IGNORES))
def test_models_that_take_padding_into_their_states_are_settled_by_count(name):
    assert not made(name)[0].honours_lengths
    check_speculation(name)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_caution_is_right_for_every_model(name):
    check_speculation(name, honours=False)


@pytest.mark.fault("C-01", twin=True)
@pytest.mark.parametrize("name", slow(IGNORES))
def test_twin_a_model_that_ignores_lengths_is_trusted(name):
    with pytest.raises(AssertionError):
        check_speculation(name, honours=True)


@pytest.mark.fault("C-02", twin=True)
def test_twin_the_mask_drops_the_lengths(monkeypatch):
    made("qwen3_next")
    monkeypatch.setattr(RecurrentCache, "make_mask", lambda cache, N: None)
    with pytest.raises(AssertionError):
        check_speculation("qwen3_next")


@pytest.mark.fault("C-04", twin=True)
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_twin_the_tail_is_that_of_the_padding(monkeypatch, name):
    made(name)
    begin = RecurrentCache.begin

    def forgets(cache, widths, starts):
        begin(cache, widths, starts)
        cache.lengths = None

    monkeypatch.setattr(RecurrentCache, "begin", forgets)
    with pytest.raises(AssertionError):
        check_speculation(name)


# --- C-05: a scan in chunks ------------------------------------------------------------------------------------


def whole_mask(attn):
    """A scan in chunks of two tokens that hands the first chunk's mask, and all lengths, to every chunk."""

    def scan(x, A_log, B, C, D, dt, dt_bias, state=None, limit=(0.001, 100.0), mask=None, lengths=None):
        ys = []
        for at in range(0, x.shape[1], 2):
            here = slice(at, at + 2)
            part = None if mask is None else mask[..., : x[:, here].shape[1]]
            y, state = attn(
                x[:, here],
                A_log,
                B[:, here],
                C[:, here],
                D,
                dt[:, here],
                dt_bias,
                state,
                limit,
                mask=part,
                lengths=lengths,
            )
            ys.append(y)
        return mx.concatenate(ys, axis=1), state

    return scan


@pytest.mark.fault("C-05")
def test_a_window_longer_than_the_scans_chunk(monkeypatch):
    """Padding in a later chunk, and prompts of several chunks."""
    made("mamba2")
    monkeypatch.setattr(ssm.ssm_attn, "__defaults__", (*ssm.ssm_attn.__defaults__[:-1], 3))
    check_speculation("mamba2")


@pytest.mark.fault("C-05", twin=True)
def test_twin_every_chunk_of_the_scan_gets_the_whole_mask(monkeypatch):
    made("mamba2")
    monkeypatch.setattr(ssm, "ssm_attn", whole_mask(ssm.ssm_attn))
    with pytest.raises(AssertionError):
        check_speculation("mamba2")


# --- crowds ----------------------------------------------------------------------------------------------------


def crowd(bound, prompts, n, **settings):
    """Tokens of all prompts, each sent as soon as the engine takes it."""
    requests = [Request(prompt_ids=prompt, max_tokens=n) for prompt in prompts]
    with Engine(bound.model, config={"scheduler": {"max_queued": 64, **settings}}) as engine:
        results = engine.generate(requests)
        assert engine.stats()["recoveries"] == 0
    return [result.token_ids for result in results]


def check_crowd(name, count=16, n=8, rounds=1, **settings):
    """Each prompt has a pattern of its own; each answer is the one that it gets alone."""
    bound, _, _ = made(name)
    prompts = [([3 + row] * 3 + [40 + row, 5]) * (1 + row % 3) for row in range(count)]
    serial = [models.serial(bound.model, prompt, n) for prompt in prompts]
    for _ in range(rounds):
        poison = [mx.full((1 << k,), float("nan")) for k in range(6, 18)]
        mx.eval(poison)
        del poison  # what is allocated next holds these
        said = crowd(bound, prompts, n, **settings)
        models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])


@pytest.mark.fault("C-04")
@pytest.mark.parametrize("name", ["falcon_h1", "mamba"])
def test_sixteen_at_once_three_times_over_freed_nans(name):
    check_crowd(name, rounds=3, prefill_chunk=4)


@pytest.mark.fault("C-08")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_twenty_requests_through_few_places(monkeypatch, tmp_path, rows):
    """A place is zero when it is given to a row, no chain hangs on it, and there are never more than allowed."""
    seen, edges, add = [], [], RecurrentCache.add

    def watched(cache, n):
        before = cache.rows
        add(cache, n)
        if (slot := cache[1]) is not None:
            mx.export_to_dot(str(tmp_path / "graph.dot"), slot)
            edges.append((tmp_path / "graph.dot").read_text().count("->"))
            seen.append(float(mx.abs(slot[before:]).max()))
        assert cache.rows <= rows

    made("mamba")
    monkeypatch.setattr(RecurrentCache, "add", watched)
    check_crowd("mamba", count=20, n=5, max_batch=rows, prefill_chunk=4, verify=False)
    assert not any(seen)
    assert len(set(edges)) <= 1  # always the same: the new zeros beside what was evaluated
    assert max(edges, default=0) < 10
    assert len(seen) > 4 or rows == 1


@pytest.mark.fault("C-08", twin=True)
def test_twin_a_new_row_begins_with_its_neighbours_state(monkeypatch):
    made("mamba")
    add = RecurrentCache.add

    def stale(cache, n):
        before = list(cache)
        add(cache, n)
        for i, slot in enumerate(before):
            if slot is not None:
                cache[i] = mx.concatenate([slot, *[slot[-1:]] * n])

    monkeypatch.setattr(RecurrentCache, "add", stale)
    with pytest.raises(AssertionError):
        check_crowd("mamba", count=20, n=5, max_batch=3, prefill_chunk=4, verify=False)


@pytest.mark.parametrize(("name", "again"), [("mamba2", 1), ("mamba", 3)])
def test_settle_costs_one_forward_or_one_per_count(name, again):
    """Rows that were cut are forwarded again, together; where padding spoils states by their number of tokens, and so
    is a row that was only padded."""
    bound, prompts, serial = made(name)
    caches, seen = Speculation(bound, prompts, serial).caches, []

    def counted(ids, cache):
        seen.append(ids.shape)
        return bound.model(ids, cache=cache)

    watched = attrs.evolve(bound, model=counted)
    ids, widths, kept = mx.ones((4, 4), dtype=mx.uint32), [4, 4, 3, 3], [2, 4, 1, 3]
    forward(watched, caches, ids, widths)
    settle(watched, caches, ids, widths, kept)
    assert len(seen) == 1 + again
    assert {cache.tokens for cache in caches} == {tuple(n + k for n, k in zip(LENGTHS, kept, strict=True))}
