"""Kind K, over many steps: nothing that a row or the engine holds grows with them."""

import pathlib
import tempfile

import mlx.core as mx
import pytest

from oarlock.core import group
from oarlock.core.sampling import SamplerGroup

SCRIPTS = {1: [10, 11], 2: [20, 21], 3: [30, 31]}


def edges(arrays):
    """How many steps of computation hang on these arrays, unevaluated."""
    if not arrays:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "graph.dot"
        with path.open("w") as file:
            mx.export_to_dot(file, *arrays)
        return path.read_text().count("->")


def check_the_graph_stays(engine, rows, steps, first, joiner):
    """After ``steps`` steps as much is unevaluated as after ``first``: on the caches, the register and the samplers."""
    handles = [engine.submit(request) for request in rows]
    seen = []
    for step in range(steps):
        engine.step()
        if step in (first, steps - 1):
            running = engine._driver.group
            method, samplers = running._method, running._samplers
            held = [array for cache in method.caches() for array in cache.arrays()]
            held += [*method._register.arrays(), *(v for v in vars(samplers).values() if isinstance(v, mx.array))]
            seen.append(edges(held))
        if step % 50 == 10:
            engine.submit(joiner)
    assert seen[1] <= seen[0], seen
    for handle in handles:
        handle.cancel()


def check_by_script(bench, steps, first=20, **model):
    rows = [bench.ask(1, n=steps + 20), bench.ask(2, 2, n=steps + 20)]
    engine = bench.engine(bench.Scripted(SCRIPTS, **model))
    check_the_graph_stays(engine, rows, steps, first, bench.ask(3, n=5))


@pytest.mark.fault("K-02")
def test_600_steps_leave_as_little_unevaluated_as_20(bench):
    check_by_script(bench, 600)


@pytest.mark.fault("K-02", twin=True)
def test_twin_a_count_that_nobody_evaluates_is_noticed(bench, planted, monkeypatch):
    draw = SamplerGroup.draw

    def counting(self, *arguments):
        self._count = getattr(self, "_count", mx.array(0)) + 1
        return draw(self, *arguments)

    monkeypatch.setattr(SamplerGroup, "draw", counting)
    with planted():
        check_by_script(bench, 60)


@pytest.mark.fault("K-02")
def test_what_a_model_writes_and_never_reads_does_not_pile_up(bench):
    check_by_script(bench, 600, first=240, reads_values=False)


@pytest.mark.fault("K-02", twin=True)
def test_twin_what_nobody_ever_evaluates_piles_up(bench, planted, monkeypatch):
    monkeypatch.setattr(group, "CLEAR_EVERY", 10**9)
    with planted():
        check_by_script(bench, 600, first=240, reads_values=False)


@pytest.mark.fault("K-02")
def test_no_storage_lets_steps_pile_up(bench, storage):
    """Two rows of other lengths, and one more that comes and goes."""
    engine = bench.engine(bench.stored(storage), layouts=bench.STORAGES[storage].layouts)
    rows = [bench.ask(*prompt, n=80) for prompt in bench.prompts((12, 3), 97)]
    check_the_graph_stays(engine, rows, 60, 30, bench.ask(5, 6, 7, n=5))
