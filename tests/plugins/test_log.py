"""The log plugin: one event a transition, through whatever structlog the application configured."""

import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from oarlock.core import FinishReason, Request, Usage, manager
from oarlock.core.observe import Observers, StepRecord
from oarlock.plugins import log

REQUEST = Request(id="r1", prompt_ids=[1, 2], max_tokens=5)
USAGE = Usage(prompt_tokens=2, generated_tokens=5, cached_tokens=1, prefill_ms=1.25, decode_ms=3.5, seed=7)
FACTS = {
    "request_admitted": {"request": REQUEST},
    "request_first_token": {"request": REQUEST, "elapsed": 0.0125},
    "request_finished": {"request": REQUEST, "reason": FinishReason.LENGTH, "usage": USAGE},
    "request_failed": {"request": REQUEST, "error": ValueError("bad row")},
    "request_preempted": {"request": REQUEST},
    "step_finished": {"step": StepRecord(index=3, phase="decode", decode_ids=("r1", "r2"), left=1)},
}


@pytest.fixture
def observers():
    plugins = manager.build(plugins=[log])
    return Observers(plugins.manager)


@pytest.mark.parametrize("hook", FACTS)
def test_each_transition_is_one_event_named_like_its_hook(observers, hook):
    """snake_case event names with keys; ids are bound."""
    with capture_logs() as lines:
        observers.notify(hook, **FACTS[hook])
    (line,) = lines
    assert line["event"] == hook
    if hook.startswith("request_"):
        assert line["request_id"] == "r1"


@pytest.mark.parametrize("end", ["request_finished", "request_failed"])
def test_the_id_is_bound_once_and_forgotten_at_the_end(observers, end):
    """One logger serves all transitions of a request, also of one that never was admitted; none is left over."""
    loggers = []
    for hook in ("request_admitted", "request_first_token", "request_preempted"):
        observers.notify(hook, **FACTS[hook])
        loggers.append(log._bound[id(REQUEST)])
    assert loggers[0] is loggers[1] is loggers[2]
    for _ in range(2):
        with capture_logs() as lines:
            observers.notify(end, **FACTS[end])
        assert lines[0]["request_id"] == "r1"
        assert not log._bound


def test_the_numbers_of_a_finished_request_are_keys(observers):
    """A log line can be counted without parsing a sentence."""
    with capture_logs() as lines:
        observers.notify("request_finished", **FACTS["request_finished"])
    (line,) = lines
    assert (line["reason"], line["generated_tokens"], line["seed"]) == ("length", 5, 7)


def test_failures_are_warnings_and_steps_are_debug(observers):
    """An application that shows warnings sees failures and not one line a step."""
    with capture_logs() as lines:
        for hook, facts in FACTS.items():
            observers.notify(hook, **facts)
    levels = {line["event"]: line["log_level"] for line in lines}
    assert levels["request_failed"] == levels["request_preempted"] == "warning"
    assert levels["step_finished"] == "debug"


def test_it_is_off_unless_named():
    """Without a logging set-up structlog writes to stdout, where answers go."""
    assert log.OARLOCK_OFF_BY_DEFAULT is True


def test_it_configures_nothing():
    """Where log lines go is the application's choice: loading the plugin leaves structlog and logging alone."""
    code = (
        "import logging, structlog; from oarlock.core import manager; from oarlock.plugins import log\n"
        "manager.build(plugins=[log], disable=['oarlock'])\n"
        "assert not structlog.is_configured() and not logging.root.handlers"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)
