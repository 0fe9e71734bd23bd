"""What the samplers may rely on is refused at the door: in `SamplingParams`, before anything is queued."""

import math

import pytest

from oarlock.core import SamplingParams, errors
from oarlock.samplers import categorical, greedy


def test_bias_keys_may_be_integers_or_decimal_strings():
    """FAULTS M-06; ids beyond the vocabulary are the engine's to refuse, which knows it."""
    assert SamplingParams(logit_bias={"5": 10}).logit_bias == SamplingParams(logit_bias={5: 10}).logit_bias == {5: 10.0}


@pytest.mark.parametrize(
    "bias", [{"x": 1}, {-1: 1}, {"-1": 1}, {5: "a"}, {5: math.nan}, {5: math.inf}, {True: 1}, {1.5: 1}]
)
def test_other_biases_are_refused_with_the_key_named(bias):
    """FAULTS M-06."""
    with pytest.raises(errors.InvalidParameter) as caught:
        SamplingParams(logit_bias=bias)
    assert "logit_bias" in caught.value.name
    assert str(next(iter(bias))) in str(caught.value)


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_logprobs_up_to_the_limit_are_taken(count):
    """FAULTS M-07."""
    assert SamplingParams(logprobs=count).logprobs == count


@pytest.mark.parametrize("count", [21, 49153, -1, True, 2.0, "3"])
def test_other_logprobs_are_refused(count):
    """FAULTS M-07."""
    with pytest.raises(errors.InvalidParameter) as caught:
        SamplingParams(logprobs=count)
    assert caught.value.name == "logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_numbers_outside_their_range_are_refused_by_name(field, value):
    with pytest.raises(errors.InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.name == field


@pytest.mark.parametrize("module", [greedy, categorical])
def test_the_module_registers_its_sampler(module):
    found = []
    module.register_samplers(found.append)
    assert [sampler.name for sampler in found] == [module.__name__.rpartition(".")[2]]
    assert found[0].is_argmax_invariant
    assert module.OARLOCK_API == 1
