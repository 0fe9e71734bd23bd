"""LoRA adapters in mlx-lm's directories: ``adapter_config.json`` beside ``adapters.safetensors``.

It does not train, fuse or download them, and it reads no other library's format.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from oarlock.core import errors, hookimpl
from oarlock.plugins.models import fingerprint

OARLOCK_API = 1

_LINES, _WIDTH = 3, 5
_adapted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_guard = threading.Lock()


@attrs.frozen
class LoraOptions:
    """``path``: the adapter's directory, relative to the working directory."""

    path: str = attrs.field(validator=attrs.validators.instance_of(str))


@attrs.frozen
class Chosen:
    """What the lines of one forward add: ``indices`` uint32 [B] into the factors, ``scales`` float32 [B, 1, 1].

    ``some`` bool [B, 1, 1] tells lines with an adapter from those without, None where all have one.
    """

    names: tuple[str, ...]
    indices: mx.array
    scales: mx.array
    some: mx.array | None


class Selection(threading.local):
    """The lines of the forward that this thread is building; None outside of one, and for bare models."""

    now: Chosen | None = None
    last: Chosen | None = None


class AdaptedLinear(nn.Module):
    """A linear layer, quantized or not, to which every line of a forward adds factors of its own.

    ``a`` [adapters + 1, in, rank] and ``b`` [adapters + 1, rank, out]; those at index 0 are zeros.
    """

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, selection: Selection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx.nn has no annotations
        self.linear, self.a, self.b = linear, a, b
        self._selection = selection

    def __call__(self, x: mx.array) -> mx.array:
        """Return [B, W, out] for ``x`` [B, W, in]: what the layer gives alone, and the chosen factors' share."""
        y: mx.array = self.linear(x)
        chosen = self._selection.now
        if chosen is None:
            return y
        if x.ndim != 3 or x.shape[0] != len(chosen.names):
            msg = f"an adapted layer got {x.shape} for {len(chosen.names)} lines; [lines, width, features] is needed"
            raise ValueError(msg)
        z = mx.gather_mm(x, self.a, rhs_indices=chosen.indices)  # (B, W, rank)
        z = mx.gather_mm(z, self.b, rhs_indices=chosen.indices)  # (B, W, out)
        whole = y + (chosen.scales.astype(z.dtype) * z).astype(x.dtype)
        return whole if chosen.some is None else mx.where(chosen.some, whole, y)


class _Witness(nn.Module):
    """A linear layer that notes the shapes of what it gets."""

    def __init__(self, linear: nn.Module, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx.nn has no annotations
        self.linear, self._shapes = linear, shapes

    def __call__(self, x: mx.array) -> mx.array:
        self._shapes.append(x.shape)
        y: mx.array = self.linear(x)
        return y


class LoraBank:
    """The adapters of one engine on its model. Those of linear layers alone are applied line by line."""

    def __init__(
        self, model: Any, modules: Mapping[str, Mapping[str, Any]], identities: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Wrap what ``modules`` (mlx-lm's own layers, by adapter and path) adapt; the model has its own ones yet."""
        self._model, self.identities = model, identities
        linear = {name: own for name, own in modules.items() if all(map(_plain_lora, own.values()))}
        paths = {path for own in linear.values() for path in own}
        mixed = _paths_that_mix_lines(model, paths)
        self.per_row = frozenset(name for name, own in linear.items() if mixed.isdisjoint(own))
        self._by_group = {name: own for name, own in modules.items() if name not in self.per_row}
        self._places = {name: place for place, name in enumerate(sorted(self.per_row), start=1)}
        self._scales = [0.0] + [float(next(iter(linear[name].values())).scale) for name in self._places]
        self._selection = Selection()
        layers = {path: [linear[name].get(path) for name in self._places] for path in sorted(paths - mixed)}
        own = {path: loras for path, loras in layers.items() if any(loras)}
        wrapped = {path: AdaptedLinear(*_stacked(loras), self._selection) for path, loras in own.items()}
        mx.eval([(layer.a, layer.b) for layer in wrapped.values()])
        self._undo = _replace(model, wrapped)

    @contextlib.contextmanager
    def applied(self, names: Sequence[str]) -> Iterator[None]:
        """Let the lines of this thread's next forward have these adapters."""
        before, self._selection.now = self._selection.now, self._choose(tuple(names))
        try:
            yield
        finally:
            self._selection.now = before

    def enter(self, name: str) -> Callable[[], None]:
        """Put mlx-lm's layers of one adapter into the model; return what takes them out again."""
        return _replace(self._model, self._by_group[name])

    def close(self) -> None:
        """Give the model its own layers back."""
        self._undo()
        with _guard:
            _adapted.pop(id(self._model), None)

    def _choose(self, names: tuple[str, ...]) -> Chosen:
        """Return the arrays of these lines: the last forward's where the lines are the same."""
        last = self._selection.last
        if last is not None and last.names == names:
            return last
        places = [self._places.get(name, 0) for name in names]
        some = None if all(places) else mx.array([place > 0 for place in places])[:, None, None]
        scales = mx.array([self._scales[place] for place in places], dtype=mx.float32)[:, None, None]
        self._selection.last = chosen = Chosen(names, mx.array(places, dtype=mx.uint32), scales, some)
        return chosen


def _plain_lora(module: Any) -> bool:
    from mlx_lm.tuner.lora import LoRALinear

    return type(module) is LoRALinear and type(module.linear) in (nn.Linear, nn.QuantizedLinear)


def _stacked(loras: Sequence[Any]) -> tuple[nn.Module, mx.array, mx.array]:
    """Return the layer itself and the factors of all adapters, zeros first and for those that leave it alone."""
    one = next(lora for lora in loras if lora is not None)
    rank = max(lora.lora_a.shape[1] for lora in loras if lora is not None)
    (inner, _), (_, outer) = one.lora_a.shape, one.lora_b.shape
    a, b = [mx.zeros((inner, rank), one.lora_a.dtype)], [mx.zeros((rank, outer), one.lora_b.dtype)]
    for lora in loras:
        more = 0 if lora is None else rank - lora.lora_a.shape[1]
        a.append(a[0] if lora is None else mx.pad(lora.lora_a, [(0, 0), (0, more)]))
        b.append(b[0] if lora is None else mx.pad(lora.lora_b, [(0, more), (0, 0)]))
    return one.linear, mx.stack(a), mx.stack(b)


def _paths_that_mix_lines(model: Any, paths: set[str]) -> set[str]:
    """Return which linear layers get anything but [lines, width, features]: nothing there is a line's own."""
    if not paths:
        return set()
    own = dict(model.named_modules())
    shapes: dict[str, list[tuple[int, ...]]] = {path: [] for path in paths}
    undo = _replace(model, {path: _Witness(own[path], shapes[path]) for path in paths})
    try:
        model(mx.zeros((_LINES, _WIDTH), dtype=mx.uint32))
    finally:
        undo()
    return {path for path, seen in shapes.items() if any(shape[:-1] != (_LINES, _WIDTH) for shape in seen)}


def _replace(model: Any, modules: Mapping[str, Any]) -> Callable[[], None]:
    """Put modules into the model, by path, and return what puts back what stood there."""
    own = dict(model.named_modules())
    before = {path: own[path] for path in modules}

    def put(given: Mapping[str, Any]) -> None:
        model.update_modules(tree_unflatten(list(given.items())))

    put(modules)
    return partial(put, before)


def _read(name: str, path: Path) -> None:
    """Refuse what is no directory of mlx-lm's, and weights that replace the model's own."""
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror}); a directory of mlx-lm's is needed"
        raise errors.AdapterRefused(name, reason) from error
    except ValueError as error:
        reason = f"its adapter_config.json is no JSON: {error}"
        raise errors.AdapterRefused(name, reason) from error
    kind = config.get("fine_tune_type", "lora") if isinstance(config, dict) else None
    if kind not in ("lora", "dora"):
        raise errors.AdapterRefused(name, f"its fine_tune_type is {kind!r}; 'lora' and 'dora' are allowed")


def _layers(model: Any, name: str, path: Path) -> dict[str, Any]:
    """Return mlx-lm's layers for one adapter, by path. The model is left with its own."""
    from mlx_lm.tuner.utils import load_adapters

    _read(name, path)
    before = dict(model.named_modules())
    changed: dict[str, Any] = {}
    try:
        load_adapters(model, str(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise errors.AdapterRefused(name, " ".join(str(error).split())) from error
    finally:
        for where, module in sorted(model.named_modules(), key=lambda entry: entry[0].count(".")):
            inside = any(where.startswith(f"{outer}.") for outer in changed)
            if where in before and before[where] is not module and not inside:
                changed[where] = module
        model.update_modules(tree_unflatten([(where, before[where]) for where in changed]))
    if not changed:
        raise errors.AdapterRefused(name, "it changes no layer of this model")
    for module in changed.values():
        module.eval()  # no dropout
        mx.eval(module.parameters())
    return changed


def _identity(path: Path) -> str:
    return fingerprint([path / "adapter_config.json", *path.glob("adapters*.safetensors")])


@attrs.frozen
class Lora:
    """Registers as ``mlx_lm``: DoRA and layers other than linear ones are applied by group, the rest per row."""

    name: str = "mlx_lm"
    options: type = LoraOptions

    def open(self, model: Any, adapters: Mapping[str, LoraOptions]) -> LoraBank:
        """Load every adapter onto ``model``, which one engine at a time may adapt."""
        with _guard:
            if _adapted.get(id(model)) is model:
                raise errors.AdapterRefused(next(iter(adapters)), "another engine adapts this model; close it first")
            _adapted[id(model)] = model
        try:
            paths = {name: Path(own.path) for name, own in adapters.items()}
            modules = {name: _layers(model, name, path) for name, path in paths.items()}
            return LoraBank(model, modules, {name: _identity(path) for name, path in paths.items()})
        except BaseException:
            with _guard:
                _adapted.pop(id(model), None)
            raise


@hookimpl
def register_adapters(register: Callable[[object], None]) -> None:
    """Register the kind `mlx_lm`."""
    register(Lora())
