"""From tensors to a loaded mlx-lm model. It does not own what the metadata means (see `architectures`)."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from oarlock.core import errors
from oarlock.plugins.gguf import quants

if TYPE_CHECKING:
    from oarlock.plugins.gguf.architectures import Plan
    from oarlock.plugins.gguf.reader import GGUFFile

_ROPE_FACTORS = "rope_freqs.weight"
_STORED = {"F32": mx.float32, "BF16": mx.bfloat16}


class FactorRoPE(Module):
    """RoPE whose frequencies are divided by factors that the file brings (Llama 3.1 and later).

    The file has the factors and not the four numbers they were computed from, so mlx-lm's own class is of no use.
    """

    def __init__(self, dims: int, base: float, factors: mx.array, *, traditional: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx.nn has no annotations
        self.dims, self.traditional = dims, traditional
        self._freqs = factors * base ** (mx.arange(0, dims, 2) / dims)  # (dims / 2,), wavelengths over 2 pi

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def num_parameters(file: GGUFFile) -> int:
    """Return how many numbers the tensors hold."""
    return sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def build(source: str, file: GGUFFile, plan: Plan, dtype: mx.Dtype | None) -> Any:
    """Return the model with its weights (lazy). Raises `errors.UnsupportedModel` unless every tensor has its place.

    With ``dtype`` None matrices stay packed where that is exact. Everything else, and all of the activations, then has
    the type of the embedding: float32, bfloat16, or float16, which is the type of the packed blocks' scales.
    """
    keep = dtype is None
    if dtype is None:
        dtype = _STORED.get(file.tensors["token_embd.weight"].kind, mx.float16)
    weights: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for name, tensor in file.tensors.items():
        path = plan.path(name)
        if path is None:
            if name != _ROPE_FACTORS:
                weights[name] = mx.zeros(())  # no parameter has this name, so that it counts as unexpected
            continue
        packed = quants.pack(tensor) if keep and dtype == mx.float16 else None
        if packed is not None:
            module = path.removesuffix(".weight")
            weights |= {path: packed.weight, f"{module}.scales": packed.scales, f"{module}.biases": packed.biases}
            bits[module] = packed.bits
            continue
        values = quants.dense(source, tensor)
        if plan.norm_offset and path.endswith("norm.weight"):
            values = values - plan.norm_offset
        weights[path] = mx.array(values).astype(dtype)
    model = _empty(source, plan, set(weights), bits)
    _check(source, model, weights)
    model.load_weights(list(weights.items()), strict=True)
    if _ROPE_FACTORS in file.tensors:
        _set_rope(model, mx.array(quants.dense(source, file.tensors[_ROPE_FACTORS])), plan)
    model.eval()
    return model


def _empty(source: str, plan: Plan, names: set[str], bits: dict[str, int]) -> Any:
    """Return the model before it has weights, with packed layers where ``bits`` names them."""
    module = importlib.import_module(f"mlx_lm.models.{plan.module}")
    try:
        model = module.Model(module.ModelArgs.from_dict(dict(plan.arguments)))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        msg = f"its metadata do not make a model: {error}"
        raise errors.UnsupportedModel(source, msg) from error
    model.sanitize(dict.fromkeys(names))  # drops an output layer that the embedding stands for
    if bits:

        def packing(path: str, _module: Any) -> dict[str, Any] | bool:
            return {"group_size": quants.GROUP, "bits": bits[path], "mode": "affine"} if path in bits else False

        quantize(model, class_predicate=packing)
    return model


def _check(source: str, model: Any, weights: dict[str, mx.array]) -> None:
    """Refuse weights that do not fit the model's parameters, with the numbers and the first names."""
    flat: Any = tree_flatten(model.parameters())
    wanted = {name: array.shape for name, array in flat}
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = sorted(n for n in wanted.keys() & weights.keys() if wanted[n] != weights[n].shape)
    if missing or extra or wrong:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("unexpected", extra), ("of the wrong shape", wrong))
            if names
        ]
        msg = f"its tensors do not fit the model's {len(wanted)} parameters: {'; '.join(parts)}"
        raise errors.UnsupportedModel(source, msg)


def _set_rope(model: Any, factors: mx.array, plan: Plan) -> None:
    arguments = plan.arguments
    for layer in model.layers:
        layer.self_attn.rope = FactorRoPE(
            arguments["head_dim"],
            arguments["rope_theta"],
            factors,
            traditional=arguments.get("rope_traditional", False),
        )
