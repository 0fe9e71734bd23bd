"""FAULTS Q-08: every key of the configuration changes what can be observed, or is refused."""

import attrs
import mlx.core as mx
import pytest

from oarlock.core import SamplingParams, errors, hookimpl
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.loader import LoadedModel
from oarlock.core.contracts.state_cache import NullStateCache
from oarlock.core.engine import Engine
from oarlock.layouts.full import FullLayout
from oarlock.methods.plain import PlainDecoding
from oarlock.samplers.greedy import GreedyRows


@attrs.frozen
class Options:
    """One option of a method."""

    pace: int = 1


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask):
    """Every query sees its row's first token."""
    return mx.broadcast_to(values[:, :, :1], queries.shape)


def attending(scripted):
    """Return the class ``scripted`` with attention under the name that models give it: its steps can be mixed."""

    class Attending(scripted):
        def first_tokens(self, kv, cache):
            mask = cache.make_mask(kv.shape[2], return_array=False, window_size=None)
            keys, values = cache.update_and_fetch(kv, kv)
            seen = scaled_dot_product_attention(kv, keys, values, cache, scale=1.0, mask=mask)
            return seen[:, 0, :, 0].astype(mx.int32)

    return Attending


class Recorder:
    """A plugin of every kind, which writes down what happens to it."""

    name, is_argmax_invariant = "recorder", False

    def __init__(self, model):
        self.model, self.log = model, []
        model.before = lambda ids, cache: self.log.append(("forward", ids.shape))

    @hookimpl
    def register_loaders(self, register):
        register(self)

    @hookimpl
    def register_layouts(self, register):
        register(FullLayout(name="other"))

    @hookimpl
    def register_methods(self, register):
        register(Other(self.log))

    @hookimpl
    def register_samplers(self, register):
        register(self)

    @hookimpl
    def register_state_caches(self, register):
        register(Kept(self.log))

    @hookimpl
    def step_finished(self, step):
        self.log.append(("step", step.decode_ids, step.prefill_ids, step.joined, step.left))

    # a loader, and a sampler that counts its rows
    def accepts(self, source):
        return source == "recorded"

    def load(self, source, *, dtype="auto"):
        self.log.append(("load", dtype))
        return LoadedModel(model=self.model, tokenizer=None, identity="x", model_type="scripted", positions=64)

    def handles(self, params):
        return params.temperature == 0.125

    def open(self, params):
        self.log.append(("open", len(params)))
        return GreedyRows()


class FailsOnce(PlainDecoding):
    """Plain decoding whose first step fails as a device does."""

    failed = False

    def advance(self, work=None):
        if not self.failed:
            self.failed = True
            raise OSError("once")
        super().advance(work)


class Other:
    """Plain decoding by another name, with an option."""

    name, options = "other", Options

    def __init__(self, log):
        self.log = log

    def open(self, host, options):
        self.log.append(("method", options.pace))
        return FailsOnce(host)


class Kept(NullStateCache):
    """A state cache that writes down what it is given."""

    name = "kept"

    def __init__(self, log):
        self.log = log

    def open(self, bound):
        return self

    def keeps(self, row):
        return True

    def lookup(self, key, tokens):
        self.log.append(("lookup", len(tokens)))

    def publish(self, key, tokens, states):
        self.log.append(("publish", len(tokens)))


def record(bench, config):
    """Everything that can be seen of one workload: forwards, steps, samplers, publications, plugins, errors."""
    model = attending(bench.Scripted)({first: [10 * first, 10 * first + 1] for first in (1, 2, 3, 4)})
    recorder = Recorder(model)
    try:
        engine = Engine.load("recorded", config=config, plugins=[recorder])
    except errors.OarlockError as error:
        return [type(error), str(error)]
    log = recorder.log
    log.append(("layers", [layer.layout.name for layer in engine.bound.layers]))
    log += [("plugin", info.name, info.state) for info in engine.bound.plugins.infos]
    special = SamplingParams(temperature=0.125)
    requests = [bench.ask(1, n=9), bench.ask(2, 2, 2, n=9, sampling=special), bench.ask(3, 3, n=9, sampling=special)]
    requests += [bench.ask(4, *[4] * 11, n=3)]
    with engine:
        first = engine.submit(attrs.evolve(requests[0], id="first"), events=lambda event: log.append(event.index))
        for _ in range(3):
            engine.step()
        handles = [first]
        for place, request in enumerate(requests[1:]):
            try:
                handles.append(engine.submit(attrs.evolve(request, id=f"r{place}")))
            except errors.QueueFull as error:
                log.append(type(error))
        while engine.step():
            pass
        log.append([getattr(handle.outcome, "token_ids", repr(handle.outcome)) for handle in handles])
    return log


CHANGES = {
    "model.dtype": "float16",
    "scheduler.max_batch": 2,
    "scheduler.max_queued": 1,
    "scheduler.policy": "fifo",
    "scheduler.stall_bound_ms": 1e-6,
    "scheduler.prefill_chunk": 4,
    "scheduler.prefill_batch_tokens": 2,
    "scheduler.tail_split": False,
    "scheduler.early_first_token": False,
    "scheduler.pipeline": False,
    "scheduler.vectorised_sampling": False,
    "scheduler.kv_budget": 4096,
    "scheduler.max_recoveries": 0,
    "scheduler.mixed": False,
    "scheduler.mixed_token_budget": 2,
    "scheduler.compiled": True,
    "scheduler.verify": False,
    "state_cache.name": "kept",
    "state_cache.publish_min_tokens": 2,
    "layouts.full": "other",
    "layouts.layers": {"0": "other"},
    "method.name": "other",
    "method.pace": 3,
    "adapters.alice": "no such directory",
    "plugins.disable": ["log"],
    "plugins.enable": ["log"],
    "plugins.require": ["oarlock>=99"],
}
ELSEWHERE = {f"state_cache.{key}" for key in ("prefix_bytes", "disk", "disk_bytes", "checkpoints")}
ELSEWHERE |= {"scheduler.overcommit"}
"""Their effects need more than these requests: tests/core/test_budget.py, tests/plugins/state_cache."""
BESIDE = {
    "scheduler.max_recoveries": {"method": {"name": "other"}},
    "state_cache.publish_min_tokens": {"state_cache": {"name": "kept"}},
    "method.pace": {"method": {"name": "other"}},
}


def changed(key, value):
    """The configuration with this key, and the one it is compared with."""
    base = BESIDE.get(key, {})
    section, name = key.split(".")
    return base, {**base, section: {**base.get(section, {}), name: value}}


def check_it_has_an_effect(bench, key, value):
    base, other = changed(key, value)
    assert record(bench, base) != record(bench, other)


@pytest.mark.fault("Q-08")
@pytest.mark.parametrize("key", CHANGES)
def test_every_key_changes_something(bench, key):
    check_it_has_an_effect(bench, key, CHANGES[key])


@pytest.mark.fault("Q-08", twin=True)
@pytest.mark.parametrize("base", [{}, *BESIDE.values()])
def test_twin_the_same_configuration_changes_nothing(bench, base):
    """So what the test above sees is the key's effect."""
    assert record(bench, base) == record(bench, base)


def test_no_key_is_left_out():
    """Each is in the table above, or its effect is shown elsewhere."""
    keys = {
        f"{section.name}.{field.name}"
        for section in attrs.fields(EngineConfig)
        for field in attrs.fields(type(getattr(EngineConfig(), section.name)))
    }
    free = {
        "layouts.kinds": "layouts.full",
        "method.options": "method.pace",
        "adapters.named": "adapters.alice",
    }  # tables whose keys are not ours
    assert {free.get(key, key) for key in keys} == CHANGES.keys() | ELSEWHERE
