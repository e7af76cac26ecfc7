"""RingEngine: the cache as a ring, read by edgekv's own attention operator, in which an eviction moves nothing.

    slots     0 .. S-1         S .. C-1
              pinned prefix    ring: token n >= S (counted from the very first) in slot S + (n - S) mod (C - S)

Keys stay where they were written, at the angle they were written with. A window key has the angle of its absolute
position n. A pinned key has that of its own slot, and is met by queries turned to their position less the evicted
tokens: so it sits just before the window, as in StreamingLLM, and the operator turns every query twice. An eviction is
then nothing but two integers: the oldest slots will be overwritten.

Where the pinned prefix ends is only known at the first eviction (its Move says so). Until then no token has wrapped
round, token n is in slot n, and S does not matter.

A layer that sees only a window of the last tokens may hold just these (KVSpec.ring_slots): token n in slot n mod R, no
pinned prefix. It cannot be cut back further than it has rows for; `keeps` says so.

Codes are those of the reference (kv/quant.py); within a block of 16 slots they are interleaved as native/kernels.h
says, and put into the plain order of rows when they are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np

from edgekv.engines.base import EngineState, Logits, PinnedAngles, check_move
from edgekv.engines.onnx.binding import CACHE_DTYPES, Array
from edgekv.engines.onnx.centre import CentreTable
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.onnx.native import BLOCK
from edgekv.engines.rope import amplitudes, inverse_frequencies, rotated_centre, settled_ropes
from edgekv.errors import InvalidOption
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec, RopeSpec

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
        self.empty()

    def empty(self) -> None:
        """Count from nothing again."""
        self.evicted = 0
        self.pinned = 0
        self.written = 0  # tokens, from the very first, up to where slots have been overwritten
        self._missing = 0  # tokens, from the very first, that no ring holds, whatever room it has

    def own_ring(self, layer: int) -> bool:
        """Whether the layer holds its last tokens only."""
        return self._slots[layer] != self._capacity

    def bind(self, io: Any) -> None:
        """Bind every layer; the operator writes into its input."""
        for number, layer in enumerate(self.layers):
            for part, rows in layer.parts.items():
                io.bind_input(f"past_{part}.{number}", "cpu", 0, rows.dtype, (1, *rows.shape), rows.ctypes.data)

    def first(self, layer: int) -> int:
        """The first token (counted without the evicted ones) whose row the layer still holds, and all after it."""
        if not self.own_ring(layer):
            return 0
        return max(0, max(self._missing, self.written - self._slots[layer]) - self.evicted)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of the rows of tokens start .. stop-1 (counted without the evicted ones), [K, n, D]; of a layer with a
        ring of its own those that it still holds."""
        start = min(max(start, self.first(layer)), stop)
        return self.layers[layer].read(part, self._places(layer, start, stop))

    def write(self, part: str, layer: int, start: int, rows: Array) -> None:
        """Overwrite the rows of tokens from `start` on; a ring of its own takes as many as it has slots, the last."""
        stop = start + rows.shape[1]
        start = max(start, stop - self._slots[layer])
        self.layers[layer].write(part, self._places(layer, start, stop), rows[:, rows.shape[1] - (stop - start) :])

    def put_back(self, part: str, layer: int, length: int, rows: Array) -> None:
        """The last rows of a content of `length` tokens into a layer's own ring: all of them, or what another held."""
        start = length - rows.shape[1]
        self.written = length + self.evicted
        self._missing = max(self._missing, start + self.evicted if start else 0)
        self.write(part, layer, start, rows)

    @contextmanager
    def rings_untouched(self) -> Iterator[None]:
        """Rings of their own come out as they went in."""
        rings = [
            rows for number, layer in enumerate(self.layers) if self.own_ring(number) for rows in layer.parts.values()
        ]
        kept, written = [rows.copy() for rows in rings], self.written
        yield
        self.written = written
        for rows, old in zip(rings, kept, strict=True):
            rows[:] = old

    def move(self, target: int, source: int, count: int) -> None:
        """Forget the tokens target .. source-1: the `count` after them stay where they are."""
        self.pinned, self.evicted = target, self.evicted + source - target

    def _places(self, layer: int, start: int, stop: int) -> Array:
        """The slots of these tokens."""
        tokens = np.arange(start, stop)
        if self.own_ring(layer):
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
    _centre: CentreTable | None = None

    def evict(self, move: Move) -> None:
        """Drop rows by renumbering. A different pinned prefix than at the last eviction costs a copy and a re-run.

        Raises:
            InvalidOption: a layer with a ring of its own would see the pinned prefix, which it does not have.
        """
        check_move(move, self.length)
        if not self._windows_whole(move.length - move.count, self._evicted + move.count, move.start):
            raise InvalidOption(
                f"{move} leaves fewer tokens beside the pinned prefix than a layer's window has, and that layer "
                "keeps no others: evict less at once."
            )
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

    def keeps(self, length: int) -> bool:
        """Whether every layer holds what the token after the first `length` would see."""
        if not super().keeps(length):
            return False
        return length == 0 or self._windows_whole(length, self._evicted, self._cache.pinned)

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys (at the angles of slot + evicted) and values of slots start .. stop-1, [K, n, D]; of a layer
        with a ring of its own only those that it still holds."""
        keys, values = super().rows(layer, start, stop)
        pinned = max(0, min(self._cache.pinned, stop) - start)
        rope = self._spec.rope_layers[layer]
        if self._evicted and pinned and rope >= 0 and not self._cache.own_ring(layer):
            turn = self._evicted * self._angles[rope].frequencies
            cos, sin = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
            low, high = np.split(keys[:, :pinned], 2, axis=-1)
            keys[:, :pinned] = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
        if self._scales is not None and (centre := self._scales.centre_of(layer)) is not None:
            first = start + self._evicted
            keys += rotated_centre(centre, self._spec, self._kv.capacity, first, keys.shape[1])
        return keys, values

    def reset(self) -> None:
        """Forget everything."""
        self._tokens = []
        self._evicted = self._pinned = 0
        self._cache.empty()

    def _set_positions(self) -> None:
        """The ring turns with the tokens; there are no tables to make anew."""
        self._cache.pinned, self._cache.evicted = self._pinned, self._evicted
        self._turn_centre(0, self._kv.capacity)

    def _put_back(self, part: str, layer: int, rows: Array, count: int) -> None:
        """A layer's own ring takes the last rows, as many as another ring held, if its window is among them."""
        if not self._cache.own_ring(layer):
            super()._put_back(part, layer, rows, count)
            return
        held = max(min(count, self._spec.windows[layer]), min(count, rows.shape[1]))
        self._check_rows(rows, layer, held)
        self._cache.put_back(part, layer, count, rows)

    def _windows_whole(self, length: int, evicted: int, pinned: int) -> bool:
        """Whether rings of their own hold what the token after the first `length` would see: a window of tokens, none
        of them pinned where tokens are missing after these."""
        for layer, window in enumerate(self._spec.windows):
            if self._cache.own_ring(layer):
                oldest = max(0, length + 1 - window)
                if oldest + evicted < self._cache.first(layer) + self._evicted or (evicted and oldest < pinned):
                    return False
        return True

    def _bind_cache(self) -> None:
        slots = [self._kv.ring_slots(window, self._options.chunk) for window in self._spec.windows]
        self._cache = RingCache(self._spec, self._kv, slots)
        self._cache.bind(self._io)
        self._bind_scales()
        self._angles = {
            index: RunAngles(rope, self._spec.head_dim, self._options.chunk)
            for index, rope in enumerate(settled_ropes(self._spec, self._kv.capacity))
            if index in self._spec.rope_layers
        }
        self._state = np.zeros(4, np.int64)
        self._bind_input("state", self._state)
        self._placed = 0  # tokens of the run that angles are bound for

    def _bind_scales(self) -> None:
        if self._scales is None:
            return
        for layer, pair in enumerate(zip(self._scales.k, self._scales.v, strict=True)):
            self._constants.append(np.ascontiguousarray(np.stack(pair), np.float32))  # [2, K, D]
            self._bind_input(f"scales.{layer}", self._constants[-1])
        if self._scales.k_centre is not None:
            self._centre = CentreTable(self._spec, self._kv, self._scales)
            for name, array in self._centre.inputs():
                self._bind_input(name, array)

    def _place(self, past: int, count: int) -> None:
        """State and angles of the next run."""
        self._state[:] = past, self._evicted, self._cache.pinned, self._kv.capacity
        self._turn_centre(past, count)
        self._cache.written = max(self._cache.written, past + count + self._evicted)
        for index, angles in self._angles.items():
            table = angles.fill(past, self._evicted, count)
            if self._placed != count:
                self._bind_input(f"angles.{index}", table)
        self._placed = count

    def _turn_centre(self, start: int, count: int) -> None:
        """Note the angles of the keys of tokens start .. start+count-1, where a centre is held out of them."""
        if self._centre is not None:
            tokens = np.arange(start, start + count)
            own_slot = (tokens < self._cache.pinned) & (self._evicted > 0)
            self._centre.place(
                self._cache._places(0, start, start + count), np.where(own_slot, tokens, tokens + self._evicted)
            )

    def _pin_anew(self, move: Move, kept: EngineState) -> None:
        """Write the rows that stay for a pinned prefix of another length, and run that prefix again."""
        for layer in range(self._spec.num_layers):
            if not self._cache.own_ring(layer):
                for part, rows in (("k", kept.keys[layer]), ("v", kept.values[layer])):
                    self._cache.write(part, layer, move.start, rows[:, move.start + move.count :])
        self._turn_centre(0, self.length)
        self._run_pinned(move.start)

    def _run_pinned(self, count: int) -> None:
        """As ever; but rings of their own have no place for these tokens, so they get back what they held."""
        with self._cache.rings_untouched():
            super()._run_pinned(count)


class RunAngles:
    """cos and sin of one rotary embedding for a run's tokens, at absolute positions and less the evicted tokens."""

    def __init__(self, rope: RopeSpec, head_dim: int, chunk: int) -> None:
        self.frequencies = inverse_frequencies(rope, head_dim)  # [D/2]
        self._amplitudes = amplitudes(rope, head_dim)
        self._memory = np.zeros(4 * chunk * len(self.frequencies), np.float32)

    def fill(self, past: int, evicted: int, count: int) -> Array:
        """[4, count, D/2] for tokens after `past` cached and `evicted` gone ones, at the same place for the same count;
        the angles in float64, as everywhere."""
        table = self._memory[: 4 * count * len(self.frequencies)].reshape(4, count, -1)
        for first, half in ((past + evicted, table[:2]), (past, table[2:])):
            turns = np.arange(first, first + count, dtype=np.float64)[:, None] * self.frequencies
            half[0], half[1] = np.cos(turns) * self._amplitudes, np.sin(turns) * self._amplitudes
        return table


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a cache line."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
