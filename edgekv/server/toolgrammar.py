"""The grammar of a tool call that must be made (tool_choice "required", or one function by name).

A tag that the vocabulary holds as one token has to be named by its number: llguidance reads added tokens in angle
brackets as control tokens, which no text in a grammar matches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from edgekv.text.grammar import JSON_STYLE
from edgekv.text.template import Tool
from edgekv.text.toolcalls import CLOSE, OPEN, Style

TokenId = Callable[[str], int | None]
"""The number of a token, if the vocabulary has it (`Tokenizer.token_id`)."""


def forced_call(style: Style, tools: Sequence[Tool], names: Sequence[str], token_id: TokenId) -> dict[str, Any]:
    """The sampling options under which the answer is a call of one of the named tools, with arguments by its schema."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    if style == "llama":
        return {"json_schema": json.dumps(_any_of(functions, "parameters"))}
    schema = _any_of(functions, "arguments") | {"x-guidance": JSON_STYLE}
    first, last = (_tag(tag, token_id) for tag in (OPEN, CLOSE))
    return {"grammar": f'start: {first} "\\n" call "\\n" {last}\ncall: %json {json.dumps(schema)}'}


def _tag(tag: str, token_id: TokenId) -> str:
    number = token_id(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"


def _any_of(functions: Sequence[Any], arguments_key: str) -> dict[str, Any]:
    return {"anyOf": [_shape(function, arguments_key, place) for place, function in enumerate(functions)]}


def _shape(function: Any, arguments_key: str, place: int) -> dict[str, Any]:
    parameters = _moved(function["parameters"], f"#/anyOf/{place}/properties/{arguments_key}")
    properties = {"name": {"const": function["name"]}, arguments_key: parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))  # names -> schemas
_DATA = frozenset(("const", "enum", "default", "examples"))


def _moved(schema: Any, place: str) -> Any:
    """The schema with what it refers to inside of itself (JSON Schema, "$ref") found at its place in a larger one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if key in _NAMED and isinstance(value, dict):
        return {name: _moved(item, place) for name, item in value.items()}
    return value if key in _DATA else _moved(value, place)
