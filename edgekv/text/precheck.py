"""The length check: what a prompt needs, what the cache has, and what would be dropped, before anything runs.

Three rules. Nothing is ever cut in silence. The system prompt is never dropped. One message that is larger than the
window is always an error, since it could not even be read whole.

    overflow="error"    prompt + answer must fit the cache                     (the API's default)
    overflow="window"   the oldest turns leave, and the report says which      (the chat's default)

A session has a third, overflow="summarise" (edgekv/notes.py); what it asks of the cache always fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from edgekv.errors import ContextOverflow, InvalidOption
from edgekv.kv.window import Span, Window

Overflow = Literal["error", "window", "summarise"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


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
    too_long: int = 0  # if refused: the tokens that max_allowed is the limit of (of the prompt, or of one message)

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
            raise ContextOverflow(self.problem, input_tokens=self.too_long, max_allowed=self.max_allowed)
        return self


def check_lengths(
    *,
    input_tokens: int,
    turn_starts: Sequence[int],
    state: Window,
    max_pinned: int,
    max_new_tokens: int | None,
    overflow: Overflow,
    answer_start: int | None = None,
    markers: Sequence[Span] = (),
) -> LengthReport:
    """Work out what a prompt would do to the cache.

    Args:
        turn_starts: token at which each message's turn begins; the first may be preceded by pinned text.
        state: the cache after everything reusable was kept and the rest forgotten; `state.pinned` is what the prompt
            wants pinned. Its reusable tokens are length + evicted.
        max_pinned: the most tokens that may be pinned.
        answer_start: token at which the answer's turn begins, if the prompt has one.
        markers: tokens that no eviction splits.

    Raises:
        InvalidOption: an unknown overflow policy.
    """
    if overflow not in OVERFLOWS:
        raise InvalidOption(f"Unknown overflow policy {overflow!r}: choose {' or '.join(OVERFLOWS)}.")
    if overflow == "summarise":
        raise InvalidOption("overflow='summarise' keeps a note from turn to turn, so it needs a session.")
    reused = state.length + state.evicted
    borders = turn_starts if answer_start is None else (*turn_starts, answer_start)
    starts = tuple(start for start in borders if start >= state.pinned)
    problem, max_allowed, too_long = _problem(input_tokens, turn_starts, state, max_pinned, max_new_tokens, overflow)
    before = answer = state
    if not problem:
        before = state.forecast(input_tokens - reused, starts, markers)
        answer = before.forecast(max_new_tokens or 0, starts, markers)
    return LengthReport(
        input_tokens=input_tokens,
        reused_tokens=reused,
        capacity=state.capacity,
        pinned=state.pinned,
        max_new_tokens=max_new_tokens,
        max_allowed=max_allowed,
        overflow=overflow,
        evicts=before.evicted - state.evicted,
        evicts_with_answer=answer.evicted - state.evicted,
        turns_leaving=turns_between(
            turn_starts, input_tokens, state.pinned + state.evicted, state.pinned + before.evicted
        ),
        turns_gone=turns_between(turn_starts, input_tokens, state.pinned, state.pinned + state.evicted),
        problem=problem,
        too_long=too_long,
    )


def _problem(
    input_tokens: int,
    turn_starts: Sequence[int],
    state: Window,
    max_pinned: int,
    max_new_tokens: int | None,
    overflow: Overflow,
) -> tuple[str, int, int]:
    """(why the prompt is refused or "", the most that would not be, what there is of that)."""
    capacity = state.capacity
    if state.pinned > max_pinned:
        text = (
            f"The system prompt is {state.pinned} tokens, but at most {max_pinned} (a quarter of the cache of "
            f"{capacity}) can be kept for good: shorten it, or load the model with a larger --context."
        )
        return text, max_pinned, state.pinned
    if overflow == "error":
        wanted = 1 if max_new_tokens is None else max_new_tokens
        allowed, room = max(0, capacity - wanted), capacity - input_tokens
        if input_tokens > allowed:
            remedies = [f"send at most {allowed} tokens"] if allowed else []
            remedies += [f"ask for at most {room} tokens of answer"] if room > 0 else []
            text = (
                f"The prompt is {input_tokens} tokens and {wanted} for the answer are asked for, but the cache holds "
                f"{capacity}: {', '.join([*remedies, 'use a larger --context'])}, or overflow='window'."
            )
            return text, allowed, input_tokens
        return "", allowed, 0
    window = capacity - state.pinned
    longest = _longest_new_turn(turn_starts, input_tokens, state)
    if longest > window:
        text = (
            f"One message is {longest} tokens, but the window behind the {state.pinned} pinned tokens holds "
            f"{window}: split the message, or load the model with a larger --context."
        )
        return text, window, longest
    if not turn_starts:
        return "", input_tokens, 0
    return "", max(turn_starts[-1], state.length + state.evicted, state.pinned) + window, 0


def _longest_new_turn(turn_starts: Sequence[int], input_tokens: int, state: Window) -> int:
    """Tokens of the longest message that must be read whole. One that has begun to be read, such as the model's own
    last answer, counts only with what is left of it."""
    reused = state.length + state.evicted
    spans = pairwise((*turn_starts, input_tokens))
    sizes = (stop - max(start if start >= reused else reused, state.pinned) for start, stop in spans)
    return max(sizes, default=0)


def turns_between(turn_starts: Sequence[int], input_tokens: int, first: int, last: int) -> tuple[int, ...]:
    """Indices of turns that have tokens in first .. last-1."""
    spans = enumerate(pairwise((*turn_starts, input_tokens)))
    return tuple(index for index, (start, stop) in spans if max(start, first) < min(stop, last))
