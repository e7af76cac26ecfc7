"""The model's own chat template, run in a sandbox (`text/sandbox.py`).

What a template says it wants is final: BOS is where it writes it and nowhere else, and messages it refuses
are an error that quotes it. Nothing is merged or reordered to please it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

import jinja2

from edgekv.errors import TemplateError
from edgekv.text.sandbox import MAX_CHARS, LimitExceeded, TemplateSandbox
from edgekv.units import format_bytes


class Message(TypedDict):
    """One turn of a conversation. The optional parts are those of a conversation with tools, named as OpenAI does; the
    `arguments` in tool_calls are a mapping, which is what templates expect."""

    role: str
    content: str
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Tool = Mapping[str, Any]
"""As OpenAI describes one: {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}."""

_PARTS = frozenset(Message.__annotations__)
_PROBE_TOOL = "zqxtoolprobe"


class ChatTemplate:
    """A compiled chat template.

    Raises:
        TemplateError: the source is not a template that Jinja can read.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.bos_token, self.eos_token, self.source = bos_token, eos_token, source
        self._tools: tuple[Tool, ...] = ()
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The model's chat template is not valid Jinja (line {error.lineno}: {error.message}): "
                "the checkpoint needs another one."
            ) from None
        except (RecursionError, SyntaxError, MemoryError):  # Jinja's parser, and Python's of what Jinja makes of it
            raise TemplateError(
                "The model's chat template is nested too deeply: the checkpoint needs another one."
            ) from None

    def with_tools(self, tools: Sequence[Tool]) -> ChatTemplate:
        """The same template, given these tools whenever it runs."""
        bound = copy(self)
        bound._tools = tuple(tools)
        return bound

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template tells the model about tools, found by trying."""
        tool = {"type": "function", "function": {"name": _PROBE_TOOL, "description": "", "parameters": {}}}
        text = self.with_tools([tool]).try_render([Message(role="user", content="Hello")])
        return text is not None and _PROBE_TOOL in text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text, control tokens and all, with the header of the answer if wanted.

        Raises:
            TemplateError: the template refuses these messages, fails on them, or writes without end.
        """
        try:
            return self._run(messages, add_generation_prompt)
        except TemplateError:
            raise
        except LimitExceeded as error:
            if sum(len(message["content"]) for message in messages) > MAX_CHARS:
                raise _too_much() from None
            raise TemplateError(f"The model's chat template was stopped: {error}. Use another template.") from None
        except Exception as error:  # the template's code may raise anything; it is all the template's fault
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise TemplateError(
                f'The model\'s chat template refuses these messages: "{said}". {self._advice(messages)}'
            ) from None

    def try_render(self, messages: Sequence[Message]) -> str | None:
        """The conversation without a header for the answer, or None where the template refuses it."""
        try:
            return self._run(messages, add_generation_prompt=False)
        except Exception:  # as in `render`
            return None

    def _run(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        plain = [
            message if _PARTS.issuperset(message) else {key: value for key, value in message.items() if key in _PARTS}
            for message in messages
        ]
        with self._sandbox.time_limit():
            stream = self._template.generate(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=list(self._tools) or None,
                documents=None,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
            return "".join(_limited(stream))

    def _advice(self, messages: Sequence[Message]) -> str:
        """What to do about a refusal, found by trying."""
        if self.try_render([Message(role="user", content="Hello")]) is None:
            return "It refuses even a single user message: the checkpoint needs another template."
        others = [message for message in messages if message["role"] != "system"]
        if 0 < len(others) < len(messages) and self.try_render(others) is not None:
            return "This model's template has no system role: put it in the first user message."
        roles = [message["role"] for message in others]
        if any(first == second for first, second in pairwise(roles)):
            return "Two turns in a row are from the same side: join them into one message."
        if roles[:1] != ["user"]:
            return "Start with a user message, after the system prompt if there is one."
        return "Send user and assistant messages in turn."


def _limited(chunks: Iterator[str]) -> Iterator[str]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_CHARS:
            raise _too_much()
        yield chunk


def _too_much() -> TemplateError:
    limit = format_bytes(MAX_CHARS)
    return TemplateError(f"The rendered conversation is larger than {limit} of text: shorten the messages.")
