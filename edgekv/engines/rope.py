"""Rotary angles in float64: the tables that a graph reads, re-made whenever tokens have left.

Row i of a table serves cache slot i, which stands for position i + evicted. Angles are computed in float64 because
float32 positions past a few hundred thousand would already blur the fastest pairs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgekv.model.spec import RopeSpec

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Float64:
    """Radians per position of each pair, [D/2]."""
    frequencies: Float64 = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def rope_tables(rope: RopeSpec, head_dim: int, first: int, count: int) -> tuple[Float32, Float32]:
    """cos and sin for positions first .. first+count-1, each [count, D/2] float32."""
    angles = np.arange(first, first + count, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(frequencies: Float64, rope: RopeSpec) -> Float64:
    """Llama 3.1's scaling: slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    wavelengths = 2 * np.pi / frequencies
    ratio = rope.original_max_position / wavelengths
    blend = np.clip((ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
