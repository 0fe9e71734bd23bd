"""What an engine tells while it runs: spans of a request, times and bytes of a step, gauges. Rules are SPEC 19's."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.core.observe import StepTrace

PHASES = {
    "cache.lookup_restore", "prefill.total", "prefill.batch_setup", "prefill.row_sync", "prefill.chunk",
    "prefill.forward", "prefill.evaluate", "prefill.kv_maintenance", "prefill.checkpoint", "prefill.project",
    "prefill.complete", "token_zero.total", "token_zero.forward", "token_zero.sample",
}  # fmt: skip
BYTES = {"active_bytes", "peak_bytes", "cache_bytes"}


class Trace:
    """Records spans as (phase, attributes), and in ``order`` when each begins and ends."""

    def __init__(self):
        self.spans, self.order = [], []

    def begin(self, phase, attributes):
        self.spans.append((phase, attributes))
        self.order.append(("begin", phase))
        return lambda: self.order.append(("end", phase))

    def of(self, phase):
        return [attributes for name, attributes in self.spans if name == phase]

    def ends_of(self, phase):
        return [place for place, event in enumerate(self.order) if event == ("end", phase)]


class Keeps(NullStateCache):
    """A state cache that wants every state, so that boundaries are stored."""

    name = "keeps"

    def open(self, bound):
        return self

    @hookimpl
    def register_state_caches(self, register):
        register(self)

    def keeps(self, row):
        return True


def traced(model, *, plugins=(), traces=True, started=lambda: None, **scheduler):
    """Run three requests, one after the other joining, traced or not, and return their traces."""
    traces = [Trace() if traces else None for _ in range(3)]
    config = {"scheduler": {"prefill_chunk": 8, **scheduler}, "state_cache": {"name": "keeps", "publish_min_tokens": 4}}
    with Engine(model, config=config, plugins=[Keeps(), *plugins]) as engine:
        started()
        handles = []
        for trace, length in zip(traces, (20, 12, 30), strict=True):
            prompt = [1 + (5 * i) % 90 for i in range(length)]
            handles.append(engine.submit(Request(prompt_ids=prompt, max_tokens=6, trace=trace)))
            engine.step()
        for handle in handles:
            handle.result()
    return traces


def test_a_request_is_traced_through_every_phase(tiny):
    """19.1; each span that is begun is ended, once."""
    for trace in traced(tiny):
        assert {phase for phase, _ in trace.spans} == PHASES | {"engine.mixed_forward"}
        for phase in PHASES | {"engine.mixed_forward"}:
            assert trace.order.count(("begin", phase)) == trace.order.count(("end", phase))


def test_the_prefill_span_closes_where_that_of_the_first_token_opens(tiny):
    """6.2: at projection."""
    for trace in traced(tiny):
        assert trace.ends_of("prefill.total")[0] < trace.order.index(("begin", "token_zero.total"))
        assert trace.order.index(("begin", "prefill.project")) > trace.ends_of("prefill.total")[0]


def test_chunks_are_spans_from_where_they_start_to_where_they_end(tiny):
    """Whole chunks, in as many forwards as a stall bound asks for."""
    for bound in (0, 1e-6):
        spans = traced(tiny, stall_bound_ms=bound)[2]
        chunks = [(each["start"], each["end"]) for each in spans.of("prefill.chunk")]
        assert chunks == [(0, 8), (8, 16), (16, 24), (24, 29), (29, 30)]
        widths = [each["tokens"] for each in spans.of("prefill.forward")]
        assert sum(widths) == 30
        assert (len(widths) > 9) == bool(bound)


def test_spans_of_the_first_token_carry_the_allocators_bytes(tiny):
    """19.3."""
    for trace in traced(tiny):
        for phase in ("token_zero.total", "token_zero.forward", "token_zero.sample"):
            (attributes,) = trace.of(phase)
            assert attributes.keys() >= BYTES
            assert attributes["peak_bytes"] >= attributes["active_bytes"] > 0


def test_a_mixed_forward_is_a_span_of_either_side_with_its_tokens(tiny):
    """19.3: what decodes, what is prefilled, and both, under one work id."""
    first, _, last = (trace.of("engine.mixed_forward") for trace in traced(tiny))
    assert [each["packed_tokens"] - each["decode_tokens"] - each["prefill_tokens"] for each in last] == [0] * len(last)
    assert {each["work"] for each in first} & {each["work"] for each in last}


@pytest.fixture
def waits(monkeypatch):
    """Count what makes the host wait: evaluations and synchronisations."""
    counted = {"eval": 0, "synchronize": 0}
    for name in counted:
        call = getattr(mx, name)

        def counting(*given, name=name, call=call):
            counted[name] += 1
            return call(*given)

        monkeypatch.setattr(mx, name, counting)
    return counted


def test_only_attribution_adds_waits(tiny, waits):
    """19.4: a trace adds none; attribution evaluates the state, then the scores, then reads the first token at once."""
    found = {}
    for name, plugins in (("plain", ()), ("traced", (StepTrace(),)), ("attributed", (StepTrace(attribution=True),))):
        start = functools.partial(waits.update, eval=0, synchronize=0)
        traces = traced(tiny, plugins=plugins, traces=name != "plain", started=start, early_first_token=False)
        found[name] = dict(waits)
    assert found["plain"] == found["traced"]
    assert found["attributed"]["eval"] > found["plain"]["eval"]
    assert found["attributed"]["synchronize"] > found["plain"]["synchronize"]
    order = traces[0].order
    places = [order.index(("end", phase)) for phase in ("prefill.evaluate", "token_zero.head", "token_zero.sample")]
    assert places == sorted(places)
    assert order.index(("begin", "token_zero.head")) > max(
        place for place, event in enumerate(order) if event == ("begin", "prefill.evaluate")
    )


def test_tokens_are_the_same_under_attribution(tiny):
    requests = [Request(prompt_ids=[1 + i, 5, 9], max_tokens=8) for i in range(3)]
    found = []
    for plugins in ((), (StepTrace(attribution=True),)):
        with Engine(tiny, plugins=plugins) as engine:
            found.append([result.token_ids for result in engine.generate(requests)])
    assert found[0] == found[1]


def test_every_step_says_where_its_time_went(tiny, told):
    """19.5: build, read and emit of both sides, the gap before it, and the allocator's bytes."""
    with Engine(tiny, plugins=[told]) as engine:
        first = engine.submit(Request(prompt_ids=[3, 1, 4], max_tokens=30))
        engine.step()
        second = engine.submit(Request(prompt_ids=list(range(1, 40)), max_tokens=5))
        first.result()
        second.result()
        before = len(told.records)
        engine.generate([Request(prompt_ids=[5], max_tokens=3)])
    assert {step.phase for step in told.records} == {"prefill", "decode", "prefill+decode"}
    assert [step.index for step in told.records] == sorted({step.index for step in told.records})
    for step in told.records:
        assert 0 < step.build_ms + step.read_ms + step.emit_ms <= step.total_ms
        assert step.peak_bytes >= step.active_bytes > 0
    pipelined = [step for step in told.records if step.phase == "decode" and not step.joined]
    assert sum(step.read_ms > 0 for step in pipelined) > 20  # the wait for a draw that the step before started
    assert all(step.gap_ms > 0 for step in told.records[1:before])
    assert told.records[before].gap_ms == 0  # the engine had been idle


def test_gauges_hold_the_caches_and_the_allocators_bytes(tiny):
    with Engine(tiny) as engine:
        handle = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=9))
        while not engine.stats()["active_rows"]:
            engine.step()
        stats = engine.stats()
        assert stats["kv_bytes"] >= stats["kv_live_bytes"] > 0
        assert stats["peak_bytes"] >= stats["active_bytes"] > 0
        assert stats.keys() >= BYTES
        handle.result()
        assert (engine.stats()["kv_bytes"], engine.stats()["kv_live_bytes"]) == (0, 0)
