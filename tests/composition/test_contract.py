"""The table as a contract: a layout of anybody's, given by name or as an object, is tried in every cell."""

from typing import ClassVar

import pytest

from oarlock.core.testing.composition.cells import Cell, Status, run
from oarlock.core.testing.composition.contract import CompositionContract
from oarlock.layouts.full import FullCache, FullLayout


@pytest.mark.long
class TestGathered(CompositionContract):
    """Blocks that are put together before they are read."""

    layout = "paged"
    options: ClassVar = {"block_size": 16, "reads": "gather"}


class KeepingCache(FullCache):
    """Takes no token back that is not wanted."""

    def sibling(self, slots):
        other = super().sibling(slots)
        other.__class__ = KeepingCache
        return other

    def begin(self, widths, starts):
        super().begin(widths, starts)
        self.widths = widths

    def commit(self, kept):
        super().commit(self.widths)


class KeepingLayout(FullLayout):
    """Of `KeepingCache`, or of `FullCache` where it is ``whole``."""

    whole = True

    def open(self, layer, options, *, slots, window):
        cache = super().open(layer, options, slots=slots, window=window)
        cache.__class__ = FullCache if self.whole else KeepingCache
        return cache


class Contract(CompositionContract):
    """Not collected: its cells are run here."""

    layout = KeepingLayout(name="keeping")
    tolerance = 1e-4


@pytest.mark.parametrize("whole", [True, False])
def test_a_layout_given_as_an_object_is_tried(shared, tmp_path, monkeypatch, whole):
    """And its twin, which keeps rejected drafts, is found out, where drafts are rejected."""
    monkeypatch.setattr(KeepingLayout, "whole", whole)
    for method, good in (("plain", True), ("speculative, ngram", whole)):
        storage = Contract.storage("full")
        outcome = run(Cell(storage.name, method, "penalties"), shared, _new(tmp_path, method), storage)
        assert (outcome.status is Status.EQUAL) == good, outcome.message
        assert storage.layouts["full"]["name"] == "keeping"


def _new(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    return folder
