"""A plugin chosen in the configuration: its name, and its options, which its own attrs class checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from oarlock.core import values
from oarlock.core.errors import InvalidConfigValue, UnknownConfigKey

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Choice:
    """A plugin chosen by name, with its options. ``key`` is the place in the configuration, for messages."""

    name: str
    options: Mapping[str, Any] = attrs.field(factory=lambda: MappingProxyType({}))
    key: str = attrs.field(default="", eq=False)


def parse_table(key: str, value: Any) -> Mapping[str, Any]:
    """Return ``value`` as a read-only table, its keys still to be checked."""
    if not isinstance(value, Mapping) or not all(isinstance(option, str) for option in value):
        raise InvalidConfigValue(key, value, "tables of options")
    return MappingProxyType(dict(value))


def parse_choice(key: str, value: Any) -> Choice:
    """Return what ``value`` chooses: a name, a table that holds one, or a choice."""
    if isinstance(value, Choice):
        return value if value.key else attrs.evolve(value, key=key)
    if isinstance(value, Mapping) and "name" in value:
        given = {option: given for option, given in value.items() if option != "name"}
        return Choice(name=values.name(f"{key}.name", value["name"]), options=parse_table(key, given), key=key)
    if isinstance(value, str) and value.strip():
        return Choice(name=value, key=key)
    raise InvalidConfigValue(key, value, 'a name, or a table with "name" and options')


def parse_name_or_choice(key: str, value: Any) -> str | Choice:
    """Return a bare name as it is, a table as the choice it makes."""
    return parse_choice(key, value) if isinstance(value, Mapping | Choice) else values.name(key, value)


def check_keys(section: str, given: Any, known: Iterable[str]) -> None:
    """Raise `UnknownConfigKey` where ``given`` has keys besides those known, `InvalidConfigValue` where it is no table."""
    if not isinstance(given, Mapping):
        raise InvalidConfigValue(section or "(the whole)", given, "a table")
    known = tuple(known)
    for key in given:
        if key not in known:
            raise UnknownConfigKey(str(key), section, known)


def parse_options(options: type[T], given: Mapping[str, Any], section: str) -> T:
    """Build a plugin's attrs class ``options`` from ``given``; ``section`` names the place in the configuration.

    An unknown key raises `UnknownConfigKey`, a value that the class refuses `InvalidConfigValue`.
    """
    check_keys(section, given, [field.alias for field in attrs.fields(options)])  # type: ignore[arg-type]
    return _made(options, given, section)


def evolved(part: T, given: Mapping[str, Any], section: str) -> T:
    """Return ``part`` with the fields changed that ``given`` names, its name excepted. Raises as `parse_options`."""
    kind: Any = type(part)
    fields = attrs.fields(kind) if attrs.has(kind) else ()
    check_keys(section, given, [field.alias for field in fields if field.init and field.name != "name"])
    return _made(lambda **changes: attrs.evolve(part, **changes), given, section) if given else part  # type: ignore[misc]


def _made(make: Callable[..., T], given: Mapping[str, Any], section: str) -> T:
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        raise InvalidConfigValue(section, dict(given), str(error.args[0] if error.args else error)) from error
