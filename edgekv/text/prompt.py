"""ChatFormat: messages to a prompt, and where in the prompt each turn and the pinned prefix end.

The session must know two things that a template does not tell: where turns begin, so that whole turns are evicted, and
how much of the beginning is BOS and system prompt (also one that the template supplies by itself), so that it is
pinned. Both are found by rendering and comparing, for any template:

    turn i begins     at the length of render(messages[:i]), if that is how the whole begins
    user header       what render([u, a, u']) has between a and u', less what render([u, a]) has after a
    pinned            what stands before the first user's content, less the user header

With ChatML, Llama 3 and Gemma, pinned is exactly BOS and system block. A template that writes the system prompt inside
the first user's turn (Mistral) has no such border: there the text up to the user's own words is pinned, header
included. Templates that refuse the probes pin what comes before the first turn, as far as that can be told.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Any, cast

from edgekv.errors import InvalidOption, TemplateError
from edgekv.text.template import ChatTemplate, Message, Tool
from edgekv.text.tokenizer import GuardedEncoding, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles end up inside control tokens (`<|user|>`), so they are never free text."""

_LEADING_ROLES = ("system", "developer")
_WORD = re.compile(r"[A-Za-z0-9_.-]*")
_USER, _ANSWER, _NEXT = "zqxfirstprobe", "zqxanswerprobe", "zqxsecondprobe"


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. All offsets are characters of `text`.

    Attributes:
        text: rendered from guarded contents; `ChatFormat.encode` turns it into ids.
        turn_offsets: where the turn of each message begins, never decreasing.
        pinned_chars: the length of BOS and system prompt at the beginning.
        answer_offset: where the generation prompt, and so the answer's turn, begins.
        markers: first character and end of what the template wrote around the contents, turn by turn.
    """

    text: str
    turn_offsets: tuple[int, ...]
    pinned_chars: int
    answer_offset: int
    markers: tuple[tuple[int, int], ...] = ()


class ChatFormat:
    """How one model wants a conversation: its template and its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._seen = _Seen()
        self._guarded: list[tuple[Message, Message]] = []  # the messages of the last prompt, and the same guarded
        self._last: tuple[bool, Prompt] | None = None  # that prompt
        self._with_tools: tuple[Sequence[Tool], ChatFormat] = ((), self)

    def with_tools(self, tools: Sequence[Tool]) -> ChatFormat:
        """The same format, with tools that the model is told of; the last one asked for is kept.

        Raises:
            TemplateError: the template does not know what a tool is.
        """
        if not tools:
            return self
        if not self.template.takes_tools:
            raise TemplateError("This model's chat template takes no tools: leave them out, or use another model.")
        if self._with_tools[0] != tools:
            guarded = self._guard(list(tools))
            self._with_tools = (tools, ChatFormat(self.tokenizer, self.template.with_tools(guarded)))
        return self._with_tools[1]

    def prompt(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> Prompt:
        """Render a conversation.

        Raises:
            TemplateError: the template refuses the messages, leaves the system prompt out, or a role is unknown.
            InvalidOption: something is no message with a role and a text.
        """
        self._check(messages)
        known = [message for message, _ in self._guarded]
        if self._last is not None and self._last[0] == add_generation_prompt and known == list(messages):
            return self._last[1]  # checked first and sent then
        made = self._prompt(self._guard_messages(messages), add_generation_prompt)
        self._last = (add_generation_prompt, made)
        return made

    def _prompt(self, guarded: Sequence[Message], add_generation_prompt: bool) -> Prompt:
        text = self.template.render(guarded, add_generation_prompt=add_generation_prompt)
        starts = self._turn_starts(guarded, text)
        pinned = self._pinned_chars(guarded, text)
        first = _leading(guarded)
        if first < len(starts):
            pinned = (starts[first] or 0) if pinned is None else pinned
            starts[first] = pinned
        answer = self._answer_offset(guarded, text) if add_generation_prompt else len(text)
        turns = _monotone(starts)
        contents = [message["content"] for message in guarded]
        return Prompt(text, turns, pinned or 0, answer, tuple(_markers(text, contents, (*turns, answer))))

    def encode(self, prompt_text: str) -> GuardedEncoding:
        """The ids of a prompt's text; BOS is among them exactly if the template wrote it (case C19)."""
        return self.tokenizer.encode_guarded(prompt_text)

    def _guard_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages guarded; those that the last prompt began with are known."""
        pairs = zip(self._guarded, messages, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        new = [(copy.deepcopy(message), self._guard_message(message)) for message in messages[kept:]]
        self._last, self._guarded = None, [*self._guarded[:kept], *new]
        return [guarded for _, guarded in self._guarded]

    def _guard_message(self, message: Message) -> Message:
        guarded: Any = self._guard(message) | {"role": message["role"]}
        guarded["content"] = self.tokenizer.guard(message["content"])
        return cast(Message, guarded)

    def _guard(self, value: Any) -> Any:
        """The texts in a tool or a tool call, guarded. Single words are left alone: templates compare them ("string",
        "function") and look them up, and none writes them between the halves of a control token."""
        if isinstance(value, str):
            return value if _WORD.fullmatch(value) else self.tokenizer.guard(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list | tuple) else value

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise TemplateError("There are no messages: a prompt needs at least one.")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise InvalidOption(
                    f"Message {number} is {reprlib.repr(message)}; it must be like "
                    '{"role": "user", "content": "a text"}.'
                )
        unknown = sorted({message["role"] for message in messages} - set(ROLES))
        if unknown:
            raise TemplateError(f"The role {unknown[0]!r} is none of {', '.join(ROLES)}: name one of these.")
        if any(message.get("tool_calls") for message in messages) and not self.template.takes_tools:
            raise TemplateError("This model's chat template takes no tools, so no message can have tool calls.")
        dropped = self._dropped_roles.intersection(message["role"] for message in messages)
        if dropped:
            raise TemplateError(
                f"The model's chat template leaves {min(dropped)} messages out without a word. "
                f"This model's template has no {min(dropped)} role: put it in the first user message."
            )

    @cached_property
    def _dropped_roles(self) -> frozenset[str]:
        """Leading roles whose messages the template drops in silence; a refusal speaks for itself."""
        user = Message(role="user", content=_USER)
        texts = {role: self.template.try_render([Message(role=role, content=_NEXT), user]) for role in _LEADING_ROLES}
        return frozenset(role for role, text in texts.items() if text is not None and _NEXT not in text)

    @cached_property
    def _user_header(self) -> str:
        """What stands before the content of a user's turn that is not the first; '' if that cannot be told."""
        dialogue = [Message(role="user", content=_USER), Message(role="assistant", content=_ANSWER)]
        short = self.template.try_render(dialogue)
        long = self.template.try_render([*dialogue, Message(role="user", content=_NEXT)])
        if short is None or long is None:
            return ""
        _, found, answer_end = short.rpartition(_ANSWER)
        between = long.rpartition(_NEXT)[0].rpartition(_ANSWER)[2]
        size = self._size_in(between, answer_end) if found else None
        return between[size:] if size is not None else ""

    def _pinned_chars(self, guarded: Sequence[Message], text: str) -> int | None:
        """The length of BOS and system prompt, or None if the template does not answer."""
        probe = self.template.try_render([*guarded[: _leading(guarded)], Message(role="user", content=_USER)])
        if probe is None or _USER not in probe:
            return None
        before = probe.rpartition(_USER)[0]
        pinned = before.removesuffix(self._user_header)
        if text.startswith(pinned):
            return len(pinned)
        return len(_common_prefix(text, before).removesuffix(self._user_header))

    def _turn_starts(self, guarded: Sequence[Message], text: str) -> list[int | None]:
        known = self._seen.starts_in(guarded, text)
        starts = [*known, *(self._turn_start(guarded, index, text) for index in range(len(known), len(guarded)))]
        self._seen = _Seen(tuple(guarded), text, tuple(starts))
        return starts

    def _turn_start(self, guarded: Sequence[Message], index: int, text: str) -> int | None:
        """Where a turn begins, or None. The second way is for templates that write the last answer differently."""
        if index == 0:
            return 0
        before = self.template.try_render(guarded[:index])
        size = None if before is None else self._size_in(text, before)
        if size is not None:
            return size
        through = self.template.try_render(guarded[: index + 1])
        if guarded[index]["role"] != "user" or not self._user_header or through is None or not text.startswith(through):
            return None
        content = guarded[index]["content"]
        at = max(through.rfind(self._user_header + spelling) for spelling in (content, content.strip()))
        return at if at >= 0 else None

    def _answer_offset(self, guarded: Sequence[Message], text: str) -> int:
        """Where the generation prompt begins, or the end of the text if there is none."""
        before = self.template.try_render(guarded)
        size = None if before is None else self._size_in(text, before)
        return len(text) if size is None else size

    def _size_in(self, text: str, beginning: str) -> int | None:
        """How much of `text` a rendering of its first messages is; some templates (Phi 3) end every one with EOS."""
        for begin in (beginning, beginning.removesuffix(self.template.eos_token)):
            if text.startswith(begin):
                return len(begin)
        return None


@dataclass(frozen=True)
class _Seen:
    """The turns found last time. A conversation grows at its end, so all but the newest need no rendering again."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    starts: tuple[int | None, ...] = ()

    def starts_in(self, messages: Sequence[Message], text: str) -> tuple[int | None, ...]:
        """Turn starts that still hold: same messages, and the same text up to the last of them."""
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.messages, messages, strict=False))
        starts = self.starts[: sum(1 for _ in pairs)]
        latest = max((start for start in starts if start is not None), default=0)
        return starts if text.startswith(self.text[:latest]) else ()


def _markers(text: str, contents: Sequence[str], borders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Header and footer of each turn, and the header of the answer. A content that is not found (a template may rewrite
    it) has none: nothing in its turn is known to belong together."""
    for content, (start, end) in zip(contents, pairwise(borders), strict=True):
        for spelling in (content, content.strip()):
            if (at := text.find(spelling, start, end)) >= 0:
                yield from ((start, at), (at + len(spelling), end))
                break
    yield borders[-1], len(text)


def _leading(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are the system's."""
    return sum(1 for _ in takewhile(lambda message: message["role"] in _LEADING_ROLES, messages))


def _common_prefix(first: str, second: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _monotone(offsets: Sequence[int | None]) -> tuple[int, ...]:
    """Unknown turns begin with the one before; none begins earlier than that."""
    return tuple(accumulate((offset or 0 for offset in offsets), max))
