"""The tiny models, mlx-lm's own tokens for them, and the rule of equality."""

import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from oarlock.core.testing import models
from oarlock.core.testing.models import Comparison, InsensitiveModel, TokensDiffer


def test_the_table_has_every_architecture():
    """56 from outside, and our own smaller ones; each names its model type."""
    table = models.table()
    assert len(table) - len(models.VARIANTS) == 56
    assert set(models.VARIANTS) <= set(table)
    assert all(arguments["model_type"] for arguments in table.values())
    with pytest.raises(TypeError):
        table["x"] = {}


def test_weights_are_float32_seeded_and_amplified():
    first, same, other = models.build("tiny-full"), models.build("tiny-full"), models.build("tiny-full", seed=1)
    flat = [dict(tree_flatten(model.parameters())) for model in (first, same, other)]
    assert {array.dtype for array in flat[0].values()} == {mx.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert mx.array_equal(flat[0][name], flat[1][name])
    assert not mx.array_equal(flat[0][name], flat[2][name])
    plain = dict(tree_flatten(models.build("tiny-full", amplify=1.0, guard=False).parameters()))
    assert mx.allclose(flat[0][name], 1.8 * plain[name])
    assert mx.array_equal(flat[0]["model.norm.weight"], plain["model.norm.weight"])


def test_arguments_can_be_changed():
    model = models.build("tiny-full", num_hidden_layers=2, vocab_size=50)
    assert len(model.layers) == 2
    assert model.lm_head.weight.shape[0] == 50
    assert models.sensitivity(model) == models.sensitivity(model) > models.SENSITIVITY


def test_recurrences_are_amplified():
    """Otherwise random weights hide errors of the state."""
    flat = dict(tree_flatten(models.build("mamba", guard=False).parameters()))
    decays = [array for name, array in flat.items() if name.endswith("A_log")]
    assert decays
    assert all(bool((array == -4).all()) for array in decays)


def test_a_model_that_forgets_its_past_is_refused():
    """Its agreement would prove nothing."""
    with pytest.raises(InsensitiveModel) as caught:
        models.build("tiny-full", amplify=0.01)
    assert caught.value.name == "tiny-full"
    assert caught.value.moved <= models.SENSITIVITY
    assert models.build("tiny-full", amplify=0.01, guard=False)


def test_serial_is_greedy_and_tells_the_gaps(tiny):
    """Checked against whole forwards without a cache."""
    prompt = models.prompts([7], 97)[0]
    run, tokens = models.serial(tiny, prompt, 6), list(prompt)
    for step in range(6):
        scores = tiny(mx.array([tokens]))[0, -1]
        logprobs = (scores - mx.logsumexp(scores)).tolist()
        first, second = sorted(logprobs, reverse=True)[:2]
        assert run.tokens[step] == logprobs.index(first)
        assert run.logprobs[step] == pytest.approx(first, abs=1e-4)
        assert run.gaps[step] == pytest.approx(first - second, abs=1e-4)
        tokens.append(run.tokens[step])


def test_prompts_are_random_seeded_and_in_range():
    rows = models.prompts((3, 0, 200), 10)
    assert [len(row) for row in rows] == [3, 0, 200]
    assert set(rows[2]) == set(range(10))
    assert rows == models.prompts((3, 0, 200), 10) != models.prompts((3, 0, 200), 10, seed=1)


WIDE, TIE = [1.0, 1.0, 1.0], [1.0, 1e-4, 1.0]


@pytest.mark.parametrize("row", [[1, 2, 3], (1, 2, 3)])
def test_equal_rows_are_equal(row):
    assert models.compare([row, [4]], [[1, 2, 3], [4]], [WIDE, WIDE]) == Comparison(2, 0)


@pytest.mark.parametrize("row", [[1, 9, 3], [1, 2, 9], [1, 9], [1, 2, 3, 4]])
def test_a_row_that_differs_after_a_tie_is_excused_and_counted(row):
    assert models.compare([row], [[1, 2, 3]], [TIE]) == Comparison(1, 1)


@pytest.mark.parametrize(
    ("row", "gaps", "step", "got", "wanted"),
    [
        ([9, 2, 3], TIE, 0, 9, 1),  # before the tie
        ([1, 9, 3], WIDE, 1, 9, 2),
        ([1, 2], WIDE, 2, None, 3),
        ([1, 2, 3, 4], WIDE, 3, 4, None),
        ([], WIDE, 0, None, 1),
        ([1, 9, 3], [1.0, 1e-3, 1.0], 1, 9, 2),  # a tie is under the bound
    ],
)
def test_any_other_difference_is_an_error(row, gaps, step, got, wanted):
    with pytest.raises(TokensDiffer) as caught:
        models.compare([[1, 2, 3], row], [[1, 2, 3], [1, 2, 3]], [WIDE, gaps])
    error = caught.value
    assert (error.row, error.step, error.got, error.wanted) == (1, step, got, wanted)


def test_missing_rows_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        models.compare([[1]], [[1], [2]], [WIDE, WIDE])


def test_too_many_excuses_fail():
    """At most 2%, and something must have been compared."""
    total = Comparison(98, 1) + Comparison(2, 1)
    assert str(total) == "100 rows compared, 2 excused by a tie"
    total.check()
    for wrong in (Comparison(99, 2), Comparison(0, 0)):
        with pytest.raises(AssertionError):
            wrong.check()


def test_the_kit_is_found_as_a_package():
    """The table is package data: it is read wherever the package is installed."""
    assert "oarlock.core.testing.models" in sys.modules
    assert "testing" not in sys.modules
