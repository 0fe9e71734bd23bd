"""The tiny models of the table, one for each way of storing. It runs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from oarlock.core.testing import models

WORDS = 12
"""Tokens of every vocabulary: so few that what follows a token is often what followed it before, and often not."""

_HEADS = {"head_dim": 32}
_PACKED = {"bits": 8, "group_size": 32}
_PARTS = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}


@attrs.frozen(kw_only=True)
class Storage:
    """A layout under test: the tiny ``model`` that has layers for it, ``changes`` to its arguments, and what the config names.

    ``note``: what else is to be known. ``seed``: that of its prompts. ``tolerance``: how far log-probabilities may be from
    those alone. ``plugins`` are passed to every engine, ``disabled`` are those that they stand in for.
    """

    name: str
    model: str
    changes: Mapping[str, Any] = MappingProxyType({})
    layouts: Mapping[str, Any] = MappingProxyType({})
    note: str = ""
    seed: int = 0
    tolerance: float = 1e-4
    plugins: Sequence[object] = ()
    disabled: Sequence[str] = ()

    def build(self) -> Any:
        """Build the model."""
        whole = {"text_config": {**models.table()[self.model].get("text_config", {}), "vocab_size": WORDS}}
        words = whole if whole["text_config"].keys() > {"vocab_size"} else {"vocab_size": WORDS}
        return models.build(self.model, **words, **self.changes)


def _packing(name: str, *kinds: str, **options: Any) -> dict[str, Any]:
    return {kind: {"name": name, **_PACKED, **options} for kind in kinds}


_ALL = (
    Storage(name="full", model="tiny-full"),
    Storage(name="rotating", model="tiny-ring", note="windows of 8 tokens, every third layer full"),
    Storage(name="paged", model="tiny-full", layouts={"full": {"name": "paged", "block_size": 16}}),
    Storage(
        name="paged packed",
        model="tiny-full",
        changes=_HEADS,
        layouts=_packing("paged", "full", block_size=16),
        tolerance=1e-2,
    ),
    Storage(name="quantized", model="tiny-full", changes=_HEADS, layouts=_packing("quantized", "full"), tolerance=1e-2),
    Storage(
        name="delayed",
        model="tiny-ring",
        changes=_HEADS,
        layouts=_packing("delayed", "full", "rotating", start=17),
        tolerance=1e-2,
    ),
    Storage(name="recurrent", model="mamba2", note="states alone"),
    Storage(name="composite", model="falcon_h1", changes=_PARTS, note="a state and full attention in each layer"),
    Storage(name="chunked", model="llama4", note="blocks of 8 tokens; kept apart as well"),
    Storage(name="apart", model="gpt_bigcode", changes={"n_layer": 3}, note="one position for all rows"),
)
STORAGES: Mapping[str, Storage] = MappingProxyType({storage.name: storage for storage in _ALL})
