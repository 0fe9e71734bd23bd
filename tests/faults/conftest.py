"""What tests of faults share: a model that speaks by script, tiny real models, engines that are closed, planted faults."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx import nn

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.samplers.histories import Histories

NAN, DEAD = -1, -2
"""Tokens of a script: the scores there are not numbers, or all minus infinity."""


class Scripted(nn.Module):
    """Says ``scripts[first token]``, by position, over a real cache: a row that reads another's past says its script.

    Position p of a row answers with token p of its script, so a prompt of n tokens begins at n - 1; where a script is
    over it repeats. ``before(ids, cache)`` runs at the start of every forward. ``reads_values`` False: what it writes as
    values has no part in its scores.
    """

    def __init__(self, scripts, vocabulary=64, before=None, reads_values=True):
        super().__init__()
        self.layers = [nn.Identity()]
        self.vocabulary = vocabulary
        self.before = before
        self.reads_values = reads_values
        self._length = max(map(len, scripts.values()))
        table = [[0] * self._length for _ in range(vocabulary)]
        for first, script in scripts.items():
            table[first] = [script[i % len(script)] for i in range(self._length)]
        self._table = mx.array(table, dtype=mx.int32)

    def __call__(self, ids, cache):
        if self.before is not None:
            self.before(ids, cache[0])
        width = ids.shape[1]
        offset = mx.array(cache[0].offset, dtype=mx.int32).reshape(-1, 1)
        firsts = self.first_tokens(ids.astype(mx.float32)[:, None, :, None], cache[0])
        positions = (offset + mx.arange(width, dtype=mx.int32)) % self._length
        said = self._table[firsts, positions]
        logits = 9.0 * (said[..., None] == mx.arange(self.vocabulary)).astype(mx.float32)
        logits = mx.where((said == DEAD)[..., None], -mx.inf, logits)
        return mx.where((said == NAN)[..., None], mx.nan, logits)

    def first_tokens(self, kv, cache):
        """Append and return each row's first token, (B, 1)."""
        keys, values = cache.update_and_fetch(kv, kv)
        firsts = (values if self.reads_values else keys)[:, 0, :1, 0].astype(mx.int32)
        return mx.maximum(firsts, keys[:, 0, :1, 0].astype(mx.int32))


class Words:
    """A tokenizer of one string a token; ``eos`` ends a turn."""

    def __init__(self, words, eos=()):
        self.words = dict(words)
        self.eos_token_ids = frozenset(eos)

    def encode(self, text):
        return [next(i for i, word in self.words.items() if word == piece) for piece in text.split("|") if piece]

    def decode(self, ids):
        return "".join(self.words.get(i, f"<{i}>") for i in ids if i not in self.eos_token_ids)

    def apply_chat_template(self, messages):
        return self.encode("|".join(message["content"] for message in messages))


class Recorder:
    """A processor that notes what stands before each line of scores, and how much of it is drafted, by prompt."""

    name, is_argmax_invariant, fields, extra = "recorder", False, frozenset(), frozenset({"recorder"})

    def __init__(self):
        self.noted = {}

    @hookimpl
    def register_processors(self, register):
        register(self)

    def check(self, params, vocabulary):
        pass

    def handles(self, row):
        return "recorder" in row.params.extra

    def open(self, rows):
        return RecorderRows(self, rows)


class RecorderRows(Histories):
    def __init__(self, recorder, rows):
        super().__init__(rows)
        self._recorder, self._marks = recorder, [row.params.extra["recorder"] for row in rows]

    def apply(self, logits, rows=None, drafted=None):
        past, whose = self.lines(rows, drafted), range(len(logits)) if rows is None else rows.tolist()
        counts = drafted.counts if drafted is not None else [0] * len(logits)
        for line, (row, ahead) in enumerate(zip(whose, counts, strict=True)):
            history = tuple(past.tokens[line, : past.lengths[line].item()].tolist())
            self._recorder.noted.setdefault(self._marks[row], []).append((history, ahead))
        return logits

    def keep(self, indices):
        super().keep(indices)
        self._marks = [self._marks[i] for i in indices]


class Grammar:
    """A constraint factory, and its plugin: registers as ``counting`` and keeps what it opened, by a class of constraints."""

    name = "counting"

    def __init__(self, constraint):
        self.constraint, self.opened = constraint, []

    def open(self, spec, tokenizer, request):
        self.opened.append(self.constraint(**spec))
        return self.opened[-1]

    @hookimpl
    def register_constraints(self, register):
        register(self)


class Worker(threading.Thread):
    """A thread of a test that touches arrays: it gives its streams back, and `result` raises what it raised."""

    def __init__(self, work, *arguments):
        super().__init__(daemon=True)
        self._work, self._arguments = work, arguments
        self._value = self._error = None
        self.start()

    def run(self):
        try:
            self._value = self._work(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in `result`
            self._error = error
        # mlx 0.32 aborts the process at exit for a thread that ended with streams
        mx.clear_streams()

    def result(self, timeout=30):
        self.join(timeout)
        assert not self.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._value


@attrs.frozen
class Storage:
    """A tiny model by name, with changes, and how its layers are stored; ``exact``: as mlx-lm's own caches do."""

    name: str
    changes: Mapping[str, Any] = attrs.field(factory=dict)
    layouts: Mapping[str, Any] = attrs.field(factory=dict)
    exact: bool = True


def packing(name, **options):
    """Full and rotating layers in 8 bits."""
    choice = {"name": name, "bits": 8, "group_size": 32, **options}
    return {"full": choice, "rotating": choice}


HEADS = {"head_dim": 32}
BLOCKS = {"full": {"name": "paged", "block_size": 16}}
PARTS = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
STORAGES = {
    "full": Storage("tiny-full"),
    "rings": Storage("tiny-ring"),
    "packed": Storage("tiny-full", HEADS, packing("quantized"), False),
    "packed rings": Storage("tiny-ring", HEADS, packing("quantized"), False),
    "delayed": Storage("tiny-full", HEADS, packing("delayed", start=6), False),
    "delayed rings": Storage("tiny-ring", HEADS, packing("delayed", start=6), False),
    "blocks": Storage("tiny-full", {}, BLOCKS),
    "gathered blocks": Storage("tiny-full", {}, {"full": {**BLOCKS["full"], "reads": "gather"}}),
    "states": Storage("mamba2"),
    "states that take padding": Storage("mamba"),
    "states beside blocks": Storage("qwen3_next", {}, BLOCKS),
    "parts": Storage("falcon_h1", PARTS),
    "packed parts": Storage("falcon_h1", {**PARTS, **HEADS}, packing("quantized"), False),
    "chunks": Storage("llama4"),
}
"""Every layout, each where a model has layers of its kind."""


@functools.cache
def stored(key):
    """The model of a storage, built once."""
    return models.build(STORAGES[key].name, **STORAGES[key].changes)


@functools.cache
def alone(key, prompt, n):
    """``n`` tokens of a prompt alone and how far the two best scores were apart: mlx-lm's, or an engine's of one row."""
    storage, model = STORAGES[key], stored(key)
    if storage.exact:
        row = models.serial(model, prompt, n)
        return row.tokens, row.gaps
    config = {"layouts": storage.layouts, "scheduler": {"verify": False}}
    with Engine(model, config=config) as engine:
        (result,) = engine.generate([ask(*prompt, n=n, sampling=SamplingParams(logprobs=2))])
    return result.token_ids, gaps(result)


def gaps(result):
    """How far the two best scores of each token were apart, of a result with two of them recorded."""
    return tuple(record.top[0][1] - record.top[1][1] for record in result.logprobs)


@functools.cache
def tiny(name="tiny-full"):
    """A tiny model with random weights, built once."""
    return models.build(name)


def ask(*prompt, n=8, **fields):
    """A request for ``n`` tokens."""
    return Request(prompt_ids=prompt, max_tokens=n, **fields)


@pytest.fixture
def bench():
    """The names above, and `engine`, which closes what it opened."""
    with contextlib.ExitStack() as stack:
        yield Bench(stack)


class Bench:
    """See `bench`."""

    Scripted, Words, Worker, NAN, DEAD = Scripted, Words, Worker, NAN, DEAD
    Recorder, Grammar = Recorder, Grammar
    STORAGES = STORAGES
    tiny, ask, stored, row_alone, gaps = (staticmethod(f) for f in (tiny, ask, stored, alone, gaps))
    prompts, serial, compare = (staticmethod(f) for f in (models.prompts, models.serial, models.compare))

    def __init__(self, stack):
        self._stack = stack

    def engine(
        self, model, tokenizer=None, plugins=(), positions=None, layouts=None, state_cache=None, method=(), **scheduler
    ):
        """An engine with these settings of the scheduler, closed at the end of the test."""
        config = {"layouts": layouts or {}, "state_cache": state_cache or {"name": "none"}, "scheduler": scheduler}
        config["method"] = dict(method)
        made = Engine(model, tokenizer, config=config, plugins=plugins, positions=positions)
        return self._stack.enter_context(made)

    def run(self, engine, requests):
        """Tokens of each request run together, or its error."""
        outcomes = engine.generate(requests, return_errors=True)
        return [o if isinstance(o, BaseException) else o.token_ids for o in outcomes]

    @staticmethod
    def plant_one_rows_inputs(model):
        """Let the first row's inputs per layer be everybody's in steps of one token."""
        inner = model.language_model.model
        kind = type(inner)

        class OneRow(kind):
            def _get_per_layer_inputs(self, ids, *rest):
                out = super()._get_per_layer_inputs(ids, *rest)
                return mx.broadcast_to(out[:1], out.shape) if out.shape[1] == 1 else out

        inner.__class__ = OneRow

    def check_company(self, key, lengths, *, n=8, every=0, model=None, **settings):
        """Rows of a storage, one more after each ``every`` steps, get the tokens that each gets alone."""
        prompts = self.prompts(lengths, 97)
        wanted = [self.row_alone(key, tuple(prompt), n) for prompt in prompts]
        engine = self.engine(model or self.stored(key), layouts=STORAGES[key].layouts, **settings)
        handles = []
        for prompt in prompts:
            handles.append(engine.submit(self.ask(*prompt, n=n)))
            for _ in range(every):
                engine.step()
        said = [handle.result().token_ids for handle in handles]
        assert engine.stats()["recoveries"] == 0
        self.compare(said, *zip(*wanted, strict=True))

    def check_engine(self, model, requests, layouts, **settings):
        """Requests together get the tokens that each gets in an engine of one row."""
        scored = [attrs.evolve(request, sampling=SamplingParams(logprobs=2)) for request in requests]
        serial = self.engine(model, layouts=layouts, max_batch=1, verify=False).generate(scored)
        engine = self.engine(model, layouts=layouts, **settings)
        said = [result.token_ids for result in engine.generate(requests)]
        assert engine.stats()["recoveries"] == 0
        self.compare(said, [result.token_ids for result in serial], [gaps(result) for result in serial])

    def alone(self, model, requests, **settings):
        """Tokens of each request, in an engine that runs one at a time."""
        return self.run(self.engine(model, **{"max_batch": 1, **settings}), requests)


@pytest.fixture(params=STORAGES)
def storage(request):
    """The key of each of `STORAGES`."""
    return request.param


@contextlib.contextmanager
def must_fail(*also):
    """The check in here notices the planted fault: by an assertion, or by one of the errors ``also``."""
    with pytest.raises((AssertionError, pytest.fail.Exception, *also)):
        yield


@pytest.fixture
def planted():
    """See `must_fail`."""
    return must_fail
