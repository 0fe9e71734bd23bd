"""What the samplers may rely on is refused at the door: in `SamplingParams`, before anything is queued."""

import math
from types import SimpleNamespace

import pytest

from oarlock.core import SamplingParams, errors
from oarlock.samplers import categorical, greedy


def check_bias(make):
    """FAULTS M-06: integer keys or decimal strings; others are refused with the key named.

    Ids beyond the vocabulary are the engine's to refuse, which knows it.
    """
    assert make(logit_bias={"5": 10}).logit_bias == make(logit_bias={5: 10}).logit_bias == {5: 10.0}
    for bias in ({"x": 1}, {-1: 1}, {"-1": 1}, {5: "a"}, {5: math.nan}, {5: math.inf}, {True: 1}, {1.5: 1}, {"²": 1}):
        with pytest.raises(errors.InvalidParameter) as caught:
            make(logit_bias=bias)
        assert "logit_bias" in caught.value.name
        assert str(next(iter(bias))) in str(caught.value)


def check_logprobs(make):
    """FAULTS M-07: a client's number is bounded at the door."""
    for count in (None, 0, 1, 20):
        assert make(logprobs=count).logprobs == count
    for count in (21, 49153, -1, True, 2.0, "3"):
        with pytest.raises(errors.InvalidParameter) as caught:
            make(logprobs=count)
        assert caught.value.name == "logprobs"


@pytest.mark.fault("M-06", "M-07")
@pytest.mark.parametrize("check", [check_bias, check_logprobs])
def test_fault_is_absent(check):
    check(SamplingParams)


@pytest.mark.fault("M-06", "M-07", twin=True)
@pytest.mark.parametrize("check", [check_bias, check_logprobs])
def test_twin_parameters_taken_as_they_come_are_noticed(check):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(SimpleNamespace)


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
