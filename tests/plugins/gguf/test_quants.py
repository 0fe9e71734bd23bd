"""Blocks kept packed hold exactly the numbers that the gguf package computes; all others become dense."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest

from oarlock.core import errors
from oarlock.plugins.gguf import quants
from oarlock.plugins.gguf.reader import Tensor


def tensor(kind: str, rows: int = 24, columns: int = 320, scale: float = 1.0) -> Tensor:
    numbers = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32) * scale
    data = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return Tensor(name="w", kind=kind, shape=(rows, columns), data=data.view(np.uint8))


def unpacked(packed: quants.Packed, dtype: mx.Dtype) -> np.ndarray:
    scales, biases = packed.scales.astype(dtype), packed.biases.astype(dtype)
    return np.array(mx.dequantize(packed.weight, scales, biases, group_size=quants.GROUP, bits=packed.bits))


@pytest.mark.parametrize("kind", sorted(quants.EXACT))
@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_packed_is_bit_equal_to_the_gguf_package(kind, scale):
    source = tensor(kind, scale=scale)
    packed = quants.pack(source)
    expected = gguf.dequantize(source.data, gguf.GGMLQuantizationType[kind])
    assert packed.scales.dtype == packed.biases.dtype == mx.float16
    assert np.array_equal(unpacked(packed, mx.float32), expected)
    assert np.array_equal(quants.dense("m", source), expected)


@pytest.mark.parametrize("kind", sorted(quants.EXACT))
def test_every_code_of_a_block_survives(kind):
    """Random bytes reach codes that a quantizer never writes, such as -128 of Q8_0."""
    form, size = quants.EXACT[kind], gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(2).integers(0, 256, (64, 8, size), dtype=np.uint8)
    header = 2 if form.centre is not None else 4
    halves = np.random.default_rng(3).uniform(-2, 2, (64, 8, header // 2)).astype(np.float16)
    blocks[..., :header] = halves.view(np.uint8)
    source = Tensor(name="w", kind=kind, shape=(64, 256), data=blocks.reshape(64, -1))
    expected = gguf.dequantize(source.data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(unpacked(quants.pack(source), mx.float32), expected)


def test_a_bias_that_overflows_float16_makes_the_tensor_dense():
    source = tensor("Q8_0", scale=100_000.0)  # scales around 3,000; 128 times that is no float16
    assert quants.pack(source) is None
    assert np.isfinite(quants.dense("m", source)).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "TQ2_0", "MXFP4"])
def test_formats_that_are_not_the_same_numbers_are_not_packed(kind):
    source = tensor(kind, columns=512)
    assert quants.pack(source) is None
    assert quants.dense("m", source).shape == (24, 512)


def test_a_type_that_the_package_cannot_dequantize_is_named():
    source = Tensor(name="w", kind="I32", shape=(2, 4), data=np.zeros((2, 16), np.uint8))
    with pytest.raises(errors.UnsupportedModel, match="'w' is I32"):
        quants.dense("m", source)
