"""Observers are told one by one; a failing one is logged once and disturbs nothing. Step times add up."""

import types

import attrs
import pytest
from structlog.testing import capture_logs

from oarlock.core import hookimpl, manager
from oarlock.core.observe import Observers, StepRecord, StepTrace


def plugin(name, **hooks):
    module = types.ModuleType(name)
    for hook, function in hooks.items():
        setattr(module, hook, hookimpl(function))
    return module


def observers(*plugins):
    return Observers(manager.build(plugins=plugins, disable=["oarlock"]).manager)


def test_each_observer_gets_the_arguments_that_it_wants():
    """Whatever subset, in whatever order."""
    seen = []
    tell = observers(
        plugin("none", request_finished=lambda: seen.append("none")),
        plugin("one", request_finished=lambda usage: seen.append(usage)),
        plugin("all", request_finished=lambda usage, request, reason: seen.append((request, reason, usage))),
    )
    tell.notify("request_finished", request=1, reason=2, usage=3)
    assert sorted(map(str, seen)) == ["(1, 2, 3)", "3", "none"]


def test_observers_are_called_as_pluggy_calls_them():
    """Last registered first, but for tryfirst and trylast."""
    seen = []
    first = types.ModuleType("first")
    first.step_finished = hookimpl(tryfirst=True)(lambda: seen.append("first"))
    tell = observers(first, *(plugin(name, step_finished=lambda name=name: seen.append(name)) for name in ("a", "b")))
    tell.notify("step_finished", step=None)
    assert seen == ["first", "b", "a"]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), GeneratorExit(), AssertionError()])
def test_a_failing_observer_is_logged_once_and_disturbs_nothing(error):
    """Plugin and hook are named; the others are told every time."""
    seen = []

    def fail(request):
        raise error

    tell = observers(
        plugin("before", request_admitted=lambda: seen.append("before")),
        plugin("bad", request_admitted=fail, request_failed=fail),
        plugin("after", request_admitted=lambda: seen.append("after")),
    )
    with capture_logs() as lines:
        for _ in range(3):
            tell.notify("request_admitted", request=1)
        tell.notify("request_failed", request=1, error=ValueError())
    assert seen == ["after", "before"] * 3
    assert [(line["event"], line["hook"]) for line in lines] == [
        ("observer_failed", "request_admitted"),
        ("observer_failed", "request_failed"),
    ]
    assert all("bad" in line["plugin"] and type(error).__name__ in line["error"] for line in lines)
    assert all("test_observe.py" in line["at"] for line in lines)


def test_an_error_that_cannot_be_shown_disturbs_nothing_either():
    """Its __str__ is foreign code too."""

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def fail():
        raise Mute

    with capture_logs() as lines:
        observers(plugin("bad", step_finished=fail)).notify("step_finished", step=None)
    assert "Mute" in lines[0]["error"]


def test_ctrl_c_is_the_users():
    """The one thing that is passed on."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observers(plugin("p", step_finished=interrupt)).notify("step_finished", step=None)


def test_nobody_listening_is_known_beforehand():
    """So that no record is made for nobody."""
    tell = observers(plugin("p", step_finished=lambda: None))
    assert tell.wants("step_finished")
    assert not tell.wants("request_failed")
    tell.notify("request_failed", request=1, error=None)


def test_a_hook_that_does_not_exist_is_a_mistake_of_the_caller():
    """A typo in the engine is not swallowed with the observers' errors."""
    with pytest.raises(KeyError):
        observers().notify("request_finnished", request=1)


def test_a_step_record_counts_its_rows():
    """Counts follow from the ids: they cannot disagree."""
    step = StepRecord(index=1, phase="prefill+decode", decode_ids=("a", "b"), prefill_ids=("c",))
    assert (step.decode_rows, step.prefill_rows) == (2, 1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        step.index = 2


def test_the_trace_counts_every_step_by_its_phase():
    """19.5: steps without a read count too, else build and gap times are inflated; a report resets."""
    trace = StepTrace()
    tell = observers(trace)
    for index in range(100):
        tell.notify(
            "step_finished", step=StepRecord(index=index, phase="decode", build_ms=index, read_ms=2, total_ms=5)
        )
    tell.notify("step_finished", step=StepRecord(index=100, phase="prefill", build_ms=1000, gap_ms=7, total_ms=9))
    report = trace.report()
    assert report.steps == {"all": 101, "decode": 100, "prefill": 1}
    assert set(report.times) == set(report.steps)
    assert {name: each.mean for name, each in report.times["prefill"].items()} == {
        "build_ms": 1000, "read_ms": 0, "emit_ms": 0, "gap_ms": 7, "total_ms": 9,
    }  # fmt: skip
    assert attrs.astuple(report.times["decode"]["build_ms"]) == (49.5, 50, 98)
    assert attrs.astuple(report.times["all"]["build_ms"]) == (pytest.approx(5950 / 101), 50, 99)
    assert trace.report().steps == {}
