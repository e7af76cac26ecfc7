"""Conversations over one cache.

`Chat` turns messages into tokens so that what is cached is kept: as long as the newly rendered text begins with the
text that the cached tokens stand for, those tokens are taken as they are and only the rest is tokenised. (A model's own
answer, tokenised again, need not give the tokens it generated.) If history was edited, that holds up to the control
token before the edit.

`Session` is one dialogue: it holds the messages, and after every answer, finished or interrupted, the text that was
shown is what is remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption
from edgekv.generate import Event, Finished, NotedDown, PrefillProgress, Request, TextDelta, Timeline, answer
from edgekv.kv.window import Span, Window
from edgekv.notes import Notepad, Task, next_task
from edgekv.parking import ParkingLot
from edgekv.sampling import SamplingOptions
from edgekv.session_file import CacheIdentity, read_session, write_session
from edgekv.session_state import ChatState, EncodedText, Seat, SessionState
from edgekv.text.grammar import Grammars
from edgekv.text.precheck import LengthReport, Overflow, check_lengths
from edgekv.text.prompt import ChatFormat, Prompt
from edgekv.text.template import Message, Tool
from edgekv.text.tokenizer import Tokenizer

Events = Generator[Event, None, None]
Reusable = Callable[[Sequence[int], int], Window]
"""(a prompt's tokens, how many of them to pin) -> the state of a cache that keeps what it can of the prompt."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens."""

    encoded: EncodedText
    turn_starts: tuple[int, ...] = ()  # token at which each message's turn begins
    answer_start: int | None = None  # token at which the answer's turn begins
    pinned: int = 0  # tokens of BOS and system prompt
    markers: tuple[Span, ...] = ()  # tokens that the template wrote as one

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

    Several dialogues may share it, each with a `Seat` of its own; calls without one are a dialogue, too. When another
    one has its turn, what the cache holds is parked, and comes back when it is needed again.

    Args:
        add_bos: the id that the tokenizer puts before plain text, if it does. Templates write their own.
        identity: what the cache's numbers mean, for saved sessions. lot: where contents of the cache are parked.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        chat_format: ChatFormat | None,
        add_bos: int | None = None,
        identity: CacheIdentity | None = None,
        lot: ParkingLot | None = None,
    ) -> None:
        self.timeline = Timeline(engine)
        self.identity, self._lot = identity, lot or ParkingLot()
        self._own_seat = Seat()
        self._seated = weakref.ref(self._own_seat)  # who has the cache; a dialogue that is gone has no claim to it
        self.tokenizer, self._format, self._add_bos = tokenizer, chat_format, add_bos
        self._grammars = Grammars(tokenizer, engine.spec.vocab_size, engine.spec.eos_ids)
        self._control_ids = frozenset(map(tokenizer.token_id, tokenizer.special_tokens))
        self._known = EncodedText()
        self._active: Events | None = None

    def precheck(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions,
        overflow: Overflow,
        tools: Sequence[Tool] = (),
        dialogue: Dialogue | None = None,
    ) -> LengthReport:
        """What these messages would do to the cache; nothing is run."""
        reusable, known = self._view(self._seat_of(dialogue))
        return self._check(self._encode(self._render(messages, tools), known), reusable, sampling, overflow)

    def stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions,
        overflow: Overflow,
        tools: Sequence[Tool] = (),
        dialogue: Dialogue | None = None,
    ) -> Events:
        """Answer the messages; lengths are checked before this returns.

        Args:
            dialogue: whose messages they are, if the cache is to be kept for it.

        Raises:
            ContextOverflow: they do not fit. TemplateError: the template refuses them, or takes no tools.
        """
        self.stop()
        seat, random = self._seat_of(dialogue), dialogue.random if dialogue else None
        encoded = self._encode(self._render(messages, tools), self._view(seat)[1])
        return self._start(encoded, seat, sampling, overflow, random)

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
        return self._start(EncodedPrompt(EncodedText("", ids)), self._own_seat, sampling, overflow)

    def stop(self) -> None:
        """End an answer that is still being made; what it gave out stays in the cache."""
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def exclusive(self) -> AbstractContextManager[object]:
        """A context for whatever changes the cache outside of an answer."""
        self.stop()
        return nullcontext()

    def reset(self, dialogue: Dialogue | None = None) -> None:
        """Forget what a dialogue has in the cache."""
        seat = self._seat_of(dialogue)
        with self.exclusive():
            seat.parked = None
            if seat is self._seated():
                self._clear()

    def state(self, dialogue: Dialogue) -> ChatState:
        """What a dialogue has in the cache; rows are read when they are asked for, inside of `exclusive`."""
        if dialogue.seat is self._seated():
            return ChatState(self.timeline.save(copy=False), self._known)
        return dialogue.seat.parked or ChatState.empty()

    def restore(self, dialogue: Dialogue, state: ChatState) -> None:
        """Give a dialogue the cache with this content, inside of `exclusive`. An empty one costs a reading."""
        dialogue.seat.parked = None
        self._sit(dialogue.seat)
        self._clear()
        if state.timeline.engine.tokens:
            self._load(state)

    def _seat_of(self, dialogue: Dialogue | None) -> Seat:
        return self._own_seat if dialogue is None else dialogue.seat

    def _view(self, seat: Seat) -> tuple[Reusable, EncodedText]:
        """What a dialogue has or, if it has nothing yet, can take over from the one before it."""
        if seat.parked is not None:
            return partial(seat.parked.timeline.passed.reusable, self.timeline.engine.kv), seat.parked.known
        return self.timeline.reusable, self._known

    def _sit(self, seat: Seat) -> None:
        """Give the cache to a dialogue. One that has nothing parked begins with what is there: the same system prompt
        need not be read again."""
        before = self._seated()
        if seat is before:
            return
        parked, seat.parked = seat.parked, None  # first, so that it is not what has to make room
        if before is not None and self.timeline.window.length:
            self._lot.park(before, ChatState(self.timeline.save(copy=False), self._known))
        self._seated = weakref.ref(seat)
        if parked is not None:
            self._load(parked)

    def _load(self, state: ChatState) -> None:
        self._known = EncodedText()
        self.timeline.load(state.timeline)
        self._known = state.known

    def _clear(self) -> None:
        self.timeline.reset()
        self._known = EncodedText()

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        if self._format is None:
            raise InvalidOption("This model has no chat template, so it cannot chat: use generate() to continue text.")
        return self._format.with_tools(tools).prompt(messages)

    def _start(
        self,
        prompt: EncodedPrompt,
        seat: Seat,
        sampling: SamplingOptions,
        overflow: Overflow,
        random: np.random.Generator | None = None,
    ) -> Events:
        self._sit(seat)
        report = self._check(prompt, self.timeline.reusable, sampling, overflow).require()
        constraint = self._grammars.constraint(sampling)
        request = replace(self._request(prompt, report), constraint=constraint, random=random)
        self._active = self._run(prompt, request, sampling)
        return self._active

    def _encode(self, prompt: Prompt, known: EncodedText) -> EncodedPrompt:
        known = known.shared_with(prompt.text, self._control_ids)
        tail = self.tokenizer.encode_guarded(prompt.text[len(known.text) :])
        starts = (*known.starts, *(len(known.text) + start for start in tail.starts))
        whole = EncodedText(prompt.text, (*known.ids, *tail.ids), starts)
        turn_starts = tuple(whole.token_at(offset) for offset in prompt.turn_offsets)
        answer_start = whole.token_at(prompt.answer_offset)
        markers = tuple((whole.token_at(start), whole.token_at(end)) for start, end in prompt.markers)
        return EncodedPrompt(whole, turn_starts, answer_start, whole.token_at(prompt.pinned_chars), markers)

    def _check(
        self, encoded: EncodedPrompt, reusable: Reusable, sampling: SamplingOptions, overflow: Overflow
    ) -> LengthReport:
        kv = self.timeline.engine.kv
        state = reusable(encoded.ids, min(encoded.pinned, kv.max_pinned))
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
            markers=encoded.markers,
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
            markers=encoded.markers,
        )

    def _run(self, prompt: EncodedPrompt, request: Request, sampling: SamplingOptions) -> Events:
        self._known = EncodedText()
        try:
            yield from answer(self.timeline, self.tokenizer, request, sampling)
        finally:
            self._remember(prompt.encoded)

    def _remember(self, prompt: EncodedText) -> None:
        """The text that tokens stand for: the prompt's, and that of those of the answer that are in the cache."""
        held = tuple(self.timeline.tokens)
        if prompt.text and held[: len(prompt.ids)] == prompt.ids:
            said = held[len(prompt.ids) :]
            text = prompt.text + self.tokenizer.guard(self.tokenizer.decode(said))
            self._known = EncodedText(text, held, (*prompt.starts, *[len(prompt.text)] * len(said)))
        elif prompt.text:  # it was not read to its end
            self._known = prompt


class Dialogue:
    """Whose messages they are: a place at the cache and a random stream that goes on from answer to answer."""

    def __init__(self, seed: int | None) -> None:
        self.seat = Seat()
        self.random = np.random.default_rng(seed)


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
        self._pad = Notepad()
        self._dialogue = Dialogue(self.sampling.seed)
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
        messages = self._pad.view([*self.messages, Message(role="user", content=text)])
        policy: Overflow = "window" if self.overflow == "summarise" else self.overflow
        return self._chat.precheck(messages, sampling or self.sampling, policy, dialogue=self._dialogue)

    @property
    def note(self) -> str:
        """What the model noted down of turns that have left (overflow="summarise"), or an empty string."""
        return self._pad.note

    def send(self, text: str, sampling: SamplingOptions | None = None) -> Events:
        """Say something and stream the answer. If the text is refused, the conversation is as it was.

        Raises:
            ContextOverflow: the text does not fit. TemplateError: the template refuses it.
        """
        messages = [*self.messages, Message(role="user", content=text)]
        chosen = sampling or self.sampling
        if chosen.seed is not None and chosen.seed != self.sampling.seed:
            self._dialogue.random = np.random.default_rng(chosen.seed)
        if self.overflow == "summarise":
            self.precheck(text, chosen).require()
            return self._record(messages, self._with_notes(messages, chosen))
        events = self._chat.stream(messages, chosen, self.overflow, dialogue=self._dialogue)
        return self._record(messages, events)

    @property
    def last_question(self) -> str:
        """What the user said last, or an empty string."""
        said = [message["content"] for message in self.messages if message["role"] == "user"]
        return said[-1] if said else ""

    def undo(self) -> bool:
        """Take back the last exchange; False if there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        if last >= 0:
            self._chat.stop()
            del self.messages[last:]
            self._pad = self._pad.without(self.messages)
        return last >= 0

    def reset(self) -> None:
        """Forget the dialogue; the system prompt stays."""
        self._chat.reset(self._dialogue)
        self._pad = Notepad()
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def save(self, path: Path) -> str:
        """Write messages, cache and random stream to a file, atomically; returns its SHA-256.

        Raises:
            StorageError: it cannot be written; what was there is untouched. InvalidOption: the cache has no identity.
        """
        identity = self._identity()
        with self._chat.exclusive():
            return write_session(path, self._state(), identity, self._chat.timeline.engine.kv.capacity)

    def load(self, path: Path, *, reread: bool = False) -> None:
        """Go on with a saved session, as if it had never stopped; this one is as it was if that is refused.

        Args:
            reread: take only the words; they are read again with the next message.

        Raises:
            SessionError: it is missing, damaged, or for another model, dtype, scales or capacity.
        """
        capacity = self._chat.timeline.engine.kv.capacity
        state = read_session(path, None if reread else self._identity(), capacity)
        with self._chat.exclusive():
            self._chat.restore(self._dialogue, state.chat)
        self.messages, self.sampling, self.overflow = list(state.messages), state.sampling, state.overflow
        self._dialogue.random.bit_generator.state = state.random
        self._pad = Notepad(state.note, state.noted)

    def _identity(self) -> CacheIdentity:
        if self._chat.identity is None:
            raise InvalidOption("This session's cache does not say what it holds, so it cannot be saved or loaded.")
        return self._chat.identity

    def _state(self) -> SessionState:
        random = dict(self._dialogue.random.bit_generator.state)
        chat = self._chat.state(self._dialogue)
        words, pad = tuple(self.messages), self._pad
        return SessionState(words, self.sampling, self.overflow, random, chat, pad.note, pad.noted)

    def _with_notes(self, messages: list[Message], sampling: SamplingOptions) -> Events:
        """Note down what must leave for these messages to have room, then answer them."""
        kv = self._chat.timeline.engine.kv
        wanted = min(sampling.max_new_tokens or kv.stride, kv.max_pinned)
        while (found := self._measure(self._pad.view(messages)).input_tokens) + wanted > kv.capacity:
            yield from self._take_note(next_task(self._pad, messages, self._measure))
        room = min(sampling.max_new_tokens or kv.capacity, kv.capacity - found)
        chosen = replace(sampling, max_new_tokens=room)
        events = self._chat.stream(self._pad.view(messages), chosen, "error", dialogue=self._dialogue)
        try:
            yield from events
        finally:
            events.close()

    def _take_note(self, task: Task) -> Events:
        events = self._chat.stream(task.messages, task.sampling, "error", dialogue=self._dialogue)
        text = ""
        try:
            for event in events:
                if isinstance(event, Finished):
                    text = event.text
                elif isinstance(event, PrefillProgress):
                    yield event
        finally:
            events.close()
        self._pad = task.result(text, self._chat.tokenizer)
        yield NotedDown(self._pad.note, self._pad.noted)

    def _measure(self, messages: Sequence[Message]) -> LengthReport:
        return self._chat.precheck(messages, self.sampling, "window", dialogue=self._dialogue)

    def _record(self, messages: list[Message], events: Events) -> Events:
        """Pass the events on; at the end, however it comes, remember what was shown."""
        shown, finished = "", False
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    shown += event.text
                finished = isinstance(event, Finished) and event.finish_reason != "time"
                yield event
        finally:
            events.close()
            if shown or finished:
                self.messages = [*messages, Message(role="assistant", content=shown)]
