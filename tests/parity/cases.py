"""Every model file of mlx-lm, built small, with what it says alone in each storage and how it fares in company."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from oarlock.core import Request
from oarlock.core.contracts.layout import LayerInfo
from oarlock.core.engine import Engine
from oarlock.core.errors import OarlockError
from oarlock.core.layers import read
from oarlock.core.testing import models, storages

HERE = Path(__file__).parent
LENGTHS, TOKENS = (12, 3, 30, 1, 9), (14, 16, 5, 12, 10)
BITS, GROUP, BLOCK = 8, 32, 16
SEEDS, NOISE = 8, 1e-6
"""Quantized rows are compared on the first of so many draws of prompts whose tokens survive this noise in the weights: a
number on the edge of two codes falls to either side, and takes the choice of experts with it."""
STORAGES: Mapping[str, frozenset[str]] = {
    "own": frozenset(),
    "quantized": frozenset({"full", "rotating"}),
    "paged": frozenset({"full"}),
}
"""Each storage and the kinds of layers that it is asked to hold; other layers stay as they are."""

EXCUSED = {
    "bitnet": "its kernel runs on Metal only",
    "deepseek_v41": "its caches speak a protocol of their own (`update_window`, `compress_kv`)",
    "gear": "mlx-lm cannot run it with its own caches: it asks a state for a mask by `offset`",
    "muse_spark": "its kernel runs on Metal only",
    "olmo": "it needs the package `ai2-olmo`",
    "phi3small": "its scores are written at token ids above 100,256: nothing small can be built",
    "prism_hadamard_qwen35": "it holds packed weights only: nothing random can be built",
}


def more() -> dict[str, dict[str, Any]]:
    """Return the arguments of the models that the kit's table does not have."""
    return json.loads((HERE / "more_models.json").read_text(encoding="utf-8"))


def modules() -> list[str]:
    """Return the names of mlx-lm's files that define a model."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "models"
    return sorted(p.stem for p in folder.glob("*.py") if re.search(r"^class Model\b", p.read_text(), re.MULTILINE))


def known() -> dict[str, str]:
    """Return the names in the kit's table by those of the page: its own variants stand under their model type."""
    table = models.table()
    own = {name: name for name in table if not name.startswith("tiny-")}
    return {arguments["model_type"]: name for name, arguments in table.items() if name not in own} | own


def changes(purpose: str) -> dict[str, dict[str, Any]]:
    """Return what is laid over the tables: ``smaller`` than they are, or ``packable``, with head sizes that can be."""
    return json.loads((HERE / "changed_models.json").read_text(encoding="utf-8"))[purpose]


def made(name: str, storage: str = "own") -> Any:
    """Build a model of either table; for ``quantized`` with head sizes that are multiples of the group."""
    arguments = models.table()[known()[name]] if name in known() else more()[name]
    arguments = _over(arguments, changes("smaller").get(name, {}))
    if storage == "quantized":
        arguments = _over(arguments, changes("packable").get(name, {}))
    return models.build(name, guard=False, **arguments)


def _over(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with ``changes``, those of nested tables among them."""
    nested = {key: _over(arguments[key], value) for key, value in changes.items() if isinstance(value, Mapping)}
    return {**arguments, **changes, **nested}


def leaves(infos: Iterable[LayerInfo]) -> Iterator[LayerInfo]:
    """Yield layers, and the parts of those that keep several caches."""
    for info in infos:
        yield from leaves(info.parts) if info.parts else (info,)


def layouts(model: Any, storage: str) -> dict[str, Any]:
    """Return the configuration that asks for ``storage`` wherever it can be; empty where no layer is of its kinds."""
    held = [info for info in leaves(read(model).layers) if info.kind in STORAGES[storage]]
    if not held or storage == "own":
        return {}
    options: Mapping[str, Any] = (
        {"bits": BITS, "group_size": GROUP} if storage == "quantized" else {"block_size": BLOCK}
    )
    bare = {info.path: info.kind for info in held if storage == "quantized" and not info.value_dim}
    return {**{kind: {"name": storage, **options} for kind in STORAGES[storage]}, "layers": bare}


@attrs.frozen(kw_only=True)
class Case:
    """A model in one storage, prompts, and what mlx-lm says to each alone in that storage."""

    model: Any
    prompts: Sequence[Sequence[int]]
    serial: Sequence[models.Serial]
    layouts: Mapping[str, Any]
    rounded: bool = False

    @classmethod
    def of(cls, name: str, storage: str = "own") -> Case | None:
        """Run mlx-lm alone; None where no layer can be in ``storage``."""
        model = made(name, storage)
        chosen = layouts(model, storage)
        if storage != "own" and not chosen:
            return None
        vocabulary = min(97, int(model(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]))
        if storage != "quantized":
            prompts = models.prompts(LENGTHS, vocabulary)
            return cls(model=model, prompts=prompts, serial=_alone(model, prompts), layouts=chosen)
        theirs, other = _quantized_by_mlx_lm(model), _noisy(made(name, storage))
        for seed in range(SEEDS):
            prompts = models.prompts(LENGTHS, vocabulary, seed)
            serial, moved = (
                _alone(each, prompts, lambda: storages.quantized(model, BITS, GROUP, theirs=theirs))
                for each in (model, other)
            )
            if [row.tokens for row in serial] == [row.tokens for row in moved]:
                break
        rounded = storages.rounded(storages.quantized(model, BITS, GROUP, theirs=theirs))
        return cls(model=model, prompts=prompts, serial=serial, layouts=chosen, rounded=rounded)


def _alone(
    model: Any, prompts: Sequence[Sequence[int]], caches: Callable[[], list[Any] | None] = lambda: None
) -> list[models.Serial]:
    return [models.serial(model, prompt, n, prompt_cache=caches()) for prompt, n in zip(prompts, TOKENS, strict=True)]


def _noisy(model: Any) -> Any:
    """Return ``model`` with every weight moved by a share of about `NOISE`."""
    mx.random.seed(1)
    model.update(tree_map(lambda w: w * (1 + NOISE * mx.random.normal(w.shape)).astype(w.dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def _quantized_by_mlx_lm(model: Any) -> bool:
    """Return whether mlx-lm can run the model with its own quantized caches."""
    try:
        models.serial(model, [1, 2, 3], 2, prompt_cache=storages.quantized(model, BITS, GROUP))
    except Exception:  # noqa: BLE001 - whatever it is, such a run is not to be had
        return False
    return True


def judged(case: Case) -> str:
    """Return how the rows fared in chunks of two kinds."""
    here = ""
    for chunk in (4, 512):
        try:
            here = ours(case, chunk)
        except OarlockError as error:
            here = f"refused: {error}"
        except AssertionError as error:
            return f"**differs**: {error}"
    return here


def ours(case: Case, chunk: int) -> str:
    """Return how rows shared forwards. Raises AssertionError where tokens differ or anything was repeated."""
    config = {"scheduler": {"prefill_chunk": chunk}, "layouts": case.layouts}
    with Engine(case.model, config=config) as engine:
        handles = []
        for at, (prompt, n) in enumerate(zip(case.prompts, TOKENS, strict=True)):
            handles.append(engine.submit(Request(prompt_ids=prompt, max_tokens=n)))
            for _ in range(at):
                engine.step()
        said = [handle.result().token_ids for handle in handles]
        models.compare(said, [row.tokens for row in case.serial], [row.gaps for row in case.serial]).check()
        assert engine.stats()["recoveries"] == 0
        verdict = engine.bound.verdict
        return "equal" if verdict.ragged else f"equal lengths: `{verdict.reason}`"


def kinds(model: Any) -> str:
    """Return how many layers of each kind a model has."""
    counted = Counter(_kind(info) for info in read(model).layers)
    return ", ".join(f"{count} {kind}" for kind, count in counted.items())


def _kind(info: LayerInfo) -> str:
    return f"({' + '.join(map(_kind, info.parts))})" if info.parts else info.kind
