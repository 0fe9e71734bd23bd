"""The layouts' benchmark runs on little rows and counts right. No test asserts a time."""

import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest


@pytest.fixture
def groups(load, monkeypatch):
    """Two layers instead of thirty."""
    module = load("groups")
    monkeypatch.setattr(module, "LAYERS", 2)
    return module


@pytest.fixture
def rows(load, groups, monkeypatch):
    """Little rows."""
    module = load("rows")
    for name, value in {"LENGTHS": [3, 40, 300], "ROWS": 3, "TOKENS": 40, "WINDOW": 32, "LAYERS": 2}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_every_layout_holds_what_joined_and_did_not_leave(groups):
    """The last row takes the place of the one that leaves, and mlx-lm's batch loses the same one."""
    assert {"full", "rotating", "quantized, 8 bits", "quantized, 4 bits", "paged"} <= set(groups.LAYOUTS)
    theirs = groups.PaddedGroup([5, 9, 30], mx.float32)
    theirs.join(theirs.row(7))
    theirs.leave(0)
    assert sorted((theirs.caches[0].offset).tolist()) == [7, 9, 30]
    for name, choice in groups.LAYOUTS.items():
        group = groups.Group(choice, mx.float32, window=64 if name == "rotating" else 0)
        group.fill([5, 9, 30])
        group.append()
        group.join(group.row(7))
        group.leave(0)
        assert all(cache.tokens == (7, 10, 31) for cache in group.caches), name


def test_bytes_stand_beside_their_targets(rows):
    """Rows of very different lengths: blocks follow the sum, padding follows the longest."""
    report = rows.held()
    assert report.facts["tokens"] == 343 + 3 * rows.STEPS
    lines = {line.split("|")[1].strip(): line for line in report.table.splitlines()}
    assert set(lines) >= {"mlx-lm, padded", *rows.LAYOUTS}
    assert "reaches 0.3 x full" in lines["quantized, 4 bits"]


@pytest.mark.parametrize(("ratio", "word"), [(1.15, "reaches"), (1.16, "MISSES")])
def test_a_limit_is_judged(rows, ratio, word):
    assert rows._verdict("paged", {"the sum of lengths": ratio, "full": 0}).startswith(word)
    assert not rows._verdict("full", {})


def test_joins_and_leaves_are_compared_layout_by_layout(rows):
    *reports, growth = rows.moves(5)
    assert [report.name.split(", ", 1)[1].split(", 3 rows")[0] for report in reports] == list(rows.LAYOUTS)
    for report in reports:
        assert [each.target for each in report.comparisons] == [20.0, None, 20.0, None]
        assert all(each.ratio.pairs == 5 for each in report.comparisons)
    assert len(growth.figures) == 3 * len(rows.LAYOUTS)


def test_exact_layouts_decode_the_same_tokens_and_gathers_are_charged(load, monkeypatch):
    """Row by row and over a common prefix nothing is gathered; gathering all copies every row's columns."""
    reads, models = load("reads"), load("models")
    lengths = {"ROWS": 3, "EQUAL": 40, "LENGTHS": [10, 33, 70], "PREFIX": 64, "TAIL": 5, "STEPS": 2}
    for name, value in lengths.items():
        monkeypatch.setattr(reads, name, value)
    monkeypatch.setattr(reads, "SIDES", {name: reads.SIDES[name] for name in reads.EXACT})
    text = lambda loaded, lengths: [[(7 * i + 3 * row) % 251 for i in range(n)] for row, n in enumerate(lengths)]  # noqa: E731
    monkeypatch.setattr(models, "prompts", text)
    reports = list(reads.measure(SimpleNamespace(model=models.tiny()), 5))
    assert len(reports) == 3
    for report in reports:
        cells = [line.split("|")[1:4] for line in report.table.splitlines()[2:]]
        found = {side.strip(): (int(count), float(size)) for side, count, size in cells}
        assert found["full"][1] == found["paged"][1] == 0
        assert all(count > 20 for count, _ in found.values())
        assert len(report.facts["hash of the exact"]) == 16
        if report is not reports[0]:  # rows of one length may lie at equal distances: a view
            assert found[reads.GATHERED][1] > 0
    assert [report.comparisons[0].target for report in reports] == [0.9, 1.0, None]


def test_operations_are_counted_without_views(load):
    """One product and one sum; a transposed view runs no kernel."""
    x = mx.ones((4, 4))
    mx.eval(x)
    assert load("graphs").dispatches([mx.sum(x.T @ x)]) == 2


def test_an_unknown_workload_is_refused(load):
    program = load("layouts").__file__
    done = subprocess.run([sys.executable, program, "byte"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "byte" in done.stderr
