"""The harness computes what DESIGN section 8 asks for: pairs, quartiles, targets at the lower one, equal hashes."""

import time
from dataclasses import dataclass, field

import pytest


@dataclass
class Side:
    """Notes when it had its turn."""

    name: str
    turns: list
    block_type: type
    rows: list = field(default_factory=list)

    def block(self, steps):
        self.turns.append(self.name)
        return self.block_type(1.0, 0.5, steps, 2 * steps)


def test_a_ratio_is_the_median_and_quartiles_of_the_pairs(harness):
    """Not the ratio of medians: each pair is divided by itself."""
    found = harness.ratio([1, 2, 4, 1, 1], [2, 2, 2, 3, 1.5])  # 2, 1, 0.5, 3, 1.5
    assert (found.low, found.median, found.high, found.pairs) == (1.0, 1.5, 2.0, 5)


@pytest.mark.parametrize(("ours", "theirs"), [([1] * 4, [1] * 4), ([1] * 6, [1] * 5)])
def test_fewer_than_five_pairs_or_a_half_one_are_refused(harness, ours, theirs):
    with pytest.raises(ValueError, match=str(len(theirs))):
        harness.ratio(ours, theirs)


@pytest.mark.parametrize(("low", "reached"), [(0.97, True), (0.969, False)])
def test_a_target_is_reached_by_the_lower_quartile(harness, low, reached):
    found = harness.Comparison(what="x", ratio=harness.Spread(1.1, low, 1.2, 5), target=0.97)
    assert found.reached is reached
    assert ("MISSES" in str(found)) is not reached


def test_a_ratio_without_a_target_judges_nothing(harness):
    assert harness.Comparison(what="x", ratio=harness.Spread(1.0, 1.0, 1.0, 5)).reached is None


def test_sides_take_turns_and_the_order_turns_too(harness):
    """The first block of each warms up and does not count."""
    turns = []
    sides = [Side(name, turns, harness.Block) for name in "ab"]
    blocks = harness.in_turns(sides, 3, 4)
    assert "".join(turns) == "ab" + "abbaabba"
    assert [len(blocks[name]) for name in "ab"] == [4, 4]
    assert blocks["a"][0].tokens == 6


def test_a_stopwatch_tells_computing_from_waiting(harness):
    """Only that both are there and in order: no test asserts a time."""
    watch = harness.Stopwatch()
    time.sleep(0.001)
    block = watch.block(2, 4)
    assert 0 <= block.host <= block.seconds
    assert (block.steps, block.tokens) == (2, 4)


def test_equal_tokens_have_one_hash_as_far_as_all_sides_went(harness):
    """A pipeline has read one step more or less than its neighbour."""
    long, short = [[1, 2, 3], [4, 5, 6]], [[1, 2], [4, 5, 6]]
    assert harness.equal_hash({"a": long, "b": short}) == harness.token_hash([[1, 2], [4, 5, 6]])
    assert harness.token_hash([[1, 2]]) != harness.token_hash([[1], [2]])


def test_unequal_tokens_are_an_error_that_names_row_step_and_both_tokens(harness):
    with pytest.raises(harness.UnequalTokens, match=r"row 1, token 2: a has 6, b has 7$"):
        harness.equal_hash({"a": [[1, 2, 3], [4, 5, 6]], "b": [[1, 2, 3], [4, 5, 7]]})


@pytest.mark.parametrize(("gap", "tie"), [(5e-4, True), (0.5, False)])
def test_the_error_tells_a_near_tie_from_a_fault(harness, gap, tie):
    """The gap is asked for behind the tokens that both sides share."""
    asked = []

    def between(row, tokens):
        asked.append((row, tokens))
        return gap

    with pytest.raises(harness.UnequalTokens) as caught:
        harness.equal_hash({"a": [[1, 2, 3]], "b": [[1, 9, 3]]}, between)
    assert asked == [(0, [1])]
    assert ("near-tie" in str(caught.value)) is tie


def test_a_report_says_everything_in_lines_and_in_json(harness):
    report = harness.Report(
        name="r",
        facts={"hash": "abc"},
        figures={"ms": harness.Spread(1234.5, 1.0, 2.0, 5)},
        comparisons=[harness.Comparison(what="x", ratio=harness.Spread(1.0, 0.9, 1.1, 5), target=0.97)],
    )
    assert all(part in str(report) for part in ("abc", "1234", "MISSES 0.97"))
    plain = report.plain()
    assert plain["comparisons"][0]["reached"] is False
    assert plain["figures"]["ms"]["high"] == 2.0
