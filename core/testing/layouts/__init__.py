"""The conformance kit for cache layouts: what any layout must do, tried on toy layers, token by token.

    class TestMine(LayoutContract):
        layout = MyLayout()
        options = {"bits": 4}

in a test file, or ``pytest --oarlock-layout NAME`` for a layout that is installed. A failure says which clause broke
(the name of the test), on which kind of layer, and after which operations.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from oarlock.core.contracts.layout import CacheLayout
from oarlock.core.testing.layouts import lives
from oarlock.core.testing.layouts.cases import Case, Subject
from oarlock.core.testing.layouts.forwards import Forwards
from oarlock.core.testing.layouts.masks import Masks
from oarlock.core.testing.layouts.membership import Membership
from oarlock.core.testing.layouts.prefixes import Prefixes
from oarlock.core.testing.layouts.room import Room
from oarlock.core.testing.layouts.storage import Storage

__all__ = ["LayoutContract", "violations"]


class LayoutContract(Forwards, Masks, Membership, Storage, Prefixes, Room):
    """What a layout promises, clause by clause; subclass it, name a ``layout``, and let pytest find the subclass.

    ``layout`` is an object, or the name of an installed one; ``options`` as they stand in a config file.
    ``tolerance`` is how far, as a share, what attention gives may be from exact storage: 0 is rounding alone. Where it
    is more, rows are compared with themselves, stored alone, to the last bits. ``levels``: a token's keys and values are x or -x,
    which affine codes of 3 bits and more store exactly; False: normally distributed. ``parts``: kinds of a composite layer's caches.
    """

    layout: ClassVar[CacheLayout | str]
    options: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 0.0
    levels: ClassVar[bool] = True
    parts: ClassVar[Sequence[str]] = ("recurrent", "full")

    @classmethod
    def subject(cls) -> Subject:
        """Return the layout with all that is said of it."""
        return Subject(cls.layout, cls.options, cls.tolerance, cls.levels, cls.parts)

    @classmethod
    def check_subject(cls) -> None:
        """Raise what makes it impossible to begin: an unknown name, options out of range, a refusal of every layer."""
        cls.subject().cases()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every clause on every kind of layer that the layout holds."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.subject().cases(), ids=lambda case: case.name)

    def test_it_says_what_it_is(self) -> None:
        """A name, the kinds that it holds, and a class of options that names its own."""
        layout = self.subject().resolved()
        assert isinstance(layout.name, str)
        assert layout.name
        assert layout.kinds
        assert all(isinstance(kind, str) for kind in layout.kinds)
        assert attrs.has(layout.options), f"options is {layout.options}, no attrs class"

    @pytest.mark.parametrize("seed", range(lives.SEQUENCES))
    def test_any_order_of_operations_holds(self, case: Case, seed: int) -> None:
        """A random life; where it is wrong, the shortest one that still is."""
        (operations,) = lives.sequences([seed])
        layers = case.layers()
        complaint = lives.shortest(lambda: layers.open(slots=1 + seed % 3, window=lives.DRAFT), operations)
        if complaint is not None:
            raise complaint


def violations(contract: type[LayoutContract], clause: str = "test_") -> Iterator[tuple[str, BaseException]]:
    """Run the clauses whose names begin with ``clause`` without pytest's help.

    Yields, for each that is broken, its name with the case, and the complaint.
    """
    instance, cases = contract(), contract.subject().cases()
    for name, function in inspect.getmembers(contract, inspect.isfunction):
        wanted = inspect.signature(function).parameters
        for case in (cases if "case" in wanted else [None]) if name.startswith(clause) else []:
            for arguments in _products(function):
                given = {**arguments, **({"case": case} if case else {})}
                with tempfile.TemporaryDirectory() as folder:
                    if "tmp_path" in wanted:
                        given["tmp_path"] = Path(folder)
                    try:
                        function(instance, **given)
                    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - the clause is broken, whatever it is
                        yield "-".join([name, *([case.name] if case else []), *map(str, arguments.values())]), error


def _products(clause: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments that the clause's own parametrize marks give."""
    made: list[dict[str, Any]] = [{}]
    for mark in getattr(clause, "pytestmark", ()):
        name, values = mark.args
        made = [{**each, name: value} for each in made for value in values]
    yield from made
