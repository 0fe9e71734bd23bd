"""Throughput and stall against rows, as an SVG of its own colours. It measures nothing and needs no library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from oarlock.plugins.cli.bench.pairs import Report, Spread

WIDTH, HEIGHT = 380, 300
LEFT, TOP, ACROSS, DOWN = 64, 56, 290, 190
"""Of each panel: where its axes begin, and how far they go."""
COLOURS = ("#0969da", "#bc4c00", "#1a7f37")
PANELS = {"tokens a second": "throughput, tokens a second", "ms stalled": "longest wait beside a prompt that joins, ms"}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">
<style>text {{ font: 12px system-ui, sans-serif; fill: #1f2328 }} .end {{ text-anchor: end }} .middle {{ text-anchor: middle }}</style>
<rect width="{width}" height="{height}" rx="8" fill="#f6f8fa"/>
<text x="16" y="24" font-weight="600">{title}</text>
"""


def drawn(title: str, reports: Sequence[Report]) -> str:
    """Return the picture: a panel for each unit that was measured, a line a side, medians with their quartiles."""
    panels = {unit: named for unit, named in PANELS.items() if any(unit in name for r in reports for name in r.figures)}
    parts = [HEAD.format(width=max(1, len(panels)) * WIDTH, height=HEIGHT, title=escape(title))]
    for place, (unit, named) in enumerate(panels.items()):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(unit, named, reports), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(unit: str, named: str, reports: Sequence[Report]) -> Iterator[str]:
    rows = [report.facts["rows"] for report in reports]
    lines: dict[str, dict[int, Spread]] = {}
    for report in reports:
        for name, spread in report.figures.items():
            side, _, measured = name.partition(": ")
            if measured == unit:
                lines.setdefault(side, {})[report.facts["rows"]] = spread
    top = _round_up(max(spread.high for line in lines.values() for spread in line.values()))
    places = {count: LEFT + ACROSS * (i + 0.5) / len(rows) for i, count in enumerate(rows)}
    yield f'<text x="{LEFT}" y="{TOP - 10}">{escape(named)}</text>'
    yield f'<path d="M{LEFT} {TOP} V{TOP + DOWN} H{LEFT + ACROSS}" fill="none" stroke="#59636e"/>'
    for value in (0, top / 2, top):
        yield f'<text x="{LEFT - 6}" y="{_height(value, top) + 4:.1f}" class="end">{value:.4g}</text>'
    for count, x in places.items():
        yield f'<text x="{x:.1f}" y="{TOP + DOWN + 18}" class="middle">{count}</text>'
    yield f'<text x="{LEFT + ACROSS}" y="{TOP + DOWN + 36}" class="end">rows</text>'
    for number, (side, line) in enumerate(lines.items()):
        yield from _line(side, line, places, top, number)


def _line(side: str, line: Mapping[int, Spread], places: Mapping[int, float], top: float, number: int) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    points = [(places[count] + 8 * number, spread) for count, spread in line.items()]
    path = " ".join(f"{x:.1f},{_height(spread.median, top):.1f}" for x, spread in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, spread in points:
        low, high = _height(spread.low, top), _height(spread.high, top)
        yield f'<path d="M{x:.1f} {low:.1f} V{high:.1f}" stroke="{colour}" stroke-width="6" stroke-opacity="0.35"/>'
        yield f'<circle cx="{x:.1f}" cy="{_height(spread.median, top):.1f}" r="3" fill="{colour}"/>'
    yield f'<text x="{LEFT + 10}" y="{TOP + 14 + 16 * number}" style="fill: {colour}">{escape(side)}</text>'


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, ... times a power of ten: where an axis ends."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _height(value: float, top: float) -> float:
    """Return where ``value`` stands; the axis begins at 0."""
    return TOP + DOWN * (1 - value / top)
