"""From a prompt's tokens to an answer's events: the cache's timeline, prefill, decode, and stopping at any moment.

`Timeline` is what an engine cannot know: which tokens have passed, evicted ones included, so that the longest prefix
shared with the next prompt can be kept. `answer` is a generator of events; whoever consumes it may stop at any event
(close it, or raise) and the cache is left holding exactly the tokens whose text was given out.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from edgekv.engines.base import Engine, EngineState, Logits
from edgekv.kv.window import Span, TokenHistory, Window
from edgekv.sampling import Constraint, Sampler, SamplingOptions, TokenScore, score_token
from edgekv.text.detokenize import StreamDetokenizer
from edgekv.text.precheck import turns_between
from edgekv.text.tokenizer import Tokenizer

PREFILL_STEP = 256
"""Tokens between two progress events (and chances to stop) while a prompt is read."""

FinishReason = Literal["stop", "length", "time", "interrupted"]


@dataclass(frozen=True)
class Usage:
    """What one answer took. Tokens and seconds."""

    input_tokens: int
    reused_tokens: int  # of the input, not prefilled again
    output_tokens: int = 0
    evicted_tokens: int = 0  # left during this prompt and answer
    evicted_turns: tuple[int, ...] = ()  # indices of the messages that these are from; the answer's is the last
    prefill_s: float = 0.0  # until the first token was chosen, or the time was up before it
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed."""
        return (self.output_tokens - 1) / self.decode_s if self.output_tokens > 1 and self.decode_s else 0.0


@dataclass(frozen=True)
class PrefillProgress:
    """So many of the new tokens of the prompt have been read."""

    done: int
    total: int


@dataclass(frozen=True)
class Evicted:
    """Tokens have left the cache."""

    tokens: int
    total: int  # since the conversation began
    turns: tuple[int, ...] = ()  # indices of the messages that they are from; the answer's is the last


@dataclass(frozen=True)
class TextDelta:
    """More text of the answer. The pieces joined are the answer."""

    text: str


@dataclass(frozen=True)
class TokenScored:
    """A token has been chosen; only with `top_logprobs`. It comes before the text that the token settles."""

    text: str
    score: TokenScore
    top: tuple[str, ...] = ()  # the texts of score.top


@dataclass(frozen=True)
class Finished:
    """The answer is complete."""

    text: str
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class NotedDown:
    """Turns have left, and the model's note on them is pinned in their place (overflow="summarise")."""

    note: str
    messages: int  # how many it is about, counted from the first after the system prompt


Event = PrefillProgress | Evicted | NotedDown | TokenScored | TextDelta | Finished


@dataclass(frozen=True)
class TimelineState:
    """A copy of a timeline and of the cache's content."""

    engine: EngineState
    gone: Sequence[int]  # evicted tokens, in order
    pinned: int

    @property
    def history(self) -> TokenHistory:
        """As `Timeline.history`."""
        return _history(self.engine.tokens, self.gone, self.pinned)


class Timeline:
    """All tokens that have passed through an engine's cache since it was empty, and which of them are still there."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pinned = engine.kv.sinks
        self._gone = array("i")  # evicted tokens, in order: 4 bytes each, for a chat that never ends

    @property
    def pinned(self) -> int:
        """S: how many tokens at the beginning are never evicted."""
        return self._pinned

    @property
    def tokens(self) -> list[int]:
        """Every token since the cache was empty."""
        return list(self.history.tokens)

    @property
    def history(self) -> TokenHistory:
        """The tokens, and how many of them have left."""
        self._heal()
        return _history(self.engine.tokens, self._gone, self._pinned)

    @property
    def window(self) -> Window:
        """The cache's state in integers."""
        self._heal()
        engine = self.engine
        return Window(engine.kv.capacity, engine.kv.stride, self._pinned, engine.length, engine.evicted)

    def reusable(self, tokens: Sequence[int], pinned: int) -> Window:
        """The state that `rewind` would leave; nothing is changed."""
        state = self.history.reusable(self.engine.kv, tokens, pinned)
        return state if self.engine.keeps(state.length) else state.truncate(0)

    def rewind(self, tokens: Sequence[int], pinned: int) -> int:
        """Keep the longest prefix shared with `tokens`, forget the rest, pin `pinned` tokens; returns its length."""
        state = self.reusable(tokens, pinned)
        self.engine.truncate(state.length)
        if not state.evicted:
            self._gone = array("i")
        self._pinned = state.pinned
        return state.length + state.evicted

    def append(
        self,
        tokens: Sequence[int],
        turn_starts: Sequence[int] = (),
        markers: Sequence[Span] = (),
        *,
        all_logits: bool = False,
    ) -> tuple[Logits, int]:
        """Run tokens, evicting whenever the cache is full. Returns (logits as Engine.forward's, tokens evicted)."""
        engine = self.engine
        if len(tokens) <= engine.kv.capacity - engine.length:
            return engine.forward(tokens, all_logits=all_logits), 0
        moves = self.window.moves(len(tokens), turn_starts, markers)
        before, leaving = engine.evicted, [*engine.tokens, *tokens][self._pinned :]
        try:
            logits = engine.append(tokens, moves, all_logits=all_logits)
        finally:  # whatever has happened, as many as the engine says
            self._gone.extend(leaving[: max(engine.evicted - before, 0)])
        return logits, engine.evicted - before

    def truncate(self, count: int) -> None:
        """Forget the last tokens so that `count` in all remain; evicted ones cannot be forgotten."""
        self.engine.truncate(max(count - self.window.evicted, 0))

    def reset(self) -> None:
        """Forget everything."""
        self.engine.reset()
        self._gone = array("i")

    def save(self, *, copy: bool = True) -> TimelineState:
        """The state now. Without `copy` the cache's rows are read when they are asked for; see `Engine.save`."""
        self._heal()
        return TimelineState(self.engine.save(copy=copy), self._gone[:], self._pinned)

    def load(self, state: TimelineState) -> None:
        """Go back to a saved state, of this engine or of another of the same model, scales and dtype."""
        self.reset()
        self.engine.load(state.engine)
        self._gone, self._pinned = array("i", state.gone), state.pinned

    def _heal(self) -> None:
        """An eviction that was interrupted leaves the engine empty: then nothing is remembered either."""
        if len(self._gone) != self.engine.evicted:
            self._gone = array("i")
            self.engine.reset()


@dataclass(frozen=True)
class Request:
    """One prompt, ready to run."""

    tokens: Sequence[int]
    turn_starts: Sequence[int]
    pinned: int
    eos_ids: frozenset[int]
    room: int | None  # the most tokens the answer may have; None: no limit
    constraint: Constraint | None = None  # what the answer must follow
    markers: Sequence[Span] = ()  # what the template wrote as one, which no eviction splits
    random: np.random.Generator | None = None  # the random stream to go on with; None: a new one


def answer(timeline: Timeline, tokenizer: Tokenizer, request: Request, sampling: SamplingOptions) -> Iterator[Event]:
    """Run a prompt and stream the answer; the last event is `Finished`.

    If the consumer stops early, the cache forgets every token whose text it was not given.
    """
    run = _Answer(timeline, tokenizer, request, sampling)
    try:
        yield from run.prefill()
        yield from run.decode()
    finally:
        run.settle()
    yield run.finished()


class _Answer:
    """The state of one answer while it is being made."""

    def __init__(self, timeline: Timeline, tokenizer: Tokenizer, request: Request, sampling: SamplingOptions) -> None:
        self._timeline, self._request, self._sampling = timeline, request, sampling
        self._tokenizer = tokenizer
        self._detokenizer = StreamDetokenizer(tokenizer, sampling.stop)
        self._sampler = Sampler(sampling, request.constraint, request.random)
        self._started = time.perf_counter()
        self._usage = Usage(len(request.tokens), timeline.rewind(request.tokens, request.pinned))
        self._logits: Logits | None = None
        self._output: list[int] = []
        self._reason: FinishReason = "interrupted"

    def prefill(self) -> Iterator[Event]:
        new = self._request.tokens[self._usage.reused_tokens :]
        for start in range(0, len(new), PREFILL_STEP):
            if start:
                yield PrefillProgress(start, len(new))
            if start and self._late():
                return
            yield from self._append(new[start : start + PREFILL_STEP])

    def decode(self) -> Iterator[Event]:
        limit = min(x for x in (self._request.room, self._sampling.max_new_tokens, 1 << 62) if x is not None)
        while not self._late():
            token = self._choose()
            if token in self._request.eos_ids:
                self._reason = "stop"
                break
            self._output.append(token)
            yield from self._score(token)
            yield from self._text(self._detokenizer.add(token))
            if self._detokenizer.stopped or len(self._output) >= limit:
                self._reason = "stop" if self._detokenizer.stopped else "length"
                break
            yield from self._append([token])
        yield from self._text(self._detokenizer.finish())
        if self._detokenizer.stopped:  # in the last token
            self._reason = "stop"

    def settle(self) -> None:
        """Leave in the cache the prompt and those tokens of the answer that were given out as text."""
        prefill_s = self._usage.prefill_s or time.perf_counter() - self._started
        self._usage = replace(self._usage, output_tokens=len(self._output), prefill_s=prefill_s)
        self._usage = replace(self._usage, decode_s=self._decode_s())
        window, prompt = self._timeline.window, len(self._request.tokens)
        held = window.length + window.evicted
        if held > prompt:
            shown = self._shown_tokens(held - prompt)
            if held > prompt + shown:
                self._timeline.truncate(prompt + shown)

    def _shown_tokens(self, held: int) -> int:
        """Of the answer's tokens in the cache, how many stand for text that was given out, and for nothing more."""
        count = min(held, self._detokenizer.shown_tokens)
        while not self._detokenizer.shown.startswith(self._tokenizer.decode(self._output[:count])):
            count -= 1
        return count

    def finished(self) -> Finished:
        return Finished(self._detokenizer.shown, self._reason, self._usage)

    def _choose(self) -> int:
        assert self._logits is not None, "a prompt has at least one token, so prefill has set the logits"
        token = self._sampler(self._logits, self._output)
        if not self._output:
            self._usage = replace(self._usage, prefill_s=time.perf_counter() - self._started)
        return token

    def _score(self, token: int) -> Iterator[Event]:
        if self._sampling.top_logprobs is not None:
            assert self._logits is not None, "the token was chosen from them"
            score = score_token(self._logits, token, self._sampling.top_logprobs)
            piece = self._tokenizer.piece
            yield TokenScored(piece(token), score, tuple(piece(other) for other, _ in score.top))

    def _late(self) -> bool:
        """Whether the time is up; then that is the reason for the end."""
        limit = self._sampling.max_seconds
        if limit is None or time.perf_counter() - self._started < limit:
            return False
        self._reason = "time"
        return True

    def _append(self, tokens: Sequence[int]) -> Iterator[Event]:
        request, usage, before = self._request, self._usage, self._timeline.window
        self._logits, evicted = self._timeline.append(tokens, request.turn_starts, request.markers)
        if evicted:
            first, last = (before.pinned + count for count in (before.evicted, before.evicted + evicted))
            turns = turns_between(request.turn_starts, max(last, len(request.tokens)), first, last)
            gone = tuple(sorted({*usage.evicted_turns, *turns}))
            self._usage = replace(usage, evicted_tokens=usage.evicted_tokens + evicted, evicted_turns=gone)
            yield Evicted(evicted, self._timeline.engine.evicted, turns)

    def _decode_s(self) -> float:
        return time.perf_counter() - self._started - self._usage.prefill_s if self._output else 0.0

    @staticmethod
    def _text(text: str) -> Iterator[Event]:
        if text:
            yield TextDelta(text)


def _history(held: Sequence[int], gone: Sequence[int], pinned: int) -> TokenHistory:
    tokens = array("i", held[:pinned]) + array("i", gone) + array("i", held[pinned:])
    return TokenHistory(tokens, pinned, len(gone))
