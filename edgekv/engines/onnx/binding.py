"""Preallocated buffers, bound once: everything a run reads or writes, with its shape beside it.

ONNX Runtime reads and writes these arrays in place. The traps, met and handled here: an array given by pointer must
outlive the run, so whoever binds it keeps it; a binding remembers the shape it was given, so only what changes its
shape (ids, rows, logits) is bound again, and only then; the cache is bound as past and as present, which makes the
operator append in place.

On another device than the CPU the cache lives in OrtValues instead and rows travel through the host when they move,
which happens once per stride.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.engines.memory import zeros_apart
from edgekv.kv.spec import ROW_FACTORS, KVDtype, KVSpec
from edgekv.model.spec import ModelSpec

Array = npt.NDArray[Any]

CACHE_DTYPES: dict[KVDtype, type[np.generic]] = {
    "int8": np.int8,
    "k8v4": np.int8,
    "int4": np.uint8,
    "fp8": np.uint8,
    "fp16": np.float16,
    "float": np.float32,
}


def ring_dtype(dtype: KVDtype) -> np.dtype[Any]:
    """Of the rows as edgekv's own operator has them: codes with factors are int8, two of 4 bits in one, too."""
    return np.dtype(np.int8 if dtype in ROW_FACTORS else CACHE_DTYPES[dtype])


def gqa_row_items(spec: ModelSpec, dtype: KVDtype) -> int:
    """Array items of a row (one token of one KV head) of GroupQueryAttention's: D, or D/2 where two channels share a
    byte. Those of edgekv's own operator are kv/rows.py's."""
    return spec.head_dim // 2 if dtype == "int4" else spec.head_dim


class CacheMemory(Protocol):
    """The rows of all layers: keys and values, each [L][K, C, row]."""

    def bind(self, io: Any) -> None: ...
    def read(self, part: str, layer: int, start: int, stop: int) -> Array: ...
    def write(self, part: str, layer: int, start: int, rows: Array) -> None: ...
    def move(self, target: int, source: int, count: int) -> None: ...


def bind_array(io: Any, name: str, array: Array) -> None:
    """Bind an input in host memory by pointer; the caller keeps the array alive."""
    io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class HostCache:
    """The cache in host memory, one allocation for keys and one for values."""

    def __init__(self, spec: ModelSpec, kv: KVSpec) -> None:
        shape = (spec.num_layers, spec.num_kv_heads, kv.capacity, gqa_row_items(spec, kv.dtype))
        self._parts = {part: np.zeros(shape, CACHE_DTYPES[kv.dtype]) for part in "kv"}  # [L, K, C, row]

    def layers(self, part: str) -> Array:
        """The memory itself, [L, K, C, row]."""
        return self._parts[part]

    def bind(self, io: Any) -> None:
        """Bind every layer as past and as present."""
        for part, array in self._parts.items():
            for layer, rows in enumerate(array):
                place = ("cpu", 0, rows.dtype, (1, *rows.shape), rows.ctypes.data)
                io.bind_input(f"past_{part}.{layer}", *place)
                io.bind_output(f"present_{part}.{layer}", *place)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of rows start .. stop-1 of one layer, [K, stop-start, row]."""
        return self._parts[part][layer, :, start:stop].copy()

    def write(self, part: str, layer: int, start: int, rows: Array) -> None:
        """Overwrite rows from `start` on."""
        self._parts[part][layer, :, start : start + rows.shape[1]] = rows

    def move(self, target: int, source: int, count: int) -> None:
        """Move `count` rows of every head to an earlier place: one memmove each, no temporary."""
        for array in self._parts.values():
            row_bytes = array.strides[2]
            base, head_bytes = array.ctypes.data, array.strides[1]
            for head in range(array.shape[0] * array.shape[1]):
                start = base + head * head_bytes
                ctypes.memmove(start + target * row_bytes, start + source * row_bytes, count * row_bytes)


class DeviceCache:
    """The cache in a device's memory, as one OrtValue a layer and part."""

    def __init__(self, spec: ModelSpec, kv: KVSpec, device: str) -> None:
        from onnxruntime import OrtValue

        shape = (1, spec.num_kv_heads, kv.capacity, gqa_row_items(spec, kv.dtype))
        dtype = CACHE_DTYPES[kv.dtype]
        self._parts = {  # an array each: on a CPU device the value does not copy it
            part: [OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), device, 0) for _ in range(spec.num_layers)]
            for part in "kv"
        }

    def bind(self, io: Any) -> None:
        """Bind every layer as past and as present."""
        for part, layers in self._parts.items():
            for layer, value in enumerate(layers):
                io.bind_ortvalue_input(f"past_{part}.{layer}", value)
                io.bind_ortvalue_output(f"present_{part}.{layer}", value)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of rows start .. stop-1 of one layer, [K, stop-start, row]."""
        return np.array(self._parts[part][layer].numpy()[0, :, start:stop])

    def write(self, part: str, layer: int, start: int, rows: Array) -> None:
        """Overwrite rows from `start` on."""
        whole = np.array(self._parts[part][layer].numpy())
        whole[0, :, start : start + rows.shape[1]] = rows
        self._parts[part][layer].update_inplace(whole)

    def move(self, target: int, source: int, count: int) -> None:
        """Move `count` rows of every head to an earlier place, through the host."""
        for layers in self._parts.values():
            for value in layers:
                whole = np.array(value.numpy())
                whole[0, :, target : target + count] = whole[0, :, source : source + count].copy()
                value.update_inplace(whole)


class StepBuffers:
    """The small inputs and the logits of a run, bound again only when their shapes change.

    Args:
        copied: the provider copies an input when it is bound (any but the CPU's), so every run binds afresh.
    """

    def __init__(self, io: Any, chunk: int, vocab_size: int, *, copied: bool = False) -> None:
        self._io, self._copied = io, copied
        self._vocab_size = vocab_size
        self._ids = np.zeros((1, chunk), np.int64)
        self._rows = np.zeros(chunk, np.int64)
        self._last = np.zeros(1, np.int32)  # seqlens_k: total - 1
        self._total = np.zeros((), np.int32)
        self._check = np.zeros((1, 1, 1), np.float32)  # the sum of the last hidden states
        self._logits = np.zeros((1, 1, vocab_size), np.float32)
        self._bound: tuple[int, int] = (-1, -1)
        self._bind_lengths()
        io.bind_output("check", "cpu", 0, np.float32, (1, 1, 1), self._check.ctypes.data)

    def set(self, tokens: Array, past: int, rows: range) -> None:
        """Fill in one run: `tokens` come after `past` filled slots, logits are wanted for `rows` of them."""
        count = len(tokens)
        self._ids[0, :count] = tokens
        self._rows[: len(rows)] = rows
        self._last[0] = past + count - 1
        self._total[()] = past + count
        if self._copied:
            self._bind_lengths()
        if self._copied or self._bound != (count, len(rows)):
            self._bind(count, len(rows))

    @property
    def logits(self) -> Array:
        """The last run's logits, [R, V]; overwritten by the next run."""
        logits: Array = self._logits[0]
        return logits

    @property
    def finite(self) -> bool:
        """Whether the last run's hidden states and logits were all finite (a sum is not finite if a term is not)."""
        return bool(np.isfinite(self._check.item()) and np.isfinite(self._logits.sum()))

    def _bind_lengths(self) -> None:
        for name, array in (("seqlens_k", self._last), ("total", self._total)):
            bind_array(self._io, name, array)

    def _bind(self, count: int, rows: int) -> None:
        if self._logits.shape[1] != rows:
            self._logits = zeros_apart((1, rows, self._vocab_size))
        self._io.bind_input("ids", "cpu", 0, np.int64, (1, count), self._ids.ctypes.data)
        self._io.bind_input("rows", "cpu", 0, np.int64, (rows,), self._rows.ctypes.data)
        self._io.bind_output("logits", "cpu", 0, np.float32, self._logits.shape, self._logits.ctypes.data)
        self._bound = (count, rows)
