"""INT8 rows as edgekv's own operator holds them: the reference, in numpy, of native/kernels.inl.

A row has D codes and a factor f of its own, the least of 16 bits (the upper half of a float32) that keeps its codes
within 127. A row of small numbers is then as finely divided as one of large ones, and nothing is ever clipped, whatever
was calibrated.

    values   v ~ s f code            s the calibrated scale of each channel
    keys     k ~ r f (H code) / n    r the square roots of these scales, H a Hadamard matrix: H H = n I

Keys have channels that are many times larger than others, after any rotary embedding. Mixed by H (as in QuaRot,
Ashkboos et al., arXiv 2404.00456) all channels become alike, and queries that are mixed, too, give the same scores.
Dividing by r before is for constants that stay in keys (SmoothQuant, Xiao et al., arXiv 2211.10438, has the same square
root): one large channel would coarsen all others. models/FIDELITY.md has what each of these is worth.

As saved, the two bytes of the factor are behind the codes: [..., T, D + 2].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgekv.kv.quant import LIMIT, Float32, quantize
from edgekv.kv.spec import FACTOR_BYTES

Rows = npt.NDArray[np.int8]

LEAST_FACTOR, LARGEST_FACTOR = np.float32(2.0**-64), np.float32(2.0**64)
"""Beyond these a row is as good as zero, or not finite."""


def quantize_keys(keys: Float32, scales: Float32) -> Rows:
    """Rotated keys [..., T, D] as rows [..., T, D + 2]; scales: of their channels, broadcastable to them."""
    return _rows(mixed(keys / key_scales(scales)), np.ones(1, np.float32))


def quantize_values(values: Float32, scales: Float32) -> Rows:
    """Values [..., T, D] as rows [..., T, D + 2]."""
    return _rows(values, scales)


def dequantize_keys(rows: Rows, scales: Float32) -> Float32:
    """What rows of keys stand for, [..., T, D]."""
    keys = mixed(_numbers(rows))
    return (keys * (key_scales(scales) / mixed_channels(keys.shape[-1]))).astype(np.float32)


def dequantize_values(rows: Rows, scales: Float32) -> Float32:
    """What rows of values stand for, [..., T, D]."""
    return (_numbers(rows) * scales).astype(np.float32)


def key_scales(scales: Float32) -> Float32:
    """r: what channels of keys are divided by before they are mixed."""
    return np.sqrt(scales).astype(np.float32)


def mixed_channels(dim: int) -> int:
    """n, how many neighbouring channels H mixes: the largest power of two that divides D."""
    return dim & -dim


def mixed(x: Float32) -> Float32:
    """H x in groups of n channels, with Sylvester's matrix H[i, j] = (-1)^popcount(i & j)."""
    n = mixed_channels(x.shape[-1])
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(*x.shape[:-1], -1, n) @ matrix).reshape(x.shape).astype(np.float32)


def row_factors(x: Float32, scales: Float32) -> Float32:
    """The factor of each row beside the scales, [..., T, 1]; what is not a number does not count."""
    sizes = np.abs(x / scales).astype(np.float32)
    largest = np.max(np.where(np.isnan(sizes), np.float32(0), sizes), axis=-1, keepdims=True)
    least = np.clip(largest / np.float32(LIMIT["int8"]), LEAST_FACTOR, LARGEST_FACTOR)
    bits = np.ascontiguousarray(least, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def pack(codes: npt.NDArray[np.generic], factors: Float32) -> Rows:
    """Codes [..., T, D] and factors [..., T, 1] -> rows [..., T, D + 2]."""
    upper = (np.ascontiguousarray(factors, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.concatenate([codes.astype(np.int8), upper.view(np.int8)], axis=-1)


def _rows(x: Float32, scales: Float32) -> Rows:
    factors = row_factors(x, scales)
    return pack(quantize(x, scales * factors, "int8"), factors)


def _numbers(rows: Rows) -> Float32:
    """Codes times the factor of their row."""
    upper = np.ascontiguousarray(rows[..., -FACTOR_BYTES:]).view("<u2").astype(np.uint32)
    return np.asarray(rows[..., :-FACTOR_BYTES] * (upper << 16).view(np.float32), np.float32)
