"""The rounding error of keys and values, layer by layer, and the share that saturates.

Errors are those of `kv.quant.fake_quantize` on the rows of a float cache, or of `kv.rows` where rows have factors of
their own, so one run of the float engine serves any dtype, also one that no engine at hand can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import Engine
from edgekv.engines.rope import rotated_centre
from edgekv.kv.quant import count_saturated, fake_quantize
from edgekv.kv.rows import own_rows
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVDtype, RowFactors

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerCheck:
    """One layer's errors: root mean square of the rounding over that of the rows; the share beyond the last code."""

    layer: int
    k_error: float
    v_error: float
    k_saturated: float
    v_saturated: float


class ErrorMeter:
    """Sums up what quantising does to the rows of a float cache.

    Args:
        dtype: of the rows, by default the scales'. factors: those of the rows; with factors none saturates.
    """

    def __init__(self, scales: KVScales, dtype: KVDtype | None = None, factors: RowFactors = "none") -> None:
        self._scales, self._dtype, self._factors = scales, dtype or scales.dtype, factors
        self.sums = np.zeros((len(scales.k), 2, 4), np.float64)  # [L, K or V, error^2, value^2, saturated, values]

    def see(self, engine: Engine, start: int, stop: int) -> None:
        """Take in the rows of slots start .. stop-1."""
        for layer, sums in enumerate(self.sums):
            keys, values = engine.rows(layer, start, stop)
            centre = self._scales.centre_of(layer)
            taken = 0.0 if centre is None else self._turned(centre, engine, start, stop)
            sums[0] += self._count("k", keys - taken, keys, self._scales.k[layer][:, None])
            centres = self._scales.v_centre
            left = values if centres is None else values - centres[layer][:, None]
            sums[1] += self._count("v", left, values, self._scales.v[layer][:, None])

    def layers(self) -> tuple[LayerCheck, ...]:
        """The errors so far, by layer."""
        return tuple(LayerCheck(layer, *_ratios(sums)) for layer, sums in enumerate(self.sums))

    def overall(self) -> LayerCheck:
        """The errors of all layers together, as if they were one (number -1)."""
        return LayerCheck(-1, *_ratios(self.sums.sum(axis=0)))

    @staticmethod
    def _turned(centre: Float32, engine: Engine, start: int, stop: int) -> Float32:
        return rotated_centre(centre, engine.spec, engine.kv.capacity, start + engine.evicted, stop - start)

    def _count(self, part: str, held: Float32, rows: Float32, scale: Float32) -> tuple[float, float, float, float]:
        """What is quantised of rows, and the rows, [K, T, D]; scale [K, 1, D]."""
        dtype = self._dtype
        if self._factors != "none":
            quantise, restore = own_rows(dtype, part, self._factors)
            return _energy(restore(quantise(held, scale), scale) - held), _energy(rows), 0, rows.size
        difference = fake_quantize(held, scale, dtype) - held
        return _energy(difference), _energy(rows), count_saturated(held, scale, dtype), rows.size


def _ratios(sums: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    """(k error, v error, k saturated, v saturated) from sums [K or V, 4]."""
    errors = np.sqrt(sums[:, 0] / np.maximum(sums[:, 1], 1e-30))
    beyond = sums[:, 2] / np.maximum(sums[:, 3], 1)
    return float(errors[0]), float(errors[1]), float(beyond[0]), float(beyond[1])


def _energy(x: Float32) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))
