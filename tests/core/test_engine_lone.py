"""A row that runs alone: its prefill's caches are the group's, and neither its coming nor its going moves a byte."""

import io

import mlx.core as mx
import pytest

from oarlock.core import Request, hookimpl
from oarlock.core.engine import Engine
from oarlock.layouts.full import FullCache, FullLayout, FullOptions

MOVES = ("join", "extract", "compact", "_copy")


class Told(FullCache):
    """Notes what moves rows."""

    def __init__(self, slots):
        super().__init__(slots)
        self.moved = []

    def __getattribute__(self, name):
        if name in MOVES:
            self.moved.append(name)
        return super().__getattribute__(name)

    def keep(self, indices):
        if list(indices) != list(range(self.rows)):
            self.moved.append("keep")
        super().keep(indices)


class CopiesOnTake(Told):
    def take(self, indices):
        return self._copy(indices)


def plugin(cache_type, opened):
    class Layout:
        name, kinds, options = "told", frozenset({"full"}), FullOptions
        refuses, bytes_at = FullLayout().refuses, FullLayout().bytes_at

        def open(self, layer, options, *, slots, window):
            opened.append(cache_type(slots))
            return opened[-1]

        def restore(self, state):
            raise NotImplementedError

    class Plugin:
        @hookimpl
        def register_layouts(self, register):
            register(Layout())

    return Plugin()


def check_lone(model, cache_type, **settings):
    """From prefill to the end, the same three caches, and the same arrays where no token was appended."""
    opened = []
    config = {"scheduler": {"verify": False, **settings}, "layouts": {"full": "told"}, "state_cache": {"name": "none"}}
    with Engine(model, config=config, plugins=[plugin(cache_type, opened)]) as engine:
        handle = engine.submit(Request(prompt_ids=list(range(40)), max_tokens=6))
        while not engine.stats()["active_rows"]:
            engine.step()
        group = engine._driver.group._method.caches()
        assert [id(cache) for cache in group] == [id(cache) for cache in opened]
        handle.result()
        assert engine.stats()["kv_bytes"] == 0
    assert len(opened) == 3
    assert [cache.moved for cache in opened] == [[]] * 3


@pytest.mark.parametrize(
    "settings", [{}, {"pipeline": False}, {"early_first_token": False}, {"prefill_chunk": 7}], ids=str
)
def test_a_lone_row_is_adopted_and_dropped_without_a_move(tiny, settings):
    check_lone(tiny, Told, **settings)


def test_an_adoption_that_copies_is_found(tiny):
    """The twin."""
    with pytest.raises(AssertionError):
        check_lone(tiny, CopiesOnTake)


def test_600_steps_of_an_engine_leave_no_graph(tiny):
    """Caches and register hang on no more edges after 600 steps than after a few."""
    with Engine(tiny) as engine:
        handles = [engine.submit(Request(prompt_ids=[i, i + 1], max_tokens=620)) for i in range(2)]
        edges = []
        for count in range(610):
            engine.step()
            if count in (9, 608):
                method = engine._driver.group._method
                graph = io.StringIO()
                mx.export_to_dot(graph, *(array for cache in method.caches() for array in cache.arrays()))
                edges.append(graph.getvalue().count("->"))
        assert not any(handle.done for handle in handles)
    assert edges[0] == edges[1]
