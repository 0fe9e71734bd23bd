"""What rows give the model's forward beside ids and caches: prepared embeddings, and positions of their own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from oarlock.core.contracts.inputs import PreparedInputs
from oarlock.core.errors import InvalidParameter, UnsupportedFeature
from oarlock.core.row import Row

if TYPE_CHECKING:
    from oarlock.core.bind import BoundModel
    from oarlock.core.request import Request

EMBEDDINGS = "input_embeddings"


def arguments(rows: Sequence[Row], starts: Sequence[int], width: int) -> dict[str, mx.array]:
    """Return named arrays for a forward in which ``width`` tokens of each row follow the ``starts`` that it holds."""
    prepared = [row.request.inputs for row in rows if row.request.inputs is not None]
    if not prepared:
        return {}
    named: dict[str, mx.array] = {}
    if starts[0] < rows[0].prompt_tokens:  # rows are prefilled alone
        named[EMBEDDINGS] = prepared[0].embeddings[None, starts[0] : starts[0] + width]
    if prepared[0].argument:
        positions = [inputs.at(start, width) for inputs, start in zip(prepared, starts, strict=True)]
        named[prepared[0].argument] = mx.array(positions, dtype=mx.int32)
    return named


def check(request: Request, bound: BoundModel) -> None:
    """Evaluate a request's prepared input, or refuse it: the model cannot take it, or its numbers do not match.

    Raises `errors.InvalidParameter` and `errors.UnsupportedFeature`.
    """
    inputs, ids = request.inputs, request.prompt_ids or ()
    if not isinstance(inputs, PreparedInputs):
        raise InvalidParameter("inputs", inputs, "PreparedInputs, or None")
    taken = inspect.signature(bound.model.__call__).parameters
    for name in (EMBEDDINGS, *([inputs.argument] if inputs.argument else [])):
        if name not in taken:
            reason = f"the forward of model type {bound.model_type!r} takes no {name}, only {', '.join(taken)}"
            raise UnsupportedFeature("inputs", reason)
    shape: Any = getattr(inputs.embeddings, "shape", None)
    if not isinstance(inputs.embeddings, mx.array) or len(shape) != 2 or shape[0] != len(ids):
        raise InvalidParameter("inputs.embeddings", shape, f"an array [n, D] for the {len(ids)} prompt_ids given")
    if not mx.issubdtype(inputs.embeddings.dtype, mx.floating):
        raise InvalidParameter("inputs.embeddings", inputs.embeddings.dtype, "floating-point numbers")
    if len(inputs.positions) != (len(ids) if inputs.argument else 0):
        allowed = f"{len(ids)} with an argument that takes them, none without"
        raise InvalidParameter("inputs.positions", len(inputs.positions), allowed)
    mx.eval(inputs.embeddings)  # another thread may drive the engine
