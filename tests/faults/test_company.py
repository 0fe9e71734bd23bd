"""Kind B again, for every storage: what a row says depends on no other row, no chunk and no rounding but near a tie."""

import contextlib

import attrs
import mlx.core as mx
import pytest
from mlx.utils import tree_map

from oarlock.core import SamplingParams, preparing
from oarlock.core.errors import CompositionError, ModelNotBatchable
from oarlock.core.planner import plan
from oarlock.core.testing import models
from oarlock.layouts.rotating import RingCache
from oarlock.layouts.slots import SlotCache

PACKED = {"name": "quantized", "bits": 8, "group_size": 32}
LATE = {**PACKED, "name": "delayed", "start": 6}

# --- columns that nobody sees ------------------------------------------------------------------------------------


@pytest.mark.fault("B-01", "B-05")
def test_short_rows_beside_a_long_one_stay_finite(bench, storage):
    """Whole chunks of the long one pass while the others have nothing in them."""
    bench.check_company(storage, (1, 40, 2, 12), every=1, prefill_chunk=5)


def leaves_nan(kind, join):
    """A join, behind which no row's free columns are numbers."""

    def dirty(self, other, slots):
        join(self, other, slots)
        if isinstance(self, RingCache) and kind is SlotCache:
            return  # its own join is not over
        for row in range(self.rows):
            for name, plane in self.planes.items():
                if plane.dtype != mx.uint32:
                    self.planes[name][row, :, self._held(row) :] = mx.nan

    return dirty


@pytest.mark.fault("B-05", twin=True)
@pytest.mark.parametrize("key", ["rings", "packed", "packed rings", "delayed"])
def test_twin_columns_that_nobody_cleared_are_noticed(bench, planted, monkeypatch, key):
    """A weight of zero times something that is no number is no number."""
    for prompt in bench.prompts((1, 40, 2), 97):
        bench.row_alone(key, tuple(prompt), 8)
    for kind in (SlotCache, RingCache):
        monkeypatch.setattr(kind, "join", leaves_nan(kind, kind.join))
    with planted(RuntimeError):
        bench.check_company(key, (1, 40, 2), prefill_chunk=5, verify=False)


# --- chunks ------------------------------------------------------------------------------------------------------


def check_chunks(bench, monkeypatch, key, lengths, chunks):
    """Every chunk size reads each position once, at its own place, and gives the same scores."""
    model, seen = bench.stored(key), []
    call = type(model).__call__

    def spying(self, ids, cache=None, **named):
        if cache is not None:
            starts = cache[0].tokens
            seen.append([(starts[0] + i, token) for i, token in enumerate(ids[0].tolist())])
        return call(self, ids, cache=cache, **named)

    engine = bench.engine(model, layouts=bench.STORAGES[key].layouts, max_batch=1, verify=False)
    monkeypatch.setattr(type(model), "__call__", spying)
    for prompt in bench.prompts(lengths, 97):
        best = []
        for chunk in sorted({*chunks, len(prompt) - 1, len(prompt), len(prompt) + 1}):
            seen.clear()
            sampling = SamplingParams(logprobs=1)
            (result,) = engine.generate([bench.ask(*prompt, n=1, prefill_chunk=chunk, sampling=sampling)])
            assert [pair for forward in seen for pair in forward] == list(enumerate(prompt)), chunk
            best.append(result.logprobs[0])
        assert len({record.token for record in best}) == 1
        assert max(record.logprob for record in best) - min(record.logprob for record in best) < 1e-3


@pytest.mark.fault("B-09")
def test_every_chunk_size_reads_every_position_once(bench, monkeypatch, storage):
    """Shorter than a window, a block of positions, a start of packing, and longer."""
    check_chunks(bench, monkeypatch, storage, (20,), (1, 3, 7))


@pytest.mark.fault("B-09", twin=True)
@pytest.mark.parametrize("key", ["packed rings", "delayed", "blocks", "states"])
def test_twin_a_prompt_that_ends_one_token_early_is_noticed(bench, planted, monkeypatch, key):
    def wrong(length, position, chunk, **rest):
        made = plan(length, position, chunk, **rest)
        return attrs.evolve(made, final=made.final or made.end >= length - 1)

    monkeypatch.setattr(preparing, "plan", wrong)
    with planted():
        check_chunks(bench, monkeypatch, key, (7,), (2,))


# --- kernels and models that know one row ------------------------------------------------------------------------


def first_row_only(kernel):
    """The kernel, with nothing but zeros for rows behind the first."""

    def broken(x, *arguments, **named):
        out = kernel(x, *arguments, **named)
        return mx.concatenate([out[:1], mx.zeros_like(out[1:])]) if out.ndim > 2 and out.shape[0] > 1 else out

    return broken


def check_refused_or_equal(bench, key, **settings):
    """What is wrong for rows in company is refused at bind, or none of them notices."""
    with contextlib.suppress(ModelNotBatchable):
        bench.check_company(key, (7, 2, 4, 4), prefill_chunk=4, **settings)


def plant_kernel(bench, monkeypatch, key):
    """Break what the storage's layers compute with, once the rows' own tokens are known."""
    for prompt in bench.prompts((7, 2, 4, 4), 97):
        bench.row_alone(key, tuple(prompt), 8)
    if "states" in key or "parts" in key:
        monkeypatch.setattr(mx, "conv1d", first_row_only(mx.conv1d))
    else:
        monkeypatch.setattr(mx.fast, "rope", first_row_only(mx.fast.rope))


@pytest.mark.fault("B-03")
@pytest.mark.parametrize(
    "key", ["rings", "packed rings", "delayed", "blocks", "states beside blocks", "parts", "chunks"]
)
def test_a_kernel_that_is_right_for_the_first_row_only_is_found_at_bind(bench, monkeypatch, key):
    """Rotations where layers attend, convolutions where they keep a state."""
    plant_kernel(bench, monkeypatch, key)
    with pytest.raises(ModelNotBatchable):
        bench.check_company(key, (7, 2, 4, 4))


@pytest.mark.fault("B-03")
@pytest.mark.parametrize("key", ["packed rings", "delayed", "gathered blocks", "blocks"])
def test_attention_that_is_right_for_the_first_row_only_is_found_at_bind(bench, monkeypatch, key):
    """Where rows are read one by one, nobody minds."""
    for prompt in bench.prompts((7, 2, 4, 4), 97):
        bench.row_alone(key, tuple(prompt), 8)
    attention = first_row_only(mx.fast.scaled_dot_product_attention)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    check_refused_or_equal(bench, key)


@pytest.mark.fault("B-03", twin=True)
@pytest.mark.parametrize("key", ["packed rings", "blocks", "states", "parts"])
def test_twin_without_the_probe_it_answers_wrongly(bench, planted, monkeypatch, key):
    plant_kernel(bench, monkeypatch, key)
    with planted(RuntimeError):
        check_refused_or_equal(bench, key, verify=False)


ONE_POSITION = [
    ("gpt_bigcode", {"n_layer": 3}, "packed"),
    ("afm7", {"num_layers": 4, "num_kv_reuse_layers": 2}, "delayed"),
    ("llama4", {}, "blocks"),
]


def check_one_position(bench, name, changes, key, **settings):
    """Rows of a model that makes one number of its offsets are those of an engine of one row."""
    requests = [bench.ask(*prompt, n=6) for prompt in bench.prompts((7, 2, 4), 97)]
    bench.check_engine(models.build(name, **changes), requests, bench.STORAGES[key].layouts, **settings)


@pytest.mark.fault("B-10")
@pytest.mark.parametrize(("name", "changes", "key"), ONE_POSITION)
def test_a_model_that_makes_one_number_of_its_offsets_is_known_at_bind(bench, name, changes, key):
    check_one_position(bench, name, changes, key)


@pytest.mark.fault("B-10", twin=True)
@pytest.mark.parametrize(("name", "changes", "key"), ONE_POSITION)
def test_twin_without_the_probe_they_answer_wrongly(bench, planted, name, changes, key):
    with planted(CompositionError):
        check_one_position(bench, name, changes, key, verify=False)


# --- inputs per layer --------------------------------------------------------------------------------------------

LAYERS = {
    "rings": {},
    "packed rings": {"full": PACKED, "rotating": PACKED},
    "delayed": {"full": LATE, "rotating": LATE},
    "blocks": {"full": {"name": "paged", "block_size": 16}},
}


def check_inputs_per_layer(bench, model, layouts, **settings):
    """Five rows at once, each leaves some steps before the next, down to one."""
    prompts = bench.prompts((12, 3, 7, 1, 9), 500)
    requests = [bench.ask(*prompt, n=3 + 2 * place) for place, prompt in enumerate(prompts)]
    bench.check_engine(model, requests, layouts, prefill_chunk=4, **settings)


@pytest.mark.fault("B-11")
@pytest.mark.parametrize("key", LAYERS)
def test_inputs_per_layer_follow_their_rows(bench, key):
    """gemma4: windows beside full layers, and layers that read another one's keys."""
    check_inputs_per_layer(bench, models.build("gemma4"), LAYERS[key])


@pytest.mark.fault("B-11", twin=True)
@pytest.mark.parametrize("key", ["packed rings", "blocks"])
def test_twin_one_rows_inputs_for_all_are_noticed(bench, planted, key):
    model = models.build("gemma4")
    bench.plant_one_rows_inputs(model)
    with planted():
        check_inputs_per_layer(bench, model, LAYERS[key], verify=False)


# --- near ties ---------------------------------------------------------------------------------------------------


def check_the_rule(bench, key, tolerance, shift=0):
    """Where a row of bfloat16 leaves what it says alone, the two best scores were nearer than ``tolerance``."""
    model = models.build(bench.STORAGES[key].name, **bench.STORAGES[key].changes)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    prompts = bench.prompts([3 + i % 9 for i in range(10)], 97)
    requests = [bench.ask(*prompt, n=6, sampling=SamplingParams(logprobs=2)) for prompt in prompts]
    layouts = bench.STORAGES[key].layouts
    serial = bench.engine(model, layouts=layouts, max_batch=1, verify=False).generate(requests)
    answers = bench.engine(model, layouts=layouts, verify=False).generate(requests)
    for wanted, got in zip(serial, answers[shift:] + answers[:shift], strict=True):
        step = next((i for i in range(6) if wanted.token_ids[i] != got.token_ids[i]), None)
        assert step is None or min(bench.gaps(wanted)[: step + 1]) <= tolerance, (step, bench.gaps(wanted))


@pytest.mark.fault("B-12")
@pytest.mark.fault("B-12", twin=True)
@pytest.mark.parametrize("key", ["rings", "packed", "blocks", "states"])
def test_rounding_moves_near_ties_only(bench, planted, key):
    """0.25 is two steps of a score near 16; the tokens of another row are no rounding."""
    check_the_rule(bench, key, 0.25)
    with planted():
        check_the_rule(bench, key, 0.25, shift=1)
