"""Model + config + plugins -> BoundModel: chosen once, frozen. It runs nothing but the probe."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from oarlock.core import layers as reading
from oarlock.core.adapters import Adapters
from oarlock.core.attention import Swap
from oarlock.core.choices import evolved, parse_options
from oarlock.core.companion import Companion
from oarlock.core.compiling import Compiling
from oarlock.core.compiling import decide as decide_compiled
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.composition import APART, BoundLayer, described, longest_append, stops_of
from oarlock.core.contracts.layout import BatchCache, LayerInfo
from oarlock.core.contracts.method import CheckedMethod, GroupedMethod, MethodHost, WindowedMethod
from oarlock.core.contracts.policy import Policy
from oarlock.core.contracts.proposer import ListeningProposer, ProposerRows
from oarlock.core.contracts.sampler import Processor, Sampler
from oarlock.core.contracts.state_cache import NullStateCache, StateCache
from oarlock.core.device import settled
from oarlock.core.errors import LayoutRefused, ProposerRefused
from oarlock.core.head import Trimmed
from oarlock.core.layout_choice import bind_layer, check_columns, geometry, own_layout
from oarlock.core.manager import PluginSet
from oarlock.core.mixing import Mixing, decide, find_body
from oarlock.core.models import load_model
from oarlock.core.probe import Verdict, probe
from oarlock.core.processing import in_order
from oarlock.core.sampling import specialised_first
from oarlock.core.tap import Tap


@attrs.frozen(kw_only=True, eq=False)
class BoundModel:
    """A composition: fixed for the life of an engine.

    ``vocabulary`` is the rows of the embedding (token ids stay below it), ``positions`` the most tokens of a
    sequence or None, ``verdict`` what the probe found, ``mixing`` whether a decode step may take a chunk along, ``compiling``
    whether it may be a replayed one, ``stops`` the lengths at which a layer's storage changes,
    ``stored`` a digest of the layouts.
    """

    model: Any
    model_type: str
    identity: str
    config: EngineConfig
    plugins: PluginSet
    layers: tuple[BoundLayer, ...]
    samplers: tuple[Sampler, ...]
    processors: tuple[Processor, ...]
    policy: Policy
    method: str
    method_reason: str
    adapters: Adapters
    vocabulary: int
    positions: int | None
    tokenizer: Any = None
    verdict: Verdict = attrs.field(factory=Verdict)
    mixing: Mixing = attrs.field(factory=Mixing)
    compiling: Compiling = attrs.field(factory=Compiling)
    stops: tuple[int, ...] = attrs.field(init=False)
    stored: str = attrs.field(init=False)
    companions: dict[str, Companion] = attrs.field(factory=dict, repr=False)
    tap: Tap = attrs.field(factory=Tap, repr=False)
    _windows: dict[str, int] = attrs.field(factory=dict, init=False, repr=False)

    @stops.default
    def _stops(self) -> tuple[int, ...]:
        return stops_of(self.layers)

    @stored.default
    def _stored(self) -> str:
        return described(self.layers)

    def longest_append(self, tokens: int, width: int) -> int:
        """Return ``width``, or less where a row of ``tokens`` comes to a stop before: no forward may go past it."""
        return longest_append(self.stops, tokens, width)

    @property
    def honours_lengths(self) -> bool:
        """Return whether recurrent layers mind per-row widths; False where nobody looked."""
        return self.verdict.honours_lengths

    def open_caches(self, *, slots: int, window: int) -> list[BatchCache]:
        """Return one cache per layer, without rows, as the plain list that models expect."""
        return [layer.layout.open(layer.info, layer.options, slots=slots, window=window) for layer in self.layers]

    def apart(self, verdict: Verdict) -> BoundModel:
        """Return this composition with rows of different length apart, in every layer."""
        info = LayerInfo(index=-1, path="of all lengths", kind=APART)
        wrap = self.plugins.resolve("layout", own_layout(info, self.plugins)[0])
        layers = [attrs.evolve(layer, layout=wrap.compose([layer])) for layer in self.layers]
        return attrs.evolve(self, layers=tuple(layers), verdict=verdict)

    def swap(self) -> contextlib.ExitStack:
        """Let what layouts hand out attend by itself, and the head be cut, until this is closed, where that is needed."""
        needed, opened = self.mixing.on or any(layer.attends for layer in self.layers), contextlib.ExitStack()
        opened.callback(Swap(self.model.modules() if needed else ()).close)
        if body := self.tap.path or self.mixing.body:
            opened.callback(Trimmed(self.model, body).close)
        return opened

    def open_method(self, name: str, host: MethodHost) -> GroupedMethod:
        """Open a registered method for a group; only the engine's own has options."""
        method, options = self.method_of(name)
        return method.open(host, options)  # type: ignore[no-any-return]

    def window(self, name: str) -> int:
        """Return for what window a registered method has caches opened."""
        if name not in self._windows:
            method, options = self.method_of(name)
            self._windows[name] = method.window(options) if isinstance(method, WindowedMethod) else 1
        return self._windows[name]

    def check_method(self) -> None:
        """Raise what opening the engine's method would raise of its options."""
        method, options = self.method_of(self.method)
        if isinstance(method, CheckedMethod):
            method.check(self, options)

    def method_of(self, name: str) -> tuple[Any, Any]:
        """Return a registered method with its options."""
        method = self.plugins.resolve("method", name)
        given = self.config.method.options if name == self.config.method.name else {}
        return method, parse_options(method.options, given, "method")

    def proposer(self, name: str, given: Mapping[str, Any]) -> Callable[[], ProposerRows]:
        """Return what opens a registered proposer. Raises `errors.ProposerRefused`, and what its name or options raise."""
        found = self.plugins.resolve("proposer", name)
        options = parse_options(found.options, given, "method.proposer")
        reason = found.refuses(self, options)
        if reason is None and isinstance(found, ListeningProposer) and found.listens(options):
            reason = self._untapped()
        if reason is not None:
            raise ProposerRefused(name, self.model_type, reason)
        return functools.partial(found.open, self, options)

    def _untapped(self) -> str | None:
        """Find the end of the model's body, once; return why it gives no hidden states, or None."""
        if not self.verdict.ragged:
            return "it listens to hidden states, and rows of different length do not share a forward of this model"
        self.tap.path = self.tap.path or find_body(self)
        return None if self.tap.path else "it listens to hidden states, and no part of this model ends before its head"

    def companion(self, source: str) -> Companion:
        """Return a second model, loaded and bound when it is first asked for. Raises what loading and binding raise."""
        if source not in self.companions:
            loaded = load_model(source, self.config, self.plugins)
            alone = attrs.evolve(self.config.scheduler, mixed=False, compiled=False)
            config = EngineConfig(model=self.config.model, scheduler=alone)
            bound = bind(
                loaded.model,
                config,
                self.plugins,
                model_type=loaded.model_type,
                identity=loaded.identity,
                positions=loaded.positions,
                tokenizer=loaded.tokenizer,
            )
            self.companions[source] = Companion(bound)
        return self.companions[source]

    def open_state_cache(self) -> StateCache:
        """Open the configured state cache, or the one that keeps nothing."""
        settings = self.config.state_cache
        if settings.name == NullStateCache.name:
            return NullStateCache()
        return self.plugins.resolve("state_cache", settings.name).open(self)  # type: ignore[no-any-return]

    def bytes_at(self, tokens: int, window: int = 1) -> int:
        """Return the bytes of one row's caches at ``tokens``, where forwards of ``window`` tokens may be taken back."""

        def longer(info: LayerInfo) -> LayerInfo:
            return attrs.evolve(info, window=info.window + window - 1) if info.window else info

        return sum(layer.layout.bytes_at(longer(layer.info), layer.options, tokens) for layer in self.layers)

    def explain(self) -> list[dict[str, str]]:
        """Return the composition line by line: what was chosen where, and why."""
        lines = [
            {
                "part": f"layer {layer.info.path}",
                "kind": layer.info.kind,
                "choice": " + ".join(part.layout.name for part in layer.parts) or layer.layout.name,
                "detail": geometry(layer.info),
                "reason": "; ".join(dict.fromkeys(each.reason for each in layer.parts or [layer])),
            }
            for layer in self.layers
        ]
        settings = self.config.scheduler
        stops = [f"one ends at {stop}" for stop in self.stops]
        policy = settings.policy_choice
        detail = ", ".join(f"{option} {value}" for option, value in policy.options.items())
        lines += [
            {"part": "rows", "kind": "", **self.verdict.explain()},
            {"part": "mixed", "kind": "", **self.mixing.explain()},
            {"part": "compiled", "kind": "", **self.compiling.explain()},
            {"part": "method", "kind": "", "choice": self.method, "detail": "", "reason": self.method_reason},
            {
                "part": "samplers",
                "kind": "",
                "choice": ", ".join(s.name for s in self.samplers),
                "detail": "",
                "reason": "all that are registered, the specialised first; rows take the first that handles them",
            },
            {
                "part": "processors",
                "kind": "",
                "choice": ", ".join(p.name for p in self.processors) or "none",
                "detail": "",
                "reason": "all that are registered, by name; rows that ask for none pass by",
            },
            {"part": "policy", "kind": "", "choice": policy.name, "detail": detail, "reason": f"config {policy.key}"},
            {
                "part": "prefill",
                "kind": "",
                "choice": f"chunks of {settings.prefill_chunk}",
                "detail": ", ".join(["tail split" if settings.tail_split else "no tail split", *stops]),
                "reason": "config scheduler",
            },
            {
                "part": "state cache",
                "kind": "",
                "choice": self.config.state_cache.name,
                "detail": "",
                "reason": "config state_cache.name",
            },
            *self.adapters.explain(),
        ]
        return lines


def bind(
    model: Any,
    config: EngineConfig,
    plugins: PluginSet,
    *,
    model_type: str = "",
    identity: str = "",
    positions: int | None = None,
    tokenizer: Any = None,
) -> BoundModel:
    """Compose ``model`` with what the config and the plugins choose, then freeze the registries.

    Raises `errors.UnsupportedLayer`, `errors.LayoutRefused`, `errors.ModelNotBatchable`, or what resolving a name
    raises, before any request is taken.
    """
    config, facts = settled(config), reading.read(model)
    known = {info.path for layer in facts.layers for info in (layer, *layer.parts)}
    for path in config.layouts.layers:
        if path not in known:
            raise LayoutRefused(config.layouts.layers[path].name, path, f"the model has {len(facts.layers)} layers")
    method, method_reason = _choose_method(model, config, plugins)
    policy = config.scheduler.policy_choice
    bound = BoundModel(
        model=model,
        model_type=model_type or getattr(model, "model_type", type(model).__module__.rpartition(".")[2]),
        identity=identity,
        config=config,
        plugins=plugins,
        layers=tuple(bind_layer(info, model, config, plugins) for info in facts.layers),
        samplers=specialised_first(plugins.registries.samplers),
        processors=in_order(plugins.registries.processors),
        policy=evolved(plugins.resolve("policy", policy.name), policy.options, policy.key),
        method=method,
        method_reason=method_reason,
        adapters=Adapters(model, config.adapters.named, plugins),
        vocabulary=facts.vocabulary,
        positions=positions,
        tokenizer=tokenizer,
    )
    check_columns(bound.layers)
    reading.evaluate(model)
    items = [item for registry in plugins.registries for item in registry]
    reading.evaluate_plugins([*plugins.manager.get_plugins(), *items])
    plugins.registries.freeze()
    with contextlib.closing(bound.swap()):
        bound = probe(bound) if config.scheduler.verify else bound
        bound.check_method()  # before what a proposer that listens forbids
        return attrs.evolve(bound, mixing=decide(bound), compiling=decide_compiled(bound))


def _choose_method(model: Any, config: EngineConfig, plugins: PluginSet) -> tuple[str, str]:
    """Return the method's name and why: the config's unless a plugin answers for the default."""
    default = type(config.method)().name
    if config.method.name == default and not config.method.options:
        chosen = plugins.manager.hook.choose_method(model=model, config=config)
        if chosen is not None:
            plugins.resolve("method", chosen)
            return chosen, "hook choose_method"
    plugins.resolve("method", config.method.name)
    return config.method.name, "config method.name"
