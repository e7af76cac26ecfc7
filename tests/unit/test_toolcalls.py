"""Tool calls found in text that comes in pieces; what is no call stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.text.toolcalls import Style, ToolCall, call_parser, style_of

NAMES = {"look", "go"}
LOOK = ToolCall("look", '{"far": true}')

UNKNOWN = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "look", "arguments": "far"}</tool_call>'


def call(arguments: str) -> str:
    """A call of `go` between tags."""
    return f'<tool_call>{{"name": "go", "arguments": {arguments}}}</tool_call>'


HERMES = [
    ('<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>', [LOOK]),
    (
        'I look.\n<tool_call>{"name":"look","arguments":{"far":true}}</tool_call>\n'
        '<tool_call>{"name": "go"}</tool_call>',
        ["I look.\n", ToolCall("look", '{"far":true}'), "\n", ToolCall("go", "{}")],
    ),
    ('<tool_call>{"name": "look", "arguments": {"far": true}}', [LOOK]),  # cut off before the tag
    ('<tool_call>{"name": "look", "arg', ['<tool_call>{"name": "look", "arg']),
    ("<tool_call>nonsense</tool_call> so", ["<tool_call>nonsense</tool_call> so"]),
    ('{"name": "go", "arguments": {"to": "\\ud83d"}}', [ToolCall("go", '{"to": "\\ud83d"}')]),  # can still be sent
    (call('{"x": 1e999, "y": 12345678901234567890.5}'), [ToolCall("go", '{"x": 1e999, "y": 12345678901234567890.5}')]),
    (call('{ "a" : [1,{"b":"}"}] , "c":null}'), [ToolCall("go", '{ "a" : [1,{"b":"}"}] , "c":null}')]),
    (call('{"x": NaN}'), [call('{"x": NaN}')]),
    (call('{"x": -Infinity}'), [call('{"x": -Infinity}')]),
    (f'{{"a": 1}}\n{call("{}")}', ['{"a": 1}\n', ToolCall("go", "{}")]),
    (UNKNOWN, [UNKNOWN]),
    (NO_OBJECT, [NO_OBJECT]),
    ("1 < 2 <tool_cal", ["1 < 2 <tool_cal"]),
    ("plain", ["plain"]),
    (" \n", [" \n"]),
    ('{"name": "look", "arguments": {"far": true}}', [LOOK]),
    ('{"far": true}', ['{"far": true}']),
]

LLAMA = [
    ('{"name": "look", "parameters": {"far": true}}', [LOOK]),
    (' {"name": "look", "parameters": {"far": true}}; {"name": "go", "parameters": {}}', [LOOK, ToolCall("go", "{}")]),
    ('{"name": "fly", "parameters": {}}', ['{"name": "fly", "parameters": {}}']),
    ('{"name": "look", "parameters": {"far"', ['{"name": "look", "parameters": {"far"']),
    ('So {"name": "look", "parameters": {}}', ['So {"name": "look", "parameters": {}}']),
    ("[1, 2]", ["[1, 2]"]),
]


def parsed(style: Style, pieces: list[str]) -> list[str | ToolCall]:
    """Everything a parser gives, with texts that stand side by side joined."""
    parser = call_parser(style, NAMES)
    parts = [part for piece in pieces for part in parser.put(piece)] + list(parser.close())
    joined: list[str | ToolCall] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("style", "text", "parts"), [*(("hermes", *c) for c in HERMES), *(("llama", *c) for c in LLAMA)]
)
def test_calls_and_text(style: Style, text: str, parts: list[str | ToolCall], size: int) -> None:
    """The same however the text is cut."""
    assert parsed(style, [text[at : at + size] for at in range(0, len(text), size)]) == parts


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<", "{", '"name"', "x", "\n", ";", "}"]), max_size=12))
def test_nothing_is_lost(pieces: list[str]) -> None:
    """A text without a valid call comes out as it went in."""
    for style in ("hermes", "llama"):
        assert "".join(map(str, parsed(style, pieces))) == "".join(pieces)


def test_text_is_not_held_back_without_need() -> None:
    """Only what may begin a tag waits."""
    parser = call_parser("hermes", NAMES)
    assert list(parser.put("Hello <b")) == ["Hello <b"]
    assert list(parser.put("old> and <too")) == ["old> and "]
    assert list(parser.put("thpaste")) == ["<toothpaste"]


def test_the_template_shows_the_style() -> None:
    """By the tag that it teaches."""
    assert style_of("... <tool_call> ...") == "hermes"
    assert style_of('... {"name": ..., "parameters": ...}') == "llama"
