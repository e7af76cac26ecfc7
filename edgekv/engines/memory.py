"""Memory for what is large: in large pages where the system has them, and given back whole.

A processor looks up some thousand pages at once. In pages of 4 KiB that is a few MiB, and a token of a model of 0.8 GiB
then took 19 ms where it takes 16 in pages of 2 MiB (2 threads, AMD EPYC). Linux gives those to private memory that asks
for them; numpy asks for arrays of 4 MiB and more, and a layer's rows are smaller.

Logits of many tokens are a mapping of their own, too. As numpy's array they may lie in the heap, which keeps what is
freed and hands it out in pieces; and as numpy has asked for large pages there, Linux may fill all of it again for the
sake of some of these (khugepaged). Once in five soaks of 100,000 tokens a process grew by 12 MiB, as many as these are.
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

_MANY = 4 << 20  # bytes: from here on numpy asks for large pages
_LINE = 64  # bytes of a cache line (native/matmul.h); a vector load from its beginning straddles no two


def large_memory(size: int) -> Array:
    """So many bytes of zeros, [size] uint8, from a page's beginning on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def zeros_apart(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    """Zeros that the system has back as soon as they are freed, if they are many."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.zeros(shape, dtype) if size < _MANY else large_memory(size).view(dtype).reshape(shape)


def own_copy(array: Array) -> Array:
    """A copy, in memory as `zeros_apart` has it."""
    copy = zeros_apart(array.shape, array.dtype)
    copy[...] = array
    return copy


def joined(parts: Sequence[Array]) -> Array:
    """Parts one after another along the first axis, in memory as `zeros_apart` has it; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    out = zeros_apart((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    return np.concatenate(parts, out=out)


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
