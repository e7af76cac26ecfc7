"""kv/window.py against a model on plain lists (helpers/schedule.py), over random tokens, turns and take-backs.

The list model holds the numbers of the tokens in the cache and deletes from it; it knows nothing of lengths, offsets or
moves. What must agree at every step is which tokens are there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from helpers.schedule import leaving
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import CacheFull, InvalidOption
from edgekv.kv.window import Window


@dataclass(frozen=True)
class Run:
    """A cache, the gaps between turns, and what happens to it: n > 0 tokens arrive, n < 0 are taken back."""

    capacity: int
    stride: int
    pinned: int
    gaps: list[int]
    steps: list[int] = field(default_factory=list)

    @property
    def turns(self) -> tuple[int, ...]:
        starts, at = [], 0
        for gap in self.gaps:
            starts.append(at)
            at += gap
        return tuple(starts)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    capacity = draw(st.integers(2, 80))
    stride = draw(st.integers(1, capacity))
    pinned = draw(st.integers(0, capacity - stride))
    gaps = draw(st.lists(st.integers(1, 2 * capacity), max_size=60))
    steps = draw(st.lists(st.integers(-5, 3 * capacity).filter(bool), min_size=1, max_size=30))
    return Run(capacity, stride, pinned, gaps, steps)


@given(runs(), st.integers(1, 10_000))
def test_a_forecast_of_any_number_is_quick(run: Run, more: int) -> None:
    """An answer may be asked for that is longer than any computer could count to."""
    state = Window(run.capacity, run.stride, run.pinned)
    far = state.forecast(10**18, run.turns)
    assert far.length + far.evicted == 10**18
    assert far.forecast(more, run.turns) == state.forecast(10**18 + more, run.turns)


@settings(max_examples=400, deadline=None)
@given(runs())
def test_equals_lists(run: Run) -> None:
    """Thousands of tokens an example: after each, length, evicted and the tokens held are those of the list model."""
    follow(run)


@pytest.mark.slow
def test_equals_lists_for_millions_of_tokens() -> None:
    """The same over three million tokens of seeded random runs."""
    chance, tokens = random.Random(0), 0
    while tokens < 3_000_000:
        capacity = chance.randint(2, 80)
        stride = chance.randint(1, capacity)
        gaps = [chance.randint(1, 2 * capacity) for _ in range(chance.randrange(60))]
        steps = [chance.choice((-5, -1, 1, capacity, 3 * capacity)) for _ in range(chance.randint(1, 300))]
        tokens += follow(Run(capacity, stride, chance.randint(0, capacity - stride), gaps, steps))


def follow(run: Run) -> int:
    """Run beside the list model; returns how many tokens arrived."""
    state = Window(run.capacity, run.stride, run.pinned)
    held: list[int] = []  # the list model
    slots: list[int] = []  # what the moves make of an array of slots
    for step in run.steps:
        if step < 0:
            length = max(len(held) + step, run.pinned, 1) if held else 0
            if length < len(held):
                state, held, slots = state.truncate(length), held[:length], slots[:length]
            continue
        for _ in range(step):
            arriving = state.length + state.evicted
            gone = leaving(held, run.capacity, run.stride, run.pinned, run.turns)
            if gone:
                move = state.next_move(run.turns)
                assert (move.start, move.length) == (run.pinned, len(slots))
                slots[move.start :] = slots[move.start + move.count :]
                state = state.apply(move)
                held = [number for number in held if number not in gone]
            state, held, slots = state.append(1), [*held, arriving], [*slots, arriving]
            assert slots == held
            assert (state.length, state.length + state.evicted) == (len(held), arriving + 1)
    return sum(step for step in run.steps if step > 0)


@settings(max_examples=400, deadline=None)
@given(runs())
def test_invariants(run: Run) -> None:
    """Case C03: the pinned never leave, order is kept, the capacity is never exceeded, some slot becomes free."""
    state, slots, total = Window(run.capacity, run.stride, run.pinned), list[int](), sum(map(abs, run.steps))
    for number in range(total):
        if not state.room:
            with pytest.raises(CacheFull):
                state.append(1)
            move = state.next_move(run.turns)
            assert 1 <= move.count <= 2 * run.stride
            assert move.count >= min(run.stride, run.capacity - run.pinned)
            del slots[move.start : move.start + move.count]
            state = state.apply(move)
        state = state.append(1)
        slots.append(number)
        assert slots[: run.pinned] == list(range(min(run.pinned, len(slots))))
        window = slots[run.pinned :]
        assert window == list(range(number + 1 - len(window), number + 1))
        assert len(slots) == state.length <= run.capacity


@settings(max_examples=400, deadline=None)
@given(runs())
def test_whole_turns_leave(run: Run) -> None:
    """If a turn starts between G and 2 G tokens behind the oldest, the eviction ends at the first such start."""
    state = Window(run.capacity, run.stride, run.pinned).forecast(sum(map(abs, run.steps)), run.turns)
    if state.room:
        return
    oldest = state.pinned + state.evicted
    newest = state.length + state.evicted  # the number that the arriving token will have
    zone = range(oldest + run.stride, min(oldest + 2 * run.stride, newest) + 1)
    inside = [start for start in run.turns if start in zone]
    count = state.next_move(run.turns).count
    assert count == (min(inside) - oldest if inside else min(run.stride, state.length - state.pinned))


@settings(max_examples=400, deadline=None)
@given(runs())
def test_forecast_equals_step_by_step(run: Run) -> None:
    """Case C07: the schedule depends on the number of tokens alone; and a forecast changes nothing."""
    state = Window(run.capacity, run.stride, run.pinned)
    total = sum(map(abs, run.steps))
    whole = state.forecast(total, run.turns)
    assert state == Window(run.capacity, run.stride, run.pinned)
    for step in map(abs, run.steps):
        state = state.forecast(step, run.turns)
    assert state == whole


@settings(max_examples=400, deadline=None)
@given(runs())
def test_turns_that_are_not_known_yet_change_nothing(run: Run) -> None:
    """Case C07: a turn by turn run knows only the turns so far, which is all the schedule may depend on."""
    state = Window(run.capacity, run.stride, run.pinned)
    bounds = [*run.turns, sum(run.gaps)]
    for index, (start, stop) in enumerate(pairwise(bounds)):
        state = state.forecast(stop - start, run.turns[: index + 1])
    assert state == Window(run.capacity, run.stride, run.pinned).forecast(sum(run.gaps), run.turns)


def test_an_emptied_cache_starts_again_at_position_0() -> None:
    """Truncating to nothing forgets the evictions; to anything else keeps them."""
    state = Window(64, 8, 4).forecast(200)
    assert state.truncate(10).evicted == state.evicted > 0
    assert state.truncate(0) == Window(64, 8, 4)


@pytest.mark.parametrize(("pinned", "stride"), [(-1, 8), (57, 8), (0, 65)])
def test_no_window_is_refused(pinned: int, stride: int) -> None:
    """Pinned tokens that leave less than a stride of window."""
    with pytest.raises(InvalidOption):
        Window(64, stride, pinned)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(4, 80), st.integers(1, 20), st.integers(0, 16), st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=40), st.data(),
)  # fmt: skip
def test_no_marker_is_split(
    capacity: int, stride: int, pinned: int, evicted: int, gaps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """An eviction never ends inside of what the template wrote as one, unless that begins among the oldest and is
    longer than twice the stride; without markers it ends where it always did. At most twice the stride leaves: layers
    that hold only their window rely on it."""
    stride, pinned = min(stride, capacity), min(pinned, capacity - min(stride, capacity))
    state = Window(capacity, stride, pinned, capacity, evicted)
    spans, at = [], 0
    for gap, size in gaps:
        spans.append((at + gap, at + gap + size))
        at += gap + size
    turns = [start for start, _ in spans if data.draw(st.booleans())]
    plain, move = state.next_move(turns), state.next_move(turns, spans)
    cut = pinned + evicted + move.count
    inside = [(start, end) for start, end in spans if start < cut < end]
    most = min(2 * stride, capacity - pinned)
    assert not inside or (inside[0][0] <= pinned + evicted and inside[0][1] - pinned - evicted > most)
    assert plain.count - 6 <= move.count <= min(plain.count + 6, most)
    split = [span for span in spans if span[0] < pinned + evicted + plain.count < span[1]]
    assert (move == plain) == (split == inside)
