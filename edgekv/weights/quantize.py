"""Floats or odd block formats -> BlockWeight, and how exactly.

`quantize_blocks` is the ordinary asymmetric rounding used for float sources. `split_blocks` applies it twice, for the
embedding and head that the publisher of a quantised model left in 16 bits. `affine` reads formats that store
w = d * q + m with a float minimum m (GGUF Q4_1, Q4_K, Q5_1, Q5_K), exactly.

`without_shift` is for an embedding or head in such a format: the operator that looks rows up wants an integer zero
point, and forcing m / d to one in 4 bits would lose much (25 % perplexity, were it done to all matrices of the default
model). In 8 bits there is room to do better: codes k * q with scale d / k, for the k of 1 .. 17 at which k * m / d
comes closest to an integer. All steps between codes stay exact and the only error is one offset a block of at most
d / (18 k) (Dirichlet), usually far less. Blocks where that would be worse than ordinary rounding to 8 bits (their range
hardly holds 0, or does not) are rounded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgekv.weights.base import BlockWeight, Codes, Float32, SplitWeight, row_blocks

_quietly = np.errstate(invalid="ignore", over="ignore")  # what is not finite shows in the scale, and is refused there


@_quietly
def quantize_blocks(weight: Float32, *, bits: int, group: int) -> BlockWeight:
    """Round a float matrix [N, K] to asymmetric codes, one scale and zero point a block of `group` columns.

    The range of each block is widened to include 0, which is therefore represented exactly.
    """
    rows, columns = weight.shape
    blocks_per_row = columns // group
    top = (1 << bits) - 1
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, blocks_per_row), np.float32)
    zeros = np.empty((rows, blocks_per_row), np.uint8)
    for part in row_blocks((rows, columns)):
        blocks = weight[part].reshape(-1, blocks_per_row, group)  # [n, K/group, group]
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scale = (high - low) / top
        scale[scale == 0] = 1.0
        zero = np.clip(np.rint(-low / scale), 0, top)
        code = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, top)
        codes[part] = code.reshape(-1, columns).astype(np.uint8)
        scales[part], zeros[part] = scale, zero.astype(np.uint8)
    return BlockWeight(codes, scales, zeros, bits, group)


def split_blocks(weight: Float32, *, group: int) -> SplitWeight:
    """Hold a float matrix [N, K] as the sum of two 8-bit ones: 255 steps, and 255 steps of what they leave."""
    high = quantize_blocks(weight, bits=8, group=group)
    return SplitWeight(high, quantize_blocks(weight - high.dequantize(), bits=8, group=group))


@_quietly
def affine(codes: Codes, step: Float32, minimum: Float32, *, bits: int, group: int) -> BlockWeight:
    """w = step * code + minimum, as codes around their middle and a shift; exact to float32.

    Args:
        codes: [N, K], of so many bits. step, minimum: [N, K / group].
    """
    middle = np.float32(1 << (bits - 1))
    return BlockWeight(codes, step, None, bits, group, shift=minimum + middle * step)


@_quietly
def without_shift(weight: BlockWeight) -> BlockWeight:
    """A matrix of 4 or 5 bits with a shift, in 8 bits with integer zero points, as exactly as that can be."""
    codes, step, group, top = weight.codes, weight.scales, weight.group, (1 << weight.bits) - 1
    minimum = weight.shifts() - np.float32(weight.midpoint) * step
    safe = np.where(step > 0, step, 1).astype(np.float64)
    offset = np.where(step > 0, -minimum / safe, 0.0)  # the float zero point, in codes
    best_error = np.full(step.shape, np.inf)
    best_factor = np.ones(step.shape, np.int16)
    for factor in range(1, 255 // top + 1):
        zero = np.rint(offset * factor)
        error = np.abs(offset * factor - zero) / factor
        usable = (zero >= 0) & (zero <= 255)
        better = usable & (error < best_error)
        best_error[better], best_factor[better] = error[better], factor
    scales = (safe / best_factor).astype(np.float32)
    zeros = np.clip(np.rint(offset * best_factor), 0, 255).astype(np.uint8)
    wide = (codes.reshape(*step.shape, group) * best_factor[..., None]).astype(np.uint8)
    held = BlockWeight(wide.reshape(codes.shape), scales, zeros, 8, group)
    plain_error = np.maximum(np.maximum(offset, top), top - offset) / 510  # half a step of the 8-bit rounding, in codes
    return _refit(held, codes, step, minimum, ~((step > 0) & (best_error <= plain_error)))


def _refit(
    held: BlockWeight, codes: Codes, step: Float32, minimum: Float32, blocks: npt.NDArray[np.bool_]
) -> BlockWeight:
    """Blocks that no integer zero point serves well are rounded afresh."""
    if not blocks.any():
        return held
    values = codes.reshape(*step.shape, held.group)[blocks] * step[blocks][:, None] + minimum[blocks][:, None]
    fresh = quantize_blocks(values.astype(np.float32), bits=8, group=held.group)  # one row a block
    wide = held.codes.reshape(*step.shape, held.group)
    wide[blocks] = fresh.codes
    held.scales[blocks] = fresh.scales[:, 0]
    if held.zeros is not None and fresh.zeros is not None:
        held.zeros[blocks] = fresh.zeros[:, 0]
    return held
