"""The bind probe: what it lets through, what it finds and where, what it costs, and when it proves nothing."""

import mlx.core as mx
import pytest
import structlog
from mlx import nn

from oarlock.core import Request, errors, probe, rehearsal
from oarlock.core.bind import bind
from oarlock.core.config import EngineConfig
from oarlock.core.engine import Engine
from oarlock.core.manager import build
from oarlock.core.testing import models
from oarlock.layouts.full import FullCache


def bound(model, config=None, **facts):
    settings = EngineConfig.load(config or {})
    return bind(model, settings, build(settings), **facts)


class Wrong(nn.Module):
    """A part of a layer that does ``wrong(inner, x, ...)``."""

    def __init__(self, inner, wrong):
        super().__init__()
        self.inner, self._wrong = inner, wrong

    def __call__(self, x, *args, **named):
        return self._wrong(self.inner, x, *args, **named)


def first_offset(rope, x, offset=0):
    """Positions of row 0 for every row."""
    return rope(x, offset=offset if isinstance(offset, int) else mx.broadcast_to(offset[:1], offset.shape))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_mishandles_positions_is_named(layer):
    model = models.build("tiny-full")
    attention = model.model.layers[layer].self_attn
    attention.rope = Wrong(attention.rope, first_offset)
    with pytest.raises(errors.ModelNotBatchable, match="differ") as caught:
        bound(model)
    assert (caught.value.layer, caught.value.model_type) == (str(layer), "llama")


PACKED = {"layouts": {"full": {"name": "quantized", "bits": 4, "group_size": 32}}}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_so_it_is_where_the_states_are_packed(layer):
    """What mishandled positions do to packed numbers is no rounding."""
    model = models.build("tiny-full", head_dim=32)
    attention = model.model.layers[layer].self_attn
    attention.rope = Wrong(attention.rope, first_offset)
    with pytest.raises(errors.ModelNotBatchable, match="differ") as caught:
        bound(model, PACKED)
    assert caught.value.layer == str(layer)


def test_numbers_that_fall_to_another_code_are_no_reason_to_refuse(monkeypatch):
    """A kernel that differs in its last bits for several rows: few codes differ at first, and the scores by more than bits."""
    model = models.build("tiny-full", head_dim=32)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj = Wrong(attention.k_proj, lambda k, x: k(x) * (1 + 1e-4 * (x.shape[0] > 1)))
        attention.v_proj = Wrong(attention.v_proj, lambda v, x: v(x) + 2e-4 * mx.cos(v(x)) * (x.shape[0] > 1))
    assert bound(model, PACKED).verdict.ragged
    monkeypatch.setattr(probe, "_COARSE", 1e-3)
    with pytest.raises(errors.ModelNotBatchable, match="differ"):
        bound(model, PACKED)


def test_what_goes_wrong_behind_the_last_state_is_found_too():
    model = models.build("tiny-full")
    model.model.norm = Wrong(model.model.norm, lambda norm, x: norm(x[::-1] if x.shape[0] == 2 else x))
    with pytest.raises(errors.ModelNotBatchable, match="no layer's state") as caught:
        bound(model)
    assert caught.value.layer is None


class Doubled(nn.Module):
    """A mixer that doubles a row's first token where it has no state yet."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x, mask=None, cache=None):
        if cache[0] is None:
            x = mx.concatenate([2 * x[:, :1], x[:, 1:]], axis=1)
        return self.inner(x, mask, cache)


def test_a_model_that_minds_whether_there_is_a_state_runs_equal_lengths_and_is_named():
    """A row that begins beside others has zeros there: so each length is forwarded by itself."""
    model = models.build("mamba2")
    model.backbone.layers[0].mixer = Doubled(model.backbone.layers[0].mixer)
    verdict = bound(model).verdict
    assert not verdict.ragged
    assert "2 * x[:, :1]" in verdict.reason
    prompts = models.prompts((9, 2, 5), 89)
    serial = [models.serial(model, prompt, 8) for prompt in prompts]
    with Engine(model, config={"scheduler": {"prefill_chunk": 3}}) as engine:
        results = engine.generate([Request(prompt_ids=prompt, max_tokens=8) for prompt in prompts])
    models.compare([r.token_ids for r in results], [row.tokens for row in serial], [row.gaps for row in serial]).check()


def test_that_excuses_no_other_fault():
    """Lines that run without a state are in every recurrent model; they count only where they matter."""
    model = models.build("mamba2")
    last = model.backbone.layers[-1]
    last.mixer = Wrong(last.mixer, spoilt_state)
    long, short = rehearsal.prompts(sound := bound(models.build("mamba2")))
    assert probe._only_without_state(sound, long, short) == []
    with pytest.raises(errors.ModelNotBatchable):
        bound(model)


def spoilt_state(mixer, x, mask=None, cache=None):
    """Row 0's state for every row."""
    out = mixer(x, mask, cache)
    cache[1] = mx.broadcast_to(cache[1][:1], cache[1].shape)
    return out


def test_a_recurrent_state_is_compared_itself():
    """Scores that hardly mind it would let it through."""
    model = models.build("mamba2")
    last = model.backbone.layers[-1]
    last.mixer = Wrong(last.mixer, spoilt_state)
    with pytest.raises(errors.ModelNotBatchable) as caught:
        bound(model)
    assert caught.value.layer == str(len(model.layers) - 1)


def test_an_error_that_a_layout_raises_for_ragged_rows_is_no_reason_to_keep_them_apart(monkeypatch):
    """Only a line of the model is: whatever else fails is refused."""
    fetch = FullCache.update_and_fetch

    def one_length_only(cache, keys, values):
        if not cache._starts.equal:
            msg = "one length only"
            raise TypeError(msg)
        return fetch(cache, keys, values)

    monkeypatch.setattr(FullCache, "update_and_fetch", one_length_only)
    with pytest.raises(errors.ModelNotBatchable, match="one length only"):
        bound(models.build("tiny-full"))


def test_a_model_with_one_position_is_named_with_its_line_and_its_rotation_is_as_before():
    rope = mx.fast.rope
    plan = bound(models.build("afm7", num_layers=4, num_kv_reuse_layers=2))
    assert mx.fast.rope is rope
    assert not plan.verdict.ragged
    assert "afm7.py:" in plan.verdict.reason
    assert "S - L" in plan.verdict.reason
    line = next(line for line in plan.explain() if line["part"] == "rows")
    assert line == {"part": "rows", "kind": "", **plan.verdict.explain()}
    assert line["choice"] == "equal lengths share a forward"


def test_explain_says_what_was_found():
    lines = {name: bound(models.build(name)).verdict.explain() for name in ("tiny-full", "mamba", "mamba2")}
    assert {line["choice"] for line in lines.values()} == {"all lengths share a forward"}
    assert [line["detail"] for line in lines.values()] == [
        "",
        "recurrent layers do not mind the lengths of padded rows",
        "recurrent layers mind the lengths of padded rows",
    ]


def test_it_can_be_turned_off(monkeypatch):
    """Then nothing is run, and the cautious answers stand."""
    monkeypatch.setattr(rehearsal, "together", None)
    plan = bound(models.build("mamba2"), {"scheduler": {"verify": False}})
    assert (plan.honours_lengths, plan.verdict.ragged, plan.verdict.probed) == (False, True, False)
    assert "off" in plan.verdict.explain()["reason"]


def test_a_model_that_hardly_minds_its_past_is_said_to_prove_little():
    model = models.build("tiny-full")
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    with structlog.testing.capture_logs() as logs:
        plan = bound(model)
    assert not plan.verdict.sensitive
    assert [log["event"] for log in logs] == ["probe_proves_little"]
    assert "proves little" in plan.verdict.explain()["reason"]
    assert bound(models.build("tiny-full")).verdict.sensitive


def counted(model):
    """The model, and the shapes that it is called with."""
    shapes, call = [], type(model).__call__

    class Counted(type(model)):
        def __call__(self, ids, cache=None):
            shapes.append(ids.shape)
            return call(self, ids, cache)

    model.__class__ = Counted
    return model, shapes


def test_it_costs_a_few_forwards_of_a_few_tokens():
    for name, most in (("tiny-full", 26), ("mamba2", 24)):
        model, shapes = counted(models.build(name))
        bound(model)
        assert len(shapes) <= most
        assert max(width for _, width in shapes) <= 5


@pytest.mark.parametrize("chunk", [1, 4, 40, 512])
def test_small_chunks_are_run_past(chunk):
    model, shapes = counted(models.build("tiny-full"))
    plan = bound(model, {"scheduler": {"prefill_chunk": chunk}})
    long, short = rehearsal.prompts(plan)
    assert len(long) > chunk or chunk > 64
    assert len(short) < len(long) <= 67
    assert max(width for _, width in shapes) <= max(chunk, 2)  # bind reads the layers by a forward of two


@pytest.mark.parametrize("positions", [8, 9, None])
def test_it_stays_within_the_models_positions(positions):
    plan = bound(models.build("tiny-full"), {"scheduler": {"prefill_chunk": 8}}, positions=positions)
    long, _ = rehearsal.prompts(plan)
    assert len(long) + 3 <= (positions or 99)


def test_nothing_of_it_is_left():
    with Engine(models.build("mamba2")) as engine:
        assert (engine.stats()["kv_bytes"], engine.stats()["recoveries"]) == (0, 0)
