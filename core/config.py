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
    """``[model]``: the weights."""

    dtype: str = _setting("auto", values.one_of("auto", "float32", "bfloat16", "float16", "stored"))
    """How weights are held. "auto": as they are stored on a GPU, float32 on the CPU where that fits."""


@attrs.frozen(kw_only=True, field_transformer=_parsed("scheduler"))
class SchedulerConfig:
    """``[scheduler]``: what runs when, and within which limits."""

    max_batch: int = _setting(16, values.floor)
    """The most rows that run and prepare together."""
    max_queued: int = _setting(64, values.whole(1))
    """The most requests that wait; `submit` refuses what comes on top."""
    policy: str | Choice = _setting("decode_first", parse_name_or_choice)  # noqa: RUF009 - a field, as all here
    """The order of admissions, prefill and decode steps: a name, or a table of it and its options."""
    stall_bound_ms: float = _setting(0, values.at_least(0))
    """The longest that running rows wait for one advance of a joiner's prompt, in milliseconds; 0: a chunk's time."""
    prefill_chunk: int = _setting(512, values.whole(1))
    """The most prompt tokens of a row in one forward; a request may name another number."""
    prefill_batch_tokens: int = _setting(2048, values.whole(1))
    """Prompt tokens up to which rows that wait are prefilled in company."""
    tail_split: bool = _setting(True, values.flag)
    """A prompt's last token is forwarded by itself, as mlx-lm does: its scores are those of a decode step."""
    early_first_token: bool = _setting(True, values.flag)
    """The first token of a row that runs alone is read at once; false: once its next step is built."""
    pipeline: bool | str = _setting("auto", values.auto_flag)
    """The next step is built before the previous one is read. "auto": on a GPU only."""
    vectorised_sampling: bool = _setting(True, values.flag)
    """A sampler draws for all rows in one call; false: row by row."""
    compiled: bool | str = _setting("auto", values.auto_flag)
    """The forward of up to four rows that stay together is traced once and replayed. "auto": never."""
    mixed: bool | str = _setting("auto", values.auto_flag)
    """A chunk of a prompt and a decode step share a forward. "auto": where model and layouts allow it."""
    mixed_token_budget: int | str = _setting("auto", values.auto_whole(1))
    """The most tokens of such a forward. "auto": 64 on a CPU, 256 on a GPU."""
    kv_budget: int | float | None = _setting(None, values.parse_budget)
    """Bytes that all caches may take, those of joining rows included, or a share of the memory; "none": no limit."""
    overcommit: float = _setting(1.0, values.at_least(1.0))
    """How many times the budget admissions may promise; beyond 1, rows may be preempted for it later."""
    max_recoveries: int = _setting(8, values.whole(0))
    """How often in a row the device may fail with nobody guilty and no request finished in between; then all rows fail."""
    verify: bool = _setting(True, values.flag)
    """The bind probe: rows of different length are run batched and alone, and what differs is refused."""

    @property
    def policy_choice(self) -> Choice:
        """The policy with its options, however it was named."""
        return parse_choice("scheduler.policy", self.policy)


@attrs.frozen(kw_only=True, field_transformer=_parsed("state_cache"))
class StateCacheConfig:
    """``[state_cache]``: what is kept of rows outside the running group."""

    name: str = _setting("memory", values.name)
    """The registered state cache: "memory" keeps the states of rows that ended, "none" nothing."""
    prefix_bytes: int = _setting("1GiB", values.parse_bytes)
    """The most bytes of states in memory."""
    publish_min_tokens: int = _setting(64, values.whole(1))
    """Shorter beginnings are not stored."""
    disk: str = _setting("", values.text)
    """A directory for what outlives the process, which several may share; "" stores nothing there."""
    checkpoints: str = _setting("", values.text)
    """A directory for checkpoints, where they are to be apart from what `disk` names."""
    disk_bytes: int = _setting("10GiB", values.parse_bytes)
    """The most bytes on disk."""

    def __attrs_post_init__(self) -> None:
        for key, value in (("state_cache.disk", self.disk), ("state_cache.checkpoints", self.checkpoints)):
            if value and self.name == "none":
                raise InvalidConfigValue(key, value, "a directory beside state_cache.name = 'memory'")


@attrs.frozen(kw_only=True, field_transformer=_parsed("layouts"))
class LayoutsConfig:
    """``[layouts]``: how layers keep their past."""

    kinds: Mapping[str, Choice] = _setting({}, _kinds)
    """The layout of a kind of layer: a name, or a table of it and its options. Kinds that are not named keep their own."""
    layers: Mapping[str, Choice] = _setting({}, _layers)
    """The layout of single layers, which goes first: `"7"`, a range `"0-3"`, a part of a composite layer `"7.1"`."""

    def for_layer(self, path: str, kind: str) -> Choice | None:
        """Return what the config names for this layer, or None."""
        return self.layers.get(path) or self.kinds.get(kind)


@attrs.frozen(kw_only=True, field_transformer=_parsed("method"))
class MethodConfig:
    """``[method]``: how a group of rows advances."""

    name: str = _setting("plain", values.name)
    """The registered method."""
    options: Mapping[str, Any] = _setting({}, parse_table)
    """Every other key of the section is an option of that method."""


@attrs.frozen(kw_only=True, field_transformer=_parsed("adapters"))
class AdaptersConfig:
    """``[adapters]``: those that requests may name."""

    named: Mapping[str, Choice] = _setting({}, _adapters)
    """A directory as mlx-lm's training leaves it, or a table with the name of a kind of adapter and its options."""


@attrs.frozen(kw_only=True, field_transformer=_parsed("plugins"))
class PluginsConfig:
    """``[plugins]``: which of those that are installed are loaded."""

    disable: tuple[str, ...] = _setting((), values.names)
    """Plugins or distributions that are never loaded."""
    enable: tuple[str, ...] = _setting((), values.names)
    """Plugins that are off by default, and loaded here."""
    require: tuple[str, ...] = _setting((), values.names)
    """PEP 508 requirements, such as `"my-plugin>=1.2"`; one that is not met is an error."""

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
