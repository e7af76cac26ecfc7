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

Rendering takes as long as the conversation is long, so a message that is added to one costs one rendering and no more:
what the last prompt gave holds as long as the text begins as it did then (told by hashes: nothing is kept of the words
but what the messages are), and a new turn that is written as the probes' turns are needs no rendering to be found.
"""

from __future__ import annotations

import copy
import re
import reprlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product, takewhile
from typing import Any

from edgekv.errors import InvalidOption, TemplateError
from edgekv.slices import common_length
from edgekv.text.hashing import HASH_BYTES, beginning, beginnings
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
        contents: of the messages, as the template got them.
    """

    text: str
    turn_offsets: tuple[int, ...]
    pinned_chars: int
    answer_offset: int
    contents: tuple[str, ...] = ()

    def markers(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """First character and end of what the template wrote around the contents: header and footer of each turn that
        ends behind `start`, and the header of the answer. A content that is not found (a template may rewrite it) has
        none: nothing in its turn is known to belong together."""
        borders = (*self.turn_offsets, self.answer_offset)
        first = max(bisect_right(borders, start) - 1, 0)
        for content, (begin, end) in zip(self.contents[first:], pairwise(borders[first:]), strict=True):
            for spelling in (content, content.strip()):
                if (at := self.text.find(spelling, begin, end)) >= 0:
                    yield from ((begin, at), (at + len(spelling), end))
                    break
        yield borders[-1], len(self.text)


class ChatFormat:
    """How one model wants a conversation: its template and its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._seen = _Seen()
        self._last: tuple[bool, Prompt] | None = None  # the prompt that these messages gave
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

    def prompt(self, messages: Sequence[Message], add_generation_prompt: bool = True, *, keep: bool = True) -> Prompt:
        """Render a conversation.

        Args:
            keep: hold the prompt, in case the same one is asked for again.

        Raises:
            TemplateError: the template refuses the messages, leaves the system prompt out, or a role is unknown.
            InvalidOption: something is no message with a role and a text.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            kind = type(messages).__name__
            raise InvalidOption(f'The messages are a {kind}; they must be a list of {{"role": ..., "content": ...}}.')
        known = self._seen.shared_with(messages)
        last, self._last = self._last, None
        if last is not None and last[0] == add_generation_prompt and known == len(messages) == len(self._seen.messages):
            made = last[1]  # checked first and sent then
        else:
            self._check(messages, known)
            self._seen.go_on(known, map(self._guard_message, messages[known:]))
            made = self._prompt([kept.message() for kept in self._seen.messages], add_generation_prompt)
        self._last = (add_generation_prompt, made) if keep else None
        return made

    def _prompt(self, guarded: Sequence[Message], add_generation_prompt: bool) -> Prompt:
        text = self.template.render(guarded, add_generation_prompt=add_generation_prompt)
        starts = self._turn_starts(guarded, text)
        answer = self._answer_offset(guarded, text) if add_generation_prompt else len(text)
        self._seen.keep(text, starts, answer)
        pinned = self._pinned_chars(guarded, text)
        first = _leading(guarded)
        if first < len(starts):
            pinned = (starts[first] or 0) if pinned is None else pinned
            starts[first] = pinned
        answer = len(text) if answer is None else answer
        contents = tuple(message["content"] for message in guarded)
        return Prompt(text, _monotone(starts), pinned or 0, answer, contents)

    def encode(self, prompt_text: str) -> GuardedEncoding:
        """The ids of a prompt's text; BOS is among them exactly if the template wrote it."""
        return self.tokenizer.encode_guarded(prompt_text)

    def _guard_message(self, message: Message) -> _Guarded:
        content = self.tokenizer.guard(message["content"])
        if len(message) == 2:
            return _Guarded(message["role"], message["content"], content)
        guarded: Any = self._guard(message) | {"role": message["role"], "content": content}
        return _Guarded(message["role"], message["content"], content, (copy.deepcopy(message), guarded))

    def _guard(self, value: Any) -> Any:
        """The texts in a tool or a tool call, guarded. Single words are left alone: templates compare them ("string",
        "function") and look them up, and none writes them between the halves of a control token."""
        if isinstance(value, str):
            return value if _WORD.fullmatch(value) else self.tokenizer.guard(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list | tuple) else value

    def _check(self, messages: Sequence[Message], known: int) -> None:
        """Refuse what is no conversation; the first `known` messages have been checked before."""
        if not messages:
            raise TemplateError("There are no messages: a prompt needs at least one.")
        messages = messages[known:]
        for number, message in enumerate(messages, known):
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
    def _manner(self) -> _Manner:
        """How turns are written, found with a dialogue of three."""
        question = [Message(role="user", content=_USER)]
        dialogue = [*question, Message(role="assistant", content=_ANSWER)]
        whole = self.template.try_render([*dialogue, Message(role="user", content=_NEXT)])
        parts = [] if whole is None else re.split(f"{_USER}|{_ANSWER}|{_NEXT}", whole)
        if len(parts) != 4:
            return _Manner()
        user_end, answer_header = self._border(parts[1], question, _USER)
        answer_end, user_header = self._border(parts[2], dialogue, _ANSWER)
        return _Manner(user_header, user_end, answer_header, answer_end, self._generation_prompt(question))

    def _border(self, between: str, before: Sequence[Message], content: str) -> tuple[str, str]:
        """What stands between two contents, as the end of one turn and the header of the next; '' if it cannot be told.
        `before`: the messages up to the border, the last of which has that content."""
        text = self.template.try_render(before)
        _, found, end = (text or "").rpartition(content)
        size = self._size_in(between, end) if found else None
        return ("", "") if size is None else (between[:size], between[size:])

    def _generation_prompt(self, messages: Sequence[Message]) -> str:
        """What is written for the model to go on behind, or ''."""
        before = self.template.try_render(messages)
        try:
            text = self.template.render(messages)
        except TemplateError:
            return ""
        size = None if before is None else self._size_in(text, before)
        return "" if size is None else text[size:]

    def _pinned_chars(self, guarded: Sequence[Message], text: str) -> int | None:
        """The length of BOS and system prompt, or None if the template does not answer."""
        probe = self.template.try_render([*guarded[: _leading(guarded)], Message(role="user", content=_USER)])
        if probe is None or _USER not in probe:
            return None
        before = probe.rpartition(_USER)[0]
        pinned = before.removesuffix(self._manner.user_header)
        if text.startswith(pinned):
            return len(pinned)
        return len(text[: common_length(text, before)].removesuffix(self._manner.user_header))

    def _turn_starts(self, guarded: Sequence[Message], text: str) -> list[int | None]:
        starts = self._seen.starts_in(text)
        for index in range(len(starts), len(guarded)):
            near = self._manner.next_start(guarded[index - 1 : index + 1], text, starts[-1]) if index else None
            starts.append(self._turn_start(guarded, index, text) if near is None else near)
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
        header = self._manner.user_header
        if guarded[index]["role"] != "user" or not header or through is None or not text.startswith(through):
            return None
        at = max(through.rfind(header + spelling) for spelling in _spellings(guarded[index]))
        return at if at >= 0 else None

    def _answer_offset(self, guarded: Sequence[Message], text: str) -> int | None:
        """Where the generation prompt begins, or None if there is none."""
        near = self._manner.answer_start(guarded[-1], text)
        if near is not None:
            return near
        before = self.template.try_render(guarded)
        return None if before is None else self._size_in(text, before)

    def _size_in(self, text: str, beginning: str) -> int | None:
        """How much of `text` a rendering of its first messages is; some templates (Phi 3) end every one with EOS."""
        for begin in (beginning, beginning.removesuffix(self.template.eos_token)):
            if text.startswith(begin):
                return len(begin)
        return None


@dataclass(frozen=True)
class _Manner:
    """How a template writes the turns of a plain dialogue: header, content, end. Turns that are found written so, to
    the last character, need no rendering to tell where they begin."""

    user_header: str = ""
    user_end: str = ""
    answer_header: str = ""
    answer_end: str = ""
    generation_prompt: str = ""

    def next_start(self, turns: Sequence[Message], text: str, first: int | None) -> int | None:
        """Where the second of two turns begins, if the first begins at `first`; None if it cannot be told."""
        parts = {
            ("user", "assistant"): (self.user_header, self.user_end, self.answer_header),
            ("assistant", "user"): (self.answer_header, self.answer_end, self.user_header),
        }.get((turns[0]["role"], turns[1]["role"]))
        if parts is None or first is None or not parts[2] or any(len(turn) > 2 for turn in turns):
            return None
        for said, next_said in product(*map(_spellings, turns)):
            turn = parts[0] + said + parts[1]
            if text.startswith(turn + parts[2] + next_said, first):
                return first + len(turn)
        return None

    def answer_start(self, question: Message, text: str) -> int | None:
        """Where the generation prompt begins behind a question at the end; None if it cannot be told."""
        if question["role"] == "user" and self.generation_prompt:
            for said in _spellings(question):
                if text.endswith(self.user_header + said + self.user_end + self.generation_prompt):
                    return len(text) - len(self.generation_prompt)
        return None


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A message as it was given and as the template gets it, in few bytes: a conversation has many."""

    role: str
    content: str
    guarded: str  # the content; the same object where there is nothing to guard
    whole: tuple[Message, Message] | None = None  # a copy of it, and that guarded, if it has more than role and content

    def is_of(self, message: Any) -> bool:
        if self.whole is not None:
            return bool(message == self.whole[0])
        mapping = type(message) is dict or isinstance(message, Mapping)  # the first is quick to tell
        plain = mapping and len(message) == 2
        return plain and message.get("content") == self.content and message.get("role") == self.role

    def message(self) -> Message:
        return Message(role=self.role, content=self.guarded) if self.whole is None else self.whole[1]


@dataclass(frozen=True)
class _AnswerTurn:
    """Where an answer was to begin: there begins the next message's turn, if what it stood behind is still the same."""

    start: int
    before: bytes  # hash
    header: str

    def holds(self, text: str) -> bool:
        return text.startswith(self.header, self.start) and beginning(text, self.start) == self.before


class _Seen:
    """The messages of the last prompt, and where their turns began. A conversation grows at its end, so all but the
    newest need no guarding and no rendering again."""

    def __init__(self) -> None:
        self.messages: list[_Guarded] = []
        self._starts = array("q")  # of the first messages; -1: not to be told
        self._hashes = bytearray()  # of the text up to the latest of these starts so far, 16 bytes each
        self._answer: _AnswerTurn | None = None

    def shared_with(self, messages: Sequence[Any]) -> int:
        """How many messages these begin with."""
        pairs = zip(self.messages, messages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0].is_of(pair[1]), pairs))

    def go_on(self, known: int, new: Iterable[_Guarded]) -> None:
        """There are these messages behind the first `known`, and no others. Where a turn begins that could not be told
        may be told when messages behind it are gone."""
        taken_back = known < len(self.messages)
        if taken_back:
            self._answer = None
        self._forget(self._starts.index(-1) if taken_back and -1 in self._starts[:known] else known)
        self.messages[known:] = new

    def starts_in(self, text: str) -> list[int | None]:
        """Turn starts that still hold: the text is the same up to the last of them."""
        answer, self._answer = self._answer, None
        if answer is not None and answer.holds(text):
            if len(self._starts) < len(self.messages):
                self._add(answer.start, answer.before)
        elif self._starts and beginning(text, max(self._starts)) != self._hashes[-HASH_BYTES:]:
            self._forget(0)
        return [start if start >= 0 else None for start in self._starts]

    def keep(self, text: str, starts: Sequence[int | None], answer: int | None) -> None:
        """Remember where turns begin, those that `starts_in` gave and the ones behind; and where the answer's does."""
        ends = list(accumulate((start or 0 for start in starts), max))
        new, at = range(len(self._starts), len(starts)), ends[-1] if answer is None else max(answer, ends[-1])
        hashes = beginnings(text, [*ends[new.start :], at])
        for index in new:
            start = starts[index]
            self._add(-1 if start is None else start, next(hashes))
        if answer is not None and ends[-1] <= answer < len(text):
            self._answer = _AnswerTurn(answer, next(hashes), text[answer:])

    def _add(self, start: int, before: bytes) -> None:
        self._starts.append(start)
        self._hashes += before

    def _forget(self, known: int) -> None:
        """The starts behind the first `known`."""
        del self._starts[known:], self._hashes[known * HASH_BYTES :]


def _spellings(message: Message) -> tuple[str, ...]:
    """A content as templates write it."""
    content = message["content"]
    return (content,) if content == content.strip() else (content, content.strip())


def _leading(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are the system's."""
    return sum(1 for _ in takewhile(lambda message: message["role"] in _LEADING_ROLES, messages))


def _monotone(offsets: Sequence[int | None]) -> tuple[int, ...]:
    """Unknown turns begin with the one before; none begins earlier than that."""
    return tuple(accumulate((offset or 0 for offset in offsets), max))
