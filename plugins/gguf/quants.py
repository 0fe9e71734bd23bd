"""From GGUF blocks to MLX arrays: packed as they are where MLX's affine format says the same, else dense.

Both formats split a row into groups of 32 weights. MLX's weight is ``scale * code + bias`` with an unsigned code;
a block of GGUF is that with a bias of its own (Q4_1, Q5_1) or with codes that are centred on zero (Q4_0, Q5_0, Q8_0),
whose bias is ``-centre * scale``: a power of two times the scale, so exact unless it overflows float16. The K and IQ
formats are not of this form (two levels of scales, groups of 16, tables) and become dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from oarlock.core import errors

if TYPE_CHECKING:
    import mlx.core as mx

    from oarlock.plugins.gguf.reader import Tensor

GROUP = 32


@attrs.frozen
class _Format:
    """How a block is laid out: scale, then a bias if there is one, then high bits if there are any, then codes."""

    bits: int
    centre: int | None = None
    """What is subtracted from a code; None: the block holds a bias."""


EXACT = {
    "Q4_0": _Format(4, 8),
    "Q4_1": _Format(4),
    "Q5_0": _Format(5, 16),
    "Q5_1": _Format(5),
    "Q8_0": _Format(8, 128),
}


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """A matrix in MLX's affine format, in groups of 32.

    ``weight``: uint32 (rows, columns * bits / 32); ``scales`` and ``biases``: float16 (rows, columns / 32).
    """

    bits: int
    weight: mx.array
    scales: mx.array
    biases: mx.array


def pack(tensor: Tensor) -> Packed | None:
    """Return the matrix in MLX's affine format, or None where that would not be the same numbers."""
    import mlx.core as mx

    form = EXACT.get(tensor.kind)
    if form is None or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    blocks = tensor.data.reshape(rows, columns // GROUP, -1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    at = 2
    if form.centre is None:
        biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        at = 4
    else:
        with np.errstate(over="ignore"):
            biases = (np.float32(-form.centre) * scales.astype(np.float32)).astype(np.float16)
        if not np.isfinite(biases).all():
            return None
    codes = _codes(blocks[..., at:], form.bits).reshape(rows, columns)
    return Packed(
        bits=form.bits,
        weight=mx.array(_words(codes, form.bits)),
        scales=mx.array(scales),
        biases=mx.array(biases),
    )


def _codes(body: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the unsigned codes (rows, blocks, 32) of the blocks' bytes behind scale and bias."""
    if bits == 8:
        return body ^ np.uint8(128)  # int8 + 128
    nibbles = body[..., -16:]  # low halves are the first 16 codes, high halves the last
    codes: NDArray[np.uint8] = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.uint8)
    if bits == 5:
        high: NDArray[np.uint8] = np.unpackbits(body[..., :4], axis=-1, bitorder="little")
        codes |= high << np.uint8(4)
    return codes


def _words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack codes (rows, columns), the first one lowest, without gaps between them."""
    if bits == 8:
        packed = np.ascontiguousarray(codes)
    elif bits == 4:
        packed = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    else:
        single = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")  # (rows, columns, bits)
        packed = np.packbits(single.reshape(len(codes), -1), axis=-1, bitorder="little")
    return packed.view(np.uint32)


def dense(source: str, tensor: Tensor) -> NDArray[np.float32]:
    """Return the tensor's numbers in float32, as the ``gguf`` package computes them."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: NDArray[np.float32] = dequantize(tensor.data, GGMLQuantizationType[tensor.kind])
    except NotImplementedError:
        msg = f"tensor {tensor.name!r} is {tensor.kind}, which the installed gguf package does not dequantize"
        raise errors.UnsupportedModel(source, msg) from None
    return values.reshape(tensor.shape)
