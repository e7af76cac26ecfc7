"""Weights and cache lie in memory that large pages may serve."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edgekv.engines.onnx.memory import large_memory, zeros_together


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
