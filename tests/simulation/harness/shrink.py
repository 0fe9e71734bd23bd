"""Makes a failing schedule small and writes it down as a test. It knows nothing of what a schedule checks."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import attrs

from harness.instruments import Instruments
from harness.plan import Plan
from harness.schedule import Script, play, script
from harness.world import Setting

ACTS = ("close", "hold", "task", "cancel task", "cancel", "release")


def shrunk(number: int, tools: Instruments, seconds: float = 30.0) -> str:
    """Return a test that fails as schedule ``number`` does, with as little in it as was found in ``seconds``."""
    small, until = script(number), time.monotonic() + seconds
    error = _error(small, tools)
    if error is None:
        return f"schedule {number} does not fail when it runs again"
    place, found, fruitful = 0, 0, True
    while fruitful:
        less = next(itertools.islice(_less(small), place, None), None)
        if time.monotonic() > until or (less is None and place == 0):
            break
        if less is None:  # once more from the first, for as long as that helps
            place, fruitful = 0, found > 0
            found = 0
            continue
        again = _error(less, tools)
        if again is not None and _kind(again) == _kind(error):
            small, error, found = less, again, found + 1
        else:
            place += 1
    return f"def test_schedule_{number}(tools):\n    # {error}\n    play({written(small)}, tools)\n"


def _error(small: Script, tools: Instruments) -> str | None:
    """Run a script on copies of its plans and return what it breaks."""
    try:
        play(attrs.evolve(small, plans=tuple(attrs.evolve(plan) for plan in small.plans)), tools)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return f"{type(error).__name__}: {error}"
    return None


def _kind(error: str) -> str:
    """Return how an error begins, numbers apart: what is shrunk is not to become another failure."""
    return re.sub(r"[^A-Za-z: ]", "", error)[:40]


def _less(small: Script) -> Iterator[Script]:
    """Yield what is one thing simpler, the largest things first."""
    half = len(small.plans) // 2
    if half > 1:
        yield attrs.evolve(small, plans=small.plans[:half])
        yield attrs.evolve(small, plans=small.plans[half:])
    for place in reversed(range(len(small.plans))):
        if len(small.plans) > 1:
            yield attrs.evolve(small, plans=(*small.plans[:place], *small.plans[place + 1 :]))
    for act in ACTS:
        if act not in small.without:
            yield attrs.evolve(small, without=small.without | {act})
    for place, plan in enumerate(small.plans):
        for simpler in _plainer(plan, ("index", "prompt", "max_tokens")):
            yield attrs.evolve(small, plans=(*small.plans[:place], simpler, *small.plans[place + 1 :]))
    for setting in _plainer(small.setting, ("scheduler",)):
        yield attrs.evolve(small, setting=setting)
    for key in small.setting.scheduler:
        if key not in ("max_batch", "policy"):
            scheduler = {name: value for name, value in small.setting.scheduler.items() if name != key}
            yield attrs.evolve(small, setting=attrs.evolve(small.setting, scheduler=scheduler))


def _plainer(thing: Any, needed: tuple[str, ...]) -> Iterator[Any]:
    """Yield a plan or setting with one field after the other at its default."""
    for field in _told(thing):
        if field.name not in needed:
            yield attrs.evolve(thing, **{field.name: field.default})


def written(thing: Any) -> str:
    """Return the constructor call of a script, a setting or a plan: what is not at its default."""
    if isinstance(thing, tuple) and thing and isinstance(thing[0], Plan):
        return f"({', '.join(map(written, thing))},)"
    if not isinstance(thing, (Script, Setting, Plan)):
        return repr(thing)
    given = (f"{field.name}={written(getattr(thing, field.name))}" for field in _told(thing))
    return f"{type(thing).__name__}({', '.join(given)})"


def _told(thing: Any) -> list[Any]:
    return [field for field in attrs.fields(type(thing)) if getattr(thing, field.name) != field.default]
