"""A bare engine for single checks: a model whose best token is always 0, and the parts that a check brings."""

from __future__ import annotations

import attrs
import pytest

from harness.model import StubModel
from oarlock.core import hookimpl
from oarlock.core.engine import Engine


class Zeros(StubModel):
    """Keys and values as in the stub, and the score of token 0 is the best at every step. It notes its forwards."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.before = lambda cache, ids: self.shapes.append(list(ids.shape))

    def __call__(self, ids, cache):
        return 0 * super().__call__(ids, cache) - self._tokens


@attrs.define(eq=False)
class Given:
    """A plugin of the parts that a check brings."""

    store: object = None
    methods: tuple = ()
    adapter: object = None

    @hookimpl
    def register_state_caches(self, register):
        if self.store is not None:
            register(self.store)

    @hookimpl
    def register_methods(self, register):
        for method in self.methods:
            register(method)

    @hookimpl
    def register_adapters(self, register):
        if self.adapter is not None:
            register(self.adapter)


def build(model, *, store=None, methods=(), adapter=None, lock=None, **scheduler):
    config = {"scheduler": {"verify": False, **scheduler}}
    if store is not None:
        config["state_cache"] = {"name": store.name, "publish_min_tokens": 256}
    return Engine(model, config=config, plugins=[Given(store, methods, adapter)], lock=lock)


def prompt(length, first):
    return tuple((first + 7 * i) % 60 for i in range(length))


def run(engine, requests, turns=400):
    handles = [engine.submit(request) for request in requests]
    for _ in range(turns):
        if not engine.step():
            return handles
    pytest.fail(f"not done after {turns} steps: {engine.stats()}")
