"""What rows of every layout hold, and what they cost to join and to leave, beside mlx-lm's padded batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
from groups import LAYERS, LAYOUTS, Group, PaddedGroup
from storages import KV_HEADS, SIZE

from oarlock.plugins.cli.bench.pairs import Block, Comparison, Report, Spread, Stopwatch, ratio, spread

LENGTHS = [round(64 * 64 ** (row / 15)) for row in range(16)]
"""64 to 4,096, each longer than the one before by the same factor."""
STEPS = 8
"""Tokens that every row is then given: what a running row has allocated, not what a prefill left."""
ROWS, TOKENS = 16, 2048
WINDOW = 512
FASTER = 20.0
"""How many times faster than mlx-lm's a join and a leave should be."""
HELD = {**LAYOUTS, "paged, 4 bits": {"name": "paged", "bits": 4, "group_size": 64}}
LIMITS = {"paged": ("the sum of lengths", 1.15), "quantized, 4 bits": ("full", 0.30)}


def held(dtype: mx.Dtype = mx.bfloat16) -> Report:
    """Allocate the same rows in every layout; say what the arrays and the device hold."""
    lengths = [length + STEPS for length in LENGTHS]
    own = sum(lengths) * LAYERS * 2 * KV_HEADS * SIZE * dtype.size
    makers: dict[str, Callable[[], Group | PaddedGroup]] = {
        "mlx-lm, padded": lambda: PaddedGroup(LENGTHS, dtype),
        **{name: lambda choice=choice: _filled(choice, dtype) for name, choice in HELD.items()},  # type: ignore[misc]
    }
    arrays, device = {}, {}
    for name, make in makers.items():
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        group = make()
        for _ in range(STEPS):
            group.append()
        arrays[name], device[name] = group.nbytes, mx.get_active_memory() - before
        del group
    lines = [
        "| | MB | on the device | / sum of lengths | / full | / mlx-lm | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, count in arrays.items():
        against = {"the sum of lengths": count / own, "full": count / arrays["full"]}
        cells = [f"{count / 1e6:.0f}", f"{device[name] / 1e6:.0f}"]
        cells += [f"{each:.2f}" for each in (*against.values(), count / arrays["mlx-lm, padded"])]
        lines.append(f"| {name} | {' | '.join(cells)} | {_verdict(name, against)} |")
    return Report(
        name=f"KV bytes, {len(LENGTHS)} rows of {LENGTHS[0]} to {LENGTHS[-1]} tokens and {STEPS} more, {LAYERS} layers",
        facts={
            "dtype": str(dtype).rpartition(".")[2],
            "tokens": sum(lengths),
            "MB of the tokens alone": round(own / 1e6),
            "window of rotating": WINDOW,
        },
        table="\n".join(lines),
    )


def _filled(choice: dict[str, object], dtype: mx.Dtype) -> Group:
    group = Group(choice, dtype, window=WINDOW if choice["name"] == "rotating" else 0)
    group.fill(LENGTHS)
    return group


def _verdict(name: str, against: dict[str, float]) -> str:
    if name not in LIMITS:
        return ""
    what, limit = LIMITS[name]
    return f"{'reaches' if against[what] <= limit else 'MISSES'} {limit} x {what}"


def moves(rounds: int, dtype: mx.Dtype = mx.float32) -> Iterator[Report]:
    """Let a row join and the first one leave, in turns with mlx-lm's `extend` and `filter`; a report a layout.

    Rows have taken a step since they came, so buffers have grown, and the memory pool is empty, as both engines leave
    it behind every chunk of a prefill.
    """
    theirs = PaddedGroup([TOKENS] * (ROWS - 1), dtype)
    theirs.append()
    for name, choice in LAYOUTS.items():
        ours = Group(choice, dtype, window=TOKENS if name == "rotating" else 0)
        ours.fill([TOKENS] * (ROWS - 1))
        ours.append()
        blocks: dict[tuple[str, str], list[Block]] = {}
        for number in range(rounds + 1):
            for side, group in ((name, ours), ("mlx-lm", theirs))[:: 1 if number % 2 else -1]:
                done = {"join": _joined(group), "leave": _timed(group, lambda group=group: group.leave(0))}  # type: ignore[misc]
                for what, block in done.items() if number else ():  # the first round warms up
                    blocks.setdefault((side, what), []).append(block)
        clock = {key: [block.seconds for block in each] for key, each in blocks.items()}
        spent = {key: [block.cpu for block in each] for key, each in blocks.items()}
        yield Report(
            name=f"join and leave, {name}, {ROWS} rows x {TOKENS} tokens, {LAYERS} layers",
            figures={f"{side}: ms to {what}": spread([1e3 * s for s in each]) for (side, what), each in clock.items()},
            comparisons=[
                Comparison(
                    what=f"{what}: mlx-lm's {unit} / ours",
                    ratio=ratio(times[name, what], times["mlx-lm", what]),
                    target=target,
                )
                for what in ("join", "leave")
                for unit, times, target in (("time", clock, FASTER), ("CPU time", spent, None))
            ],
        )
        del ours, group
    del theirs
    yield growing(dtype)


def _joined(group: Group | PaddedGroup) -> Block:
    row = group.row(TOKENS)
    return _timed(group, lambda: group.join(row))  # type: ignore[arg-type]


def _timed(group: Group | PaddedGroup, work: Callable[[], None]) -> Block:
    mx.synchronize()
    mx.clear_cache()
    watch = Stopwatch()
    work()
    mx.eval(group.arrays())
    return watch.block(1, 0)


def growing(dtype: mx.Dtype) -> Report:
    """Let rows join one by one from none: what each join takes where slots must be had for it, and in all."""
    figures: dict[str, Spread] = {}
    for name, choice in LAYOUTS.items():
        group = Group(choice, dtype, window=TOKENS if name == "rotating" else 0)
        mx.clear_cache()
        mx.reset_peak_memory()
        times = [_joined(group).seconds for _ in range(ROWS)]
        figures[f"{name}: ms a join, all {ROWS}"] = spread([1e3 * s for s in times])
        figures[f"{name}: ms, the dearest"] = spread([1e3 * max(times)])
        figures[f"{name}: MB beside the rows at the worst"] = spread([(mx.get_peak_memory() - group.nbytes) / 1e6])
        del group
    return Report(name=f"{ROWS} joins from none, {TOKENS} tokens each: slots grow on the way", figures=figures)
