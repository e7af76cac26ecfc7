"""Tool calls in a model's text, found while it streams.

Two manners are common, and the template shows which one a model was taught:

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them, text around them
    llama    the whole answer is {"name": "f", "parameters": {...}}, or several joined by ";"

A model of the first manner that forgets its tags (Qwen2.5-Coder does) is understood if its whole answer is a call.
Text is passed on as soon as it cannot be the beginning of a call. What looks like a call and is none (broken JSON, no
name, a tool that was not offered) is passed on as the text it is: nothing that the model said is ever lost.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Style = Literal["hermes", "llama"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


_DECODER, _WHITE = json.JSONDecoder(), " \t\r\n"


@dataclass(frozen=True)
class ToolCall:
    """A call; `arguments` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class CallParser(Protocol):
    """Takes an answer's text piece by piece; gives text and calls in order."""

    def put(self, text: str) -> Iterator[str | ToolCall]: ...
    def close(self) -> Iterator[str | ToolCall]: ...


def style_of(template_source: str) -> Style:
    """The manner that a chat template teaches."""
    return "hermes" if OPEN in template_source else "llama"


def call_parser(style: Style, names: Collection[str]) -> CallParser:
    """A parser for one answer. `names` are the tools offered."""
    return FirstLookParser(names) if style == "hermes" else LlamaParser(names)


class FirstLookParser:
    """Takes an answer that begins with a brace for a call without tags, any other as text with calls between tags."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""
        self._chosen: CallParser | None = None

    def put(self, text: str) -> Iterator[str | ToolCall]:
        if self._chosen is None:
            self._held += text
            if not (begins := self._held.lstrip()):
                return
            self._chosen = LlamaParser(self._names) if begins.startswith("{") else HermesParser(self._names)
            text = self._held
        yield from self._chosen.put(text)

    def close(self) -> Iterator[str | ToolCall]:
        found = [self._held] if self._chosen is None else list(self._chosen.close())
        if len(found) == 1 and isinstance(found[0], str) and isinstance(self._chosen, LlamaParser):  # no call itself
            tagged = HermesParser(self._names)
            found = [*tagged.put(found[0]), *tagged.close()]
        yield from filter(None, found)


class HermesParser:
    """Calls between tags."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held, self._inside = names, "", False

    def put(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while (at := self._held.find(CLOSE if self._inside else OPEN)) >= 0:
            yield from self._upto(at)
        if not self._inside:
            keep = _possible_beginning(self._held, OPEN)
            passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            yield from [passed] if passed else []

    def close(self) -> Iterator[str | ToolCall]:
        held, self._held = self._held, ""
        if self._inside:  # small models forget the closing tag
            call = _as_call(held, "arguments", self._names)
            yield call if call is not None else OPEN + held
        elif held:
            yield held

    def _upto(self, at: int) -> Iterator[str | ToolCall]:
        """Give what stands before the tag at `at`, and step over the tag."""
        before, tag = self._held[:at], CLOSE if self._inside else OPEN
        self._held = self._held[at + len(tag) :]
        if self._inside:
            call = _as_call(before, "arguments", self._names)
            yield call if call is not None else OPEN + before + CLOSE
        elif before:
            yield before
        self._inside = not self._inside


class LlamaParser:
    """The answer itself is the call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held, self._plain = names, "", False

    def put(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        begins = self._held.lstrip()
        self._plain = self._plain or (bool(begins) and not begins.startswith("{"))
        if self._plain:
            passed, self._held = self._held, ""
            yield passed

    def close(self) -> Iterator[str | ToolCall]:
        held, self._held = self._held, ""
        calls = [_as_call(part, "parameters", self._names) for part in _json_values(held)]
        if calls and None not in calls:
            yield from (call for call in calls if call is not None)
        elif held:
            yield held


def _possible_beginning(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


def _json_values(text: str) -> list[str]:
    """The JSON values of a text in which they are joined by ";" and white space; [] if that is not what it is."""
    decoder, parts, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        parts.append(rest[:end])
        rest = rest[end:].lstrip("; \n\t\r")
    return parts


def _as_call(text: str, arguments_key: str, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON text is, or None."""
    parts = _members(text)
    name = None if parts is None or "name" not in parts else json.loads(parts["name"])
    if parts is None or not isinstance(name, str) or name not in names:
        return None
    arguments = parts.get(arguments_key, parts.get("arguments", "{}"))
    return ToolCall(name, arguments) if arguments.startswith("{") else None


def _members(text: str) -> dict[str, str] | None:
    """The members of a JSON object, their values as they are written; None if that is not what it is. NaN and Infinity,
    which Python reads, are no JSON."""
    try:
        if not isinstance(json.loads(text, parse_constant=_no_json), dict):
            return None
    except (ValueError, RecursionError):
        return None
    found, rest = {}, text.strip()[1:].lstrip(_WHITE)
    while not rest.startswith("}"):
        name, end = _DECODER.raw_decode(rest)
        rest = rest[end:].lstrip(_WHITE)[1:].lstrip(_WHITE)  # the colon
        _, end = _DECODER.raw_decode(rest)
        found[name], rest = rest[:end], rest[end:].lstrip(_WHITE)
        rest = rest[1:].lstrip(_WHITE) if rest.startswith(",") else rest
    return found


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
