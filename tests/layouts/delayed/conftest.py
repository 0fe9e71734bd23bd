"""Delayed caches as a `Kind` of the tests beside: what a forward sees is plain where it began before the stop, else packed."""

import dataclasses

import pytest

from oarlock.core.contracts.composition import Part
from oarlock.layouts.delayed import DelayedCache, DelayedLayout
from oarlock.layouts.full import FullCache
from oarlock.layouts.rings import Ring
from oarlock.layouts.rotating import RotatingCache

STOP = 5


@pytest.fixture
def delayed_kind(packed_kind):
    """Make the kind of a delayed cache."""

    def make(window=None, keep=0, slack=0, *, stop=STOP, bits=4, attends=True, cache_type=DelayedCache):
        packed = packed_kind(bits, window, keep, slack, attends=attends)
        plain = dataclasses.replace(packed, stored=packed.given[:2])
        packing = packed.open(1).format

        class Delayed(type(packed)):
            def solo(self, tokens, n):
                return (plain if len(tokens) - n < stop else packed).solo(tokens, n)

        def opened(slots):
            ring = Ring(window=window, keep=keep, slack=slack) if window else None
            early = FullCache(slots) if ring is None else RotatingCache(slots, ring)
            return cache_type([Part([], early), Part([], packed.open(slots))], stop)

        def rounded(arrays):
            """Packing is the same before and behind the stop, so rows of both are held to one table."""
            return packed.plain(arrays if "keys.scales" in arrays else {n: p for name in arrays for n, p in
                                packing.pack(name, arrays[name]).items()})  # fmt: skip

        fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
        return Delayed(**{**fields, "open": opened, "layout": DelayedLayout(), "plain": rounded})

    return make


@pytest.fixture
def forms():
    """Say which rows are packed."""
    return lambda cache: [cache.extract(row).meta()["packed"] == "1" for row in range(cache.rows)]
