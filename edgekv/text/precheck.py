"""The length check: what a prompt needs, what the cache has, and what would be dropped, before anything runs.

Three rules. Nothing is ever cut in silence. The system prompt is never dropped. One message that is larger than the
window is always an error, since it could not even be read whole.

    overflow="error"    prompt + answer must fit the cache                     (the API's default)
    overflow="window"   the oldest turns leave, and the report says which      (the chat's default)

A session has a third, overflow="summarise" (edgekv/notes.py); what it asks of the cache always fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from edgekv.errors import ContextOverflow, InvalidOption
from edgekv.kv.window import Span, Window

Overflow = Literal["error", "window", "summarise"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

LARGER = "load the model with a larger --context"
LONGER = "take a model with a longer context (the cache holds all of this one's)"
"""What whoever loads the model can do; LONGER where a larger cache cannot be had."""

_SERVE_LARGER = "give it more room (a larger --context)"
_SERVE_LONGER = "choose a model with a longer context"


@dataclass(frozen=True)
class LengthReport:
    """What would happen with a prompt. All numbers are tokens."""

    input_tokens: int  # the whole rendered prompt
    reused_tokens: int  # of these, already in the cache (or evicted from it earlier)
    capacity: int
    pinned: int  # the beginning that is never evicted
    max_new_tokens: int | None  # as asked; None: as many as fit, or without end under overflow="window"
    max_allowed: int  # the longest prompt that would be accepted, if it is the newest message that differs
    overflow: Overflow
    evicts: int  # tokens that leave before the answer begins
    evicts_with_answer: int  # ... and by its end, if it takes all of max_new_tokens
    turns_leaving: tuple[int, ...]  # indices of the messages that lose tokens before the answer begins
    turns_gone: tuple[int, ...] = ()  # indices of the messages that have lost tokens already
    problem: str = ""  # why it is refused; empty: it fits
    told_client: str = ""  # the same for someone who sends messages to a server, and has no say in how it runs
    too_long: int = 0  # if refused: the tokens that max_allowed is the limit of (of the prompt, or of one message)
    whole: bool = False  # the cache holds the model's whole context, so that a larger one cannot be had

    @property
    def more_room(self) -> str:
        """What whoever loads the model can do for more room."""
        return LONGER if self.whole else LARGER

    @property
    def fits(self) -> bool:
        """Whether the prompt is accepted."""
        return not self.problem

    @property
    def new_tokens(self) -> int:
        """Tokens that have to be prefilled."""
        return self.input_tokens - self.reused_tokens

    def require(self) -> LengthReport:
        """Return the report itself, or raise.

        Raises:
            ContextOverflow: the prompt does not fit; nothing has been run.
        """
        if self.problem:
            raise ContextOverflow(
                self.problem,
                input_tokens=self.too_long,
                max_allowed=self.max_allowed,
                told_client=self.told_client,
            )
        return self


@dataclass(frozen=True)
class PromptOutline:
    """A prompt without its words: how many tokens, and where turns begin among them."""

    length: int
    turn_starts: Sequence[int] = ()  # token at which each message's turn begins; the first may be behind pinned text
    answer_start: int | None = None  # token at which the answer's turn begins, if the prompt has one
    markers: Sequence[Span] = ()  # tokens that no eviction splits
    pinned: int = 0  # tokens at the beginning that are to be pinned, which may be more than the cache can

    @property
    def all_starts(self) -> tuple[int, ...]:
        """Every token at which an eviction may end on a turn's border: also the answer's, as in the next prompt."""
        return (*self.turn_starts, *(() if self.answer_start is None else (self.answer_start,)))

    def turns_in(self, first: int, last: int) -> tuple[int, ...]:
        """Indices of turns that have tokens in first .. last-1."""
        return turns_between(self.turn_starts, self.length, first, last)


@dataclass(frozen=True)
class _Limit:
    """The most that is accepted and, if the prompt is more, why it is refused and what there is of that.

    Attributes:
        fact: what is too long for what. sender: what its sender can do about it.
        turns_may_leave: another overflow policy is a remedy, too.
    """

    max_allowed: int
    too_long: int = 0
    fact: str = ""
    sender: str = ""
    turns_may_leave: bool = False

    def problem(self, whole: bool) -> str:
        """With what whoever loaded the model can do. whole: the cache cannot be larger."""
        owner = f"or {LONGER if whole else LARGER}"
        if self.turns_may_leave:
            owner = "or use overflow='window'" if whole else "use a larger --context, or overflow='window'"
        return self.fact and f"{self.fact}: {self.sender}, {owner}."

    def told_client(self, whole: bool) -> str:
        """With what the server's owner can do."""
        remedies = [_SERVE_LONGER if whole else _SERVE_LARGER]
        if self.turns_may_leave:
            remedies = [*([] if whole else remedies), "let the oldest turns leave (--overflow window)"]
        fact = self.fact and f"{self.fact}: {self.sender}, or begin a new conversation."
        return fact and f"{fact} Whoever runs this server can {', or '.join(remedies)}."


def check_lengths(
    prompt: PromptOutline,
    state: Window,
    *,
    max_pinned: int,
    max_new_tokens: int | None,
    overflow: Overflow,
    whole: bool = False,
) -> LengthReport:
    """Work out what a prompt would do to the cache.

    Args:
        state: the cache after everything reusable was kept and the rest forgotten; `state.pinned` is what the prompt
            wants pinned. Its reusable tokens are length + evicted.
        max_pinned: the most tokens that may be pinned.
        whole: the cache holds the model's whole context, so that a larger one cannot be advised.

    Raises:
        InvalidOption: an unknown overflow policy.
    """
    if overflow not in OVERFLOWS:
        raise InvalidOption(f"Unknown overflow policy {overflow!r}: choose {' or '.join(OVERFLOWS)}.")
    if overflow == "summarise":
        raise InvalidOption("overflow='summarise' keeps a note from turn to turn, so it needs a session.")
    reused = state.length + state.evicted
    limit = _limit(prompt, state, max_pinned, max_new_tokens, overflow)
    before = answer = state
    if not limit.fact:
        starts = prompt.all_starts[bisect_left(prompt.all_starts, state.pinned + state.evicted) :]
        before = state.forecast(prompt.length - reused, starts, prompt.markers)
        answer = before.forecast(max_new_tokens or 0, starts, prompt.markers)
    return LengthReport(
        input_tokens=prompt.length,
        reused_tokens=reused,
        capacity=state.capacity,
        pinned=state.pinned,
        max_new_tokens=max_new_tokens,
        max_allowed=limit.max_allowed,
        overflow=overflow,
        evicts=before.evicted - state.evicted,
        evicts_with_answer=answer.evicted - state.evicted,
        turns_leaving=prompt.turns_in(state.pinned + state.evicted, state.pinned + before.evicted),
        turns_gone=prompt.turns_in(state.pinned, state.pinned + state.evicted),
        problem=limit.problem(whole),
        told_client=limit.told_client(whole),
        too_long=limit.too_long,
        whole=whole,
    )


def _limit(
    prompt: PromptOutline, state: Window, max_pinned: int, max_new_tokens: int | None, overflow: Overflow
) -> _Limit:
    pinned = max(prompt.pinned, state.pinned)
    if pinned > max_pinned:
        fact = (
            f"The system prompt is {pinned} tokens, but at most {max_pinned} (a quarter of the cache of "
            f"{state.capacity}) can be kept for good"
        )
        return _Limit(max_pinned, pinned, fact, "shorten it")
    if overflow == "error":
        return _limit_of_whole(prompt.length, state.capacity, 1 if max_new_tokens is None else max_new_tokens)
    return _limit_of_message(prompt, state)


def _limit_of_whole(length: int, capacity: int, answer: int) -> _Limit:
    """Prompt and answer must fit the cache."""
    allowed, room = max(0, capacity - answer), capacity - length
    if length <= allowed:
        return _Limit(allowed)
    fact = f"The prompt is {length} tokens and {answer} for the answer are asked for, but the cache holds {capacity}"
    remedies = [f"send at most {allowed} tokens"] if allowed else []
    remedies += [f"ask for at most {room} tokens of answer"] if room > 0 else []
    sender = ", ".join(remedies) or "send less and expect a shorter answer"
    return _Limit(allowed, length, fact, sender, turns_may_leave=True)


def _limit_of_message(prompt: PromptOutline, state: Window) -> _Limit:
    """Each message that is to be read must fit the window."""
    window = state.capacity - state.pinned
    longest = _longest_new_turn(prompt, state)
    if longest > window:
        fact = f"One message is {longest} tokens, but the window behind the {state.pinned} pinned tokens holds {window}"
        return _Limit(window, longest, fact, "split the message")
    if not prompt.turn_starts:
        return _Limit(prompt.length)
    return _Limit(max(prompt.turn_starts[-1], state.length + state.evicted, state.pinned) + window)


def _longest_new_turn(prompt: PromptOutline, state: Window) -> int:
    """Tokens of the longest message that must be read whole. One that has begun to be read, such as the model's own
    last answer, counts only with what is left of it."""
    read = max(state.length + state.evicted, state.pinned)
    first = max(bisect_right(prompt.turn_starts, read) - 1, 0)  # those before it have been read
    spans = pairwise((*prompt.turn_starts[first:], prompt.length))
    return max((stop - max(start, read) for start, stop in spans), default=0)


def turns_between(turn_starts: Sequence[int], input_tokens: int, first: int, last: int) -> tuple[int, ...]:
    """Indices of turns that have tokens in first .. last-1. turn_starts: never decreasing."""
    begin, end = max(bisect_right(turn_starts, first) - 1, 0), bisect_left(turn_starts, last)
    if begin >= end:
        return ()
    inside, stop = turn_starts[begin + 1 : end], (*turn_starts[end : end + 1], input_tokens)[0]
    spans = enumerate(pairwise((max(turn_starts[begin], first), *inside, min(stop, last))), begin)
    return tuple(index for index, (start, stop) in spans if start < stop)
