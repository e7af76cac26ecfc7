"""RingCache: keys and values of all layers in two tensors, written in place; a ring as engines/cached.py has it.

A token's *place* is its number among those in the cache. How the keys' angles follow is said in attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgekv.engines.base import check_rows
from edgekv.engines.cached import RingLayout
from edgekv.engines.rope import rope_tables, settled
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import TURN_REACH, TURN_STEP, KVDtype, KVSpec
from edgekv.model.spec import ModelSpec, RopeSpec

Rows = npt.NDArray[Any]

STORED: dict[KVDtype, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "float": torch.float32,
}
"""How a row's numbers are stored."""

_AS_BYTES = (torch.float8_e4m3fn,)  # numpy has no such type: rows travel as their bytes


@dataclass
class Place:
    """Where the next run's tokens go. Python integers for the host, the same in a tensor for kernels.

    Attributes:
        past: filled slots before the run. evicted: tokens that have left. pinned: S. capacity: C.
        state: [4] int32 on the cache's device: past, evicted, pinned, capacity.
    """

    capacity: int
    state: Tensor
    past: int = 0
    evicted: int = 0
    pinned: int = 0

    def set(self, past: int) -> None:
        """The next run comes after `past` slots; copies four integers to the device."""
        self.past = past
        self.state.copy_(torch.tensor([past, self.evicted, self.pinned, self.capacity], dtype=torch.int32))

    def slots(self, start: int, stop: int) -> Tensor:
        """The slots of tokens start .. stop-1, [stop-start] int64 on the cache's device."""
        tokens = torch.arange(start, stop, device=self.state.device)
        ring = self.pinned + (tokens - self.pinned + self.evicted) % (self.capacity - self.pinned)
        return torch.where(tokens < self.pinned, tokens, ring)


@dataclass(frozen=True)
class Turns:
    """cos and sin of every place's angle, as two small tables: angle(s + r) = angle(s) + angle(r), s a multiple of 32.

    What is multiplied with the turned centre is turned to s first, so that a tile of places is met by the same few rows
    wherever it begins. Both come from float64 (engines/rope.py); a row has D/2 cosines, and D/2 sines behind them.

    Attributes:
        starts: [C/32 rounded up, D] float32, of places 0, 32, 64 ..., times the RoPE's attention factor.
        within: [64, D] float32, of places 0 .. 63, without it.
    """

    starts: Tensor
    within: Tensor

    @classmethod
    def of(cls, rope: RopeSpec, head_dim: int, capacity: int, device: torch.device) -> Turns:
        """Of a settled RoPE and a cache of `capacity` slots."""

        def table(rope: RopeSpec, count: int) -> Rows:
            return np.concatenate(rope_tables(rope, head_dim, 0, count), axis=1)

        starts, within = table(rope, capacity)[::TURN_STEP], table(replace(rope, attention_factor=1.0), TURN_REACH)
        return cls(torch.tensor(starts, device=device), torch.tensor(within, device=device))


@dataclass(frozen=True)
class LayerRows:
    """One layer's part of the cache.

    Attributes:
        keys, values: [K, C, D] as stored. k_scale, v_scale: [K, D] float32, or None where nothing is scaled.
        k_centre: [K, D] float32, what keys are stored without (kv/scales.py), or None.
        turns: with a centre, the places' angles, by which it is turned.
        v_centre: [K, D] float32, what values are stored without, or None.
    """

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_centre: Tensor | None = None
    turns: Turns | None = None
    v_centre: Tensor | None = None


class RingCache(RingLayout):
    """The rows of all layers, allocated once."""

    def __init__(self, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, device: torch.device) -> None:
        self.place = Place(kv.capacity, torch.zeros(4, dtype=torch.int32, device=device))
        super().__init__()
        shape = (spec.num_layers, spec.num_kv_heads, kv.capacity, spec.head_dim)
        self._parts = {part: torch.zeros(shape, dtype=STORED[kv.dtype], device=device) for part in "kv"}  # [L, K, C, D]
        self._scales: dict[str, Tensor] | None = None  # each [L, K, D]
        if scales is not None:
            self._scales = {"k": torch.tensor(scales.k, device=device), "v": torch.tensor(scales.v, device=device)}
        self._v_centres: Tensor | None = None  # [L, K, D]
        if scales is not None and scales.v_centre is not None:
            self._v_centres = torch.tensor(scales.v_centre, device=device)
        self._centres: dict[int, Tensor] = {}
        self._turns: Turns | None = None
        if scales is not None and scales.k_centre is not None:
            self._centres = {i: torch.tensor(scales.k_centre[i], device=device) for i in scales.centred_layers}
            rope = settled(spec.rope, spec.head_dim, kv.capacity)
            self._turns = Turns.of(rope, spec.head_dim, kv.capacity, device)

    @property
    def evicted(self) -> int:
        """How many tokens have left."""
        return self.place.evicted

    @evicted.setter
    def evicted(self, count: int) -> None:
        self.place.evicted = count

    @property
    def pinned(self) -> int:
        """How many tokens the last eviction left at the beginning."""
        return self.place.pinned

    @pinned.setter
    def pinned(self, count: int) -> None:
        self.place.pinned = count

    def layer(self, index: int) -> LayerRows:
        """Views of one layer."""
        scales, centre = self._scales, self._centres.get(index)
        return LayerRows(
            keys=self._parts["k"][index],
            values=self._parts["v"][index],
            k_scale=None if scales is None else scales["k"][index],
            v_scale=None if scales is None else scales["v"][index],
            k_centre=centre,
            turns=None if centre is None else self._turns,
            v_centre=None if self._v_centres is None else self._v_centres[index],
        )

    def read(self, part: str, layer: int, start: int, stop: int) -> Rows:
        """A copy of the rows of tokens start .. stop-1 as stored, [K, stop-start, D]; FP8 as bytes."""
        rows = _bytes_of(self._parts[part][layer])[:, self.place.slots(start, stop)]
        return np.asarray(rows.cpu().numpy())

    def write(self, part: str, layer: int, start: int, rows: Rows) -> None:
        """Overwrite the rows of tokens from `start` on with stored ones."""
        target = _bytes_of(self._parts[part][layer])
        slots = self.place.slots(start, start + rows.shape[1])
        target[:, slots] = torch.from_numpy(np.ascontiguousarray(rows)).to(target.device)

    def put_back(self, part: str, layer: int, rows: Rows, length: int) -> None:
        """Write a layer's rows of all tokens."""
        heads, _, dim = self._parts[part][layer].shape
        check_rows(rows, layer, (heads, length, dim), self.row_dtype)
        self.write(part, layer, 0, rows)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """numpy's type of what `read` gives and `write` takes."""
        return np.asarray(_bytes_of(self._parts["k"][:0]).cpu().numpy()).dtype

    def floats(self, part: str, layer: int, start: int, stop: int) -> Tensor:
        """The rows of tokens start .. stop-1 as numbers, [K, stop-start, D] float32 on the host; keys less their
        centre."""
        stored = self._parts[part][layer]
        rows = _bytes_of(stored)[:, self.place.slots(start, stop)].view(stored.dtype).float()
        if self._scales is not None:
            rows = rows * self._scales[part][layer][:, None]
        if part == "v" and self._v_centres is not None:
            rows = rows + self._v_centres[layer][:, None]
        return rows.cpu()


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8) if rows.dtype in _AS_BYTES else rows
