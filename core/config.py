"""The engine's one configuration: frozen, validated, from a TOML file, a mapping or keywords.

It knows keys, types and ranges. Whether a name is registered, and whether a model can do it, is for bind to say.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from oarlock.core import values
from oarlock.core.choices import Choice, check_keys, parse_choice, parse_name_or_choice, parse_table
from oarlock.core.errors import InvalidConfigValue, UnreadableConfig

KINDS = ("full", "rotating", "recurrent", "chunked", "composite")
"""The layer kinds that ``[layouts]`` may name: those of `contracts.layout.KINDS` (a test compares them)."""


def _kinds(_: str, value: Any) -> Mapping[str, Choice]:
    check_keys("layouts", value, (*KINDS, "layers"))
    return MappingProxyType({kind: parse_choice(f"layouts.{kind}", chosen) for kind, chosen in value.items()})


def _layers(key: str, value: Any) -> Mapping[str, Choice]:
    """Return one choice per layer path: a range ``"0-3"`` becomes four entries."""
    layers: dict[str, Choice] = {}
    for text, chosen in parse_table(key, value).items():
        match = re.fullmatch(r"(\d+)(?:-(\d+)|\.(\d+))?", text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + 10_000:
            raise InvalidConfigValue(key, text, 'layers as "7", a range "0-3", or a part of a composite layer "7.1"')
        for path in [text] if match[3] else map(str, range(first, last + 1)):
            if path in layers:
                raise InvalidConfigValue(key, text, f"each layer once; {layers[path].key} names layer {path} as well")
            layers[path] = parse_choice(f"{key}.{text}", chosen)
    return MappingProxyType(layers)


def _adapters(_: str, value: Any) -> Mapping[str, Choice]:
    """Return how each adapter is opened: a bare path stands for a directory of kind `mlx_lm`."""
    named = {}
    for name, given in parse_table("adapters", value).items():
        key, path = f"adapters.{values.name('adapters', name)}", isinstance(given, str | PathLike)
        named[name] = parse_choice(key, {"name": "mlx_lm", "path": values.name(key, str(given))} if path else given)
    return MappingProxyType(named)


def _setting(default: Any, parse: values.Parse) -> Any:
    """Return a field whose values go through ``parse``, which is told the field's full key."""
    return attrs.field(default=default, metadata={"parse": parse})


def _parsed(section: str) -> Callable[[type, list[Any]], list[Any]]:
    def transform(_: type, fields: list[Any]) -> list[Any]:
        return [f.evolve(converter=functools.partial(f.metadata["parse"], f"{section}.{f.name}")) for f in fields]

    return transform


@attrs.frozen(kw_only=True, field_transformer=_parsed("model"))
class ModelConfig:
    """``[model]``: how weights are held. "auto" is "stored" on a GPU, float32 on the CPU where it fits."""

    dtype: str = _setting("auto", values.one_of("auto", "float32", "bfloat16", "float16", "stored"))


@attrs.frozen(kw_only=True, field_transformer=_parsed("scheduler"))
class SchedulerConfig:
    """``[scheduler]``: what runs when, and within which limits. Units: tokens, rows, milliseconds, bytes.

    ``stall_bound_ms`` is the longest that running rows wait for one advance of a joiner's prompt; 0 is a chunk's time.
    ``compiled`` "auto" compiles no decode step: on the CPU the first one waits for the C++ compiler, and no GPU was measured.
    ``pipeline`` and ``mixed_token_budget`` "auto" go by the device: see `core.device`.
    """

    max_batch: int = _setting(16, values.floor)
    max_queued: int = _setting(64, values.whole(1))
    policy: str | Choice = _setting("decode_first", parse_name_or_choice)  # noqa: RUF009 - a field, as all here
    stall_bound_ms: float = _setting(0, values.at_least(0))
    prefill_chunk: int = _setting(512, values.whole(1))
    prefill_batch_tokens: int = _setting(2048, values.whole(1))
    tail_split: bool = _setting(True, values.flag)
    early_first_token: bool = _setting(True, values.flag)
    pipeline: bool | str = _setting("auto", values.auto_flag)
    vectorised_sampling: bool = _setting(True, values.flag)
    compiled: bool | str = _setting("auto", values.auto_flag)
    mixed: bool | str = _setting("auto", values.auto_flag)
    mixed_token_budget: int | str = _setting("auto", values.auto_whole(1))
    kv_budget: int | float | None = _setting(None, values.parse_budget)
    overcommit: float = _setting(1.0, values.at_least(1.0))
    max_recoveries: int = _setting(8, values.whole(0))
    verify: bool = _setting(True, values.flag)

    @property
    def policy_choice(self) -> Choice:
        """The policy with its options, however it was named."""
        return parse_choice("scheduler.policy", self.policy)


@attrs.frozen(kw_only=True, field_transformer=_parsed("state_cache"))
class StateCacheConfig:
    """``[state_cache]``: what is kept of rows outside the running group. ``checkpoints`` are in ``disk`` unless named."""

    name: str = _setting("memory", values.name)
    prefix_bytes: int = _setting("1GiB", values.parse_bytes)
    publish_min_tokens: int = _setting(64, values.whole(1))
    disk: str = _setting("", values.text)
    checkpoints: str = _setting("", values.text)
    disk_bytes: int = _setting("10GiB", values.parse_bytes)

    def __attrs_post_init__(self) -> None:
        for key, value in (("state_cache.disk", self.disk), ("state_cache.checkpoints", self.checkpoints)):
            if value and self.name == "none":
                raise InvalidConfigValue(key, value, "a directory beside state_cache.name = 'memory'")


@attrs.frozen(kw_only=True, field_transformer=_parsed("layouts"))
class LayoutsConfig:
    """``[layouts]``: the layout by layer kind, and by layer path, which goes first. Unnamed kinds keep their own."""

    kinds: Mapping[str, Choice] = _setting({}, _kinds)
    layers: Mapping[str, Choice] = _setting({}, _layers)

    def for_layer(self, path: str, kind: str) -> Choice | None:
        """Return what the config names for this layer, or None."""
        return self.layers.get(path) or self.kinds.get(kind)


@attrs.frozen(kw_only=True, field_transformer=_parsed("method"))
class MethodConfig:
    """``[method]``: the decoding method; every other key of the section is an option of that method."""

    name: str = _setting("plain", values.name)
    options: Mapping[str, Any] = _setting({}, parse_table)


@attrs.frozen(kw_only=True, field_transformer=_parsed("adapters"))
class AdaptersConfig:
    """``[adapters]``: those that requests may name, each a path, or a table with a kind's name and its options."""

    named: Mapping[str, Choice] = _setting({}, _adapters)


@attrs.frozen(kw_only=True, field_transformer=_parsed("plugins"))
class PluginsConfig:
    """``[plugins]``: names never loaded, names loaded though off by default, and PEP 508 requirements."""

    disable: tuple[str, ...] = _setting((), values.names)
    enable: tuple[str, ...] = _setting((), values.names)
    require: tuple[str, ...] = _setting((), values.names)

    def __attrs_post_init__(self) -> None:
        for name in set(self.disable) & set(self.enable):
            raise InvalidConfigValue("plugins.enable", name, "names that plugins.disable does not hold as well")


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Every setting of an engine, one attribute a section; unnamed keys keep the defaults of their section."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    scheduler: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    state_cache: StateCacheConfig = attrs.field(factory=StateCacheConfig)
    layouts: LayoutsConfig = attrs.field(factory=LayoutsConfig)
    method: MethodConfig = attrs.field(factory=MethodConfig)
    adapters: AdaptersConfig = attrs.field(factory=AdaptersConfig)
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)

    @classmethod
    def load(cls, value: EngineConfig | Mapping[str, Any] | str | PathLike[str] | None = None) -> EngineConfig:
        """Return the configuration of a TOML file, of a mapping shaped like one, or the defaults for None.

        Raises `UnreadableConfig` for a file, `UnknownConfigKey` and `InvalidConfigValue` for what stands in it.
        """
        if value is None or isinstance(value, EngineConfig):
            return value or cls()
        if isinstance(value, str | PathLike):
            value = _read(Path(value))
        if not isinstance(value, Mapping):
            raise InvalidConfigValue("(the whole)", value, "a path, a mapping, an EngineConfig or None")
        return cls().updated(value)

    def updated(self, changes: Mapping[str, Mapping[str, Any]]) -> EngineConfig:
        """Return a copy with ``changes``, shaped like the file: ``{"scheduler": {"max_batch": 4}}``."""
        check_keys("", changes, [section.name for section in attrs.fields(EngineConfig)])
        sections = {name: _change(name, getattr(self, name), given) for name, given in changes.items()}
        return attrs.evolve(self, **sections)


def _change(name: str, section: Any, given: Any) -> Any:
    """Return ``section`` with the keys ``given`` in the shape of the file."""
    given = parse_table(name, given)
    if name == "method":
        chosen = given.get("name", section.name)
        before = section.options if chosen == section.name else {}
        options = {key: value for key, value in given.items() if key != "name"}
        return MethodConfig(name=chosen, options={**before, **options})
    if name == "layouts":
        kinds = {kind: choice for kind, choice in given.items() if kind != "layers"}
        layers = _layers("layouts.layers", given.get("layers", {}))
        return LayoutsConfig(kinds={**section.kinds, **kinds}, layers={**section.layers, **layers})
    if name == "adapters":
        return AdaptersConfig(named={**section.named, **given})
    check_keys(name, given, [field.name for field in attrs.fields(type(section))])
    return attrs.evolve(section, **given)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableConfig(str(path), error.strerror or str(error)) from error
    except ValueError as error:  # TOML and UTF-8 errors both are; they name line and column
        raise UnreadableConfig(str(path), str(error)) from error
