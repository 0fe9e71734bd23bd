"""The workloads run, on a tiny model, and count right. No test asserts a time."""

import json
import subprocess
import sys

import pytest

from oarlock.core import SamplingParams
from oarlock.core.contracts.loader import LoadedModel

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture
def sides(load):
    """All three sides on one model and the same ragged prompts."""
    model, module = load("models").tiny(), load("sides")
    ours = module.Oarlock(model, PROMPTS)
    found = [ours, module.BareLoop(ours.bound, PROMPTS), module.MlxLm(model, PROMPTS)]
    yield found
    for side in found:
        side.close()


def test_all_sides_decode_the_same_tokens(sides, harness):
    """What is compared is the same work: one token per row and step, and equal tokens."""
    blocks = harness.in_turns(sides, 4, 2)
    assert harness.equal_hash({side.name: side.rows for side in sides})
    assert {block.tokens for made in blocks.values() for block in made} == {4 * len(PROMPTS)}
    assert all(len(row) >= 12 for side in sides for row in side.rows)


def test_a_side_that_decodes_something_else_is_found(sides, harness):
    """The twin."""
    harness.in_turns(sides, 4, 2)
    sides[1].rows[2][5] += 1
    with pytest.raises(harness.UnequalTokens, match="row 2, token 5"):
        harness.equal_hash({side.name: side.rows for side in sides})


def test_rows_with_their_own_parameters_are_sampled(load):
    params = [SamplingParams(temperature=0.5 + row, top_p=0.9, seed=row) for row in range(3)]
    side = load("sides").Oarlock(load("models").tiny(), PROMPTS, params)
    assert side.block(3).tokens == 9
    side.close()


def test_storages_hold_the_same_rows_after_every_operation(load, monkeypatch):
    """Whatever the storage, a join, a leave and a rollback leave rows of the same lengths."""
    storages = load("storages")
    monkeypatch.setattr(storages, "LAYERS", 1)
    monkeypatch.setattr(storages, "CAPACITY", 64)
    lengths = [20, 18, 16]
    for storage in (storages.Left(lengths, 4), storages.Padded(lengths), storages.Separate(lengths)):
        assert storage.step().shape == (3, storages.HEADS, 1, storages.SIZE)
        storage.step(4)
        storage.roll_back([1, 4, 2], 4)
        assert storage.lengths == [22, 23, 19]
        storage.join(storage.joiner(10), 10)
        storage.leave(0)
        assert sorted(storage.lengths) == [10, 19, 23]
        assert storage.step().shape[0] == 3


def test_storages_attend_over_the_same_tokens(load, monkeypatch):
    """One step over the same contents gives the same outcome, so that the same work is timed."""
    import mlx.core as mx

    storages = load("storages")
    monkeypatch.setattr(storages, "LAYERS", 1)
    monkeypatch.setattr(storages, "CAPACITY", 64)
    full, padded, separate = storages.Left([9, 5], 3), storages.Padded([9, 5]), storages.Separate([9, 5])
    expected = full.step()
    assert mx.allclose(expected, padded.step(), atol=1e-5)
    assert mx.allclose(expected, separate.step(), atol=1e-5)
    separate.gather = False
    assert mx.allclose(full.step(), separate.step(), atol=1e-5)


def test_arrivals_count_from_when_a_request_was_due(load):
    """Time to the first token holds the wait for a step; a stall is the worst gap between a row's tokens."""
    arrivals = load("arrivals")

    class Run:
        def __init__(self):
            self.left = {}

        def submit(self, number, prompt):
            self.left[number] = 2

        def step(self):
            events = [(number, 7) for number, left in self.left.items() if left]
            self.left = {number: max(0, left - 1) for number, left in self.left.items()}
            return events, any(self.left.values())

    ticks = iter(float(i) for i in range(100))
    lives = arrivals.drive(Run(), [[1], [2]], 0.0, lambda: next(ticks))
    assert [life.tokens for life in lives] == [[7, 7], [7, 7]]
    assert all(life.times[0] > life.due and life.stall == life.times[1] - life.times[0] for life in lives)


def test_an_unknown_workload_and_too_few_rounds_are_refused(load):
    """One line, exit code 2, and nothing is run."""
    program = load("run").__file__
    for arguments, part in ((["decoed"], "decoed"), (["--rounds", "3"], "at least 5")):
        done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert part in done.stderr


@pytest.mark.long
def test_the_program_prints_json(load):
    program = load("run").__file__
    done = subprocess.run(
        [sys.executable, program, "host", "--rounds", "5", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert [report["facts"]["occupancy"] for report in found["reports"]] == [1.0, 32.0]
    assert not found["errors"]
    assert {"cores", "blas", "mlx", "mlx-lm"} <= found["machine"].keys()


def test_compiled_steps_are_compared_with_ordinary_ones(load, harness):
    """One side is compiled, the tokens are the same, and both times are there."""
    report = load("compiled").measure("tiny model", load("models").tiny(), harness.MIN_PAIRS, 1)
    assert report.facts["traces"] == 1
    assert len(report.comparisons) == 2
    assert {name.partition(":")[0] for name in report.figures} == {"compiled", "ordinary"}


def test_a_loop_is_found(load):
    """The shortest period, wherever the loop stands; a few equal tokens are none, and neither is a long period."""
    texts, free = load("texts"), list(range(60))
    assert texts.loop(free) == 0
    assert texts.loop([*free, *[7, 8, 9] * 5, *free]) == 3
    assert texts.loop([*free, *[5] * texts.LEAST_REPEATED]) == 0
    assert texts.loop([*free, *[5] * (texts.LEAST_REPEATED + 1)]) == 1
    assert texts.loop(list(range(31)) * 2) == 31
    assert texts.loop(list(range(texts.SHORTEST_PERIOD)) * 2) == 0


def test_drafts_are_compared_with_plain_decoding(load):
    """The same tokens by both methods, a pair a batch and round; some drafts are made."""
    speculation, tiny = load("speculation"), load("models").tiny()
    loaded = LoadedModel(model=tiny, tokenizer=None, identity="tiny", model_type="llama")
    asked = {str(row): prompt * 2 for row, prompt in enumerate([*PROMPTS, [1, 2]])}
    report = speculation.compare("tiny", loaded, asked, 2, 3, tokens=12)
    assert report.facts["texts"] == 4
    assert report.facts["accepted"].partition(" of ")[2] != "0"
    assert [each.ratio.pairs for each in report.comparisons] == [6]


def test_parameters_are_compared_with_greedy_rows_and_with_mlx_lm(load, harness):
    """Each row has a set of its own; a row and step make a token on every side."""
    sampling, tiny = load("sampling"), load("models").tiny()
    assert len({repr(sampling.ours(row)) for row in range(16)}) == 16
    report = sampling.measure_parameters("tiny", tiny, PROMPTS * 4, harness.MIN_PAIRS, judged=True)
    assert report.facts["occupancy"] == 12
    assert [each.target for each in report.comparisons] == [1 / 1.15, 1.5]
