"""The kit on every layout of ours: what is particular to one stands in tests/layouts."""

from oarlock.core.testing.layouts import LayoutContract


class TestFull(LayoutContract):
    layout = "full"


class TestRotating(LayoutContract):
    layout = "rotating"


class TestQuantized(LayoutContract):
    """8 bits; every code stores 1 and -1 as they are."""

    layout = "quantized"


class TestQuantizedCoarsely(LayoutContract):
    """4 bits of normally distributed numbers: rows are compared with themselves alone."""

    layout = "quantized"
    options = {"bits": 4, "group_size": 32}  # noqa: RUF012 - as it stands in a config file
    levels = False
    tolerance = 0.5


class TestDelayed(LayoutContract):
    """Converted past two wraps of the window."""

    layout = "delayed"
    options = {"start": 18}  # noqa: RUF012


class TestPaged(LayoutContract):
    layout = "paged"


class TestRecurrent(LayoutContract):
    layout = "recurrent"


class TestComposite(LayoutContract):
    layout = "composite"


class TestCompositeOfAttention(LayoutContract):
    layout = "composite"
    parts = ("full", "rotating")


class TestChunked(LayoutContract):
    layout = "chunked"


class TestApart(LayoutContract):
    layout = "apart"
