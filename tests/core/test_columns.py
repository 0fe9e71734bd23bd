"""Layers of one kind share a mask, so bind refuses layouts of one kind that read other columns."""

import pytest

from oarlock.core import hookimpl
from oarlock.core.engine import Engine
from oarlock.core.errors import LayoutRefused
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache, FullLayout


class Reversed(FullCache):
    """Says that it reads its columns from the other end."""

    def columns(self, widths):
        return ("right", *super().columns(widths)[1:])


class Layout(FullLayout):
    def open(self, layer, options, *, slots, window):
        return Reversed(slots)


class Plugin:
    @hookimpl
    def register_layouts(self, register):
        register(Layout(name="reversed"))


def bound(model, choices):
    with Engine(model, config={"layouts": choices, "scheduler": {"verify": False}}, plugins=[Plugin()]) as engine:
        return [layer.layout.name for layer in engine.bound.layers]


def test_layouts_of_one_kind_that_read_other_columns_are_refused(tiny):
    """Both layers are named."""
    with pytest.raises(LayoutRefused, match="layer 0, whose layout 'full'") as caught:
        bound(tiny, {"layers": {"1": "reversed"}})
    assert (caught.value.layout, caught.value.layer) == ("reversed", "1")


def test_all_layers_of_a_kind_may_read_other_columns(tiny):
    assert bound(tiny, {"full": "reversed"}) == ["reversed"] * 3


def test_layouts_that_read_the_same_columns_are_mixed():
    """Plain and packed, full and rotating; windows and full attention have masks of their own."""
    packed = {"name": "quantized", "group_size": 32}
    model = models.build("tiny-ring", head_dim=32)
    names = bound(model, {"layers": {"0": packed, "2": packed, "4": packed}})
    assert names == ["quantized", "rotating", "quantized", "rotating", "quantized", "full"]


def test_parts_of_composites_are_compared_too():
    model = models.build("falcon_h1")
    with pytest.raises(LayoutRefused) as caught:
        bound(model, {"layers": {"2.1": "reversed"}})
    assert caught.value.layer == "2.1"
