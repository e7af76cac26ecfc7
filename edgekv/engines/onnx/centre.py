"""Keys held less their centre, in the ring: the inputs by which the operator puts it back into the scores.

A key is rotated and quantised without the constant c of kv/scales.py. The score that it lacks, q . R(n) c, needs cosine
and sine of the pairs in which c is not zero, at the position n of each slot's key. They are the same in all layers, so
one table serves them; a run writes the columns of its new tokens, an eviction none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgekv.engines.onnx.binding import Array
from edgekv.engines.onnx.native import BLOCK
from edgekv.engines.rope import inverse_frequencies, settled
from edgekv.kv.scales import Float32, KVScales
from edgekv.kv.spec import KVSpec
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
        self.turns = np.zeros((2, len(self.pairs), -(-kv.capacity // BLOCK) * BLOCK), np.float32)

    def inputs(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays to bind; their contents change in place."""
        yield from zip(INPUTS, (self.pairs, self.turns), strict=True)
        for layer, centre in self.layers.items():
            yield f"centre.{layer}", centre

    def place(self, slots: Array, positions: Array) -> None:
        """The keys in these slots stand at these positions."""
        angles = self._frequencies * positions.astype(np.float64)
        self.turns[0][:, slots], self.turns[1][:, slots] = np.cos(angles), np.sin(angles)
