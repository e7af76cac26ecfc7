"""Keys held less their centre, in the ring: the inputs by which the operator puts it back into the scores.

A key is rotated and quantised without the constant c of kv/scales.py. The score that it lacks, q . R(n) c, needs cosine
and sine of the pairs in which c is not zero, at the position n of each slot's key. They are the same in all layers, so
one table serves them; a run writes the columns of its new tokens, an eviction none.

INT4 has all pairs, so the table is of codes, 127 for a cosine of 1, in blocks as keys of INT8 are (native/kernels.h): a
pair and slot take two bytes and not eight, and the operator multiplies them as it does keys. It takes out what these
codes make of the centre, not the centre turned exactly, so what it puts back is just that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgekv.engines.onnx.binding import Array
from edgekv.engines.onnx.native import BLOCK, TOGETHER
from edgekv.engines.rope import inverse_frequencies, settled
from edgekv.kv.quant import LIMIT, Float32
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import BITS, KVSpec
from edgekv.model.spec import ModelSpec

INPUTS = ("pairs", "turns")
"""What all layers share; `centre.i` is a layer's own."""


class CentreTable:
    """The centres of the layers that have one, and the table of their slots."""

    def __init__(self, spec: ModelSpec, kv: KVSpec, scales: KVScales) -> None:
        assert scales.k_centre is not None
        self.layers: dict[int, Float32] = {
            layer: np.ascontiguousarray(scales.k_centre[layer]) for layer in scales.centred_layers
        }
        self.pairs = scales.centre_pairs
        frequencies = inverse_frequencies(settled(spec.rope, spec.head_dim, kv.capacity), spec.head_dim)
        self._frequencies = frequencies[self.pairs, None]
        slots, count = -(-kv.capacity // BLOCK) * BLOCK, len(self.pairs)
        self._coded = BITS[kv.dtype][0] == 4
        shape = (slots, -(-2 * count // TOGETHER) * TOGETHER) if self._coded else (2, count, slots)
        self.turns: Array = np.zeros(shape, np.int8 if self._coded else np.float32)

    def inputs(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays to bind; their contents change in place."""
        yield from zip(INPUTS, (self.pairs, self.turns), strict=True)
        for layer, centre in self.layers.items():
            yield f"centre.{layer}", centre

    def place(self, slots: Array, positions: Array) -> None:
        """The keys in these slots stand at these positions."""
        angles = self._frequencies * positions.astype(np.float64)
        cos, sin = np.cos(angles), np.sin(angles)  # [P, n]
        if not self._coded:
            self.turns[0][:, slots], self.turns[1][:, slots] = cos, sin
            return
        items = self.turns.shape[1]
        codes = np.zeros((len(slots), items), np.int8)
        codes[:, : 2 * len(cos)] = np.rint(LIMIT["int8"] * np.stack([cos, sin], axis=1)).reshape(-1, len(slots)).T
        blocks = self.turns.reshape(-1, items // TOGETHER, BLOCK, TOGETHER)
        block, place = np.divmod(slots, BLOCK)
        blocks[block, :, place] = codes.reshape(len(slots), -1, TOGETHER)
