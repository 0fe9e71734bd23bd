"""A rank's part of a model, by the model's own ``shard``: heads and inner widths are divided, embeddings are whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx.utils import tree_flatten

from oarlock.core.errors import UnsupportedModel

COUNTS = {
    "attention heads": ("n_heads", "num_heads", "num_attention_heads"),
    "KV heads": ("n_kv_heads", "num_kv_heads", "num_key_value_heads"),
}


def shard(source: str, model: Any, group: Any) -> None:
    """Keep this rank's part of ``model``, whose weights are not evaluated yet.

    Raises `errors.UnsupportedModel` where the model cannot be split, or its heads not by so many.
    """
    size = group.size()
    if not callable(getattr(model, "shard", None)):
        msg = f"{type(model).__module__} has no shard(), so it cannot be split over {size} ranks"
        raise UnsupportedModel(source, msg)
    counts = sorted(set(_counts(model)))
    for name, count in counts:
        if count % size:
            sizes = ", ".join(str(n) for n in range(1, count + 1) if all(c % n == 0 for _, c in counts))
            heads = ", ".join(f"{c} {n}" for n, c in counts)
            msg = f"{count} {name} cannot be split over {size} ranks (it has {heads}); allowed: {sizes} ranks"
            raise UnsupportedModel(source, msg)
    try:
        model.shard(group)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:  # as models say what they cannot
        msg = f"it cannot be split over {size} ranks: {type(error).__name__}: {error}"
        raise UnsupportedModel(source, msg) from error


def _counts(model: Any) -> Iterator[tuple[str, int]]:
    """Yield the counts of heads that modules of the model name."""
    for module in model.modules():
        for what, names in COUNTS.items():
            for name in names:
                value = getattr(module, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield what, value


def weight_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of a model's weights, and those of its embeddings among them, which every rank holds whole."""
    flat: Any = tree_flatten(model.parameters())
    whole = [array.nbytes for name, array in flat if "embed" in name or name.startswith("lm_head")]
    return sum(array.nbytes for _, array in flat), sum(whole)
