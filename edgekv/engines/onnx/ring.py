"""RingEngine: the cache as a ring, read by edgekv's own attention operator, in which an eviction moves nothing.

    slots     0 .. S-1         S .. C-1
              pinned prefix    ring: token n >= S (counted from the very first) in slot S + (n - S) mod (C - S)

Keys stay where they were written, at the angle they were written with. A window key has the angle of its absolute
position n. A pinned key has that of its own slot, and is met by queries turned to their position less the evicted
tokens: so it sits just before the window, as in StreamingLLM, and the operator turns every query twice. An eviction is
then nothing but two integers: the oldest slots will be overwritten.

Where the pinned prefix ends is only known at the first eviction (its Move says so). Until then no token has wrapped
round, token n is in slot n, and S does not matter.

Codes are those of the reference (kv/quant.py); within a block of 16 slots they are interleaved as native/kernels.h
says, and put into the plain order of rows when they are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from edgekv.engines.base import EngineState, Logits, PinnedAngles
from edgekv.engines.onnx.binding import CACHE_DTYPES, Array
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.onnx.native import BLOCK
from edgekv.engines.rope import amplitudes, inverse_frequencies, settled
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec

_ALIGNMENT = 64  # bytes: a cache line, so that no vector load straddles two


class LayerCache:
    """One layer's keys and values in blocks of 16 slots, as native/kernels.h has them."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any], slots: int) -> None:
        heads, dim, blocks = spec.num_kv_heads, spec.head_dim, -(-slots // BLOCK)
        self._together = 4 // dtype.itemsize  # g: channels (keys) or slots (values) in one 32-bit word
        self._dim = dim
        self.parts = {part: _aligned((heads, blocks * BLOCK, dim), dtype) for part in "kv"}
        k, v = self.parts.values()
        self._keys = k.reshape(heads, blocks, dim // self._together, BLOCK, self._together)  # [K, B, D/g, 16, g]
        self._values = v.reshape(heads, blocks, BLOCK // self._together, dim, self._together)  # [K, B, 16/g, D, g]

    def read(self, part: str, slots: Array) -> Array:
        """A copy of the rows in these slots, [K, n, D]."""
        block, place = np.divmod(slots, BLOCK)
        if part == "k":
            rows = self._keys[:, block, :, place, :]  # [n, K, D/g, g]
            return np.ascontiguousarray(rows.reshape(*rows.shape[:2], self._dim).swapaxes(0, 1))
        group, inside = np.divmod(place, self._together)
        return np.ascontiguousarray(self._values[:, block, group, :, inside].swapaxes(0, 1))

    def write(self, part: str, slots: Array, rows: Array) -> None:
        """Overwrite the rows in these slots with [K, n, D]."""
        block, place = np.divmod(slots, BLOCK)
        turned = rows.swapaxes(0, 1)  # [n, K, D]
        if part == "k":
            words = turned.reshape(*turned.shape[:2], self._dim // self._together, self._together)
            self._keys[:, block, :, place, :] = words
        else:
            group, inside = np.divmod(place, self._together)
            self._values[:, block, group, :, inside] = turned


class RingCache:
    """Keys and values of all layers, and which slot holds which token. Rows are asked for in the order of tokens.

    Args:
        slots: of each layer, by default C. A layer with fewer is a ring of its own, of its last tokens.
    """

    def __init__(self, spec: ModelSpec, kv: KVSpec, slots: Sequence[int] = ()) -> None:
        self._capacity = kv.capacity
        self._slots = tuple(slots) or (kv.capacity,) * spec.num_layers
        dtype = np.dtype(CACHE_DTYPES[kv.dtype])
        self.layers = tuple(LayerCache(spec, dtype, count) for count in self._slots)
        self.evicted = 0
        self.pinned = 0
        self.written = 0  # tokens, from the very first, up to where slots have been overwritten

    def bind(self, io: Any) -> None:
        """Bind every layer; the operator writes into its input."""
        for number, layer in enumerate(self.layers):
            for part, rows in layer.parts.items():
                io.bind_input(f"past_{part}.{number}", "cpu", 0, rows.dtype, (1, *rows.shape), rows.ctypes.data)

    def first(self, layer: int) -> int:
        """The first token (counted without the evicted ones) whose row the layer still holds, and all after it."""
        if self._slots[layer] == self._capacity:
            return 0
        return max(0, self.written - self._slots[layer] - self.evicted)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of the rows of tokens start .. stop-1 (counted without the evicted ones), [K, n, D]; of a layer with a
        ring of its own those that it still holds."""
        start = min(max(start, self.first(layer)), stop)
        return self.layers[layer].read(part, self._places(layer, start, stop))

    def write(self, part: str, layer: int, start: int, rows: Array) -> None:
        """Overwrite the rows of tokens from `start` on; a ring of its own takes as many as it has slots, the last."""
        stop = start + rows.shape[1]
        start = max(start, stop - self._slots[layer])
        self.layers[layer].write(part, self._places(layer, start, stop), rows[:, start - stop :])

    def move(self, target: int, source: int, count: int) -> None:
        """Forget the tokens target .. source-1: the `count` after them stay where they are."""
        self.pinned, self.evicted = target, self.evicted + source - target

    def _places(self, layer: int, start: int, stop: int) -> Array:
        """The slots of these tokens."""
        tokens = np.arange(start, stop)
        if self._slots[layer] != self._capacity:
            return (tokens + self.evicted) % self._slots[layer]
        if not self.evicted:
            return tokens
        ring = self.pinned + (tokens - self.pinned + self.evicted) % (self._capacity - self.pinned)
        return np.where(tokens < self.pinned, tokens, ring)


class RingEngine(OnnxEngine):
    """OnnxEngine with the native operator; see `edgekv.engines.base.Engine`."""

    attention: ClassVar[Literal["native", "gqa"]] = "native"
    pinned_angles: ClassVar[PinnedAngles] = "own"
    _cache: RingCache

    def evict(self, move: Move) -> None:
        """Drop rows by renumbering. A different pinned prefix than at the last eviction costs a copy and a re-run."""
        self._check_move(move)
        try:
            kept = self.save() if self._evicted and move.start != self._cache.pinned else None
            self._cache.move(move.start, move.start + move.count, move.length - move.start - move.count)
            del self._tokens[move.start : move.start + move.count]
            self._evicted, self._pinned = self._cache.evicted, self._cache.pinned
            if kept is not None:
                self._pin_anew(move, kept)
        except BaseException:
            self.reset()
            raise

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys (at the angles of slot + evicted) and values of slots start .. stop-1, [K, n, D]."""
        keys, values = super().rows(layer, start, stop)
        pinned = max(0, min(self._cache.pinned, stop) - start)
        if self._evicted and pinned:
            turn = self._evicted * self._frequencies
            cos, sin = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
            low, high = np.split(keys[:, :pinned], 2, axis=-1)
            keys[:, :pinned] = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
        return keys, values

    def reset(self) -> None:
        """Forget everything."""
        self._tokens = []
        self._evicted = self._pinned = 0
        self._set_positions()

    def _set_positions(self) -> None:
        """The ring turns with the tokens; there are no tables to make anew."""
        self._cache.pinned, self._cache.evicted = self._pinned, self._evicted

    def _bind_cache(self) -> None:
        self._cache = RingCache(self._spec, self._kv)
        self._cache.bind(self._io)
        self._bind_scales()
        rope = settled(self._spec.rope, self._spec.head_dim, self._kv.capacity)
        self._frequencies = inverse_frequencies(rope, self._spec.head_dim)
        self._amplitudes = amplitudes(rope, self._spec.head_dim)
        self._state = np.zeros(4, np.int64)
        self._angles = np.zeros(4 * self._options.chunk * len(self._frequencies), np.float32)
        self._bind_input("state", self._state)
        self._placed = 0  # tokens of the run that `angles` is bound for

    def _bind_scales(self) -> None:
        if self._scales is None:
            return
        for layer, pair in enumerate(zip(self._scales.k, self._scales.v, strict=True)):
            self._constants.append(np.ascontiguousarray(np.stack(pair), np.float32))  # [2, K, D]
            self._bind_input(f"scales.{layer}", self._constants[-1])

    def _place(self, past: int, count: int) -> None:
        """State and angles of the next run; the angles in float64, as everywhere."""
        self._state[:] = past, self._evicted, self._cache.pinned, self._kv.capacity
        angles = self._angles[: 4 * count * len(self._frequencies)].reshape(4, count, -1)
        for first, half in ((past + self._evicted, angles[:2]), (past, angles[2:])):
            turns = np.arange(first, first + count, dtype=np.float64)[:, None] * self._frequencies
            half[0], half[1] = np.cos(turns) * self._amplitudes, np.sin(turns) * self._amplitudes
        if self._placed != count:
            self._bind_input("angles", angles)
            self._placed = count

    def _pin_anew(self, move: Move, kept: EngineState) -> None:
        """Write the rows that stay for a pinned prefix of another length, and run that prefix again."""
        for layer in range(self._spec.num_layers):
            for part, rows in (("k", kept.keys[layer]), ("v", kept.values[layer])):
                self._cache.write(part, layer, move.start, rows[:, move.start + move.count :])
        self._run_pinned(move.start)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a cache line."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
