"""RingCache: keys and values of all layers in two tensors, written in place; a ring as engines/cached.py has it.

A token's *place* is its number among those in the cache. How the keys' angles follow is said in attention.py.

INT8 rows have a factor each beside the channels' scales, as values have in edgekv's own operator (kv/rows.py): 16 bits,
which bfloat16 holds exactly. Simulated in this engine, rows quantised and restored on their way into a float cache: KL
in thousandths of a nat, and perplexity over that of floats; SmolLM2-135M, 4,092 tokens of prose, 2026-11-30.

    scales alone                            2.48 +- 0.20    1.0042 +- 0.0013
    values with factors                     1.08 +- 0.02    1.0027 +- 0.0008
    keys, too                               0.47 +- 0.02    0.9999 +- 0.0005
    keys mixed, too, as in the operator     0.23 +- 0.01    1.0001 +- 0.0004

Keys are not mixed: queries would have to be, both of each, in launches of their own in every layer and step.
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
from edgekv.kv.rows import pack, packed_factors
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import FACTOR_BYTES, ROW_FACTORS, TURN_REACH, TURN_STEP, KVDtype, KVSpec
from edgekv.model.spec import ModelSpec, RopeSpec

Rows = npt.NDArray[Any]

STORED: dict[KVDtype, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "float": torch.float32,
}
"""How a row's numbers are stored."""

_AS_BYTES = (torch.float8_e4m3fn, torch.int8)  # rows travel as bytes: numpy has no FP8, and a factor is two of them


@dataclass
class Place:
    """Where the next run's tokens go. Python integers for the host, the same in a tensor for kernels.

    Attributes:
        past: filled slots before the run. evicted: tokens that have left. pinned: S. capacity: C.
        state: [4] int32 on the cache's device: past, evicted, pinned, capacity. Of evicted what kernels ask: whether
            it is 0, and the rest after division by C - S, so that a chat of years stays within 32 bits.
    """

    capacity: int
    state: Tensor
    past: int = 0
    evicted: int = 0
    pinned: int = 0

    def set(self, past: int) -> None:
        """The next run comes after `past` slots; copies four integers to the device."""
        self.past = past
        evicted = self.evicted and (self.evicted - 1) % (self.capacity - self.pinned) + 1
        self.state.copy_(torch.tensor([past, evicted, self.pinned, self.capacity], dtype=torch.int32))

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
class Part:
    """One layer's keys or its values.

    Attributes:
        stored: [K, C, D], as STORED says. scale: [K, D] float32, or None where nothing is scaled.
        factors: [K, C] bfloat16, each row's own beside the scale (kv/rows.py), or None.
        centre: [K, D] float32, what rows are stored without (kv/scales.py), or None.
    """

    stored: Tensor
    scale: Tensor | None = None
    factors: Tensor | None = None
    centre: Tensor | None = None


@dataclass(frozen=True)
class LayerRows:
    """One layer's part of the cache. turns: where keys have a centre, the places' angles, by which it is turned."""

    keys: Part
    values: Part
    turns: Turns | None = None


class RingCache(RingLayout):
    """The rows of all layers, allocated once."""

    def __init__(self, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, device: torch.device) -> None:
        self.place = Place(kv.capacity, torch.zeros(4, dtype=torch.int32, device=device))
        super().__init__()
        shape = (spec.num_layers, spec.num_kv_heads, kv.capacity, spec.head_dim)
        self._parts = {part: torch.zeros(shape, dtype=STORED[kv.dtype], device=device) for part in "kv"}  # [L, K, C, D]
        self._factors: dict[str, Tensor] = {}  # each [L, K, C]
        if kv.dtype in ROW_FACTORS:
            self.row_factors = "plain"
            self._factors = {part: torch.zeros(shape[:-1], dtype=torch.bfloat16, device=device) for part in "kv"}
        self._scales: dict[str, Tensor] = {}  # each [L, K, D]
        self._centres: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}  # by layer, each [K, D]
        self._turns: Turns | None = None
        if scales is not None:
            self._scales = {"k": torch.tensor(scales.k, device=device), "v": torch.tensor(scales.v, device=device)}
        if scales is not None and scales.v_centre is not None:
            self._centres["v"] = dict(enumerate(torch.tensor(scales.v_centre, device=device)))
        if scales is not None and scales.k_centre is not None:
            self._centres["k"] = {i: torch.tensor(scales.k_centre[i], device=device) for i in scales.centred_layers}
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
        keys = self._part("k", index)
        return LayerRows(keys, self._part("v", index), None if keys.centre is None else self._turns)

    def _part(self, part: str, layer: int) -> Part:
        scales, factors = self._scales.get(part), self._factors.get(part)
        return Part(
            self._parts[part][layer],
            scale=None if scales is None else scales[layer],
            factors=None if factors is None else factors[layer],
            centre=self._centres[part].get(layer),
        )

    def read(self, part: str, layer: int, start: int, stop: int) -> Rows:
        """A copy of the rows of tokens start .. stop-1 as stored, [K, stop-start, row]: FP8 as bytes, and so are codes
        that have a factor behind them, whose keys are not those of the operator's int8 rows."""
        held, slots = self._part(part, layer), self.place.slots(start, stop)
        rows = np.asarray(_bytes_of(held.stored)[:, slots].cpu().numpy())
        if held.factors is None:
            return rows
        return pack(rows, held.factors[:, slots, None].float().cpu().numpy()).view(np.uint8)

    def write(self, part: str, layer: int, start: int, rows: Rows) -> None:
        """Overwrite the rows of tokens from `start` on with stored ones."""
        held, slots = self._part(part, layer), self.place.slots(start, start + rows.shape[1])
        if held.factors is not None:
            held.factors[:, slots] = torch.from_numpy(packed_factors(rows)[..., 0]).to(held.factors)
            rows = rows[..., :-FACTOR_BYTES]
        target = _bytes_of(held.stored)
        target[:, slots] = torch.from_numpy(np.ascontiguousarray(rows)).to(target.device)

    def put_back(self, part: str, layer: int, rows: Rows, length: int) -> None:
        """Write a layer's rows of all tokens."""
        heads, _, dim = self._parts[part][layer].shape
        items = dim + FACTOR_BYTES * bool(self._factors)
        check_rows(rows, layer, (heads, length, items), self.row_dtype)
        self.write(part, layer, 0, rows)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """numpy's type of what `read` gives and `write` takes."""
        return np.asarray(_bytes_of(self._parts["k"][:0]).cpu().numpy()).dtype

    def floats(self, part: str, layer: int, start: int, stop: int) -> Tensor:
        """The rows of tokens start .. stop-1 as numbers, [K, stop-start, D] float32 on the host; keys less their
        centre."""
        held, slots = self._part(part, layer), self.place.slots(start, stop)
        rows = _bytes_of(held.stored)[:, slots].view(held.stored.dtype).float()
        if held.factors is not None:
            rows = rows * held.factors[:, slots, None].float()
        if held.scale is not None:
            rows = rows * held.scale[:, None]
        if part == "v" and held.centre is not None:
            rows = rows + held.centre[:, None]
        return rows.cpu()


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8) if rows.dtype in _AS_BYTES else rows
