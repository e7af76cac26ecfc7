"""The cache as ONNX Runtime's GroupQueryAttention wants it: rows in the order of tokens, moved down by an eviction.

Row i of the RoPE tables serves slot i, which stands for position i + evicted: they are made anew when tokens have left.
The pinned tokens, run again at slot 0, then get the angles just before the window. Their queries see only themselves,
so their hidden states are what they were.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from edgekv.engines.base import Logits, PinnedAngles, check_rows
from edgekv.engines.cached import CacheLayout
from edgekv.engines.onnx.binding import CACHE_DTYPES, Array, CacheMemory, bind_array, gqa_row_items
from edgekv.engines.rope import rope_inputs, rope_tables, settled_ropes
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec


class MovedCache(CacheLayout):
    """Rows in a `HostCache` or `DeviceCache`, slot i holding token i."""

    pinned_angles: ClassVar[PinnedAngles] = "moved"

    def __init__(self, memory: CacheMemory, spec: ModelSpec, kv: KVSpec) -> None:
        super().__init__()
        self.memory = memory
        self._heads, self._row, self._dtype = spec.num_kv_heads, gqa_row_items(spec, kv.dtype), CACHE_DTYPES[kv.dtype]

    def bind(self, io: Any) -> None:
        """Bind every layer."""
        self.memory.bind(io)

    def read(self, part: str, layer: int, start: int, stop: int) -> Array:
        """A copy of rows start .. stop-1, [K, stop-start, row]."""
        return self.memory.read(part, layer, start, stop)

    def put_back(self, part: str, layer: int, rows: Array, length: int) -> None:
        """Write the rows of all tokens."""
        check_rows(rows, layer, (self._heads, length, self._row), np.dtype(self._dtype))
        self.memory.write(part, layer, 0, rows)

    def forget(self, move: Move) -> None:
        """Move the rows behind the evicted ones down."""
        end = move.start + move.count
        self.memory.move(move.start, end, move.length - end)
        self.pinned, self.evicted = move.start, self.evicted + move.count


class MovedInputs:
    """What GroupQueryAttention reads beside the cache: scales, and RoPE tables that follow the evicted tokens.

    Args:
        half: whether attention runs in float16.
    """

    def __init__(
        self, io: Any, cache: MovedCache, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, *, half: bool
    ) -> None:
        self._io, self._cache, self._capacity, self._dim = io, cache, kv.capacity, spec.head_dim
        self._ropes = settled_ropes(spec, kv.capacity)
        shape = (len(self._ropes), 2, kv.capacity, spec.head_dim // 2)  # cos and sin of each RoPE
        self.tables = np.zeros(shape, np.float16 if half else np.float32)
        self._first: int | None = None  # the position of the tables' first row
        self._scales = [] if scales is None else self._bind_scales(kv, scales)

    def place(self, past: int, count: int) -> None:
        """Before a run of `count` tokens behind `past` others."""
        first = self._cache.evicted
        if first != self._first:
            self._first = None  # until they are whole: whoever interrupts this must not leave them half made
            self._turn_to(first)
            self._first = first

    def restored(self, layer: int, start: int, keys: Logits) -> Logits:
        """Keys of tokens from `start` on as the model knows them: they are stored so."""
        return keys

    def _turn_to(self, first: int) -> None:
        for index, (rope, tables) in enumerate(zip(self._ropes, self.tables, strict=True)):
            tables[:] = rope_tables(rope, self._dim, first, self._capacity)
            for name, table in zip(rope_inputs(index), tables, strict=True):
                bind_array(self._io, name, table)

    def _bind_scales(self, kv: KVSpec, scales: KVScales) -> list[Array]:
        """Returns the arrays, which must live as long as they are bound."""
        arrays = []
        for part, layers in (("k", scales.k), ("v", scales.v)):
            for layer, values in enumerate(layers):  # [K, D]
                array = values[:1, :1].reshape(1) if kv.granularity == "tensor" else values[None, :, None, :]
                arrays.append(np.ascontiguousarray(array, np.float32))
                bind_array(self._io, f"{part}_scale.{layer}", arrays[-1])
        return arrays
