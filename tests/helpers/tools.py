"""Templates that take tools, in the manner of two families, and conversations with tools."""

from __future__ import annotations

from typing import Any

HERMES = (
    "{% if tools %}<s>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools> Call with "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>.</s>\n'
    "{% elif messages[0].role == 'system' %}<s>system\n{{ messages[0].content }}</s>\n{% endif %}"
    "{% for message in messages if message.role != 'system' %}<s>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""As Hermes and Qwen do: calls stand between tags, tools in the system prompt."""

LLAMA = (
    "{% for message in messages %}<s>{{ message.role }}\n{% if tools and loop.first %}"
    'Answer with {"name": function, "parameters": arguments}. {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}'
    "{% endif %}{% if message.tool_calls %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
    "{{ message.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ message.content }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""As Llama 3.1 does: the whole answer is the call, tools in the first message."""

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather_tool(**changes: Any) -> dict[str, Any]:
    """A tool with one argument."""
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS} | changes
    return {"type": "function", "function": function}


def called(city: str) -> list[dict[str, Any]]:
    """The messages of a call and its result; arguments are a mapping, as templates want them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"},
    ]
