"""Adapters per request: rows with different ones, and without, decode together and get the tokens of each alone."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.testing import models
from oarlock.plugins.adapters import AdaptedLinear

# --- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [{}, {"prefill_chunk": 4, "max_batch": 4}, {"pipeline": False}])
@pytest.mark.parametrize("layout", ["full", "paged"])
def test_two_adapters_and_the_bare_model_in_one_batch_give_the_tokens_of_each_alone(
    lora, model, folders, watch, scheduler, layout
):
    """SPEC 1.1.9: mlx-lm's own, with joins and leaves, and the adapters matter: they change most of the tokens."""
    wanted = lora.serial(folders)
    settings = lora.config(folders, **scheduler) | {"layouts": {"full": layout}}
    with Engine(model, config=settings, plugins=[watch]) as engine:
        outcomes = lora.arrive(engine, lora.requests())
        assert engine.stats()["recoveries"] == 0
    lora.check(outcomes, wanted)
    assert {"alice", "bob", ""} in watch.together
    bare = lora.serial(folders, names=[""] * len(lora.names))
    for row, plain, name in zip(wanted, bare, lora.names, strict=True):
        changed = sum(a != b for a, b in zip(row.tokens, plain.tokens, strict=True))
        assert changed >= len(row.tokens) / 2 if name else not changed


def test_drafts_are_verified_with_each_rows_own_adapter(lora, model, folders):
    """Windows of several tokens a row, most of them wrong."""
    method = {"name": "speculative", "proposer": {"name": "ngram", "min_n": 1}, "depth": 3, "adaptive": False}
    with Engine(model, config=lora.config(folders) | {"method": method}) as engine:
        outcomes = lora.arrive(engine, lora.requests())
        assert engine.stats()["recoveries"] == 0
        assert engine.stats()["drafted_tokens"] > 0
    lora.check(outcomes, lora.serial(folders))


def test_a_quantized_model_is_adapted_likewise(lora, folders):
    """The factors stay what they are; the layer below is the quantized one."""
    with Engine(lora.build(bits=8), config=lora.config(folders)) as engine:
        outcomes = lora.arrive(engine, lora.requests())
    lora.check(outcomes, lora.serial(folders, lambda: lora.build(bits=8)))


def test_rows_without_an_adapter_get_the_bits_of_the_bare_model(lora, model, folders):
    """Beside adapted rows too, and with zeros of either sign."""
    ids = mx.array(models.prompts((4, 4, 4), 97), dtype=mx.uint32)
    bare = model(ids)
    with Engine(model, config=lora.config(folders, verify=False)) as engine:
        bank = engine.bound.adapters
        rows = [Row(Request(prompt_ids=[1], adapter=name)) for name in ("alice", None, "bob")]
        with bank.applied(rows):
            some = model(ids)
        with bank.applied([rows[1]] * 3):
            none = model(ids)
        layer = model.layers[0].self_attn.q_proj
        layer.linear.weight = mx.zeros_like(layer.linear.weight)
        zeros = -mx.ones((3, 2, 64))
        with bank.applied(rows):
            signed = layer(zeros)[1], layer.linear(zeros)[1]
        layer.linear.weight = lora.build().layers[0].self_attn.q_proj.weight
    assert mx.array_equal(none, bare)
    assert mx.array_equal(some[1], bare[1])
    assert not mx.allclose(some[0], bare[0])
    assert mx.array_equal(*(x.view(mx.uint32) for x in signed))


LAYERS = 21
"""Adapted layers: seven in each of three blocks."""


class Row:
    """What `applied` asks of a row."""

    def __init__(self, request):
        self.request = request


def test_a_row_may_stand_for_several_lines(lora, model, folders):
    """As where a forward has one line a token."""
    ids = mx.array([[5], [6], [5], [6]], dtype=mx.uint32)
    alice, bob = (Row(Request(prompt_ids=[1], adapter=name)) for name in ("alice", "bob"))
    with Engine(model, config=lora.config(folders, verify=False)) as engine:
        with engine.bound.adapters.applied([alice, alice, bob, bob]):
            four = model(ids)
        with engine.bound.adapters.applied([alice, bob]):
            two = model(ids[:2])
    assert mx.allclose(four[0], two[0], atol=1e-5)
    assert mx.allclose(four[3], two[1], atol=1e-5)
    assert not mx.allclose(four[0], four[2], atol=1e-2)


def test_another_thread_sees_the_bare_model(lora, model, folders):
    """What a forward chooses is its thread's own."""
    ids = mx.array([[5, 6, 7]], dtype=mx.uint32)
    bare, seen = model(ids), []
    mx.eval(bare)

    def look():
        seen.append(model(ids).tolist())

    alice = Row(Request(prompt_ids=[1], adapter="alice"))
    engine = Engine(model, config=lora.config(folders, verify=False))
    with engine, engine.bound.adapters.applied([alice]):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [bare.tolist()]


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3, 11])
def test_a_forward_that_fails_for_one_adapter_costs_its_rows_only(lora, model, folders, monkeypatch, after):
    """DESIGN 7.3: the halves that are tried alone have their lines' adapters, in prefill and in decode."""
    plain, calls = AdaptedLinear.__call__, []

    def failing(self, x):
        chosen = self._selection.now
        calls.append(chosen)
        if chosen is not None and "bob" in chosen.names and len(calls) > LAYERS * after:
            raise RuntimeError("bob fails")
        return plain(self, x)

    with Engine(model, config=lora.config(folders)) as engine:
        monkeypatch.setattr(AdaptedLinear, "__call__", failing)
        outcomes = lora.arrive(engine, lora.requests())
        assert engine.stats()["recoveries"] > 0
    wanted = lora.serial(folders)
    sound = [i for i, name in enumerate(lora.names) if name != "bob"]
    lora.check([outcomes[i] for i in sound], [wanted[i] for i in sound])
    assert {str(outcomes[i]) for i in range(len(lora.names)) if i not in sound} == {"bob fails"}


def test_a_cancelled_row_leaves_and_the_rest_keep_their_adapters(lora, model, folders):
    """The lines follow the rows when places change."""
    wanted = lora.serial(folders)
    with Engine(model, config=lora.config(folders)) as engine:
        handles = [engine.submit(request) for request in lora.requests()]
        for _ in range(6):
            engine.step()
        handles[0].cancel()
        handles[2].cancel()
        while not all(handle.done for handle in handles):
            engine.step()
        lora.check([handles[i].outcome for i in (1, 3, 4, 5)], [wanted[i] for i in (1, 3, 4, 5)])


# --- by group --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dora", "embedding"])
def test_what_cannot_be_applied_per_row_is_applied_by_group(lora, model, folders, watch, tmp_path, kind):
    """SPEC 4.4: its rows wait until the others are done, and theirs are not touched."""
    if kind == "dora":
        carol = lora.save(tmp_path / "carol", lora.build(), kind="dora", keys=lora.attention, size=3.0)
    else:
        carol = lora.save(tmp_path / "carol", lora.build(), keys=["model.embed_tokens"], size=3.0)
    names = ("alice", "carol", "", "carol", "bob", "")
    own = {**folders, "carol": carol}
    before = dict(model.named_modules())
    with Engine(model, config=lora.config(own), plugins=[watch]) as engine:
        lines = {line["part"]: line["choice"] for line in engine.bound.explain()}
        assert lines["adapter alice"] == "per row"
        assert lines["adapter carol"] == "by group"
        outcomes = lora.arrive(engine, lora.requests(names))
    lora.check(outcomes, lora.serial(own, names=names))
    assert {"carol"} in watch.together
    assert all(group == {"carol"} or "carol" not in group for group in watch.together)
    assert all(dict(model.named_modules())[path] is module for path, module in before.items())


def test_a_layer_that_sees_no_lines_is_adapted_by_group(lora, folders):
    """A model that lays the tokens of all rows flat before a layer: nothing there is a line's own."""
    model = lora.build()
    feed = type(model.layers[0].mlp).__call__

    class Flat(type(model.layers[0].mlp)):
        def __call__(self, x):
            return feed(self, x.reshape(-1, x.shape[-1])).reshape(x.shape)

    model.layers[1].mlp.__class__ = Flat
    with Engine(model, config=lora.config(folders)) as engine:
        lines = {line["part"]: line["choice"] for line in engine.bound.explain()}
        assert lines["adapter alice"] == "by group"
        assert lines["adapter bob"] == "per row"
        outcomes = lora.arrive(engine, lora.requests())
    lora.check(outcomes, lora.serial(folders))


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_prefix_state_never_crosses_adapters(lora, model, folders, keeping):
    """SPEC 4.4: rows of one group, one prompt, three adapters: nobody gets another's state, everybody finds its own."""
    prompt = lora.prompts[0]
    settings = lora.config(folders) | {"state_cache": {"name": "keeping", "publish_min_tokens": 1}}
    by_name = {name: lora.adapted(lora.build(), folder) for name, folder in folders.items()} | {"": lora.build()}
    with Engine(model, config=settings, plugins=[keeping]) as engine:
        for _ in range(2):
            for name in ("alice", "", "bob"):
                outcome = engine.generate([Request(prompt_ids=prompt, max_tokens=6, adapter=name or None)])[0]
                assert outcome.token_ids == models.serial(by_name[name], prompt, 6).tokens
    assert {key["adapter"].partition(":")[0] for key, _, _ in keeping.entries} == {"alice", "", "bob"}
    assert [key["adapter"].partition(":")[0] for key in keeping.found] == ["alice", "", "bob"]
    assert len({key["adapter"].partition(":")[2] for key, _, _ in keeping.entries}) == 3, "each with its own weights"
