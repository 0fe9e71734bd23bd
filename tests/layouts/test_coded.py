"""Layouts made of a codec: one that keeps the numbers as they are is `full` and `rotating` again, token for token."""

import attrs
import mlx.core as mx
import pytest

from oarlock.core import Request, SamplingParams, hookimpl
from oarlock.core.contracts.layout import LayerInfo, Positions
from oarlock.core.engine import Engine
from oarlock.core.errors import LayoutRefused
from oarlock.core.testing import models
from oarlock.layouts.coded import CodedLayout

LENGTHS = (12, 3, 40, 1, 9)
PROMPTS = models.prompts(LENGTHS, 97)
LAYER = LayerInfo(index=0, path="0", kind="full", kv_heads=2, key_dim=8, value_dim=4, dtype=mx.float32)


@attrs.frozen
class AsItIs:
    """Keys apart from values, in one plane each; ``turned`` shows that options reach both ways."""

    turned: bool = False

    def encode(self, name, array):
        return {"all": -array if self.turned else array}

    def decode(self, name, codes, dtype):
        return -codes["all"] if self.turned else codes["all"]


@attrs.frozen
class Broken(AsItIs):
    how: str = "narrow"

    def encode(self, name, array):
        return {"all": array.sum(axis=2) if self.how == "tokens" else array}

    def decode(self, name, codes, dtype):
        whole = codes["all"]
        if self.how == "narrow":
            return whole[..., :-1]
        return whole.astype(mx.float16) if self.how == "dtype" else whole


@attrs.frozen
class Choosy(AsItIs):
    def refuses(self, layer):
        return f"{layer.key_dim} is unlucky"


class Plugin:
    def __init__(self, codec):
        self.layout = CodedLayout("coded", codec)

    @hookimpl
    def register_layouts(self, register):
        register(self.layout)


def run(name, layouts, **scheduler):
    model = models.build(name)
    sampling = [SamplingParams(logprobs=2), SamplingParams(temperature=1.0, seed=4), *[SamplingParams()] * 3]
    requests = [
        Request(prompt_ids=prompt, max_tokens=20 + 3 * row, sampling=sampling[row])
        for row, prompt in enumerate(PROMPTS)
    ]
    config = {"layouts": layouts, "scheduler": {"max_batch": 3, "prefill_chunk": 8, **scheduler}}
    with Engine(model, config=config, plugins=[Plugin(AsItIs)]) as engine:
        results = engine.generate(requests)
        assert engine.stats()["recoveries"] == 0
        names = {layer.layout.name for layer in engine.bound.layers}
    return names, [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("tiny-full", "full", {}),
        ("tiny-full", "full", {"compiled": True}),
        ("tiny-full", "full", {"mixed": True}),
        ("tiny-ring", "rotating", {}),
        ("tiny-ring", "rotating", {"mixed": True}),
    ],
    ids=str,
)
def test_numbers_kept_as_they_are_give_the_same_bits(name, kind, settings):
    """Those of the layout whose rows it has, whatever the steps are."""
    ours, answers = run(name, {kind: {"name": "coded", "turned": True}}, **settings)
    theirs, wanted = run(name, {kind: {"name": kind, **({"reads": "padded"} if kind == "full" else {})}}, **settings)
    assert "coded" in ours
    assert kind in theirs
    assert answers == wanted


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Broken("narrow"), "decoded as (1, 2, 1, 7)"),
        (Broken(how="tokens"), "'all' of keys (1, 2, 1, 8) was encoded as (1, 2, 8)"),
        (Broken(how="dtype"), "of mlx.core.float16"),
        (Choosy(), "8 is unlucky"),
    ],
)
def test_codes_that_are_no_planes_are_refused_with_their_shape(codec, said):
    refusal = CodedLayout("coded", type(codec)).refuses(LAYER, codec)
    assert said in refusal
    assert len(refusal.splitlines()) == 1


def test_a_layer_that_showed_nothing_is_refused():
    assert "nothing known" in CodedLayout("coded", AsItIs).refuses(attrs.evolve(LAYER, key_dim=0), AsItIs())


def test_a_refusal_names_the_layer_at_bind():
    with pytest.raises(LayoutRefused, match="unlucky"):
        Engine(models.build("tiny-full"), config={"layouts": {"full": "coded"}}, plugins=[Plugin(Choosy)])


@pytest.mark.parametrize("change", [{"window": 9}, {"keep": 1}, {"kind": "full"}], ids=str)
def test_rings_of_another_window_do_not_join(change):
    layout, layer = CodedLayout("coded", AsItIs), attrs.evolve(LAYER, kind="rotating", window=8)
    rows, strangers = (
        layout.open(each, AsItIs(), slots=1, window=1) for each in (layer, attrs.evolve(layer, **change))
    )
    strangers.add(1)
    with pytest.raises(TypeError):
        rows.join(strangers, [0])
    assert rows.rows == 0


def test_a_state_says_all_that_its_row_needs():
    """Options, dtype and room: what is restored stores on as before."""
    layout = CodedLayout("coded", AsItIs)
    cache = layout.open(LAYER, AsItIs(turned=True), slots=1, window=1)
    cache.add(1)
    cache.begin([3], Positions((0,)))
    keys, values = mx.random.normal((1, 2, 3, 8)), mx.random.normal((1, 2, 3, 4))
    cache.update_and_fetch(keys, values)
    cache.commit([3])
    state = cache.extract(0)
    assert mx.array_equal(state.arrays()["keys.all"], -keys)
    again = layout.restore(state)
    assert (again.storage(), again.tokens) == (cache.storage(), (3,))
    assert again.projected([300]) == cache.projected([300])
    assert mx.array_equal(again.keys_and_values()[1], values)
