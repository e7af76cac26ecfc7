"""Conversations over one cache.

`Chat` turns messages into tokens so that what is cached is kept: as long as the newly rendered text begins with the
text that the cached tokens stand for, those tokens are taken as they are and only the rest is tokenised. (A model's own
answer, tokenised again, need not give the tokens it generated.) If history was edited, that holds up to the control
token before the edit.

`Session` is one dialogue: it holds the messages, and after every answer, finished or interrupted, the text that was
shown is what is remembered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption
from edgekv.generate import Event, Finished, Request, TextDelta, Timeline, answer
from edgekv.sampling import SamplingOptions
from edgekv.text.grammar import Grammars
from edgekv.text.precheck import LengthReport, Overflow, check_lengths
from edgekv.text.prompt import ChatFormat, Prompt
from edgekv.text.template import Message, Tool
from edgekv.text.tokenizer import Tokenizer

Events = Generator[Event, None, None]


@dataclass(frozen=True)
class EncodedText:
    """Text and its tokens, with the character at which each token starts."""

    text: str = ""
    ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def token_at(self, offset: int) -> int:
        """Index of the first token that starts at or after a character."""
        return bisect_left(self.starts, offset)

    def shared_with(self, text: str, control_ids: frozenset[int | None]) -> EncodedText:
        """The part that another text begins with. Where they differ, it ends before the last control token they share:
        only there do the tokens on either side not depend on one another."""
        if text.startswith(self.text):
            return self
        common = _common_chars(self.text, text)
        shared = bisect_right(self.starts, common)
        cut = next((index for index in range(shared - 1, 0, -1) if self.ids[index] in control_ids), 0)
        return EncodedText(self.text[: self.starts[cut]], self.ids[:cut], self.starts[:cut]) if cut else EncodedText()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens."""

    encoded: EncodedText
    turn_starts: tuple[int, ...] = ()  # token at which each message's turn begins
    answer_start: int | None = None  # token at which the answer's turn begins
    pinned: int = 0  # tokens of BOS and system prompt

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.encoded.ids

    @property
    def all_starts(self) -> tuple[int, ...]:
        """Every token at which an eviction may end on a turn's border: also the answer's, as in the next prompt."""
        return self.turn_starts if self.answer_start is None else (*self.turn_starts, self.answer_start)


class Chat:
    """One engine's cache, spoken to in messages. One answer at a time: starting another one ends the first.

    Args:
        add_bos: the id that the tokenizer puts before plain text, if it does. Templates write their own.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, chat_format: ChatFormat | None, add_bos: int | None = None
    ) -> None:
        self.timeline = Timeline(engine)
        self.tokenizer, self._format, self._add_bos = tokenizer, chat_format, add_bos
        self._grammars = Grammars(tokenizer, engine.spec.vocab_size, engine.spec.eos_ids)
        self._control_ids = frozenset(map(tokenizer.token_id, tokenizer.special_tokens))
        self._known = EncodedText()
        self._active: Events | None = None

    def precheck(
        self, messages: Sequence[Message], sampling: SamplingOptions, overflow: Overflow, tools: Sequence[Tool] = ()
    ) -> LengthReport:
        """What these messages would do to the cache; nothing is run."""
        return self._check(self._encode(self._render(messages, tools)), sampling, overflow)

    def stream(
        self, messages: Sequence[Message], sampling: SamplingOptions, overflow: Overflow, tools: Sequence[Tool] = ()
    ) -> Events:
        """Answer the messages; lengths are checked before this returns.

        Raises:
            ContextOverflow: they do not fit. TemplateError: the template refuses them, or takes no tools.
        """
        self.stop()
        return self._start(self._encode(self._render(messages, tools)), sampling, overflow)

    def stream_text(self, text: str, sampling: SamplingOptions, overflow: Overflow) -> Events:
        """Continue plain text, without a template; BOS comes first if the model's tokenizer puts it there.

        Raises:
            ContextOverflow: the text does not fit. InvalidOption: there is no text.
        """
        self.stop()
        bos = (self._add_bos,) if self._add_bos is not None else ()
        ids = (*bos, *self.tokenizer.encode(text))
        if not ids:
            raise InvalidOption("The prompt is empty: give some text to continue.")
        return self._start(EncodedPrompt(EncodedText("", ids)), sampling, overflow)

    def stop(self) -> None:
        """End an answer that is still being made; what it gave out stays in the cache."""
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def reset(self) -> None:
        """Empty the cache."""
        self.stop()
        self.timeline.reset()
        self._known = EncodedText()

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        if self._format is None:
            raise InvalidOption("This model has no chat template, so it cannot chat: use generate() to continue text.")
        return self._format.with_tools(tools).prompt(messages)

    def _start(self, prompt: EncodedPrompt, sampling: SamplingOptions, overflow: Overflow) -> Events:
        report = self._check(prompt, sampling, overflow).require()
        request = replace(self._request(prompt, report), constraint=self._grammars.constraint(sampling))
        self._active = self._run(prompt, request, sampling)
        return self._active

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        known = self._known.shared_with(prompt.text, self._control_ids)
        tail = self.tokenizer.encode_guarded(prompt.text[len(known.text) :])
        starts = (*known.starts, *(len(known.text) + start for start in tail.starts))
        whole = EncodedText(prompt.text, (*known.ids, *tail.ids), starts)
        turn_starts = tuple(whole.token_at(offset) for offset in prompt.turn_offsets)
        answer_start = whole.token_at(prompt.answer_offset)
        return EncodedPrompt(whole, turn_starts, answer_start, whole.token_at(prompt.pinned_chars))

    def _check(self, encoded: EncodedPrompt, sampling: SamplingOptions, overflow: Overflow) -> LengthReport:
        kv = self.timeline.engine.kv
        state = self.timeline.reusable(encoded.ids, min(encoded.pinned, kv.max_pinned))
        if encoded.pinned > kv.max_pinned:
            state = replace(state, pinned=min(encoded.pinned, kv.capacity - kv.stride))
        return check_lengths(
            input_tokens=len(encoded.ids),
            turn_starts=encoded.turn_starts,
            answer_start=encoded.answer_start,
            state=state,
            max_pinned=kv.max_pinned,
            max_new_tokens=sampling.max_new_tokens,
            overflow=overflow,
        )

    def _request(self, encoded: EncodedPrompt, report: LengthReport) -> Request:
        capacity = self.timeline.engine.kv.capacity
        room: int | None = capacity - report.input_tokens
        if report.overflow == "window":  # the window makes room for ever; only an answer without a limit is given one
            room = None if report.max_new_tokens else capacity
        return Request(
            tokens=encoded.ids,
            turn_starts=encoded.all_starts,
            pinned=encoded.pinned,
            eos_ids=frozenset(self.timeline.engine.spec.eos_ids),
            room=room,
        )

    def _run(self, prompt: EncodedPrompt, request: Request, sampling: SamplingOptions) -> Events:
        self._known = EncodedText()
        try:
            yield from answer(self.timeline, self.tokenizer, request, sampling)
        finally:
            self._remember(prompt.encoded)

    def _remember(self, prompt: EncodedText) -> None:
        """The cached tokens stand for the prompt's text and the text of those of the answer that are among them."""
        held = tuple(self.timeline.tokens)
        said = held[len(prompt.ids) :]
        if prompt.text and held == (*prompt.ids, *said):
            text = prompt.text + self.tokenizer.guard(self.tokenizer.decode(said))
            self._known = EncodedText(text, held, (*prompt.starts, *[len(prompt.text)] * len(said)))


class Session:
    """One dialogue.

    Args:
        chat: the cache it runs on. system: the system prompt. sampling, overflow: defaults of every answer.
    """

    def __init__(
        self, chat: Chat, *, system: str = "", sampling: SamplingOptions | None = None, overflow: Overflow = "window"
    ) -> None:
        self._chat = chat
        self.sampling = sampling or SamplingOptions()
        self.overflow: Overflow = overflow
        self.messages: list[Message] = []
        if system:
            self.set_system(system)

    @property
    def system(self) -> str:
        """The system prompt, or an empty string."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Set, change or (with an empty text) remove the system prompt."""
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [Message(role="system", content=text), *rest] if text else rest

    def precheck(self, text: str, sampling: SamplingOptions | None = None) -> LengthReport:
        """What sending this text would do to the cache; nothing is run."""
        return self._chat.precheck(
            [*self.messages, Message(role="user", content=text)], sampling or self.sampling, self.overflow
        )

    def send(self, text: str, sampling: SamplingOptions | None = None) -> Events:
        """Say something and stream the answer. If the text is refused, the conversation is as it was.

        Raises:
            ContextOverflow: the text does not fit. TemplateError: the template refuses it.
        """
        messages = [*self.messages, Message(role="user", content=text)]
        events = self._chat.stream(messages, sampling or self.sampling, self.overflow)
        return self._record(messages, events)

    def undo(self) -> bool:
        """Take back the last exchange; False if there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        if last >= 0:
            self._chat.stop()
            del self.messages[last:]
        return last >= 0

    def reset(self) -> None:
        """Forget the dialogue; the system prompt stays."""
        self._chat.reset()
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def _record(self, messages: list[Message], events: Events) -> Events:
        """Pass the events on; at the end, however it comes, remember what was shown."""
        shown, finished = "", False
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    shown += event.text
                finished = isinstance(event, Finished)
                yield event
        finally:
            events.close()
            if shown or finished:
                self.messages = [*messages, Message(role="assistant", content=shown)]


def _common_chars(first: str, second: str) -> int:
    """Length of the common beginning of two texts, by bisection: comparing slices is fast, characters are not."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
