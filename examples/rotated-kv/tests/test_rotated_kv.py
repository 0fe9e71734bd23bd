"""The contract, and how far four bits are from the numbers themselves."""

from typing import ClassVar

import mlx.core as mx
import pytest
from rotated_kv import decode, encode

from oarlock.core.testing.layouts import LayoutContract


class TestRotated(LayoutContract):
    """Four bits."""

    layout = "rotated"
    tolerance = 0.8


class TestRotatedFinely(LayoutContract):
    """Eight bits."""

    layout = "rotated"
    options: ClassVar = {"bits": 8}
    tolerance = 0.3


@pytest.mark.parametrize(("bits", "most"), [(4, 0.25), (8, 0.05)])
def test_a_code_is_near_what_it_stands_for(bits, most):
    x = mx.random.normal((3, 5, 64), key=mx.random.key(1)) * mx.array([0.01, 1.0, 100.0])[:, None, None]
    off = mx.linalg.norm(decode(*encode(x, bits), bits, mx.float32) - x, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert mx.max(off).item() < most
