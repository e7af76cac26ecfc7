"""The eviction policy as a model on plain lists, written from its description; free of heavy imports."""

from __future__ import annotations

from collections.abc import Sequence


def leaving(held: Sequence[int], capacity: int, stride: int, pinned: int, turn_starts: Sequence[int] = ()) -> list[int]:
    """Which of the held token numbers leave when one more token arrives; [] while there is room.

    The policy in words: nothing leaves before the cache is full. Then the oldest `stride` tokens behind the pinned ones
    leave; but if the cut can be put in front of a token that begins a turn, by letting at least `stride` and at most
    2 `stride` tokens leave, the first such cut is taken. The token that arrives may itself begin a turn.
    """
    if len(held) < capacity:
        return []
    window = [*held[pinned:], held[-1] + 1]
    for cut in range(stride, 2 * stride + 1):
        if cut < len(window) and window[cut] in turn_starts:
            return window[:cut]
    return window[: min(stride, len(window) - 1)]
