"""Delayed caches: batched tokens are those of a serial run whose caches turn into packed ones at the same length."""

import functools

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from oarlock.core import Request
from oarlock.core.engine import Engine
from oarlock.core.errors import InvalidConfigValue, LayoutRefused
from oarlock.core.testing import models
from oarlock.layouts.delayed import DelayedCache, DelayedLayout
from oarlock.layouts.packed import Format

LENGTHS = (12, 3, 20, 1, 9)
TOKENS = 16
GROUP, START, CHUNK = 32, 8, 4
# Arguments beside the table's: head sizes that are multiples of 32, windows that wrap, nothing wider than needed.
CHANGES = {
    "tiny-full": {"head_dim": 32},
    "tiny-ring": {"head_dim": 32},
    "falcon_h1": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32, "sliding_window": 8},
    "laguna": {},
    "qwen3_next": {},
    "stablelm": {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000},
}
# What mlx-lm can quantize on its way: no windows, no sinks, keys and values of one size.
THEIRS = ("tiny-full", "qwen3_next")


class Turns:
    """A serial cache that from ``start`` tokens on holds what packed ones would be read as."""

    packing: Format
    start: int
    turned = False

    def rounded(self, array):
        return self.packing.unpack("x", self.packing.pack("x", array))

    def update_and_fetch(self, keys, values):
        if not self.turned and self.offset >= self.start:
            self.turned, self.keys, self.values = True, self.rounded(self.keys), self.rounded(self.values)
        if self.turned:
            keys, values = self.rounded(keys), self.rounded(values)
        return super().update_and_fetch(keys, values)


class TurningFull(Turns, KVCache):
    pass


class TurningRing(Turns, RotatingKVCache):
    pass


@functools.cache
def model(name):
    return models.build(name, **CHANGES[name])


def serial_cache(cache, bits, start):
    if isinstance(cache, CacheList):
        return CacheList(*(serial_cache(part, bits, start) for part in cache.caches))
    if type(cache) not in (KVCache, RotatingKVCache):
        return cache
    made = TurningFull() if type(cache) is KVCache else TurningRing(cache.max_size)
    made.packing, made.start = Format(bits=bits, group_size=GROUP), max(1, start)
    return made


@functools.cache
def alone(name, prompt, bits, start, theirs=False):
    """Generate greedily, with mlx-lm's own conversion, or with caches that turn, after a chunk that ends there."""
    if theirs:
        settings = {"kv_bits": bits, "kv_group_size": GROUP, "quantized_kv_start": start, "prefill_step_size": CHUNK}
    else:
        caches = [serial_cache(cache, bits, start) for cache in make_prompt_cache(model(name))]
        first, prompt = prompt[: min(max(1, start), len(prompt) - 1)], prompt[min(max(1, start), len(prompt) - 1) :]
        if first:
            model(name)(mx.array([first]), cache=caches)
        settings = {"prompt_cache": caches}
    tokens, gaps = [], []
    for token, scores in generate_step(mx.array(prompt), model(name), max_tokens=TOKENS, **settings):
        two = mx.sort(mx.topk(scores, 2)).tolist()
        tokens.append(int(token))
        gaps.append(two[1] - two[0])
    return tokens, gaps


def config(bits=8, start=START, **scheduler):
    choice = {"name": "delayed", "bits": bits, "group_size": GROUP, "start": start}
    return {"layouts": {"full": choice, "rotating": choice}, "scheduler": scheduler}


def check(arrival, name, bits=8, start=START, *, theirs=False, chunks=(CHUNK, 7), verify=True):
    """Five ragged prompts reach their stops at different times, at once and staggered; one leaves early."""
    prompts = models.prompts(LENGTHS, 97)
    serial = [alone(name, tuple(prompt), bits, start, theirs) for prompt in prompts]
    requests = [Request(prompt_ids=prompt, max_tokens=6 if i == 2 else TOKENS) for i, prompt in enumerate(prompts)]
    comparison = models.Comparison()
    for every, chunk, pipeline in zip((0, 3), chunks, (True, False), strict=True):
        settings = {"prefill_chunk": chunk, "pipeline": pipeline, "verify": verify}
        with Engine(model(name), config=config(bits, start, **settings)) as engine:
            results = arrival(engine, requests, every)
            assert engine.stats()["recoveries"] == 0
        wanted = [tokens[: len(result.token_ids)] for (tokens, _), result in zip(serial, results, strict=True)]
        comparison += models.compare([r.token_ids for r in results], wanted, [gaps for _, gaps in serial])
    print(f"{name}, {bits} bits from {start} tokens on: {comparison}")
    comparison.check()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", THEIRS)
def test_tokens_are_those_of_mlx_lms_quantized_kv_start(arrival, name, bits):
    """Where it has one that can run the model; the engine's chunks need not end where mlx-lm's do."""
    check(arrival, name, bits, theirs=True)


@pytest.mark.fault("B-01")
@pytest.mark.parametrize("name", CHANGES)
def test_tokens_equal_the_serial_run(arrival, name):
    """Full, rotating, recurrent and composite layers, sinks, shared keys, arrays in place of handles."""
    check(arrival, name)


@pytest.mark.parametrize("start", [0, 1, 13])
@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring"])
def test_any_start_will_do(arrival, name, start):
    """Also one that no chunk would end at; and rows that are packed from their second token on."""
    check(arrival, name, 4, start)


@pytest.mark.long
@pytest.mark.parametrize("start", [3, 11, 25])
@pytest.mark.parametrize("name", CHANGES)
def test_other_starts_equal_the_serial_run(arrival, name, start):
    check(arrival, name, 4, start)


def packs_all(cache, rows, pack=DelayedCache._pack):
    """The first row that reaches its stop takes the others with it."""
    pack(cache, range(cache.plain.rows) if rows else ())


def packs_nothing(cache, rows):
    pass


@pytest.mark.fault("B-01", twin=True)
@pytest.mark.parametrize("broken", [packs_all, packs_nothing])
def test_a_cache_that_packs_others_or_none_is_found(arrival, broken, monkeypatch):
    """The twins; the probe is off, which would refuse the first."""
    monkeypatch.setattr(DelayedCache, "_pack", broken)
    with pytest.raises(AssertionError):
        check(arrival, "tiny-full", 2, verify=False)


def test_a_layout_that_does_not_say_where_chunks_end_is_found(arrival, monkeypatch):
    monkeypatch.setattr(DelayedLayout, "stops", lambda *_: ())
    with pytest.raises(AssertionError):
        check(arrival, "tiny-full", 2, 2, chunks=(64, 64), verify=False)


# --- company, faults and mixtures --------------------------------------------------------------------------------------


def generated(arrival, name, settings, requests, every=0):
    with Engine(model(name), config=settings) as engine:
        return [result.token_ids for result in arrival(engine, requests, every)], engine.stats()["recoveries"]


def requests():
    return [Request(prompt_ids=prompt, max_tokens=TOKENS) for prompt in models.prompts(LENGTHS, 97)]


@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring"])
def test_forwards_that_fail_change_no_token(arrival, name, monkeypatch):
    """Every third one raises after it was built, also those in which rows are packed: it is repeated."""
    wanted, _ = generated(arrival, name, config(4, prefill_chunk=CHUNK, verify=False), requests(), 2)
    plain, count = type(model(name)).__call__, [0]

    def failing(self, *args, **named):
        out = plain(self, *args, **named)
        count[0] += 1
        if count[0] % 3 == 0:
            raise MemoryError
        return out

    monkeypatch.setattr(type(model(name)), "__call__", failing)
    got, recoveries = generated(arrival, name, config(4, prefill_chunk=CHUNK, verify=False), requests(), 2)
    assert recoveries > 10
    assert got == wanted


@pytest.mark.parametrize("name", ["tiny-full", "tiny-ring"])
def test_layers_with_other_stops_share_masks(arrival, name):
    """Plain, packed from the first token on, and two stops: rows in company get the tokens that they get alone."""
    choices = {"0": {"start": 5}, "1": {"start": 11}}
    named = {path: {"name": "delayed", "bits": 4, "group_size": GROUP, **more} for path, more in choices.items()}
    settings = {
        "layouts": {"layers": {**named, "2": {"name": "quantized", "bits": 8, "group_size": GROUP}}},
        "scheduler": {"prefill_chunk": 7},
    }
    wanted = [generated(arrival, name, settings, [request])[0][0] for request in requests()]
    for every in (0, 2):
        assert generated(arrival, name, settings, requests(), every)[0] == wanted


@pytest.mark.fault("G-05")
def test_what_cannot_be_packed_is_refused_at_bind():
    with pytest.raises(LayoutRefused, match="key size 16"):
        Engine(models.build("tiny-ring"), config={"layouts": {"rotating": "delayed"}})
    with pytest.raises(InvalidConfigValue, match="0 or more") as caught:
        Engine(model("tiny-full"), config=config(start=-1))
    assert "\n" not in str(caught.value)
