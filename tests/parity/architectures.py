"""Write docs/architectures.md: every model file of mlx-lm, run in company here and by mlx-lm's own batch generator.

Five ragged prompts join at different times and leave at different times, in several storages; tokens are compared with
mlx-lm's run of each prompt alone in the same storage. Run it: `python tests/parity/architectures.py`, or with names to
print only those.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import cases
import mlx.core as mx
import structlog
from mlx_lm.generate import BatchGenerator

from oarlock.core.testing import models

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
NONE = {"quantized": "no attention to pack", "paged": "no full attention"}

HEAD = """# Architectures

Every model file of mlx-lm {version}, built small with random weights that make the past matter. Five prompts of {lengths}
tokens join at different times and get {tokens} tokens, in prefill chunks of 4 and of 512. **equal**: all tokens are those
that mlx-lm generates for each prompt alone. **equal lengths**: likewise, but only rows of one length share a forward;
the line that forces it stands beside. The last column is mlx-lm's own batch generator on the same prompts.

**quantized** holds full and sliding-window layers in {bits} bits, groups of {group}, and **paged** full layers in blocks of
{block}; other layers, and keys that have no values, stay as they are. The tokens are those of mlx-lm's run of each prompt alone
in the same storage, with its `QuantizedKVCache` from the first token on. **(rounded)**: it cannot run these layers so
(it has no quantized window, and some models compute with what a cache returns); its plain caches are then given what a
packed cache would be read as.

{summary}

This page is made by `python tests/parity/architectures.py`.

| architecture | layers | here | quantized | paged | mlx-lm's batch generator |
|---|---|---|---|---|---|
"""


@attrs.frozen
class Line:
    """One architecture's result."""

    name: str
    layers: str
    here: str
    quantized: str
    paged: str
    theirs: str


def judge(name: str) -> Line:
    """Run one architecture in company, here in every storage and there."""
    case = cases.Case.of(name)
    assert case is not None
    here = cases.judged(case)
    if models.sensitivity(case.model) <= models.SENSITIVITY:
        here += " (insensitive: proves little)"
    return Line(name, cases.kinds(case.model), here, cell(name, "quantized"), cell(name, "paged"), theirs(case))


def cell(name: str, storage: str) -> str:
    """Run one architecture in another storage; the reasons stand in its own column."""
    case = cases.Case.of(name, storage)
    if case is None:
        return NONE[storage]
    result = cases.judged(case).partition(":")[0]
    return f"{result} (rounded)" if case.rounded else result


def theirs(case: cases.Case) -> str:
    """Return how mlx-lm's batch generator does on the same prompts, three at once and two later."""
    rows: dict[int, list[int]] = {}
    prompts, serial, tokens = case.prompts, case.serial, list(cases.TOKENS)
    try:
        generator = BatchGenerator(case.model)
        order = list(generator.insert([list(p) for p in prompts[:3]], max_tokens=tokens[:3]))
        for step in range(500):
            if step == 3:
                order += generator.insert([list(p) for p in prompts[3:]], max_tokens=tokens[3:])
            _, responses = generator.next()
            for response in responses:
                rows.setdefault(response.uid, []).append(response.token)
            if step > 3 and all(len(rows.get(uid, ())) >= n for uid, n in zip(order, tokens, strict=True)):
                break
        said = [rows.get(uid, []) for uid in order]
        models.compare(said, [row.tokens for row in serial], [row.gaps for row in serial])
    except AssertionError:
        wrong = sum(list(row.tokens) != got for row, got in zip(serial, said, strict=True))
        return f"{wrong} of {len(prompts)} rows differ"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what a user would see
        return f"raises {type(error).__name__}"
    return "equal"


def counted(column: Iterable[str]) -> str:
    """Return how often each result stands in a column, without its reasons."""
    kinds = Counter(each.partition(":")[0].replace("equal lengths", "equal lengths only") for each in column)
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())


def page(lines: Sequence[Line]) -> str:
    """Return the whole page."""
    other = Counter(line.theirs if line.theirs == "equal" else "not equal" for line in lines if line.theirs)
    summary = f"{len(lines)} built: {counted(line.here for line in lines)}. "
    summary += (
        f"Quantized: {counted(line.quantized for line in lines)}. Paged: {counted(line.paged for line in lines)}. "
    )
    summary += f"mlx-lm's own batch generator: {', '.join(f'{n} {kind}' for kind, n in other.most_common())}. "
    summary += f"{len(cases.EXCUSED)} are not built, with the reason."
    shape = {"lengths": ", ".join(map(str, cases.LENGTHS)), "tokens": ", ".join(map(str, cases.TOKENS))}
    shape |= {"bits": cases.BITS, "group": cases.GROUP, "block": cases.BLOCK}
    head = HEAD.format(version=importlib.import_module("mlx_lm").__version__, summary=summary, **shape)
    body = [f"| {' | '.join(cell.replace('|', ' ') for cell in attrs.astuple(each))} |" for each in lines]
    body += [f"| {name} | | not built: {reason} | | | |" for name, reason in cases.EXCUSED.items()]
    return head + "\n".join(body) + "\n"


def judge_apart(name: str) -> Line:
    """Judge one architecture in a process of its own: MLX ends the process on some errors."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=600, check=False)
    fields = done.stdout.strip().rpartition("\n")[2].split(" | ")
    lost = Line(name, "", f"**ends the process** ({done.returncode})", "", "", "")
    return Line(*fields) if len(fields) == len(attrs.fields(Line)) else lost


def main(names: Sequence[str]) -> None:
    """Judge ``names`` here, or all in processes of their own and write the page."""
    mx.set_default_device(mx.cpu)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    every = sorted({*cases.known(), *cases.more()}, key=str.lower)
    lines = []
    for name in names or every:
        lines.append(judge(name) if names else judge_apart(name))
        print(*attrs.astuple(lines[-1]), sep=" | ", flush=True)
    if not names:
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
