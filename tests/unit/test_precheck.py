"""The length check against a plain model on lists: what is refused, what leaves, and numbers that are true."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import ContextOverflow, InvalidOption
from edgekv.kv.window import Window
from edgekv.text.precheck import LengthReport, PromptOutline, check_lengths

CAPACITY, STRIDE = 256, 32
EMPTY = Window(capacity=CAPACITY, stride=STRIDE, pinned=4)


def check(
    turns: list[int], state: Window = EMPTY, *, overflow: Any = "error", max_new_tokens: int | None = None
) -> LengthReport:
    """A prompt of turns of so many tokens, the first of them the system prompt."""
    starts = [0, *accumulate(turns)]
    return check_lengths(
        PromptOutline(starts[-1], starts[:-1]),
        state,
        max_pinned=state.capacity // 4,
        max_new_tokens=max_new_tokens,
        overflow=overflow,
    )


# ---- overflow="error" ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_tokens", "max_new_tokens", "fits"),
    [
        (CAPACITY - 1, None, True),  # room for one token of answer
        (CAPACITY, None, False),
        (CAPACITY + 1, None, False),
        (CAPACITY - 1, 1, True),
        (CAPACITY - 10, 10, True),
        (CAPACITY - 9, 10, False),
        (CAPACITY - 11, 10, True),
        (CAPACITY + 1, 10, False),
        (1, CAPACITY - 1, True),
        (1, CAPACITY, False),
        (1, CAPACITY + 99, False),
    ],
)
def test_the_border(input_tokens: int, max_new_tokens: int | None, fits: bool) -> None:
    """case C02: one token decides, and it decides only between all and nothing."""
    report = check([input_tokens], max_new_tokens=max_new_tokens)
    assert report.fits is fits
    assert report.evicts == report.evicts_with_answer == 0
    assert report.turns_leaving == ()
    assert report.input_tokens == input_tokens


def test_refusal_has_both_numbers() -> None:
    """case C01: the exception carries how many there are and how many may be; the text has a way out for each."""
    with pytest.raises(ContextOverflow) as caught:
        check([10, 290], max_new_tokens=20).require()
    error = caught.value
    assert (error.input_tokens, error.max_allowed) == (300, CAPACITY - 20)
    for text in ("300", "20", "256", "send at most 236", "--context", "overflow='window'"):
        assert text in str(error)


@pytest.mark.parametrize(
    ("turns", "pinned", "overflow", "sender", "owner"),
    [
        ([10, 290], 4, "error", "send at most 236 tokens", "--overflow window"),
        ([65, 10], 65, "window", "shorten it", "--context"),
        ([4, 400], 4, "window", "split the message", "--context"),
    ],
)
def test_a_client_is_told_what_a_client_can_do(
    turns: list[int], pinned: int, overflow: Any, sender: str, owner: str
) -> None:
    """Through a server: first the sender's own ways out; options only as what the server's owner can set."""
    with pytest.raises(ContextOverflow) as caught:
        check(turns, replace(EMPTY, pinned=pinned), overflow=overflow, max_new_tokens=20).require()
    own, _, owners = caught.value.told_client.partition(" Whoever runs this server can ")
    assert sender in own
    assert own.endswith("or begin a new conversation.")
    assert "--" not in own
    assert owner in owners
    assert str(caught.value).startswith(own[: own.index(":")])


def test_advice_about_the_answer_is_possible() -> None:
    """An answer larger than the cache: no negative lengths are recommended, and the length that is fits."""
    report = check([40], max_new_tokens=1000)
    assert "send at most" not in report.problem
    assert "ask for at most 216 tokens" in report.problem
    assert report.max_allowed == 0
    assert check([40], max_new_tokens=216).fits
    assert not check([40], max_new_tokens=217).fits
    assert "ask for" not in check([CAPACITY], max_new_tokens=1000).problem


@given(input_tokens=st.integers(1, 600), max_new_tokens=st.none() | st.integers(1, 600), capacity=st.integers(64, 512))
def test_max_allowed_is_true_under_error(input_tokens: int, max_new_tokens: int | None, capacity: int) -> None:
    """Property: a prompt of exactly max_allowed passes and one more does not, whatever was tried first."""
    state = Window(capacity=capacity, stride=8, pinned=4)
    allowed = check([input_tokens], state, max_new_tokens=max_new_tokens).max_allowed
    assert check([input_tokens], state, max_new_tokens=max_new_tokens).fits == (input_tokens <= allowed)
    if allowed:
        assert check([allowed], state, max_new_tokens=max_new_tokens).fits
    assert not check([allowed + 1], state, max_new_tokens=max_new_tokens).fits


# ---- the system prompt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["error", "window"])
def test_a_system_prompt_larger_than_a_quarter(overflow: Any) -> None:
    """case C03: it is never cut, so it is refused, with its own length and the most that would be kept."""
    limit = CAPACITY // 4
    report = check([limit + 1, 10], replace(EMPTY, pinned=limit + 1), overflow=overflow)
    with pytest.raises(ContextOverflow, match=r"system prompt is 65 tokens.*64.*--context") as caught:
        report.require()
    assert (caught.value.input_tokens, caught.value.max_allowed) == (limit + 1, limit)
    assert check([limit, 10], replace(EMPTY, pinned=limit), overflow=overflow).fits


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 64))
def test_the_system_prompt_never_leaves(turns: list[int], system: int) -> None:
    """Property, case C03: turn 0 is pinned, and is never among those that lose tokens."""
    report = check([system, *turns], replace(EMPTY, pinned=system), overflow="window", max_new_tokens=2000)
    assert 0 not in report.turns_leaving


# ---- overflow="window" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [CAPACITY - 4, CAPACITY - 3, 10 * CAPACITY])
@pytest.mark.parametrize("before", [[4], [4, 100]])
def test_one_message_larger_than_the_window(message: int, before: list[int]) -> None:
    """It could not even be read whole: an error with its length and the window's, wherever it stands."""
    window = CAPACITY - 4
    for turns in ([*before, message], [*before, message, 5]):
        report = check(turns, overflow="window")
        assert report.fits is (message <= window)
        if not report.fits:
            with pytest.raises(ContextOverflow, match=f"One message is {message} tokens.*{window}") as caught:
                report.require()
            assert (caught.value.input_tokens, caught.value.max_allowed) == (message, window)
            assert report.evicts == 0
            assert report.turns_leaving == ()


def test_a_first_message_that_begins_among_the_sinks() -> None:
    """Without a system prompt the first message's first tokens are sinks; it is measured from there on."""
    for length, fits in ((CAPACITY, True), (CAPACITY + 1, False)):
        prompt = PromptOutline(length, [1])
        assert check_lengths(prompt, EMPTY, max_pinned=64, max_new_tokens=None, overflow="window").fits is fits


def test_text_without_turns_streams_through() -> None:
    """Plain text has no messages; under overflow="window" any length goes through, and what leaves is counted."""
    report = check_lengths(PromptOutline(1000), EMPTY, max_pinned=64, max_new_tokens=None, overflow="window")
    assert report.fits
    assert report.evicts == 768
    assert report.turns_leaving == ()


class Tokens:
    """The cache as a list of (turn, token) of what it holds; eviction in the policy's words, token by token."""

    def __init__(self, pinned: int, stride: int, capacity: int) -> None:
        self.pinned, self.stride, self.capacity = pinned, stride, capacity
        self.held: list[int] = []
        self.gone: list[int] = []

    def feed(self, numbers: range, starts: list[int]) -> None:
        for number in numbers:
            if len(self.held) == self.capacity:
                cut = self.pinned + self._leaving(starts)
                self.gone += self.held[self.pinned : cut]
                del self.held[self.pinned : cut]
            self.held.append(number)

    def _leaving(self, starts: list[int]) -> int:
        """How many of the oldest leave: the stride, or up to twice as many if a turn begins just behind them."""
        window = [*self.held[self.pinned :], self.held[-1] + 1]
        for count in range(self.stride, 2 * self.stride + 1):
            if count < len(window) and window[count] in starts:
                return count
        return min(self.stride, len(window) - 1)


@given(
    turns=st.lists(st.integers(1, 90), min_size=1, max_size=14),
    system=st.integers(0, 24),
    stride=st.integers(1, 48),
    answer=st.integers(1, 300),
    told=st.integers(0, 14),
)
def test_the_report_says_exactly_what_leaves(
    turns: list[int], system: int, stride: int, answer: int, told: int
) -> None:
    """Property: fed token by token into a list, a cache loses exactly the tokens and turns that were announced; also
    when the first turns were already in it."""
    capacity, pinned = 96, max(4, system)
    lengths = [max(system, 1), *turns]
    starts = [0, *accumulate(lengths)]
    total, first = starts.pop(), starts[min(told, len(starts) - 1)]
    known = [start for start in starts if start >= pinned]
    cache = Tokens(pinned, stride, capacity)
    cache.feed(range(first), known)
    state = Window(capacity=capacity, stride=stride, pinned=pinned).forecast(first, known)
    assert (state.length, state.evicted) == (len(cache.held), len(cache.gone))
    earlier = len(cache.gone)
    prompt = PromptOutline(total, starts)
    report = check_lengths(prompt, state, max_pinned=24, max_new_tokens=answer, overflow="window")
    if not report.fits:
        stops = [*starts[1:], total]
        assert max(stop - max(start, pinned) for start, stop in zip(starts, stops, strict=True)) > capacity - pinned
        return
    cache.feed(range(first, total), known)
    leaving = cache.gone[earlier:]
    assert report.evicts == len(leaving)
    assert report.new_tokens == total - first
    owners = [max(index for index, start in enumerate(starts) if start <= number) for number in leaving]
    assert report.turns_leaving == tuple(sorted(set(owners)))
    cache.feed(range(total, total + answer), known)
    assert report.evicts_with_answer == len(cache.gone) - earlier


@given(turns=st.lists(st.integers(1, 100), min_size=1, max_size=6), pinned=st.integers(1, 64))
def test_max_allowed_is_true_under_window(turns: list[int], pinned: int) -> None:
    """Property: the newest message may grow until the prompt has exactly max_allowed tokens, and not by one more."""
    state = replace(EMPTY, pinned=pinned)
    report = check([pinned, *turns], state, overflow="window")
    assert report.fits
    rest = sum(turns[:-1]) + pinned
    assert check([pinned, *turns[:-1], report.max_allowed - rest], state, overflow="window").fits
    assert not check([pinned, *turns[:-1], report.max_allowed - rest + 1], state, overflow="window").fits


@given(message=st.integers(1, 600), pinned=st.integers(1, 64))
def test_max_allowed_of_a_refused_message_is_true(message: int, pinned: int) -> None:
    """Property: what is refused is compared with what would not be: a message of max_allowed passes, +1 does not."""
    state = replace(EMPTY, pinned=pinned)
    report = check([pinned, message, 7], state, overflow="window")
    assert report.fits == (message <= CAPACITY - pinned)
    if not report.fits:
        assert report.too_long == message
        assert check([pinned, report.max_allowed, 7], state, overflow="window").fits
        assert not check([pinned, report.max_allowed + 1, 7], state, overflow="window").fits


def test_nothing_is_changed() -> None:
    """The check is a forecast: the cache's state is what it was."""
    state = replace(EMPTY, length=200, evicted=64)
    check([4, 300, 200], state, overflow="window")
    assert state == replace(EMPTY, length=200, evicted=64)


def test_unknown_policy() -> None:
    """Refused with the two there are."""
    with pytest.raises(InvalidOption, match=r"'truncate'.*error or window"):
        check([10], overflow="truncate")
