"""Who leaves and who stays, in integers: sinks + sliding window (Xiao et al., StreamingLLM, arXiv 2309.17453).

    rows      0 .. S-1        S .. length-1                    length .. C-1
              pinned prefix   window, oldest first             free
    tokens    0 .. S-1        S+evicted .. length+evicted-1

Rows are counted in the order of tokens; in which slots of memory they lie is the engine's (engines/cached.py). When the
cache is full and one more token arrives, G tokens leave from the front of the window and the rest is counted down by
G. Rows are plain bytes and are never requantised. Keys are stored rotated, so a window key keeps the angle of the
position it was written at, row + evicted, and that stays right for ever because RoPE only sees differences. The pinned
keys alone would drift away: they are to be met as if they sat just before the window. Either the engine runs the S
tokens again at the new angles, once per G, or it meets them with queries of their own, turned back by `evicted`. That
is StreamingLLM's "positions are positions in the cache".

The schedule depends on nothing but the number of tokens seen: a cache evicts exactly when it is full and another token
arrives. So feeding tokens one by one, turn by turn or all at once leaves the same cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgekv.errors import CacheFull, InvalidOption
from edgekv.kv.spec import KVSpec
from edgekv.slices import common_length

Span = tuple[int, int]
"""The first of some tokens, counted from the very first one, and the one behind the last."""


@dataclass(frozen=True)
class Move:
    """One eviction: `count` rows leave from row `start` on; those behind them are counted down by `count`."""

    start: int  # S: the rows before it are pinned
    count: int
    length: int  # before the eviction


@dataclass(frozen=True)
class Window:
    """The state of a cache of `capacity` slots, as integers. Every method returns a new state."""

    capacity: int  # C
    stride: int  # G
    pinned: int = 0  # S
    length: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.pinned <= self.capacity - self.stride:
            raise InvalidOption(
                f"{self.pinned} pinned tokens leave no window of at least {self.stride} in {self.capacity} slots."
            )

    @property
    def room(self) -> int:
        """Free slots."""
        return self.capacity - self.length

    def append(self, tokens: int) -> Window:
        """`tokens` more slots are filled.

        Raises:
            CacheFull: they do not fit.
        """
        if tokens > self.room:
            raise CacheFull(length=self.length, tokens=tokens, capacity=self.capacity)
        return replace(self, length=self.length + tokens)

    def truncate(self, length: int) -> Window:
        """Forget the tail; a cache that is emptied starts again at position 0."""
        return replace(self, length=length, evicted=self.evicted if length else 0)

    def next_move(self, turn_starts: Iterable[int] = (), markers: Iterable[Span] = ()) -> Move:
        """The eviction that makes room when the cache is full.

        Args:
            turn_starts: tokens (counted from the very first one) at which a turn begins. If one of them lies between
                the stride and twice the stride, the eviction ends there, so that whole turns leave.
            markers: stretches of tokens that the template wrote as one, such as a turn's header. An eviction that would
                end inside of one ends behind it or, where that were more than twice the stride, before it. (A layer
                that holds only its window counts on that limit: KVSpec.ring_slots.)
        """
        oldest = self.pinned + self.evicted  # the token in the first window row
        window = self.length - self.pinned
        most = min(2 * self.stride, window)
        whole = [start - oldest for start in turn_starts if self.stride <= start - oldest <= most]
        count = min(whole, default=min(self.stride, most))
        split = next(((start, end) for start, end in markers if start < oldest + count < end), None)
        if split is not None:
            before, behind = split[0] - oldest, split[1] - oldest
            if behind <= most:
                count = behind
            elif before > 0:
                count = before
        return Move(start=self.pinned, count=count, length=self.length)

    def apply(self, move: Move) -> Window:
        """The state after an eviction."""
        return replace(self, length=self.length - move.count, evicted=self.evicted + move.count)

    def moves(self, tokens: int, turn_starts: Iterable[int] = (), markers: Iterable[Span] = ()) -> tuple[Move, ...]:
        """The evictions that `tokens` more tokens bring, each when the cache is full and another one arrives."""
        starts, spans, state = tuple(turn_starts), tuple(markers), self
        made: list[Move] = []
        while tokens > state.room:
            tokens, state = tokens - state.room, state.append(state.room)
            made.append(state.next_move(starts, spans))
            state = state.apply(made[-1])
        return tuple(made)

    def forecast(self, tokens: int, turn_starts: Iterable[int] = (), markers: Iterable[Span] = ()) -> Window:
        """The state after `tokens` more tokens, with all the evictions they bring. Nothing is changed. A large number
        takes no longer: behind the last turn and marker, evictions are all alike."""
        starts, spans, state = tuple(turn_starts), tuple(markers), self
        last = max((*starts, *(end for _, end in spans)), default=0)
        while tokens:
            if not state.room:
                if state.pinned + state.evicted >= last:
                    return state._full_after(tokens)
                state = state.apply(state.next_move(starts, spans))
            step = min(tokens, state.room)
            state, tokens = state.append(step), tokens - step
        return state

    def _full_after(self, tokens: int) -> Window:
        """The state of a full cache after `tokens` more tokens, where no turn and no marker is met."""
        count = self.next_move().count
        evictions = -(-tokens // count)
        length = self.length + tokens - evictions * count
        return replace(self, length=length, evicted=self.evicted + evictions * count)


@dataclass(frozen=True)
class TokenHistory:
    """The tokens that have passed through a cache since it was empty: what of a prompt need not be read again."""

    tokens: array[int]  # all of them, evicted ones included
    pinned: int  # of these, the first that never leave
    evicted: int  # how many of those behind the pinned ones have left

    def reusable(self, kv: KVSpec, tokens: Sequence[int], pinned: int) -> Window:
        """The state that a cache is left in when it keeps the prefix that a prompt shares with it, and pins `pinned`
        tokens. After an eviction it is empty if another number was pinned, or if reading afresh is better."""
        pinned = max(pinned, kv.sinks)
        fresh = Window(kv.capacity, kv.stride, pinned)
        kept = common_length(self.tokens, array("i", tokens[:-1]))  # the last token must run, for its logits
        if self.evicted and (pinned != self.pinned or self._thinned_out(kv, len(tokens), kept)):
            return fresh
        return replace(fresh, length=kept - self.evicted, evicted=self.evicted)

    def _thinned_out(self, kv: KVSpec, prompt: int, kept: int) -> bool:
        """Whether reading a prompt afresh is better than going on with what evictions and an edit have left of it:
        where all of it fits, or the cache would end up emptier by a stride than an eviction can leave it.

        The stride of grace is for templates that rewrite what has been said (thinking blocks): every turn leaves them
        less, and without it they would read everything afresh every other turn."""
        if prompt <= kv.capacity or kept <= self.pinned + self.evicted:
            return True
        least = max(kv.capacity - 3 * kv.stride, kv.capacity // 2)
        return kept < len(self.tokens) and prompt - self.evicted < least
