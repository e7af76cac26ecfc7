"""Rows of codes as edgekv's own operator holds them (INT8, K8V4, INT4): the reference, in numpy, of native/kernels.inl.

The torch engine holds INT8 keys, too, as values are held here: with a factor, and not mixed.

A row has D codes and a factor f of its own, a scale per token and head: the least bfloat16 that keeps its codes within
127. A row of small numbers is then as finely divided as one of large ones, and nothing is ever clipped, whatever was
calibrated.

    values   v ~ s f code            s the calibrated scale of each channel
    keys     k ~ r f (H code) / n    r the square roots of these scales, H a Hadamard matrix: H H = n I

Keys have channels that are many times larger than others, after any rotary embedding. Mixed by H (as in QuaRot,
Ashkboos et al., arXiv 2404.00456) all channels become alike, and queries that are mixed, too, give the same scores.
Dividing by r before is for constants that stay in keys (SmoothQuant, Xiao et al., arXiv 2211.10438, has the same square
root): one large channel would coarsen all others. models/FIDELITY.md has what each of these is worth.

K8V4 has keys of INT8 and values of 4 bits. These are mixed like keys, to make the most of 16 codes:

    values   v ~ r f (H (code + 1/2)) / n    code -8 .. 7: which of 16 cells, whose middle is meant

Root mean square of the error over that of the values, SmolLM2-135M, 1,500 tokens of prose: 9.5 % so, 10.7 % with codes
-7 .. 7, 10.4 % with cells but not mixed, 8.8 % with a factor for each 32 mixed channels; codes -7 .. 7 in blocks of 32
without scales, about what llama.cpp's q4_0 has, 10.6 %.

INT4 has keys of 4 bits, too, held as these values are but for the scales, of which they have none (r = 1). They are
held less the mean of every pair of channels, moved a little (calibrate/thresholds.py): the row that all attention leans
on is then nearly exact, and constants, which the roots of scales are for, are gone.

As saved, the two bytes of the factor are behind the codes: [..., T, D + 2]. In 4 bits channels i and i + 8 of each 16
share a byte, the first in its lower half: [..., T, D / 2 + 2].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgekv.kv.quant import LIMIT, Float32, quantize
from edgekv.kv.spec import BITS, FACTOR_BYTES, ROW_FACTORS, KVDtype, RowFactors

Rows = npt.NDArray[np.int8]

CELLS = 16
"""How many cells 4 bits tell apart."""

LEAST_FACTOR, LARGEST_FACTOR = np.float32(2.0**-64), np.float32(2.0**64)
"""Beyond these a row is as good as zero, or not finite."""


def quantize_keys(keys: Float32, scales: Float32) -> Rows:
    """Rotated keys [..., T, D] as rows [..., T, D + 2]; scales: of their channels, broadcastable to them."""
    return _rows(mixed(keys / key_scales(scales)))


def quantize_values(values: Float32, scales: Float32) -> Rows:
    """Values [..., T, D] as rows [..., T, D + 2]."""
    return _rows((values / scales).astype(np.float32))


def dequantize_keys(rows: Rows, scales: Float32) -> Float32:
    """What rows of keys stand for, [..., T, D]."""
    keys = mixed(_numbers(rows))
    return (keys * (key_scales(scales) / mixed_channels(keys.shape[-1]))).astype(np.float32)


def dequantize_values(rows: Rows, scales: Float32) -> Float32:
    """What rows of values stand for, [..., T, D]."""
    return (_numbers(rows) * scales).astype(np.float32)


def quantize_int4_values(values: Float32, scales: Float32) -> Rows:
    """Values [..., T, D] as rows of 4 bits, [..., T, D / 2 + 2]."""
    return _int4_rows(mixed(values / key_scales(scales)))


def dequantize_int4_values(rows: Rows, scales: Float32) -> Float32:
    """What rows of values of 4 bits stand for, [..., T, D]."""
    return (_int4_numbers(rows) * key_scales(scales)).astype(np.float32)


def quantize_int4_keys(keys: Float32, scales: Float32) -> Rows:
    """Rotated keys, less their centre, [..., T, D] as rows of 4 bits, [..., T, D / 2 + 2]; `scales` are not used."""
    return _int4_rows(mixed(keys))


def dequantize_int4_keys(rows: Rows, scales: Float32) -> Float32:
    """What rows of keys of 4 bits stand for, [..., T, D]; `scales` are not used."""
    return _int4_numbers(rows)


def _int4_rows(x: Float32) -> Rows:
    """Mixed numbers [..., T, D] as rows of 4 bits."""
    factors = row_factors(x, CELLS / 2)
    cells = np.clip(np.floor(np.nan_to_num(x / factors)), -CELLS // 2, CELLS // 2 - 1).astype(np.int8)
    low, high = np.moveaxis(cells.reshape(*cells.shape[:-1], -1, 2, 8), -2, 0)  # [..., T, D / 16, 8] each
    return pack(((low & 15) | (high << 4)).reshape(*cells.shape[:-1], -1), factors)


def _int4_numbers(rows: Rows) -> Float32:
    """What rows of 4 bits stand for, not mixed any more, but for scales."""
    both, factors = rows[..., :-FACTOR_BYTES], packed_factors(rows)
    halves = np.stack([both << 4, both], axis=-2) >> 4  # [..., T, 2, D / 2], arithmetic shifts keep the sign
    halves = np.moveaxis(halves.reshape(*halves.shape[:-1], -1, 8), -3, -2)  # [..., T, D / 16, 2, 8]
    numbers = mixed((halves.reshape(*both.shape[:-1], -1) + np.float32(0.5)) * factors)
    return (numbers / np.float32(mixed_channels(numbers.shape[-1]))).astype(np.float32)


Quantize = Callable[[Float32, Float32], Rows]
Dequantize = Callable[[Rows, Float32], Float32]


def own_rows(dtype: KVDtype, part: str, factors: RowFactors = "mixed") -> tuple[Quantize, Dequantize]:
    """How rows of keys ("k") or values ("v") are made where they have factors, by default in edgekv's own operator, and
    what they stand for; of ROW_FACTORS."""
    if factors == "plain":
        return quantize_values, dequantize_values
    if BITS[dtype]["kv".index(part)] == 4:
        if part == "k":
            return quantize_int4_keys, dequantize_int4_keys
        return quantize_int4_values, dequantize_int4_values
    return (quantize_keys, dequantize_keys) if part == "k" else (quantize_values, dequantize_values)


def operator_scales(dtype: KVDtype, k: Float32, v: Float32) -> tuple[Float32, Float32]:
    """Scales of keys and of values as the operator is given them: of what is mixed the roots, of INT4's keys none."""
    if dtype not in ROW_FACTORS:
        return k, v
    k_bits, v_bits = BITS[dtype]
    return np.ones_like(k) if k_bits == 4 else key_scales(k), key_scales(v) if v_bits == 4 else v


def code_items(dim: int, dtype: KVDtype, part: str) -> int:
    """Array items of a row's D numbers: D, or half as many where two share a byte."""
    return dim // 2 if BITS[dtype]["kv".index(part)] == 4 else dim


def row_items(dim: int, dtype: KVDtype, part: str) -> int:
    """Array items of a row of the operator's: its numbers, and the bytes of its factor."""
    return code_items(dim, dtype, part) + (FACTOR_BYTES if dtype in ROW_FACTORS else 0)


def key_scales(scales: Float32) -> Float32:
    """r: what channels are divided by before they are mixed."""
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


def row_factors(x: Float32, limit: float = LIMIT["int8"]) -> Float32:
    """The factors [..., T, 1], bfloat16 in float32, that keep the codes of rows [..., T, D], divided by their scales,
    within `limit`. NaN does not count.
    """
    sizes = np.abs(x)
    largest = np.max(np.where(np.isnan(sizes), np.float32(0), sizes), axis=-1, keepdims=True)
    least = np.clip(largest / np.float32(limit), LEAST_FACTOR, LARGEST_FACTOR)
    bits = np.ascontiguousarray(least, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def pack(codes: npt.NDArray[np.generic], factors: Float32) -> Rows:
    """Codes [..., T, items] and factors [..., T, 1] -> rows [..., T, items + 2]."""
    upper = (np.ascontiguousarray(factors, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.concatenate([codes.astype(np.int8), upper.view(np.int8)], axis=-1)


def packed_factors(rows: Rows) -> Float32:
    """The factor of each row, [..., T, 1], out of what `pack` gives."""
    upper = np.ascontiguousarray(rows[..., -FACTOR_BYTES:]).view("<u2").astype(np.uint32)
    return (upper << 16).view(np.float32)


def _rows(x: Float32) -> Rows:
    factors = row_factors(x)
    return pack(quantize(x, factors, "int8"), factors)


def _numbers(rows: Rows) -> Float32:
    """Codes times the factor of their row."""
    return np.asarray(rows[..., :-FACTOR_BYTES] * packed_factors(rows), np.float32)
