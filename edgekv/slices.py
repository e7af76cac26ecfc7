"""What two sequences have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from array import array

Slices = TypeVar("Slices", str, "array[int]")


def common_length(first: Slices, second: Slices) -> int:
    """Length of the common beginning of two texts or of two arrays of one type, by bisection: comparing slices is fast,
    items one by one are not."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
