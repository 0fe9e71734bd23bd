"""The kit on every layout of ours: what is particular to one stands in tests/layouts."""

from typing import ClassVar

import pytest

from oarlock.core.testing.layouts import LayoutContract


class TestFull(LayoutContract):
    layout = "full"


@pytest.mark.long
class TestFullRowByRow(LayoutContract):
    """Where the padding is too little to be worth it as well."""

    layout = "full"
    options: ClassVar = {"reads": "rows"}


@pytest.mark.long
class TestRotating(LayoutContract):
    """Quick are the tests of tests/layouts, and rings of codes in the examples."""

    layout = "rotating"


@pytest.mark.long
class TestQuantized(LayoutContract):
    """8 bits, which store 1 and -1 as they are."""

    layout = "quantized"


@pytest.mark.long
class TestQuantizedCoarsely(LayoutContract):
    """4 bits of normally distributed numbers: rows are compared with themselves alone."""

    layout = "quantized"
    options: ClassVar = {"bits": 4, "group_size": 32}
    levels = False
    tolerance = 0.5


@pytest.mark.long
class TestDelayed(LayoutContract):
    """Converted past two wraps of the window."""

    layout = "delayed"
    options: ClassVar = {"start": 18}


@pytest.mark.long
class TestPaged(LayoutContract):
    layout = "paged"


@pytest.mark.long
class TestPagedPacked(LayoutContract):
    """8 bits in blocks."""

    layout = "paged"
    options: ClassVar = {"bits": 8, "group_size": 64}


@pytest.mark.long
class TestPagedPackedTightly(LayoutContract):
    """4 bits, gathered."""

    layout = "paged"
    options: ClassVar = {"bits": 4, "group_size": 32, "reads": "gather"}


class TestRecurrent(LayoutContract):
    layout = "recurrent"


@pytest.mark.long
class TestComposite(LayoutContract):
    layout = "composite"


@pytest.mark.long
class TestCompositeOfAttention(LayoutContract):
    layout = "composite"
    parts = ("full", "rotating")


@pytest.mark.long
class TestChunked(LayoutContract):
    layout = "chunked"


@pytest.mark.long
class TestApart(LayoutContract):
    layout = "apart"
