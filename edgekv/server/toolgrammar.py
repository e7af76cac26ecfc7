"""The grammar of a tool call that must be made (tool_choice "required", or one function by name)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgekv.text.grammar import JSON_STYLE
from edgekv.text.template import Tool
from edgekv.text.toolcalls import Style


def forced_call(style: Style, tools: Sequence[Tool], names: Sequence[str]) -> dict[str, Any]:
    """The sampling options under which the answer is a call of one of the named tools, with arguments by its schema."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    if style == "llama":
        return {"json_schema": json.dumps({"anyOf": [_shape(item, "parameters") for item in functions]})}
    schema = {"anyOf": [_shape(item, "arguments") for item in functions], "x-guidance": JSON_STYLE}
    lines = ['start: "<tool_call>\\n" call "\\n</tool_call>"', f"call: %json {json.dumps(schema)}"]
    return {"grammar": "\n".join(lines)}


def _shape(function: Any, arguments_key: str) -> dict[str, Any]:
    properties = {"name": {"const": function["name"]}, arguments_key: function["parameters"]}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }
