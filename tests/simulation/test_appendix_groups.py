"""SPEC appendix A with its numbers: A9, A11 and A12, who is opened, entered and closed when."""

from __future__ import annotations

import pytest
from harness.instruments import Lock
from harness.rig import Zeros, build, run

from oarlock.core import Request
from oarlock.core.errors import EngineClosed
from oarlock.methods.plain import PlainDecoding, PlainOptions

# --- A9, A11, A12: methods, holds, adapters ---------------------------------------------------------------------------


class Noted:
    """A method that plain decoding stands behind; it notes when it is opened, stepped and closed."""

    options = PlainOptions

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def open(self, host, options):
        name, notes = self.name, self.notes

        class Watched(PlainDecoding):
            def advance(self, work=None):
                notes.append(f"{name} steps {len(host.rows)}")
                super().advance(work)

            def close(self):
                notes.append(f"{name} closes")
                super().close()

        notes.append(f"{name} opens")
        return Watched(host)


def test_a_method_is_opened_once_for_its_rows_and_closed_before_the_next():
    """A9, 4.10, trap 46: four requests of X and one of Y."""
    notes = []
    engine = build(Zeros(), methods=(Noted("x", notes), Noted("y", notes)), max_batch=4)
    requests = [Request(prompt_ids=[i + 1], max_tokens=3, method="x") for i in range(4)]
    handles = run(engine, [*requests, Request(prompt_ids=[9], max_tokens=3, method="y")])
    assert all(handle.result().token_ids == (0, 0, 0) for handle in handles)
    assert notes[0] == "x opens"
    assert "x steps 4" in notes
    assert [note for note in notes if "steps" not in note] == ["x opens", "x closes", "y opens"]
    assert not [note for note in notes[: notes.index("x closes")] if note.startswith("y")]
    engine.close()
    assert notes[-1] == "y closes"


def test_a_method_survives_an_empty_batch():
    """4.10, trap 46: the next request of the same key finds it open."""
    notes = []
    engine = build(Zeros(), methods=(Noted("x", notes),))
    for _ in range(3):
        run(engine, [Request(prompt_ids=[1], max_tokens=2, method="x")])
        engine.step()
    assert [note for note in notes if "steps" not in note] == ["x opens"]


def test_closing_a_held_engine_rejects_the_queued():
    """A11, 2.9."""
    engine = build(Zeros())
    engine.hold()
    handle = engine.submit(Request(prompt_ids=[1], max_tokens=2))
    assert not engine.step()
    engine.close()
    assert isinstance(handle.outcome, EngineClosed)
    with pytest.raises(EngineClosed, match="closed"):
        handle.result()


class Entered:
    """An adapter that notes."""

    name = "lora"

    def __init__(self, note):
        self.note = note

    def enter(self, model):
        self.note("enter")
        return lambda: self.note("leave")


@pytest.mark.parametrize("raises", [False, True])
def test_an_adapter_is_entered_and_left_under_the_lock(raises):
    """A12, 4.3, 4.9, 16.5: resolved, entered, left; also when on_admitted raises."""
    notes = []
    lock = Lock(lambda: notes.append("unlocked"))

    def note(what):
        assert lock.held
        notes.append(what)

    def admitted():
        note("admitted")
        if raises:
            raise OSError("no")

    def namespace():
        note("namespace")
        return "n"

    engine = build(Zeros(), adapter=Entered(note), lock=lock)
    request = Request(prompt_ids=[1], max_tokens=2, adapter="lora", namespace=namespace, on_admitted=admitted)
    handle = run(engine, [request])[0]
    engine.step()
    assert notes == ["namespace", "enter", "admitted", "leave", "unlocked"]
    assert isinstance(handle.outcome, OSError) == raises
