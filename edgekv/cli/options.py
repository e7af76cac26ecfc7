"""Command-line options made from dataclass fields: name, type, default and help live in the dataclass alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

Function = TypeVar("Function", bound=Callable[..., Any])


def options_of(
    cls: type[Any],
    *,
    leave_out: tuple[str, ...] = (),
    unset: bool = False,
    told: Mapping[str, Any] | None = None,
) -> Callable[[Function], Function]:
    """A decorator that adds one option a field.

    Args:
        leave_out: fields that get no option. unset: give None for an option that was not typed, whatever its default.
        told: the defaults that help tells of, where the command has others than the dataclass.
    """

    def decorate(function: Function) -> Function:
        hints = get_type_hints(cls)
        for field in reversed([item for item in fields(cls) if item.name not in leave_out]):
            default = (told or {}).get(field.name, field.default)
            function = _option(field, hints[field.name], unset, default)(function)
        return function

    return decorate


def given(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """The options of a dataclass that were typed; takes them out of `values`."""
    names = [item.name for item in fields(cls) if item.name in values]
    picked = {name: values.pop(name) for name in names}
    return {name: value for name, value in picked.items() if value is not None and value != ()}


def _option(field: Field[Any], hint: Any, unset: bool, told: Any) -> Callable[[Function], Function]:
    flag = "--" + field.name.replace("_", "-")
    default = None if unset or field.default in (MISSING, "") else field.default
    text = field.metadata.get("help", "")
    several = get_origin(hint) is tuple
    if told not in (None, MISSING, (), ""):
        text += f" [default: {told}]"
    return click.option(
        flag, field.name, type=_click_type(hint), default=() if several else default, multiple=several, help=text
    )


def _click_type(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return click.Choice([value for value in arguments if value])
    if origin in (UnionType, Union):
        return _click_type(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return _click_type(arguments[0])
    return hint if hint in (int, float, str) else str
