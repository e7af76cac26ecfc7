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
        return {"json_schema": json.dumps({"anyOf": [_shape(item, "parameters") for item in functions]})}
    schema = {"anyOf": [_shape(item, "arguments") for item in functions], "x-guidance": JSON_STYLE}
    first, last = (_tag(tag, token_id) for tag in (OPEN, CLOSE))
    return {"grammar": f'start: {first} "\\n" call "\\n" {last}\ncall: %json {json.dumps(schema)}'}


def _tag(tag: str, token_id: TokenId) -> str:
    number = token_id(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"


def _shape(function: Any, arguments_key: str) -> dict[str, Any]:
    properties = {"name": {"const": function["name"]}, arguments_key: function["parameters"]}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }
