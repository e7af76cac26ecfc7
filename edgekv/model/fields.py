"""Fields of a published config, checked as they are read: JSON may hold anything under any name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel

Config = Mapping[str, Any]


def expect(config: Config, field: str, value: Any) -> None:
    """Refuse any other value than the one that is run; a field that is not there has it."""
    found = config.get(field, value)
    if found != value:
        raise UnsupportedModel(f"The config's {field} is {found!r}; edgekv runs this family only with {value!r}.")


def integer(config: Config, field: str, *default: int) -> int:
    """A positive whole number; the default also where it is null."""
    value = config.get(field)
    if value is None and default:
        return default[0]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a positive whole number.")
    return value


def number(config: Config, field: str, *default: float) -> float:
    """A positive number; the default also where it is null."""
    value = config.get(field)
    if value is None and default:
        return default[0]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a positive number.")
    return float(value)


def numbers(config: Config, field: str) -> tuple[float, ...]:
    """A list of positive numbers."""
    values = config.get(field)
    if not isinstance(values, list):
        raise BadCheckpoint(f"The config's {field} is {str(values)[:40]!r}; it must be a list of positive numbers.")
    return tuple(number({field: value}, field) for value in values)


def flag(config: Config, field: str, *, default: bool = False) -> bool:
    """True or false; the default also where it is null."""
    value = config.get(field)
    if value not in (None, True, False):
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be true or false.")
    return default if value is None else bool(value)


def choices(config: Config, field: str, known: Mapping[Any, bool], count: int) -> tuple[bool, ...]:
    """A list of `count` values, each translated by `known`.

    Raises:
        BadCheckpoint: it is no list, or too short. UnsupportedModel: a value that is not known.
    """
    values = config.get(field)
    if not isinstance(values, list) or len(values) < count:
        raise BadCheckpoint(f"The config's {field} is {str(values)[:40]!r}; it must be a list with {count} items.")
    for value in values[:count]:
        if not isinstance(value, str | int) or value not in known:
            raise UnsupportedModel(f"The config's {field} has {value!r}; edgekv knows {', '.join(map(repr, known))}.")
    return tuple(known[value] for value in values[:count])


def token_ids(config: Config, field: str) -> list[int]:
    """A token id, a list of them, or nothing, as a list."""
    value = config.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a token id or a list of them.")
    return list(ids)
