"""Kind B, at bind: a model or a kernel that is wrong for rows in company is refused before the first request."""

import mlx.core as mx
import pytest
from mlx import nn

from oarlock.core.errors import ModelNotBatchable
from oarlock.core.testing.models import build


def check_refused(bench, model, **settings):
    """The probe names the reason, and no engine comes of it."""
    with pytest.raises(ModelNotBatchable) as caught:
        bench.engine(model, **settings)
    assert caught.value.reason


class FirstRowOnly(nn.Module):
    """A kernel that leaves rows behind the first at zero where ``broken(x, offset)``."""

    def __init__(self, inner, broken):
        super().__init__()
        self.inner, self.broken = inner, broken

    def __call__(self, x, offset=0):
        out = self.inner(x, offset) if isinstance(self.inner, nn.RoPE) else self.inner(x)
        if x.shape[0] < 2 or not self.broken(x, offset):
            return out
        return mx.concatenate([out[:1], mx.zeros_like(out[1:])])


ROPES = {
    "one token, one shared offset": lambda x, offset: x.shape[2] == 1 and isinstance(offset, int),
    "one token, an offset a row": lambda x, offset: x.shape[2] == 1 and not isinstance(offset, int),
    "several tokens": lambda x, offset: x.shape[2] > 1,
}


def broken_rope(case):
    model = build("tiny-full")
    for layer in model.model.layers:
        layer.self_attn.rope = FirstRowOnly(layer.self_attn.rope, ROPES[case])
    return model


@pytest.mark.fault("B-03")
@pytest.mark.parametrize("case", ROPES)
def test_a_kernel_that_is_right_for_the_first_row_only_is_found_at_bind(bench, case):
    check_refused(bench, broken_rope(case))


@pytest.mark.fault("B-03")
def test_a_product_that_is_right_for_the_first_row_only_is_found_at_bind(bench):
    model = build("tiny-full")
    mlp = model.model.layers[1].mlp
    mlp.down_proj = FirstRowOnly(mlp.down_proj, lambda x, _: True)
    check_refused(bench, model)


@pytest.mark.fault("B-03")
def test_sound_kernels_are_let_through(bench):
    """And the rows of one forward are equal, which the probe relies on."""
    prompts = bench.prompts([4, 4, 4], 97)
    assert len(set(bench.run(bench.engine(bench.tiny()), [bench.ask(*prompts[0], n=6)] * 3))) == 1


@pytest.mark.fault("B-03", twin=True)
@pytest.mark.parametrize("case", ROPES)
def test_twin_without_the_probe_it_is_not_found(bench, planted, case):
    with planted():
        check_refused(bench, broken_rope(case), verify=False)


class Remembers(nn.Module):
    """A model that keeps the positions of its last decode step, and starts the next prompt from them."""

    def __init__(self):
        super().__init__()
        self.inner = build("tiny-full")
        self.layers = self.inner.layers
        self._delta = 0.0

    def __call__(self, ids, cache):
        logits = self.inner(ids, cache=cache)
        if ids.shape[1] == 1:
            self._delta = mx.max(logits[0], axis=-1) * mx.cos(ids[0].astype(mx.float32))
            return logits
        return logits + self._delta * mx.cos(mx.arange(logits.shape[-1]))


@pytest.mark.fault("B-08")
def test_a_model_that_carries_state_between_calls_is_found_at_bind(bench):
    check_refused(bench, Remembers())


@pytest.mark.fault("B-08", twin=True)
def test_twin_without_the_probe_such_a_model_answers_by_what_ran_before(bench, planted):
    with planted():
        check_refused(bench, Remembers(), verify=False)
    prompt = bench.ask(3, 5, 7, n=1)
    engine = bench.engine(Remembers(), verify=False, tail_split=False)
    first = bench.run(engine, [prompt])
    bench.run(engine, [bench.ask(8, 9, n=5)])
    assert bench.run(engine, [prompt]) != first


SMALL = {"gpt_bigcode": {"n_layer": 3}, "afm7": {"num_layers": 4, "num_kv_reuse_layers": 2}}


def check_refused_or_equal(bench, name, **settings):
    """What cannot run rows of other lengths together never answers wrongly nor fails in mid-request."""
    model = build(name, **SMALL[name])
    try:
        engine = bench.engine(model, **settings)
    except ModelNotBatchable:
        return
    prompts = bench.prompts([7, 2, 4], 97)
    serial = [bench.serial(model, prompt, 6) for prompt in prompts]
    answers = bench.run(engine, [bench.ask(*prompt, n=6) for prompt in prompts])
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    bench.compare(answers, [row.tokens for row in serial], [row.gaps for row in serial])


@pytest.mark.fault("B-10")
def test_a_model_that_makes_one_number_of_its_offsets_is_known_at_bind(bench):
    check_refused_or_equal(bench, "gpt_bigcode")


@pytest.mark.fault("B-10", twin=True)
def test_twin_without_the_probe_it_fails_in_mid_request(bench, planted):
    with planted():
        check_refused_or_equal(bench, "gpt_bigcode", verify=False)


@pytest.mark.fault("B-01")
def test_a_class_that_mishandles_rows_of_other_lengths_is_known_at_bind(bench):
    """afm7 of mlx-lm 0.32: its layers without keys of their own attend as if there were one row."""
    check_refused_or_equal(bench, "afm7")


@pytest.mark.fault("B-01", twin=True)
def test_twin_without_the_probe_the_shorter_row_says_something_else(bench, planted):
    with planted():
        check_refused_or_equal(bench, "afm7", verify=False)
