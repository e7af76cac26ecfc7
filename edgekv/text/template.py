"""The model's own chat template, run in a sandbox.

Templates are Jinja programs that came with the weights, so they are untrusted code: the immutable sandbox of Jinja
runs them, and an output beyond 16 MiB is refused. They are written for the environment that transformers gives them
(its documentation, "Chat templates"), which is reproduced here: block trimming, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that escapes nothing, and `{% generation %}`, which only marks text for
training and is passed through.

What a template says it wants is final: BOS is where it writes it and nowhere else (case C19), and messages it refuses
are an error that quotes it (case C20). Nothing is merged or reordered to please it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn, TypedDict

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgekv.errors import TemplateError
from edgekv.units import MIB, format_bytes

MAX_RENDERED_CHARS = 16 * MIB


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled chat template.

    Raises:
        TemplateError: the source is not a template that Jinja can read.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.bos_token, self.eos_token = bos_token, eos_token
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The model's chat template is not valid Jinja (line {error.lineno}: {error.message}): "
                "the checkpoint needs another one."
            ) from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as one text, control tokens and all, with the header of the answer if wanted.

        Raises:
            TemplateError: the template refuses these messages, fails on them, or writes without end.
        """
        try:
            return self._run(messages, add_generation_prompt)
        except TemplateError:
            raise
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
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        stream = self._template.generate(
            messages=plain,
            add_generation_prompt=add_generation_prompt,
            tools=None,
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
        if size > MAX_RENDERED_CHARS:
            limit = format_bytes(MAX_RENDERED_CHARS)
            raise TemplateError(f"The rendered conversation is larger than {limit} of text: shorten the messages.")
        yield chunk


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: the body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
