"""Spans on a request's own trace: opened and closed in order, and never a disturbance."""

import pytest

from oarlock.core import Request
from oarlock.core.row import Row
from oarlock.core.tracing import Spans, shared


class Trace:
    """Records what is begun and ended."""

    def __init__(self):
        self.events = []

    def begin(self, phase, attributes):
        self.events.append(("begin", phase, attributes))
        return lambda: self.events.append(("end", phase))


def row(trace=None):
    return Row(
        request=Request(prompt_ids=[1], trace=trace), id="r", prompt_ids=(1,), max_tokens=1, stop_ids=frozenset(),
        seed=0, key=None,
    )  # fmt: skip


def test_shared_work_is_recorded_on_every_traced_row_under_one_id():
    """SPEC 19.2."""
    first, second = Trace(), Trace()
    rows = [row(first), row(), row(second)]
    with shared(rows, "prefill.forward", tokens=7):
        pass
    (_, phase, attributes), ended = first.events
    assert (phase, attributes["rows"], attributes["tokens"]) == ("prefill.forward", 3, 7)
    assert second.events[0][2]["work"] == attributes["work"]
    assert ended == ("end", "prefill.forward")


def test_a_span_is_closed_when_the_work_raises():
    trace = Trace()
    with pytest.raises(KeyError), shared([row(trace)], "prefill.forward", tokens=1):
        raise KeyError
    assert trace.events[-1] == ("end", "prefill.forward")


def test_all_open_spans_close_the_latest_first():
    trace = Trace()
    spans = Spans(trace)
    spans.begin("prefill.total")
    spans.begin("prefill.forward")
    spans.end()
    assert [phase for kind, phase, *_ in trace.events if kind == "end"] == ["prefill.forward", "prefill.total"]
    spans.end()
    assert len(trace.events) == 4


def test_a_trace_that_raises_is_not_asked_again():
    class Broken:
        asked = 0

        def begin(self, phase, attributes):
            self.asked += 1
            raise OSError

    broken = Broken()
    spans = Spans(broken)
    spans.begin("prefill.total")
    spans.begin("prefill.forward")
    spans.end()
    assert broken.asked == 1
    assert not spans
