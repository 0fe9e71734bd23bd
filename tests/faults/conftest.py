"""What tests of faults share: a model that speaks by script, tiny real models, engines that are closed, planted faults."""

from __future__ import annotations

import contextlib
import functools
import threading

import mlx.core as mx
import pytest
from mlx import nn

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models

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
        kv = ids.astype(mx.float32)[:, None, :, None]
        keys, values = cache[0].update_and_fetch(kv, kv)
        firsts = (values if self.reads_values else keys)[:, 0, :1, 0].astype(mx.int32)
        firsts = mx.maximum(firsts, keys[:, 0, :1, 0].astype(mx.int32))
        positions = (offset + mx.arange(width, dtype=mx.int32)) % self._length
        said = self._table[firsts, positions]
        logits = 9.0 * (said[..., None] == mx.arange(self.vocabulary)).astype(mx.float32)
        logits = mx.where((said == DEAD)[..., None], -mx.inf, logits)
        return mx.where((said == NAN)[..., None], mx.nan, logits)


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
    tiny, ask = staticmethod(tiny), staticmethod(ask)
    prompts, serial, compare = (staticmethod(f) for f in (models.prompts, models.serial, models.compare))

    def __init__(self, stack):
        self._stack = stack

    def engine(self, model, tokenizer=None, plugins=(), positions=None, **scheduler):
        """An engine with these settings of the scheduler, closed at the end of the test."""
        made = Engine(model, tokenizer, config={"scheduler": scheduler}, plugins=plugins, positions=positions)
        return self._stack.enter_context(made)

    def run(self, engine, requests):
        """Tokens of each request run together, or its error."""
        outcomes = engine.generate(requests, return_errors=True)
        return [o if isinstance(o, BaseException) else o.token_ids for o in outcomes]

    def alone(self, model, requests, **settings):
        """Tokens of each request, in an engine that runs one at a time."""
        return self.run(self.engine(model, **{"max_batch": 1, **settings}), requests)


@contextlib.contextmanager
def must_fail(*also):
    """The check in here notices the planted fault: by an assertion, or by one of the errors ``also``."""
    with pytest.raises((AssertionError, pytest.fail.Exception, *also)):
        yield


@pytest.fixture
def planted():
    """See `must_fail`."""
    return must_fail
