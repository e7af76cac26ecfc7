"""Memory that is read for every token: weights and cache, in large pages where the system has them.

A processor looks up some thousand pages at once. In pages of 4 KiB that is a few MiB, and a token of a model of 0.8 GiB
then took 19 ms where it takes 16 in pages of 2 MiB (2 threads, AMD EPYC). Linux gives those to private memory that asks
for them; numpy asks for arrays of 4 MiB and more, and a layer's rows are smaller.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LINE = 64  # bytes of a cache line (native/matmul.h); a vector load from its beginning straddles no two


def large_memory(size: int) -> Array:
    """So many bytes of zeros, [size] uint8, from a page's beginning on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def line_starts(sizes: Iterable[int]) -> list[int]:
    """Where pieces of these sizes begin, each at a cache line behind the one before, and where the last one's lines
    end."""
    return list(accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0))


def zeros_together(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Arrays of zeros in one piece of memory, each beginning at a cache line."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    *starts, end = line_starts(sizes)
    memory = large_memory(end)
    return [
        memory[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
