"""Who leaves and who stays, in integers: sinks + sliding window (Xiao et al., StreamingLLM, arXiv 2309.17453).

    slots     0 .. S-1        S .. length-1                    length .. C-1
              pinned prefix   window, oldest first             free
    tokens    0 .. S-1        S+evicted .. length+evicted-1

When the cache is full and one more token arrives, G tokens leave from the front of the window and the rest moves down
by G rows. Rows are plain bytes and are never requantised. Keys are stored rotated, so a window key keeps the angle of
the position it was written at, slot + evicted, and that stays right for ever because RoPE only sees differences; the
pinned keys alone must be re-made to sit just before the window (the engine re-runs S tokens, once per G). That is
StreamingLLM's "positions are positions in the cache".

The schedule depends on nothing but the number of tokens seen: a cache evicts exactly when it is full and another token
arrives. So feeding tokens one by one, turn by turn or all at once leaves the same cache (cases C07, C12).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edgekv.errors import CacheFull, InvalidOption


@dataclass(frozen=True)
class Move:
    """One eviction: `count` rows leave, starting at row `start`; rows start+count .. length-1 move down by `count`."""

    start: int
    count: int
    length: int


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

    def next_move(self, turn_starts: Iterable[int] = ()) -> Move:
        """The eviction that makes room when the cache is full.

        Args:
            turn_starts: tokens (counted from the very first one) at which a turn begins. If one of them lies between
                the stride and twice the stride, the eviction ends there, so that whole turns leave.
        """
        oldest = self.pinned + self.evicted  # the token in the first window slot
        most = min(2 * self.stride, self.length - self.pinned)
        whole = [start - oldest for start in turn_starts if self.stride <= start - oldest <= most]
        return Move(start=self.pinned, count=min(whole, default=min(self.stride, most)), length=self.length)

    def apply(self, move: Move) -> Window:
        """The state after an eviction."""
        return replace(self, length=self.length - move.count, evicted=self.evicted + move.count)

    def forecast(self, tokens: int, turn_starts: Iterable[int] = ()) -> Window:
        """The state after `tokens` more tokens, with all the evictions they bring. Nothing is changed."""
        starts, state = tuple(turn_starts), self
        while tokens:
            if not state.room:
                state = state.apply(state.next_move(starts))
            step = min(tokens, state.room)
            state, tokens = state.append(step), tokens - step
        return state
