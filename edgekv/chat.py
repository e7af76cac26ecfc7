"""One engine's cache, spoken to in messages.

`Chat` turns messages into tokens so that what is cached is kept: as long as the newly rendered text begins with the
text that the cached tokens stand for, those tokens are taken as they are and only the rest is tokenised. (A model's own
answer, tokenised again, need not give the tokens it generated.) If history was edited, that holds up to the control
token before the edit.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edgekv.encoded import EncodedText, ids_array
from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption, TemplateError
from edgekv.generate import Event, Request, Timeline, answer
from edgekv.kv.window import Window
from edgekv.parking import ParkingLot
from edgekv.sampling import SamplingOptions
from edgekv.session_file import CacheIdentity
from edgekv.session_state import ChatState, Seat
from edgekv.text.grammar import Grammars
from edgekv.text.precheck import LengthReport, Overflow, PromptOutline, check_lengths
from edgekv.text.prompt import ChatFormat, Prompt
from edgekv.text.template import Message, Tool
from edgekv.text.tokenizer import GUARD, Tokenizer

Events = Generator[Event, None, None]
Reusable = Callable[[Sequence[int], int], Window]
"""(a prompt's tokens, how many of them to pin) -> the state of a cache that keeps what it can of the prompt."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens.

    Attributes:
        ids: all of them.
        prompt, encoded: what they stand for; no prompt if it is plain text, which is not known again.
    """

    ids: array[int]
    outline: PromptOutline
    prompt: Prompt | None = None
    encoded: EncodedText = field(default_factory=EncodedText)


@dataclass(frozen=True)
class _Held:
    """What a dialogue has in the cache, or could take over there.

    Attributes:
        passed: all ids that have passed through the cache. known: the text that they stand for.
    """

    reusable: Reusable
    passed: array[int]
    known: EncodedText


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
        held = self._view(self._seat_of(request.dialogue))
        prompt = self._encode(self._render(request, keep=True), held)
        return self._check(prompt, self._state(prompt, held.reusable), request)

    def stream(self, request: ChatRequest) -> Events:
        """Answer the messages; lengths are checked before this returns.

        Raises:
            ContextOverflow: they do not fit. TemplateError: the template refuses them, or takes no tools.
            InvalidOption: the chat is closed, or a message is none.
        """
        self._check_open()
        self.stop()
        held = self._view(self._seat_of(request.dialogue))
        return self._start(self._encode(self._render(request, keep=False), held), request)

    def stream_text(self, text: str, sampling: SamplingOptions, overflow: Overflow) -> Events:
        """Continue plain text, without a template; BOS comes first if the model's tokenizer puts it there.

        Raises:
            ContextOverflow: the text does not fit. InvalidOption: there is no text, or the chat is closed.
        """
        self._check_open()
        self.stop()
        bos = (self._add_bos,) if self._add_bos is not None else ()
        ids = ids_array([*bos, *self.tokenizer.encode(text)])
        if not ids:
            raise InvalidOption("The prompt is empty: give some text to continue.")
        return self._start(EncodedPrompt(ids, PromptOutline(len(ids))), ChatRequest((), sampling, overflow))

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

    def _view(self, seat: Seat) -> _Held:
        """What a dialogue has or, if it has nothing yet, can take over from the one before it."""
        if seat.parked is not None:
            history = seat.parked.timeline.history
            return _Held(partial(history.reusable, self.timeline.engine.kv), history.tokens, seat.parked.known)
        return _Held(self.timeline.reusable, self.timeline.history.tokens, self._known)

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
            try:
                self._load(parked)
            except OSError:  # its file cannot be read: then its words are read again
                self._clear()

    def _load(self, state: ChatState) -> None:
        self._known = EncodedText()
        self.timeline.load(state.timeline)
        self._known = state.known

    def _clear(self) -> None:
        self.timeline.reset()
        self._known = EncodedText()

    def _render(self, request: ChatRequest, *, keep: bool) -> Prompt:
        if self._format is None:
            raise InvalidOption("This model has no chat template, so it cannot chat: use generate() to continue text.")
        return self._format.with_tools(request.tools).prompt(request.messages, keep=keep)

    def _start(self, prompt: EncodedPrompt, request: ChatRequest) -> Events:
        self._sit(self._seat_of(request.dialogue))
        state = self._state(prompt, self.timeline.reusable)
        report = self._check(prompt, state, request).require()
        random = None if request.dialogue is None else request.dialogue.random
        constraint = self._grammars.constraint(request.sampling)
        run = replace(self._request(prompt, report), constraint=constraint, random=random)
        self._active = self._run(self._staying(prompt, state), run, request.sampling)
        return self._active

    def _encode(self, prompt: Prompt, held: _Held) -> EncodedPrompt:
        known = held.known.shared_with(prompt.text, held.passed, self._control_ids)
        tail = self.tokenizer.encode_guarded(prompt.text[known.chars :])
        whole = known.followed_by(prompt.text[known.chars :], tail.ids, tail.starts)
        turn_starts = whole.tokens_at(prompt.turn_offsets)
        spans = prompt.markers(whole.departed.chars)
        markers = tuple((whole.token_at(start), whole.token_at(end)) for start, end in spans)
        pinned, answer = whole.token_at(prompt.pinned_chars), whole.token_at(prompt.answer_offset)
        outline = PromptOutline(whole.tokens, turn_starts, answer, markers, pinned)
        ids = held.passed[: whole.departed.tokens] + whole.ids
        if not ids:
            raise TemplateError("The model's chat template makes nothing of these messages: another one is needed.")
        return EncodedPrompt(ids, outline, prompt, whole)

    def _staying(self, prompt: EncodedPrompt, state: Window) -> EncodedText | None:
        """A prompt's text and ids without what has left by now; None for a text that is not to be known again."""
        if prompt.prompt is None:
            return None
        turns = tuple(zip(prompt.prompt.turn_offsets, prompt.outline.turn_starts, strict=True))
        left = state.pinned + state.evicted if state.evicted else 0
        return prompt.encoded.without(left, prompt.prompt.text, prompt.ids, turns, self._control_ids)

    def _state(self, prompt: EncodedPrompt, reusable: Reusable) -> Window:
        """The cache when it keeps what it can of a prompt."""
        return reusable(prompt.ids, min(prompt.outline.pinned, self.timeline.engine.kv.max_pinned))

    def _check(self, prompt: EncodedPrompt, state: Window, request: ChatRequest) -> LengthReport:
        engine = self.timeline.engine
        return check_lengths(
            prompt.outline,
            state,
            max_pinned=engine.kv.max_pinned,
            max_new_tokens=request.sampling.max_new_tokens,
            overflow=request.overflow,
            whole=engine.kv.holds_all_of(engine.spec.max_context),
        )

    def _request(self, prompt: EncodedPrompt, report: LengthReport) -> Request:
        capacity = self.timeline.engine.kv.capacity
        room: int | None = capacity - report.input_tokens
        if report.overflow == "window":  # the window makes room for ever; only an answer without a limit is given one
            room = None if report.max_new_tokens else capacity
        return Request(
            tokens=prompt.ids,
            turn_starts=prompt.outline.all_starts,
            pinned=prompt.outline.pinned,
            eos_ids=frozenset(self.timeline.engine.spec.eos_ids),
            room=room,
            markers=prompt.outline.markers,
        )

    def _run(self, prompt: EncodedText | None, request: Request, sampling: SamplingOptions) -> Events:
        self._known = EncodedText()
        try:
            yield from answer(self.timeline, self.tokenizer, request, sampling)
        finally:
            if prompt is not None:
                self._known = self._after_answer(prompt, request.tokens)

    def _after_answer(self, prompt: EncodedText, ids: Sequence[int]) -> EncodedText:
        """The text that tokens stand for: the prompt's, and that of those of the answer that are in the cache."""
        passed = self.timeline.history.tokens
        if passed[: len(ids)] != ids:  # it was not read to its end
            return prompt
        said = passed[len(ids) :]
        text = self.tokenizer.guard(self.tokenizer.decode(said)).removesuffix(GUARD)  # which more of the text may undo
        return prompt.followed_by(text, said, [0] * len(said))
