"""One stored thing as the bytes of one safetensors file, and back. It opens no file and lists no directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from oarlock.core.contracts.layout import RowState

FORMAT = 1
"""Of what stands in a file's header. Files of another are not read."""

_WHOLE = (mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64)
DTYPES: Mapping[str, mx.Dtype] = {
    str(dtype).removeprefix("mlx.core."): dtype for dtype in (mx.bool_, *_WHOLE, mx.float16, mx.bfloat16, mx.float32)
}
"""By what the header calls them, which is what NumPy does, but that it has no bfloat16 and holds its bits as uint16."""


class Damaged(ValueError):
    """A file does not hold what it should; the text says why."""


class Gone(Damaged):
    """A file is not there any more: whoever else uses the directory has put another in its place, or taken it away."""


@attrs.frozen(kw_only=True)
class Stored:
    """States that cover exactly ``tokens``, whose they are, and whatever else plain JSON can say."""

    key: Mapping[str, str]
    tokens: tuple[int, ...]
    states: tuple[RowState, ...]
    more: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(state.nbytes for state in self.states)


def packed(stored: Stored) -> bytes:
    """Return the file. The arrays must be evaluated: any thread may call this.

    Raises ValueError for an array whose numbers do not lie in memory in their order.
    """
    tensors: dict[str, np.ndarray] = {}
    layers = []
    for layer, state in enumerate(stored.states):
        arrays = state.arrays()
        dtypes = {name: next(kind for kind, own in DTYPES.items() if own == a.dtype) for name, a in arrays.items()}
        layers.append({"layout": state.layout, "tokens": state.tokens, "meta": state.meta(), "dtypes": dtypes})
        tensors |= {f"{layer}/{name}": _numbers(array, dtypes[name]) for name, array in arrays.items()}
    header = {"format": FORMAT, "key": dict(stored.key), "tokens": stored.tokens, "layers": layers, "more": stored.more}
    return save(tensors, {"oarlock": json.dumps(header)})


def digest(data: bytes) -> str:
    """Return the name of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def header(beginning: bytes) -> tuple[int, Mapping[str, Any]]:
    """Return how many bytes a file's header takes, and what it says, {} where ``beginning`` does not hold it whole.

    Raises `Damaged` where it is none of ours.
    """
    size = 8 + int.from_bytes(beginning[:8], "little")
    if size > len(beginning):
        return size, {}
    try:
        found = json.loads(json.loads(beginning[8:size])["__metadata__"]["oarlock"])
        if found["format"] != FORMAT:
            msg = f"its format is {found['format']!r}, {FORMAT} is read"
            raise Damaged(msg)
        found |= {"key": dict(found["key"]), "tokens": tuple(found["tokens"]), "layers": list(found["layers"])}
    except (ValueError, LookupError, TypeError) as error:
        msg = str(error) if isinstance(error, Damaged) else "its header is none of oarlock's"
        raise Damaged(msg) from error
    return size, found


def unpacked(data: bytes) -> Stored:
    """Return what a file holds. Raises `Damaged`. Whether its digest is right is for the caller to check first."""
    _, found = header(data)
    if not found:
        msg = f"it ends after {len(data)} bytes"
        raise Damaged(msg)
    try:
        tensors = load(data)
        states = [
            RowState(
                layout=each["layout"],
                tokens=each["tokens"],
                arrays={name: _array(tensors[f"{layer}/{name}"], kind) for name, kind in each["dtypes"].items()},
                meta=each["meta"],
            )
            for layer, each in enumerate(found["layers"])
        ]
        key = {str(name): str(value) for name, value in found["key"].items()}
        return Stored(key=key, tokens=found["tokens"], states=tuple(states), more=found["more"])
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        msg = f"its contents do not fit its header: {error}"
        raise Damaged(msg) from error


def _numbers(array: mx.array, kind: str) -> np.ndarray:
    """Return what lies in memory, as NumPy holds ``kind``, without a copy."""
    view = memoryview(array)  # type: ignore[arg-type]  # its stub has no buffer protocol
    if not view.c_contiguous:
        msg = f"an array of shape {array.shape} does not lie in memory in its order"
        raise ValueError(msg)
    return np.frombuffer(view, dtype="uint16" if kind == "bfloat16" else kind).reshape(array.shape)


def _array(numbers: np.ndarray, kind: str) -> mx.array:
    return mx.array(numbers).view(DTYPES[kind])
