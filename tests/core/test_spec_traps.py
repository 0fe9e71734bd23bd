"""Traps of SPEC 21 that no other file covers: what a naive engine gets wrong between two parts that are right.

Elsewhere: 1, 5, 7, 10, 14, 15, 40, 43 and 44 are planted in tests/simulation/test_plants.py; 2, 6, 12, 16, 17, 18, 47
and 56 break its schedules; 30 to 32 stand in test_planner.py, 42 and 44 in test_scheduler.py, 45 and 46 in
tests/simulation/test_method_host.py, 11, 12 and 54 in the tests of the engine.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.core.errors import AdmissionError, EngineClosed, NeverFits, QueueFull
from oarlock.core.sampling import SamplerGroup
from oarlock.methods.plain import PlainDecoding


@pytest.mark.parametrize("vectorised", [True, False])
def test_registers_stay_uint32_beside_placeholders(engines, successor, ask, counted, monkeypatch, vectorised):
    """Trap 8: an int32 placeholder among uint32 samples would make all of them int64."""
    seen, draw = [], SamplerGroup.draw

    def drawing(self, logits, live, times=None):
        drawn = draw(self, logits, live, times)
        seen.append((drawn.tokens.dtype, tuple(live)))
        return drawn

    monkeypatch.setattr(SamplerGroup, "draw", drawing)
    engine = engines(successor, vectorised_sampling=vectorised)
    sampled = SamplingParams(temperature=1e-3, seed=1)
    engine.generate([ask(0, 3), ask(20, 9, sampling=sampled), ask(40, 6)])
    assert {dtype for dtype, _ in seen} == {mx.uint32}
    assert any(False in live and True in live for _, live in seen)


def test_the_allocators_pool_is_cleared_now_and_then(engines, successor, ask, monkeypatch):
    """Trap 35, 8.15: every 256 steps and at first tokens, not in every step."""
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    engine = engines(successor)
    engine.generate([ask(0, 520)])
    assert 2 <= len(calls) <= 6


def test_a_failing_flush_is_not_the_joiners_fault(engines, successor, ask, counted, monkeypatch):
    """Trap 55, 7.1: by then the running state is in doubt, and everything is computed again; nobody is guilty."""
    flush, failed = PlainDecoding.flush, []

    def failing(self):
        if self._register is not None and not failed:
            failed.append(True)
            raise OSError("the register cannot be read")
        flush(self)

    engine = engines(successor)
    running = [engine.submit(ask(start, 30)) for start in (0, 40)]
    while engine.stats()["active_rows"] < 2 or engine.stats()["pending_rows"]:
        engine.step()
    engine.step()
    monkeypatch.setattr(PlainDecoding, "flush", failing)
    joiner = engine.submit(ask(60, 5))
    assert joiner.result().token_ids == counted(60, 5)
    assert [handle.result().token_ids for handle in running] == [counted(0, 30), counted(40, 30)]
    assert engine.stats()["recoveries"] == len(failed) == 1
    assert engine.submit(ask(3, 2)).result().token_ids == counted(3, 2)


class Keeping(NullStateCache):
    """Keeps nothing, and notes the calls."""

    name = "keeping"

    def __init__(self):
        self.calls = []

    def open(self, bound):
        return self

    def admit(self, row):
        self.calls.append("admit")
        return True

    def keeps(self, row):
        self.calls.append("keeps")
        return True

    def release(self, row, completed):
        self.calls.append(f"release {completed}")

    def publish(self, key, tokens, states):
        self.calls.append(f"publish {len(tokens)}")

    @hookimpl
    def register_state_caches(self, register):
        register(self)


def test_a_row_is_published_after_its_lease_is_given_back(successor):
    """Trap 13, 12.3, 4.11: in decode; so what decides about keeping must not depend on the lease."""
    store = Keeping()
    config = {"scheduler": {"verify": False}, "state_cache": {"name": "keeping", "publish_min_tokens": 64}}
    with Engine(successor, config=config, plugins=[store]) as engine:
        engine.generate([Request(prompt_ids=[1, 2, 3], max_tokens=4)])
    assert store.calls == ["admit", "release True", "keeps", "publish 6"]  # the last lone token was never fed (8.7)


@pytest.mark.parametrize("end", ["cancel", "raise"])
def test_a_row_that_did_not_finish_is_not_published(successor, end):
    """Trap 15, 13.7: the lease is given back as not completed."""
    store = Keeping()

    def consumer(event):
        if event.index == 2 and end == "raise":
            raise OSError("no")
        if event.index == 2:
            handle.cancel()

    config = {"scheduler": {"verify": False}, "state_cache": {"name": "keeping", "publish_min_tokens": 64}}
    with Engine(successor, config=config, plugins=[store]) as engine:
        handle = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=9, on_token=consumer))
        while engine.step():
            pass
    assert store.calls == ["admit", "release False"]


def test_refusals_can_be_told_apart():
    """Trap 54: full, too large and closed are classes of their own; a cancelled row is no error at all."""
    kinds = (QueueFull, NeverFits, EngineClosed)
    assert all(not issubclass(a, b) for a in kinds for b in kinds if a is not b)
    assert issubclass(QueueFull, AdmissionError)
    assert issubclass(NeverFits, AdmissionError)


def test_a_request_is_never_changed(engines, successor):
    """Trap 48, 2.2: what was left open is filled in on the row."""
    request = Request(prompt_ids=[1, 2, 3], max_tokens=2)
    engines(successor).generate([request])
    assert request == Request(prompt_ids=[1, 2, 3], max_tokens=2)
    assert request.prefill_chunk is None
    assert request.id is None
