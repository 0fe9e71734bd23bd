"""`oarlock bench`: what it measures is the same work on both sides, and what it prints is all there. No time is asserted."""

import json
from xml.etree import ElementTree as ET

import pytest

from oarlock.plugins.cli.bench import sides

FEW = ("--rounds", "5", "--prompt-tokens", "6", "--joiner", "12")


def measured(invoke, tiny, *arguments, code=0):
    return json.loads(invoke("bench", tiny, *FEW, "--json", *arguments, code=code).stdout)


def test_every_number_of_rows_is_measured(invoke, tiny):
    """A block of each round after the one that warms up, a token a row and step."""
    found = measured(invoke, tiny, "--rows", "1,3")
    assert [report["facts"]["rows"] for report in found["reports"]] == [1, 3]
    assert [report["facts"]["tokens"] for report in found["reports"]] == [5 * 8, 5 * 8 * 3]
    assert all(each["pairs"] == 5 for report in found["reports"] for each in report["figures"].values())
    assert [report["comparisons"] for report in found["reports"]] == [[], []]
    assert {"cores", "device", "blas", "mlx", "mlx-lm", "date"} <= found["machine"].keys()
    assert found["errors"] == []


def test_both_sides_give_the_same_tokens(invoke, tiny):
    """Else there were no hash of both; a ratio is taken pair by pair."""
    (report,) = measured(invoke, tiny, "--rows", "2", "--against", "mlx-lm")["reports"]
    assert [each["ratio"]["pairs"] for each in report["comparisons"]] == [5, 5]
    units = ("tokens a second", "ms a step", "ms stalled")
    assert set(report["figures"]) == {f"{side}: {unit}" for side in ("oarlock", "mlx-lm") for unit in units}
    assert len(report["facts"]["hash"]) == 16


def test_without_a_joiner_nobody_waits(invoke, tiny):
    (report,) = measured(invoke, tiny, "--rows", "2", "--against", "mlx-lm", "--joiner", "0")["reports"]
    assert [each["what"] for each in report["comparisons"]] == ["throughput / mlx-lm's"]
    assert not [name for name in report["figures"] if "stalled" in name]


def test_a_stall_is_the_longest_wait_until_a_token_after_the_joiner_came(monkeypatch):
    """Steps in which running rows get nothing lengthen it; what comes before the joiner's token counts too."""
    times = iter((0.0, 1.0, 5.0, 6.0, 8.0, 9.0, 99.0))
    monkeypatch.setattr(sides.time, "perf_counter", lambda: next(times))
    given, over = iter((2, 0, 2, 0, 2)), iter((False, False, False, True, True))
    assert sides.longest_wait(lambda: next(given), lambda: next(over)) == 6.0 - 1.0
    assert next(times) == 99.0


@pytest.fixture
def wrong(monkeypatch):
    """mlx-lm's side says something else in its last row."""

    class Wrong(sides.MlxLm):
        def block(self, steps):
            done = super().block(steps)
            self.rows[-1][3] += 1
            return done

    monkeypatch.setattr("oarlock.plugins.cli.bench.decode.MlxLm", Wrong)


def test_other_tokens_are_an_error_with_row_and_step(invoke, tiny, wrong):
    """The other numbers of rows are measured all the same."""
    done = invoke("bench", tiny, *FEW, "--rows", "2,1", "--against", "mlx-lm", code=1)
    assert "with 2 rows: row 1, token 3: oarlock has" in done.stderr
    assert "with 1 rows: row 0, token 3: oarlock has" in done.stderr


def test_other_tokens_are_a_fact_where_layouts_are_named(invoke, tiny, wrong):
    arguments = ("--rows", "2", "--against", "mlx-lm", "--set", "layouts.full=paged")
    (report,) = measured(invoke, tiny, *arguments)["reports"]
    assert report["facts"]["hash"].endswith("not mlx-lm's")


def test_methods_that_take_more_tokens_a_step_are_counted_by_the_token(invoke, tiny):
    (report,) = measured(invoke, tiny, "--rows", "1", "--set", "method.name=speculative")["reports"]
    facts = report["facts"]
    assert facts["tokens a step"] == pytest.approx(facts["tokens"] / (5 * 8), abs=0.01)
    assert facts["tokens"] >= 5 * 8


def test_rows_beyond_the_configured_batch_run_together(invoke, tiny):
    (report,) = measured(invoke, tiny, "--rows", "5", "--max-batch", "2")["reports"]
    assert report["facts"]["tokens a step"] == 5


def test_the_trace_has_every_phase(invoke, tiny):
    found = measured(invoke, tiny, "--rows", "2", "--trace")["trace"]
    assert found["steps"]["all"] == sum(found["steps"].values()) - found["steps"]["all"] > 20
    assert {"prefill", "decode"} <= set(found["times"])


def test_the_table_has_a_line_for_each_number_of_rows(invoke, tiny):
    """In a terminal of 80 columns."""
    arguments = ("--rows", "1,2", "--against", "mlx-lm", "--trace")
    shown = invoke("bench", tiny, *FEW, *arguments, env={"COLUMNS": "80"}).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in lines if line[1:2] == ["oarlock"]] == ["1", "2"]
    assert [line[0] for line in lines if line and line[0] in ("mlx-lm", "all")] == ["mlx-lm", "mlx-lm", "all"]
    assert [len(line[-1]) for line in lines if line[1:2] == ["rows:"]] == [16, 16]


def test_the_plot_has_a_line_for_each_side_and_a_place_for_each_number_of_rows(invoke, tiny, tmp_path):
    file = tmp_path / "bench.svg"
    measured(invoke, tiny, "--rows", "1,3", "--against", "mlx-lm", "--plot", str(file))
    picture = ET.fromstring(file.read_text())
    names = [each.tag.rpartition("}")[2] for each in picture.iter()]
    assert (names.count("polyline"), names.count("circle")) == (2 * 2, 2 * 2 * 2)
    words = [each.text for each in picture.iter() if each.tag.endswith("text")]
    assert [words.count(word) for word in ("oarlock", "mlx-lm", "rows")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--rows", "1,x"), "'1,x'; whole numbers >= 1"),
        (("--rows", "0"), "'0'; whole numbers >= 1"),
        (("--rounds", "3"), "3 is not in the range x>=5"),
        (("--against", "vllm"), "'vllm' is not 'mlx-lm'"),
        (("--plot", "/nowhere/at/all.svg"), "/nowhere/at/all.svg"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(invoke, arguments, part):
    assert part in invoke("bench", "nowhere", *arguments, code=2).stderr


def test_a_model_that_mlx_lm_cannot_batch_is_one_line(invoke, tiny, monkeypatch):
    def refuses(*_):
        msg = "shapes (3,) and (4,)"
        raise ValueError(msg)

    monkeypatch.setattr("oarlock.plugins.cli.bench.decode.MlxLm", refuses)
    done = invoke("bench", tiny, *FEW, "--rows", "1", "--against", "mlx-lm", code=1)
    assert "leave out --against (ValueError: shapes (3,) and (4,))" in done.stderr


def test_rows_that_would_end_are_one_line(invoke, tiny):
    """The tiny model takes 4,096 positions; a block of rows that are over has no work."""
    done = invoke("bench", tiny, "--rounds", "5", "--prompt-tokens", "4080", "--rows", "1", "--joiner", "0", code=1)
    assert "the model takes 4096 positions; use a smaller" in done.stderr
