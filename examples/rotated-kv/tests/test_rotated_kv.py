"""The contract, and how far four bits are from the numbers themselves."""

import mlx.core as mx
import pytest
from rotated_kv import Rotated

from oarlock.core.testing.layouts import LayoutContract


class TestRotated(LayoutContract):
    """Four bits. Numbers that are all of one size suit its codes worst: most of the tolerance is theirs."""

    layout = "rotated"
    tolerance = 2.0


@pytest.mark.parametrize(("bits", "most"), [(4, 0.25), (8, 0.05)])
def test_a_code_is_near_what_it_stands_for(bits, most):
    x, codec = mx.random.normal((3, 1, 5, 64), key=mx.random.key(1)), Rotated(bits)
    x = x * mx.array([0.01, 1.0, 100.0])[:, None, None, None]
    again = codec.decode("keys", codec.encode("keys", x), mx.float32)
    off = mx.linalg.norm(again - x, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert mx.max(off).item() < most
