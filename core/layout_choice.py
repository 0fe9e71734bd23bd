"""Which layout holds a layer, and why: the config's, a plugin's, or the kind's own. What holds none is refused."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from oarlock.core.choices import parse_options
from oarlock.core.config import EngineConfig
from oarlock.core.contracts.composition import AttendingLayout, BoundLayer, ConvertingLayout
from oarlock.core.contracts.layout import LayerInfo
from oarlock.core.errors import LayoutRefused, UnsupportedLayer
from oarlock.core.manager import PluginSet


def bind_layer(info: LayerInfo, model: Any, config: EngineConfig, plugins: PluginSet) -> BoundLayer:
    """Choose one layer's layout: the config's for the layer, for its kind, a plugin's answer, the kind's own."""
    choice = config.layouts.for_layer(info.path, info.kind)
    options: Any = {}
    if choice is not None:
        name, options, section = choice.name, choice.options, choice.key
        reason = f"config {choice.key}"
    else:
        section = f"layouts.{info.kind}"
        answer = plugins.manager.hook.choose_layout(layer=info, model=model)
        name, reason = (answer, "hook choose_layout") if answer is not None else own_layout(info, plugins)
    layout = plugins.resolve("layout", name)
    if info.kind not in layout.kinds:
        raise LayoutRefused(name, info.path, f"it holds {', '.join(sorted(layout.kinds))}, the layer is {info.kind}")
    parsed = parse_options(layout.options, options, section)
    parts = tuple(bind_layer(part, model, config, plugins) for part in info.parts)
    if parts:
        layout = layout.compose(parts)
    refusal = layout.refuses(info, parsed)
    if refusal is not None:
        raise LayoutRefused(name, info.path, refusal)
    attends = isinstance(layout, AttendingLayout) and layout.attends(info, parsed)
    attends = attends or any(part.attends for part in parts)
    stops = set(layout.stops(info, parsed)) if isinstance(layout, ConvertingLayout) else set()
    stops.update(*(part.stops for part in parts))
    return BoundLayer(
        info=info,
        layout=layout,
        options=parsed,
        reason=reason,
        parts=parts,
        attends=attends,
        stops=tuple(sorted(stops)),
    )


def check_columns(layers: Sequence[BoundLayer]) -> None:
    """Refuse layouts that read other columns than layers of the same kind: models make one mask for all of them."""
    seen: dict[tuple[Any, ...], BoundLayer] = {}
    for layer in (part for each in layers for part in (each.parts or (each,))):
        first = seen.setdefault((layer.info.kind, layer.info.window, layer.info.keep, layer.info.chunk), layer)
        if (layer.layout, layer.options) != (first.layout, first.options) and _columns(layer) != _columns(first):
            reason = (
                f"a mask is shared with layer {first.info.path}, whose layout {first.layout.name!r} reads other columns"
            )
            raise LayoutRefused(layer.layout.name, layer.info.path, reason)


def _columns(layer: BoundLayer) -> Hashable:
    """Return how two empty rows' columns are described."""
    cache = layer.layout.open(layer.info, layer.options, slots=1, window=1)
    cache.add(2)
    return cache.columns([2, 1])


def own_layout(info: LayerInfo, plugins: PluginSet) -> tuple[str, str]:
    """Return the layout that bears the kind's name, else the first that holds the kind."""
    registry = plugins.registries.layouts
    if info.kind in registry:
        return info.kind, f"the own layout of kind {info.kind}"
    for layout in registry:
        if info.kind in layout.kinds:
            return layout.name, f"the first layout that holds kind {info.kind}"
    raise UnsupportedLayer(info.path, info.kind, "no registered layout holds this kind of layer")


def geometry(info: LayerInfo) -> str:
    """Return heads, head sizes and limits in one phrase."""
    if info.parts:
        return "; ".join(f"{part.path}: {part.kind} {geometry(part)}".strip() for part in info.parts)
    facts: Sequence[tuple[str, object]] = (
        ("heads", info.kv_heads),
        ("key size", info.key_dim),
        ("value size", info.value_dim),
        ("window", info.window),
        ("keep", info.keep),
        ("chunk", info.chunk),
        ("slots", info.slots),
    )
    return ", ".join(f"{name} {value}" for name, value in facts if value)
