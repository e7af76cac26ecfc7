"""The cache as edgekv's own attention operator wants it: a ring (engines/cached.py) in which an eviction moves nothing.

Keys stay where they were written, at the angle they were written with. A window key has the angle of its absolute
position n. A pinned key has that of its own slot, and is met by queries turned to their position less the evicted
tokens: so it sits just before the window, as in StreamingLLM, and the operator turns every query twice. An eviction is
then nothing but two integers: the oldest slots will be overwritten.

A layer that sees only a window of the last tokens may hold just these (KVSpec.ring_slots): token n in slot n mod R, no
pinned prefix. It cannot be cut back further than it has rows for; `keeps` says so.

Codes and the factors of rows are those of the reference (kv/rows.py); within a block of 16 slots codes are
interleaved as native/kernels.h says, and put into the plain order of rows when they are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from edgekv.engines.base import Logits, check_rows
from edgekv.engines.cached import RingLayout
from edgekv.engines.memory import zeros_together
from edgekv.engines.onnx.binding import Array, bind_array, ring_dtype
from edgekv.engines.onnx.centre import CentreTable
from edgekv.engines.onnx.native import BLOCK, TOGETHER
from edgekv.engines.rope import amplitudes, inverse_frequencies, rotate, rotated_centre, settled_ropes
from edgekv.errors import InvalidOption
from edgekv.kv.rows import code_items, operator_scales, row_items
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import ROW_FACTORS, KVDtype, KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec, RopeSpec


class LayerCache:
    """One layer's keys and values in blocks of 16 slots, as native/kernels.h has them. A row is its D numbers and,
    where it has a factor, the two bytes of that, which the cache holds behind the blocks of each head."""

    def __init__(self, spec: ModelSpec, dtype: KVDtype, parts: dict[str, Array]) -> None:
        """parts: the memory of keys and of values, each [K, slots, row]."""
        (heads, slots, _), dim = parts["k"].shape, spec.head_dim
        blocks = slots // BLOCK
        self._together = g = TOGETHER if dtype in ROW_FACTORS else 1
        self._items = {part: code_items(dim, dtype, part) for part in "kv"}
        self.parts = parts
        flat = {part: rows.reshape(heads, -1) for part, rows in self.parts.items()}
        codes = {part: rows[:, : slots * self._items[part]] for part, rows in flat.items()}
        self._keys = codes["k"].reshape(heads, blocks, self._items["k"] // g, BLOCK, g)
        self._values = codes["v"].reshape(heads, blocks, BLOCK // g, self._items["v"], g)
        self._factors = {
            part: rows[:, slots * self._items[part] :].reshape(heads, slots, -1) for part, rows in flat.items()
        }

    def read(self, part: str, slots: Array) -> Array:
        """A copy of the rows in these slots, [K, n, row]."""
        block, place = np.divmod(slots, BLOCK)
        if part == "k":
            rows = self._keys[:, block, :, place, :]  # [n, K, D/g, g]
            rows = rows.reshape(*rows.shape[:2], self._items[part])
        else:
            group, inside = np.divmod(place, self._together)
            rows = self._values[:, block, group, :, inside]  # [n, K, items]
        return np.concatenate([rows.swapaxes(0, 1), self._factors[part][:, slots]], axis=-1)

    def write(self, part: str, slots: Array, rows: Array) -> None:
        """Overwrite the rows in these slots with [K, n, row]."""
        block, place = np.divmod(slots, BLOCK)
        items = self._items[part]
        self._factors[part][:, slots] = rows[..., items:]
        turned = rows[..., :items].swapaxes(0, 1)  # [n, K, items]
        if part == "k":
            words = turned.reshape(*turned.shape[:2], items // self._together, self._together)
            self._keys[:, block, :, place, :] = words
        else:
            group, inside = np.divmod(place, self._together)
            self._values[:, block, group, :, inside] = turned


class RingCache(RingLayout):
    """Keys and values of all layers, and which slot holds which token.

    Args:
        slots: of each layer, by default C. A layer with fewer is a ring of its own, of its last tokens.
        centre: the angles of keys that are held less their centre, a column a slot.
    """

    def __init__(
        self, spec: ModelSpec, kv: KVSpec, slots: Sequence[int] = (), centre: CentreTable | None = None
    ) -> None:
        super().__init__()
        self._capacity, self._windows = kv.capacity, spec.windows
        self._slots = tuple(slots) or (kv.capacity,) * spec.num_layers
        self._dtype = ring_dtype(kv.dtype)
        self._heads = spec.num_kv_heads
        self._row = {part: row_items(spec.head_dim, kv.dtype, part) for part in "kv"}
        self.row_factors = "mixed" if kv.dtype in ROW_FACTORS else "none"
        self.layers = _layers(spec, kv.dtype, self._slots)
        self.written = 0  # tokens, from the very first, up to where slots have been overwritten
        self._missing = 0  # tokens, from the very first, that no ring of a layer's own holds, whatever room it has
        self._centre, self._centre_stale = centre, False

    def bind(self, io: Any) -> None:
        """Bind every layer; the operator writes into its input."""
        for number, layer in enumerate(self.layers):
            for part, rows in layer.parts.items():
                io.bind_input(f"past_{part}.{number}", "cpu", 0, rows.dtype, (1, *rows.shape), rows.ctypes.data)
        for name, array in () if self._centre is None else self._centre.inputs():
            bind_array(io, name, array)

    @property
    def centred(self) -> bool:
        """Whether some layers hold keys less a centre."""
        return self._centre is not None

    def own_ring(self, layer: int) -> bool:
        """Whether the layer holds its last tokens only."""
        return self._slots[layer] != self._capacity

    def first(self, layer: int) -> int:
        """The first token whose row the layer still holds, and all after it."""
        if not self.own_ring(layer):
            return 0
        return max(0, max(self._missing, self.written - self._slots[layer]) - self.evicted)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of the rows of tokens start .. stop-1, [K, n, row]; of a layer with a ring of its own those that it
        still holds."""
        start = min(max(start, self.first(layer)), stop)
        return self.layers[layer].read(part, self._places(layer, start, stop))

    def write(self, part: str, layer: int, start: int, rows: Array) -> None:
        """Overwrite the rows of tokens from `start` on; a ring of its own takes as many as it has slots, the last."""
        stop = start + rows.shape[1]
        start = max(start, stop - self._slots[layer])
        self.layers[layer].write(part, self._places(layer, start, stop), rows[:, rows.shape[1] - (stop - start) :])

    def put_back(self, part: str, layer: int, rows: Array, length: int) -> None:
        """Write a layer's rows; its own ring takes the last ones, as many as another ring held, if its window is among
        them."""
        own = self.own_ring(layer)
        if not own and 0 < rows.shape[1] < length:
            raise InvalidOption(
                f"Layer {layer} of this content has its last {rows.shape[1]} tokens only, where this cache keeps all "
                f"{length}: use the --context and --stride that it was saved with, or have its words read again "
                "(--reread)."
            )
        held = max(min(length, self._windows[layer]), min(length, rows.shape[1])) if own else length
        check_rows(rows, layer, (self._heads, held, self._row[part]), self._dtype)
        start = length - held
        if own:
            self.written = length + self.evicted
            self._missing = max(self._missing, start + self.evicted if start else 0)
        self.write(part, layer, start, rows)
        self._centre_stale = True

    def place(self, past: int, count: int) -> None:
        """A run is about to write the rows of `count` tokens behind `past` others."""
        self.written = max(self.written, past + count + self.evicted)
        if self._centre is not None:
            span = (0, self._capacity) if self._centre_stale else (past, past + count)
            self._centre.place(self._places(0, *span), self._positions(*span))
            self._centre_stale = False

    def check(self, move: Move) -> None:
        """Refuse an eviction after which a layer with a ring of its own would see the pinned prefix, which it lacks."""
        if not self._windows_whole(move.length - move.count, self.evicted + move.count, move.start):
            raise InvalidOption(
                f"{move} leaves fewer tokens beside the pinned prefix than a layer's window has, and that layer "
                "keeps no others: evict less at once."
            )

    def keeps(self, length: int) -> bool:
        """Whether every layer holds what the token after the first `length` would see."""
        return self._windows_whole(length, self.evicted, self.pinned)

    def reset(self, pinned: int = 0, evicted: int = 0) -> None:
        """Count from nothing again, or from so many tokens pinned and gone."""
        super().reset(pinned, evicted)
        self.written = self._missing = 0

    @contextmanager
    def rerunning(self) -> Iterator[None]:
        """Rings of their own have no place for pinned tokens: they come out as they went in."""
        rings = [
            rows for number, layer in enumerate(self.layers) if self.own_ring(number) for rows in layer.parts.values()
        ]
        kept, written = [rows.copy() for rows in rings], self.written
        yield
        self.written = written
        for rows, old in zip(rings, kept, strict=True):
            rows[:] = old

    def _places(self, layer: int, start: int, stop: int) -> Array:
        """The slots of these tokens."""
        tokens = np.arange(start, stop)
        if self.own_ring(layer):
            return (tokens + self.evicted) % self._slots[layer]
        if not self.evicted:
            return tokens
        ring = self.pinned + (tokens - self.pinned + self.evicted) % (self._capacity - self.pinned)
        return np.where(tokens < self.pinned, tokens, ring)

    def _positions(self, start: int, stop: int) -> Array:
        """The positions that these tokens' keys are rotated to: their own slots if pinned, else counted from the very
        first token."""
        tokens = np.arange(start, stop)
        return np.where((tokens < self.pinned) & (self.evicted > 0), tokens, tokens + self.evicted)

    def _windows_whole(self, length: int, evicted: int, pinned: int) -> bool:
        """Whether rings of their own hold what the token after the first `length` would see: a window of tokens, none
        of them pinned where tokens are missing after these."""
        for layer, window in enumerate(self._windows):
            if self.own_ring(layer):
                oldest = max(0, length + 1 - window)
                if oldest + evicted < self.first(layer) + self.evicted or (evicted and oldest < pinned):
                    return False
        return True


class RunPart(NamedTuple):
    """Tokens of one run between two evictions: what the operator is told of the cache before them, and how many."""

    past: int
    evicted: int
    pinned: int
    capacity: int
    tokens: int


class RingInputs:
    """What the operator reads beside the cache: scales, where a run's tokens go, and the angles of their keys and
    queries."""

    def __init__(
        self, io: Any, cache: RingCache, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, chunk: int
    ) -> None:
        self._io, self._cache, self._spec, self._kv, self._scales = io, cache, spec, kv, scales
        self.angles = {
            index: RunAngles(rope, spec.head_dim, chunk)
            for index, rope in enumerate(settled_ropes(spec, kv.capacity))
            if index in spec.rope_layers
        }
        self._placed = (0, 0)  # tokens and parts of the run that inputs are bound for
        self._state = np.zeros((chunk + 1, 4), np.int64)  # of each part: tokens before it, evicted, pinned, C
        parts = () if scales is None else operator_scales(kv.dtype, scales.k, scales.v)
        self._bound = [_contiguous(pair) for pair in zip(*parts, strict=True)]  # [2, K, D] each
        self._centres = () if scales is None or scales.v_centre is None else tuple(map(_contiguous, scales.v_centre))
        for name, arrays in (("scales", self._bound), ("value_centre", self._centres)):
            for layer, array in enumerate(arrays):
                bind_array(io, f"{name}.{layer}", array)

    @property
    def may_evict(self) -> bool:
        """Whether a run may go over evictions. Not where keys have a centre: its table has one angle for each slot."""
        return not self._cache.centred

    def enter(self, past: int, count: int) -> RunPart:
        """The next part of a run, `count` tokens behind `past` others, in the cache's state of this moment."""
        self._cache.place(past, count)
        return RunPart(past, self._cache.evicted, self._cache.pinned, self._kv.capacity, count)

    def place(self, past: int, count: int) -> None:
        """Before a run of `count` tokens behind `past` others."""
        self.place_parts([self.enter(past, count)])

    def place_parts(self, parts: Sequence[RunPart]) -> None:
        """Before a run that consists of these."""
        count = sum(part.tokens for part in parts)
        state, changed = self._state[: len(parts)], self._placed != (count, len(parts))
        state[:] = [part[:4] for part in parts]
        if changed:
            bind_array(self._io, "state", state.reshape(-1))
        past = np.concatenate([np.arange(part.past, part.past + part.tokens) for part in parts])
        for index, angles in self.angles.items():
            table = angles.fill(parts[0].past + parts[0].evicted, past)
            if changed:
                bind_array(self._io, f"angles.{index}", table)
        self._placed = (count, len(parts))

    def restored(self, layer: int, start: int, keys: Logits) -> Logits:
        """Keys of tokens from `start` on, [K, n, D], as the model knows them: the pinned ones turned on to where they
        would sit just before the window, and the centre put back."""
        stop, cache = start + keys.shape[1], self._cache
        pinned, rope = max(0, min(cache.pinned, stop) - start), self._spec.rope_layers[layer]
        if cache.evicted and pinned and rope >= 0 and not cache.own_ring(layer):
            turn = cache.evicted * self.angles[rope].frequencies
            cos, sin = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
            keys[:, :pinned] = rotate(keys[:, :pinned], cos, sin)
        if self._scales is not None and (centre := self._scales.centre_of(layer)) is not None:
            first = start + cache.evicted
            keys += rotated_centre(centre, self._spec, self._kv.capacity, first, keys.shape[1])
        return keys


class RunAngles:
    """cos and sin of one rotary embedding for a run's tokens, at absolute positions and less the evicted tokens."""

    def __init__(self, rope: RopeSpec, head_dim: int, chunk: int) -> None:
        self.frequencies = inverse_frequencies(rope, head_dim)  # [D/2]
        self._amplitudes = amplitudes(rope, head_dim)
        self._memory = np.zeros(4 * chunk * len(self.frequencies), np.float32)

    def fill(self, first: int, past: Array) -> Array:
        """[4, T, D/2] for tokens from the absolute position `first` on, which have `past` [T] others before them in the
        cache; at the same place for the same T, and the angles in float64, as everywhere."""
        count = len(past)
        table = self._memory[: 4 * count * len(self.frequencies)].reshape(4, count, -1)
        for positions, half in ((np.arange(first, first + count), table[:2]), (past, table[2:])):
            turns = positions.astype(np.float64)[:, None] * self.frequencies
            half[0], half[1] = np.cos(turns) * self._amplitudes, np.sin(turns) * self._amplitudes
        return table


def _contiguous(numbers: Any) -> Array:
    return np.ascontiguousarray(numbers, np.float32)


def _layers(spec: ModelSpec, dtype: KVDtype, slots: Sequence[int]) -> tuple[LayerCache, ...]:
    """A cache for each layer's number of slots, rounded up to blocks, all in one piece of memory."""
    row = {part: row_items(spec.head_dim, dtype, part) for part in "kv"}
    whole = [-(-count // BLOCK) * BLOCK for count in slots]
    shapes = [(spec.num_kv_heads, count, row[part]) for count in whole for part in "kv"]
    memory = zeros_together(shapes, ring_dtype(dtype))
    pairs = zip(memory[0::2], memory[1::2], strict=True)
    return tuple(LayerCache(spec, dtype, {"k": keys, "v": values}) for keys, values in pairs)
