"""Write docs/architectures.md: every model file of mlx-lm, run in company here and by mlx-lm's own batch generator.

Five ragged prompts join at different times and leave at different times; tokens are compared with mlx-lm's run of
each prompt alone. Run it: `python tests/parity/architectures.py`, or with names to print only those.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import structlog
from mlx_lm.generate import BatchGenerator

from oarlock.core import Request
from oarlock.core.contracts.layout import LayerInfo
from oarlock.core.engine import Engine
from oarlock.core.errors import OarlockError
from oarlock.core.testing import models

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "architectures.md"
LENGTHS, TOKENS = (12, 3, 30, 1, 9), (14, 16, 5, 12, 10)
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "afm7": {"num_layers": 8, "num_kv_reuse_layers": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32},
    "gemma3n": {"final_logit_softcapping": 30.0},
    "gpt_bigcode": {"n_layer": 4},
    "jamba": {"mamba_expand": 2, "mamba_d_state": 16},
    "lfm2": {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000},
}
EXCUSED = {
    "bitnet": "its kernel runs on Metal only",
    "deepseek_v41": "its caches speak a protocol of their own (`update_window`, `compress_kv`)",
    "gear": "mlx-lm cannot run it with its own caches: it asks a state for a mask by `offset`",
    "muse_spark": "its kernel runs on Metal only",
    "olmo": "it needs the package `ai2-olmo`",
    "phi3small": "its scores are written at token ids above 100,256: nothing small can be built",
    "prism_hadamard_qwen35": "it holds packed weights only: nothing random can be built",
}

HEAD = """# Architectures

Every model file of mlx-lm {version}, built small with random weights that make the past matter. Five prompts of {lengths}
tokens join at different times and get {tokens} tokens, in prefill chunks of 4 and of 512. **equal**: all tokens are those
that mlx-lm generates for each prompt alone. **equal lengths**: likewise, but only rows of one length share a forward;
the line that forces it stands beside. The last column is mlx-lm's own batch generator on the same prompts.

{summary}

This page is made by `python tests/parity/architectures.py`.

| architecture | layers | here | mlx-lm's batch generator |
|---|---|---|---|
"""


@attrs.frozen
class Line:
    """One architecture's result."""

    name: str
    layers: str
    here: str
    theirs: str


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


def made(name: str) -> Any:
    """Build a model of either table."""
    if name in known():
        return models.build(known()[name], guard=False, **SMALLER.get(name, {}))
    return models.build(name, guard=False, **more()[name])


def judge(name: str) -> Line:
    """Run one architecture in company, here and there."""
    model = made(name)
    vocabulary = min(97, int(model(mx.zeros((1, 1), dtype=mx.uint32)).shape[-1]))
    prompts = models.prompts(LENGTHS, vocabulary)
    serial = [models.serial(model, prompt, n) for prompt, n in zip(prompts, TOKENS, strict=True)]
    layers, here = "", ""
    for chunk in (4, 512):
        try:
            layers, here = ours(model, prompts, serial, chunk)
        except OarlockError as error:
            here = f"refused: {error}"
        except AssertionError as error:
            here = f"**differs**: {error}"
            break
    if models.sensitivity(model) <= models.SENSITIVITY:
        here += " (insensitive: proves little)"
    return Line(name, layers, here, theirs(model, prompts, serial))


def ours(model: Any, prompts: Sequence[Any], serial: Sequence[models.Serial], chunk: int) -> tuple[str, str]:
    """Return the layers' kinds and the result. Raises AssertionError where tokens differ or anything was repeated."""
    with Engine(model, config={"scheduler": {"prefill_chunk": chunk}}) as engine:
        handles = []
        for at, (prompt, n) in enumerate(zip(prompts, TOKENS, strict=True)):
            handles.append(engine.submit(Request(prompt_ids=prompt, max_tokens=n)))
            for _ in range(at):
                engine.step()
        said = [handle.result().token_ids for handle in handles]
        models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial]).check()
        assert engine.stats()["recoveries"] == 0
        verdict, plan = engine.bound.verdict, engine.bound.layers
        counted = Counter(_kind(layer.info) for layer in plan)
        layers = ", ".join(f"{count} {kind}" for kind, count in counted.items())
        return layers, "equal" if verdict.ragged else f"equal lengths: `{verdict.reason}`"


def _kind(info: LayerInfo) -> str:
    return f"({' + '.join(map(_kind, info.parts))})" if info.parts else info.kind


def theirs(model: Any, prompts: Sequence[Any], serial: Sequence[models.Serial]) -> str:
    """Return how mlx-lm's batch generator does on the same prompts, three at once and two later."""
    rows: dict[int, list[int]] = {}
    try:
        generator = BatchGenerator(model)
        order = list(generator.insert([list(p) for p in prompts[:3]], max_tokens=list(TOKENS[:3])))
        for step in range(500):
            if step == 3:
                order += generator.insert([list(p) for p in prompts[3:]], max_tokens=list(TOKENS[3:]))
            _, responses = generator.next()
            for response in responses:
                rows.setdefault(response.uid, []).append(response.token)
            if step > 3 and all(len(rows.get(uid, ())) >= n for uid, n in zip(order, TOKENS, strict=True)):
                break
        said = [rows.get(uid, []) for uid in order]
        models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])
    except AssertionError:
        wrong = sum(list(row.tokens) != got for row, got in zip(serial, said, strict=True))
        return f"{wrong} of {len(prompts)} rows differ"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what a user would see
        return f"raises {type(error).__name__}"
    return "equal"


def page(lines: Sequence[Line]) -> str:
    """Return the whole page."""
    kinds = Counter("equal lengths only" if "lengths:" in line.here else line.here.split(":")[0] for line in lines)
    other = Counter(line.theirs if line.theirs == "equal" else "not equal" for line in lines if line.theirs)
    summary = f"{len(lines)} built: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}. "
    summary += f"mlx-lm's own batch generator: {', '.join(f'{n} {kind}' for kind, n in other.most_common())}. "
    summary += f"{len(EXCUSED)} are not built, with the reason."
    shape = {"lengths": ", ".join(map(str, LENGTHS)), "tokens": ", ".join(map(str, TOKENS))}
    head = HEAD.format(version=importlib.import_module("mlx_lm").__version__, summary=summary, **shape)
    body = [f"| {each.name} | {each.layers} | {each.here.replace('|', ' ')} | {each.theirs} |" for each in lines]
    body += [f"| {name} | | not built: {reason} | |" for name, reason in EXCUSED.items()]
    return head + "\n".join(body) + "\n"


def judge_apart(name: str) -> Line:
    """Judge one architecture in a process of its own: MLX ends the process on some errors."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=600, check=False)
    fields = done.stdout.strip().rpartition("\n")[2].split(" | ")
    return Line(*fields) if len(fields) == 4 else Line(name, "", f"**ends the process** ({done.returncode})", "")


def main(names: Sequence[str]) -> None:
    """Judge ``names`` here, or all in processes of their own and write the page."""
    mx.set_default_device(mx.cpu)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    every = sorted({*known(), *more()}, key=str.lower)
    lines = []
    for name in names or every:
        lines.append(judge(name) if names else judge_apart(name))
        print(*attrs.astuple(lines[-1]), sep=" | ", flush=True)
    if not names:
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
