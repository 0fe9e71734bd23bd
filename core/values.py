"""Rules for single config values: each takes a key and a value and returns the value, or raises `InvalidConfigValue`.

They know no key: which value stands under which is said in `config.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from oarlock.core.errors import InvalidConfigValue
from oarlock.core.request import is_number

Parse = Callable[[str, Any], Any]
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


def _rule(ok: Callable[[Any], bool], allowed: str, convert: Callable[[Any], Any] = lambda value: value) -> Parse:
    def parse(key: str, value: Any) -> Any:
        if not ok(value):
            raise InvalidConfigValue(key, value, allowed)
        return convert(value)

    return parse


def whole(minimum: int) -> Parse:
    """Return a rule for whole numbers from ``minimum``; True is none."""
    return _rule(lambda value: type(value) is int and value >= minimum, f"whole numbers >= {minimum}")


def auto_whole(minimum: int) -> Parse:
    """Return a rule for whole numbers from ``minimum``, or "auto"."""
    allowed = f'"auto", whole numbers >= {minimum}'
    return _rule(lambda value: value == "auto" or (type(value) is int and value >= minimum), allowed)


def at_least(minimum: float) -> Parse:
    """Return a rule for finite numbers from ``minimum``, kept as floats."""
    return _rule(lambda value: is_number(value) and value >= minimum, f"finite numbers >= {minimum:g}", float)


def one_of(*allowed: str) -> Parse:
    """Return a rule for one of a few words."""
    return _rule(lambda value: isinstance(value, str) and value in allowed, ", ".join(map(repr, allowed)))


floor = _rule(lambda value: is_number(value) and value >= 1, "numbers >= 1 (rounded down)", math.floor)
flag = _rule(lambda value: isinstance(value, bool), "true, false")
auto_flag = _rule(lambda value: isinstance(value, bool) or value == "auto", '"auto", true, false')
text = _rule(lambda value: isinstance(value, str), "strings")
name = _rule(lambda value: isinstance(value, str) and value.strip() != "", "non-empty strings")
_list = _rule(lambda value: isinstance(value, list | tuple), "lists of strings", tuple)


def names(key: str, value: Any) -> tuple[str, ...]:
    """Return a tuple of non-empty strings from a list of them."""
    return tuple(name(f"{key}[{place}]", item) for place, item in enumerate(_list(key, value)))


def parse_bytes(key: str, value: Any) -> int:
    """Return a size in bytes: a whole number, or text such as ``"4GiB"``, ``"512 MiB"``, ``"1GB"`` (decimal)."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", value.strip().lower())
        if match:
            return int(float(match[1]) * _UNITS[match[2] or ""])
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise InvalidConfigValue(key, value, 'bytes as a whole number >= 0, or text like "512MiB", "4GiB", "1GB"')


def parse_budget(key: str, value: Any) -> int | float | None:
    """Return None for ``"none"``, a float in (0, 1] for ``"50%"`` of the memory, else bytes as `parse_bytes`."""
    if value is None or value == "none":
        return None
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip())):
        if 0 < float(match[1]) <= 100:
            return float(match[1]) / 100
    elif isinstance(value, int | str):
        return parse_bytes(key, value)
    raise InvalidConfigValue(key, value, '"none", bytes like "4GiB", or a share of the memory like "50%"')
