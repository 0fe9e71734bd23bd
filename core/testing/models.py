"""Tiny mlx-lm models with random weights, mlx-lm's own tokens for them, and the rule by which tokens are equal.

It proves nothing by itself: a model that does not mind its past would make any cache look right, so `build` refuses it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import json
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step

TIE = 1e-3
"""Two best scores closer than this may change places from one batch to another."""
MAX_EXCUSED = 0.02
"""Largest share of rows that may differ after a tie."""
SENSITIVITY = 0.01
"""Least move of the last scores when the first token of the prompt changes."""

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Smaller than the table's own: full attention only, and window and full layers mixed.
        "tiny-full": {
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        "tiny-ring": {
            "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
            "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
        },
    }
)  # fmt: skip


class InsensitiveModel(ValueError):
    """A model whose scores hardly depend on its past: tokens that agree on it say nothing."""

    def __init__(self, name: str, moved: float) -> None:
        self.name, self.moved = name, moved
        super().__init__(
            f"model {name!r}: another first token moves the scores by {moved:.2g}, at least {SENSITIVITY} is needed; "
            "amplify its weights more, or change its arguments"
        )


class TokensDiffer(AssertionError):
    """A row's tokens differ where no tie excuses it. Attributes: ``row``, ``step``, ``gap`` of the serial scores."""

    def __init__(self, row: int, step: int, got: int | None, wanted: int | None, gap: float) -> None:
        self.row, self.step, self.got, self.wanted, self.gap = row, step, got, wanted, gap
        super().__init__(
            f"row {row} differs at step {step}: token {got} instead of {wanted}, where the two best scores are "
            f"{gap:.3g} apart (a tie is under {TIE})"
        )


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the arguments of every tiny model by name: 56 architectures and `VARIANTS`."""
    file = importlib.resources.files(__package__).joinpath("tiny_models.json")
    return MappingProxyType({**json.loads(file.read_text(encoding="utf-8")), **VARIANTS})


def build(name: str, *, seed: int = 0, amplify: float = 1.8, guard: bool = True, **changes: Any) -> Any:
    """Build the tiny model ``name`` in float32 with seeded random weights, ``changes`` over its arguments.

    Where ``changes`` have a ``model_type`` they are all of its arguments, and ``name`` is for messages.

    Weights are multiplied by ``amplify``, those of convolutions by 30, decays are slowed and matrices of zeros filled,
    so that the past matters. Raises `InsensitiveModel` where it does not; with ``guard`` False such a model is returned. Seeds MLX's own
    generator of the calling thread.
    """
    arguments = {**({} if "model_type" in changes else table()[name]), **changes}
    module = importlib.import_module(f"mlx_lm.models.{arguments['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(arguments))
    parameters: Any = tree_flatten(model.parameters())
    weights = [(path, _amplified(path, value, amplify)) for path, value in parameters]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    if guard and not (moved := sensitivity(model)) > SENSITIVITY:  # not a number is no sign of a past either
        raise InsensitiveModel(name, moved)
    return model


def _amplified(path: str, value: mx.array, factor: float) -> mx.array:
    if path.endswith("A_log"):
        return mx.full(value.shape, -4.0, dtype=mx.float32)
    value = value.astype(mx.float32)
    if value.ndim < 2:
        return value
    if not mx.any(value):  # a factor that only a checkpoint fills: it would hide whatever it multiplies
        return mx.random.uniform(0.2, 1.0, value.shape)
    return value * (30.0 if "conv" in path else factor)


def sensitivity(model: Any, length: int = 12) -> float:
    """Return how far the last scores move when the first of ``length`` tokens changes."""
    vocabulary = model(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]  # MLX reads beyond an embedding without an error
    prompt = [(13 * i + 5) % min(89, vocabulary) for i in range(length)]
    first, second = (model(mx.array([[token, *prompt[1:]]], dtype=mx.uint32))[0, -1] for token in (5, 6))
    moved: Any = mx.max(mx.abs(first.astype(mx.float32) - second.astype(mx.float32))).item()
    return float(moved)


def prompts(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths, token ids below ``vocabulary``."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


@attrs.frozen
class Serial:
    """What mlx-lm generates alone: greedy ``tokens``, their ``logprobs``, and how far the two best are apart."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


def serial(model: Any, prompt: Sequence[int], n: int, **options: Any) -> Serial:
    """Generate ``n`` greedy tokens with mlx-lm's own generation, ``options`` its own: ``prompt_cache``, ``kv_bits``, ..."""
    tokens, best, gaps = [], [], []
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=n, **options):
        two: Any = mx.sort(mx.topk(logprobs, 2)).tolist()
        tokens.append(int(token))
        best.append(two[1])
        gaps.append(two[1] - two[0])
    return Serial(tuple(tokens), tuple(best), tuple(gaps))


@attrs.frozen
class Comparison:
    """How many rows were compared, and how many were excused: they differ, after a tie. Comparisons add up."""

    rows: int = 0
    excused: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        """Count both."""
        return Comparison(self.rows + other.rows, self.excused + other.excused)

    def __str__(self) -> str:
        """Say both numbers."""
        return f"{self.rows} rows compared, {self.excused} excused by a tie"

    def check(self) -> None:
        """Raise AssertionError where no row was compared or too many were excused."""
        assert self.rows, "no row was compared"
        assert self.excused <= MAX_EXCUSED * self.rows, f"{self}; at most {MAX_EXCUSED:.0%} may be"


def compare(
    batched: Sequence[Sequence[int]], alone: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> Comparison:
    """Compare rows of token ids with the same rows generated alone.

    They must be equal up to the first step whose serial gap is under `TIE`; a row that differs after it is excused
    and counted. Raises `TokensDiffer` for any other difference, a missing or surplus token included.
    """
    excused = 0
    for row, (got, wanted, gap) in enumerate(zip(batched, alone, gaps, strict=True)):
        step = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
        if step is None and len(got) == len(wanted):
            continue
        step = min(len(got), len(wanted)) if step is None else step
        if not any(value < TIE for value in gap[: step + 1]):
            here = gap[step] if step < len(gap) else float("nan")
            raise TokensDiffer(row, step, _at(got, step), _at(wanted, step), here)
        excused += 1
    return Comparison(len(batched), excused)


def _at(tokens: Sequence[int], step: int) -> int | None:
    return tokens[step] if step < len(tokens) else None
