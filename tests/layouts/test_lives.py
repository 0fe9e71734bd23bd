"""Random lives of the kit where it does not look by itself: other formats, other stops, and more of all of them."""

import pytest

from oarlock.core.testing.layouts import LayoutContract
from oarlock.core.testing.layouts.lives import DRAFT, SEQUENCES, sequences, shortest

OTHERS = {
    "2 bits": ("quantized", {"bits": 2, "group_size": 32}, 1.0),  # which store not even 1 and -1 exactly
    "3 bits": ("quantized", {"bits": 3, "group_size": 32}, 0.0),
    "6 bits": ("quantized", {"bits": 6, "group_size": 32}, 0.0),
    "packed at once": ("delayed", {"start": 0}, 0.0),
    "packed soon": ("delayed", {"start": 5, "bits": 4, "group_size": 32}, 0.0),
}


def check_lives(layout, options, seeds, tolerance=0.0):
    kit = type("Kit", (LayoutContract,), {"layout": layout, "options": options, "tolerance": tolerance})
    for case in kit.subject().cases():
        layers = case.layers()
        for seed, operations in zip(seeds, sequences(seeds), strict=True):
            complaint = shortest(lambda seed=seed, layers=layers: layers.open(1 + seed % 3, DRAFT), operations)
            assert complaint is None, f"{case.name}, seed {seed}: {complaint}"


@pytest.mark.parametrize(("layout", "options", "tolerance"), OTHERS.values(), ids=OTHERS)
def test_any_order_of_operations_holds(layout, options, tolerance):
    check_lives(layout, options, range(SEQUENCES, SEQUENCES + 2), tolerance)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["full", "rotating", "quantized", "delayed"])
def test_any_order_of_operations_holds_for_long(layout):
    check_lives(layout, {"start": 18} if layout == "delayed" else {}, range(SEQUENCES, SEQUENCES + 60))
