"""Which versions of MLX the tests ran on, from our own metadata, and which are installed."""

from __future__ import annotations

import importlib.metadata

import attrs

WATCHED = ("mlx", "mlx-lm")
"""Distributions whose insides oarlock reaches into."""


@attrs.frozen
class Version:
    """An installed version ("" where there is none) beside the tested range."""

    distribution: str
    installed: str
    tested: str
    in_range: bool


def versions() -> list[Version]:
    """Return what is installed of `WATCHED`."""
    from packaging.requirements import Requirement  # not ours, though mlx-lm brings it: asked late

    required = [Requirement(text) for text in importlib.metadata.requires("oarlock") or ()]
    ranges = {wanted.name: wanted.specifier for wanted in required if wanted.marker is None}
    found = []
    for name in WATCHED:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        tested = ranges.get(name)
        inside = bool(installed) and (tested is None or tested.contains(installed, prereleases=True))
        found.append(Version(name, installed, _readable(str(tested or "any")), inside))
    return found


def untested() -> list[str]:
    """Return one line for each version outside the tested range."""
    return [
        f"{v.distribution} {v.installed or '(not installed)'} is untested with this oarlock (tested: {v.tested}); "
        f"if anything fails: pip install '{v.distribution}{v.tested}'"
        for v in versions()
        if not v.in_range
    ]


def _readable(specifier: str) -> str:
    """Return the bounds lowest first: ``>=0.32,<0.33``."""
    return ",".join(sorted(specifier.split(","), key=lambda bound: bound.startswith("<")))
