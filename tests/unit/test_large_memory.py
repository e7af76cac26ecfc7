"""Weights and cache lie in memory that large pages may serve, and what is large goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edgekv.engines.memory import joined, large_memory, own_copy, zeros_apart, zeros_together


def flags_at(address: int) -> set[str]:
    """What Linux says of the mapping that an address lies in (`man 5 proc_pid_smaps`)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return set(rest)
    raise AssertionError("no mapping has this address")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' large pages")
def test_large_pages_are_asked_for_where_linux_gives_them() -> None:
    """It was shared memory once, which asks in vain: a fifth of a large model's speed."""
    memory = large_memory(8 << 20)
    found = flags_at(memory.ctypes.data)
    assert "hg" in found
    assert "sh" not in found


def test_arrays_side_by_side() -> None:
    shapes = [(3, 5, 7), (1, 1, 64), (2, 33, 1)]
    arrays = zeros_together(shapes, np.dtype(np.int8))
    assert [array.shape for array in arrays] == shapes
    assert all(array.ctypes.data % 64 == 0 and not array.any() for array in arrays)
    for number, array in enumerate(arrays):
        array[:] = number + 1
    assert [set(array.ravel()) for array in arrays] == [{1}, {2}, {3}]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' mappings")
def test_many_numbers_are_given_back() -> None:
    """They were numpy's, in the heap, and 12 MiB of it came back by themselves in a soak once."""
    rows = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
    for make in (lambda: zeros_apart((3, 1 << 20)), lambda: own_copy(rows), lambda: joined([rows[:1], rows[1:]])):
        made = make()
        address = made.ctypes.data
        assert "hg" in flags_at(address)
        del made
        with pytest.raises(AssertionError, match="no mapping"):
            flags_at(address)


def test_parts_are_joined() -> None:
    parts = [np.arange(6.0).reshape(2, 3), np.arange(3.0).reshape(1, 3)]
    assert np.array_equal(joined(parts), np.concatenate(parts))
    assert joined(parts[:1]) is parts[0]
    assert joined([np.zeros((0, 5)), np.zeros((0, 5))]).shape == (0, 5)
    assert np.array_equal(own_copy(parts[0]), parts[0])
