"""The contract of a layout among all others: under every method, with every feature, its rows say what they say alone.

    class TestMineTogether(CompositionContract):
        layout = "mine"

in a test file. What one layout promises by itself is `core.testing.layouts.LayoutContract`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from oarlock.core.contracts.layout import CacheLayout
from oarlock.core.testing.composition.cells import Cell, Status, run
from oarlock.core.testing.composition.features import FEATURES
from oarlock.core.testing.composition.methods import METHODS
from oarlock.core.testing.composition.rows import Shared
from oarlock.core.testing.composition.storages import STORAGES, Storage
from oarlock.core.testing.subjects import arguments, name_of, resolved

__all__ = ["CompositionContract"]

KINDS = ("full", "rotating", "recurrent", "composite", "chunked")
"""Kinds of layers: the table has a storage of each name, on whose model a layout of that kind is tried."""


class CompositionContract:
    """Every cell of a layout; subclass it, name a ``layout`` and its ``options``, and let pytest find the subclass.

    ``tolerance``: how far log-probabilities may be from those alone. ``seed``: that of the prompts; where the last bit of a
    number decides about a code, as in packed storage, another seed leaves a tie aside.
    """

    layout: ClassVar[CacheLayout | str]
    options: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-2
    seed: ClassVar[int] = 0
    _shared: ClassVar[Shared | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every method and feature on a model of each kind that the layout holds."""
        if "kind" in metafunc.fixturenames:
            held = resolved("layout", self.layout).kinds
            metafunc.parametrize("kind", [kind for kind in KINDS if kind in held])
            metafunc.parametrize("method", METHODS)
            metafunc.parametrize("feature", FEATURES)

    def test_a_cell(
        self, kind: str, method: str, feature: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """It says what its rows say alone, or is refused at bind for a listed reason; and it is not idle."""
        cls = type(self)
        if "_shared" not in vars(cls):
            cls._shared = Shared(tmp_path_factory.mktemp("shared"))
        storage = self.storage(kind)
        outcome = run(Cell(storage.name, method, feature), cls._shared, tmp_path, storage)  # type: ignore[arg-type]
        assert outcome.status is not Status.DEFECT, outcome.message
        assert outcome.status is Status.EQUAL or outcome.reason, f"refused for no listed reason: {outcome.message}"

    @classmethod
    def storage(cls, kind: str) -> Storage:
        """Return the model of a kind, with heads that most formats can pack, and the layout on its layers."""
        base, (plugins, disabled) = STORAGES[kind], arguments("layout", cls.layout)
        heads = {"head_dim": 32} if kind in ("full", "rotating") else {}
        return attrs.evolve(
            base,
            name=f"{name_of(cls.layout)}, {kind}",
            changes={**base.changes, **heads},
            layouts={kind: {"name": name_of(cls.layout), **cls.options}},
            seed=cls.seed,
            tolerance=cls.tolerance,
            plugins=plugins,
            disabled=disabled,
        )
