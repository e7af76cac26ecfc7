"""One engine's cache, spoken to in messages.

`Chat` turns messages into tokens so that what is cached is kept: as long as the newly rendered text begins with the
text that the cached tokens stand for, those tokens are taken as they are and only the rest is tokenised. (A model's own
answer, tokenised again, need not give the tokens it generated.) If history was edited, that holds up to the control
token before the edit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption
from edgekv.generate import Event, Request, Timeline, answer
from edgekv.kv.window import Window
from edgekv.parking import ParkingLot
from edgekv.sampling import SamplingOptions
from edgekv.session_file import CacheIdentity
from edgekv.session_state import ChatState, EncodedText, Seat
from edgekv.text.grammar import Grammars
from edgekv.text.precheck import LengthReport, Overflow, PromptOutline, check_lengths
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
    outline: PromptOutline
    pinned: int = 0  # tokens of BOS and system prompt

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.encoded.ids


class Dialogue:
    """Whose messages they are: a place at the cache and a random stream that goes on from answer to answer. What it has
    in the cache waits while others have their turn, and is freed with it."""

    def __init__(self, seed: int | None = None) -> None:
        self.seat = Seat()
        self.random = np.random.default_rng(seed)


@dataclass(frozen=True)
class ChatRequest:
    """Messages to be answered, and how.

    Attributes:
        tools: what the model may call. dialogue: whose messages they are, if the cache is to be kept for it.
    """

    messages: Sequence[Message]
    sampling: SamplingOptions
    overflow: Overflow
    tools: Sequence[Tool] = ()
    dialogue: Dialogue | None = None


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
        self._closed = False

    def precheck(self, request: ChatRequest) -> LengthReport:
        """What these messages would do to the cache; nothing is run.

        Raises:
            InvalidOption: the chat is closed, or a message is none.
        """
        self._check_open()
        reusable, known = self._view(self._seat_of(request.dialogue))
        return self._check(self._encode(self._render(request), known), reusable, request)

    def stream(self, request: ChatRequest) -> Events:
        """Answer the messages; lengths are checked before this returns.

        Raises:
            ContextOverflow: they do not fit. TemplateError: the template refuses them, or takes no tools.
            InvalidOption: the chat is closed, or a message is none.
        """
        self._check_open()
        self.stop()
        known = self._view(self._seat_of(request.dialogue))[1]
        return self._start(self._encode(self._render(request), known), request)

    def stream_text(self, text: str, sampling: SamplingOptions, overflow: Overflow) -> Events:
        """Continue plain text, without a template; BOS comes first if the model's tokenizer puts it there.

        Raises:
            ContextOverflow: the text does not fit. InvalidOption: there is no text, or the chat is closed.
        """
        self._check_open()
        self.stop()
        bos = (self._add_bos,) if self._add_bos is not None else ()
        ids = (*bos, *self.tokenizer.encode(text))
        if not ids:
            raise InvalidOption("The prompt is empty: give some text to continue.")
        return self._start(
            EncodedPrompt(EncodedText("", ids), PromptOutline(len(ids))), ChatRequest((), sampling, overflow)
        )

    def stop(self) -> None:
        """End an answer that is still being made; what it gave out stays in the cache."""
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def exclusive(self) -> AbstractContextManager[object]:
        """A context for whatever changes the cache outside of an answer."""
        self.stop()
        return nullcontext()

    def close(self) -> None:
        """Free the engine. Whoever asks for anything then, or has waited for a turn, is refused. Twice is fine."""
        with self.exclusive():
            if not self._closed:
                self._closed = True
                self.timeline.engine.close()

    def reset(self, dialogue: Dialogue | None = None) -> None:
        """Forget what a dialogue has in the cache."""
        seat = self._seat_of(dialogue)
        with self.exclusive():
            seat.parked = None
            if seat is self._seated() and not self._closed:
                self._clear()

    def state(self, dialogue: Dialogue) -> ChatState:
        """What a dialogue has in the cache; rows are read when they are asked for, inside of `exclusive`."""
        self._check_open()
        if dialogue.seat is self._seated():
            return ChatState(self.timeline.save(copy=False), self._known)
        return dialogue.seat.parked or ChatState.empty()

    def restore(self, dialogue: Dialogue, state: ChatState) -> None:
        """Give a dialogue the cache with this content, inside of `exclusive`. An empty one costs a reading."""
        self._check_open()
        dialogue.seat.parked = None
        self._sit(dialogue.seat)
        self._clear()
        if state.timeline.engine.tokens:
            self._load(state)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOption("This runtime is closed: load the model again.")

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

    def _render(self, request: ChatRequest) -> Prompt:
        if self._format is None:
            raise InvalidOption("This model has no chat template, so it cannot chat: use generate() to continue text.")
        return self._format.with_tools(request.tools).prompt(request.messages)

    def _start(self, prompt: EncodedPrompt, request: ChatRequest) -> Events:
        self._sit(self._seat_of(request.dialogue))
        report = self._check(prompt, self.timeline.reusable, request).require()
        random = None if request.dialogue is None else request.dialogue.random
        constraint = self._grammars.constraint(request.sampling)
        run = replace(self._request(prompt, report), constraint=constraint, random=random)
        self._active = self._run(prompt, run, request.sampling)
        return self._active

    def _encode(self, prompt: Prompt, known: EncodedText) -> EncodedPrompt:
        known = known.shared_with(prompt.text, self._control_ids)
        tail = self.tokenizer.encode_guarded(prompt.text[len(known.text) :])
        starts = (*known.starts, *(len(known.text) + start for start in tail.starts))
        whole = EncodedText(prompt.text, (*known.ids, *tail.ids), starts)
        turn_starts = tuple(whole.token_at(offset) for offset in prompt.turn_offsets)
        answer_start = whole.token_at(prompt.answer_offset)
        markers = tuple((whole.token_at(start), whole.token_at(end)) for start, end in prompt.markers)
        outline = PromptOutline(len(whole.ids), turn_starts, answer_start, markers)
        return EncodedPrompt(whole, outline, whole.token_at(prompt.pinned_chars))

    def _check(self, encoded: EncodedPrompt, reusable: Reusable, request: ChatRequest) -> LengthReport:
        kv = self.timeline.engine.kv
        state = reusable(encoded.ids, min(encoded.pinned, kv.max_pinned))
        if encoded.pinned > kv.max_pinned:
            state = replace(state, pinned=min(encoded.pinned, kv.capacity - kv.stride))
        return check_lengths(
            encoded.outline,
            state,
            max_pinned=kv.max_pinned,
            max_new_tokens=request.sampling.max_new_tokens,
            overflow=request.overflow,
        )

    def _request(self, encoded: EncodedPrompt, report: LengthReport) -> Request:
        capacity = self.timeline.engine.kv.capacity
        room: int | None = capacity - report.input_tokens
        if report.overflow == "window":  # the window makes room for ever; only an answer without a limit is given one
            room = None if report.max_new_tokens else capacity
        return Request(
            tokens=encoded.ids,
            turn_starts=encoded.outline.all_starts,
            pinned=encoded.pinned,
            eos_ids=frozenset(self.timeline.engine.spec.eos_ids),
            room=room,
            markers=encoded.outline.markers,
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
