"""Lengths at which a layout stores a row in another way: no forward goes past one, whatever the chunks and the company."""

import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.contracts.composition import ConvertingLayout
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout

LENGTHS = (12, 3, 20, 1, 9)


class Watched(FullCache):
    """Counts forwards by where they begin and end."""

    def __init__(self, slots, seen):
        super().__init__(slots)
        self.seen = seen

    def begin(self, widths, starts):
        super().begin(widths, starts)
        self.seen += [(start, start + width) for start, width in zip(starts, widths, strict=True) if width]


class Stopping(FullLayout):
    """`full` with stops, layer by layer; `name` is `full`'s field."""

    def __init__(self, *each):
        super().__init__(name="stopping")
        object.__setattr__(self, "each", each)
        object.__setattr__(self, "seen", [])

    def stops(self, layer, options):
        return self.each[layer.index % len(self.each)]

    def open(self, layer, options, *, slots, window):
        return Watched(slots, self.seen)


def engine(layout, **scheduler):
    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(layout)

    settings = {"layouts": {"full": "stopping"}, "scheduler": scheduler}
    return Engine(models.build("tiny-full"), config=settings, plugins=[Plugin()])


def check_stops(layout, stops, **scheduler):
    with engine(layout, **scheduler) as made:
        assert made.bound.stops == stops
        requests = [Request(prompt_ids=prompt, max_tokens=9) for prompt in models.prompts(LENGTHS, 97)]
        tokens = [result.token_ids for result in made.generate(requests)]
    past = [(start, end, stop) for start, end in layout.seen for stop in stops if start < stop < end]
    assert not past, f"(start, end, stop): {past[:5]}"
    assert {end for _, end in layout.seen} >= set(stops)
    return tokens


@pytest.mark.parametrize("scheduler", [{"prefill_chunk": 4}, {"prefill_chunk": 64}, {"tail_split": False}], ids=str)
def test_forwards_end_at_the_stops_of_all_layers(scheduler):
    """17.37: the nearest one over rows and layers; in the probe as well. Nobody's tokens change."""
    stopped = check_stops(Stopping((5, 11), (), (7,)), (5, 7, 11), **scheduler)
    assert stopped == check_stops(Stopping(()), (), **scheduler)


class Silent(Stopping):
    """Says it when it is asked, but not what the core asks for."""

    def stops(self, layer, options):
        return ()


def test_a_forward_that_goes_past_is_found():
    """The twin."""
    layout = Silent(())
    with pytest.raises(AssertionError):
        check_stops(layout, (5,), verify=False)
    with engine(layout, verify=False) as made:
        made.generate([Request(prompt_ids=list(range(12)), max_tokens=1)])
    assert any(start < 5 < end for start, end in layout.seen)


def test_the_binding_says_where_chunks_end():
    assert isinstance(Stopping(()), ConvertingLayout)
    assert not isinstance(FullLayout(), ConvertingLayout)
    with engine(Stopping((5, 11))) as made:
        lines = [line["detail"] for line in made.bound.explain() if line["part"] == "prefill"]
        assert lines == ["tail split, one ends at 5, one ends at 11"]
        assert [made.bound.longest_append(n, 4) for n in (0, 3, 5, 8, 10, 11, 50)] == [4, 2, 4, 3, 1, 4, 4]
