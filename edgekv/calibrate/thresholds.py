"""From statistics to thresholds: the magnitude that the largest code of each channel shall stand for.

For each RoPE pair p (keys) with norm r, and each channel (values) with magnitude r, over the observed tokens:

    envelope     t = max r
    percentile   t = the smallest magnitude that p % of r do not exceed
    mse          t = the one of `CANDIDATES` x max r that makes the expected squared error, rounding and clipping, least

and the result is t x headroom. A key's two channels share their pair's threshold, because at some position the rotation
turns all of the pair's norm into either of them. No method goes beyond the envelope x headroom.

For `mse` (the trade of clipping against rounding: Banner et al., arXiv 1810.05723) take the codes c_0 .. c_n that are
not negative, 0 .. 127 for INT8, a scale s, and u = x / s. The squared error of u has the primitive

    P(u) = b_i + (u - c_i)^3 / 3    in the cell of code i;    b_i = b_{i-1} + (c_i - c_{i-1})^3 / 12    joins the cells,

and past the last code its cell goes on, which is clipping. So a bin from u to u' adds s^2 (P(u') - P(u)) / (u' - u) a
count, exactly, if values lie evenly inside it. A key's channel is r cos a for an angle a that the position decides, so
its histogram is that of r with each bin spread by the arcsine law, P(r |cos a| <= x) = 1 - (2 / pi) acos(x / r); the
keys as they were seen would do for the positions seen, and for no others.

Where keys carry a constant much larger than what varies (a K bias), the constant is taken out before the rotation and
put back exactly into the scores (kv/scales.py, native/kernels.inl); t is then the envelope of what is left. It costs
the attention two products a pair and slot in the layers that have such pairs, so only pairs that gain CENTRE_GAIN times
a finer scale count, and at most MAX_PAIRS of them; most models have few or none. FP8 rounds in proportion to a number's
size, so there whatever rows have in common costs: the mean of every pair is taken out, and that of the values, too.

For the same reason an FP8 scale may as well be a little larger, and each is made just so much larger that the first
token's number is one of E4M3's (`fit_first`). All attention leans on that row (Xiao et al., StreamingLLM), it is the
same in every stream that begins with the same token, and its error is in all weights: exact, it takes more than half of
FP8's divergence away, while values less their mean alone take nothing (models/FIDELITY.md).

INT4 keys, as edgekv's own operator holds them (kv/rows.py), have no scales, and are held less the mean of every pair,
too. There the mean itself is moved, by less than one row's rounding error, so that the first token's key lies in the
middle of its cells (`fit_centre`): that row is longer than others, and alone makes half of what keys of 4 bits cost.

Measured on SmolLM2-135M-Instruct, INT8 per channel, 6,000 tokens of prose against a float cache, scales from seed
prompts (4,096 tokens unless said). Ratios of perplexity are 0.9985 to 1.0023 with a standard error of 0.0015, so they
decide nothing; the mean KL divergence does, in units of 0.001, and the share of keys at the largest code, in 0.00001:

    envelope x 1.0 / 1.05 / 1.1 / 1.2     KL 5.78 / 5.86 / 5.81 / 6.65     keys 17 / 6.4 / 2.8 / 0.7
    percentile 99.9 x 1.0 / 1.1           KL 6.82 / 6.21                   keys 52 / 12
    mse x 1.0 / 1.1                       KL 5.90 / 5.53                   keys 45 / 9.1
    envelope x 1.1, 2,048 / 8,192 tokens  KL 6.37 / 5.90                   keys 5.8 / 1.1

So the default is the envelope with 10 % of headroom: within 5 % of the best divergence, the fewest saturated keys of
all near it, the only threshold that no rotation of a key seen exceeds, and no histogram. More text hardly helps.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgekv.calibrate.observe import BINS, Histogram, Observer
from edgekv.calibrate.options import CalibrateOptions, Method
from edgekv.errors import EngineError
from edgekv.kv.quant import E4M3, LIMIT, pair_norms
from edgekv.kv.rows import dequantize_int4_keys, mixed, mixed_channels, quantize_int4_keys
from edgekv.kv.spec import MEAN_FREE, KVDtype

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

CANDIDATES: Float64 = np.linspace(0.3, 1.0, 36)
"""Thresholds that `mse` tries, relative to the largest magnitude seen."""


CENTRE_GAIN = 4.0
"""How much finer a pair's scale must become for its mean to be taken out."""

MAX_PAIRS = 16
"""Pairs in all: each costs the attention two products a slot."""

LEAST_NORMAL = np.float32(2.0**-6)
"""Of E4M3's numbers, from which on neighbours are at most an eighth apart."""


def centre(seen: Observer, options: CalibrateOptions) -> Float32 | None:
    """What is to be taken out of the keys, [L, K, D], zero but for the pairs that gain most; None where none does."""
    if options.centre == "none" or options.method != "envelope" or seen.k_mean is None:
        return None
    if options.dtype in MEAN_FREE:
        mean = seen.whole_k_mean
        return fit_centre(mean, seen.first[0]) if options.dtype == "int4" and mean is not None else mean
    gains = seen.pair_max / np.maximum(seen.left_max, np.float32(1e-6))  # [L, K, D/2]
    best = np.argsort(-gains.max(axis=(0, 1)))[:MAX_PAIRS]
    taken = np.zeros(gains.shape, np.bool_)
    taken[..., best] = gains[..., best] >= CENTRE_GAIN
    if not taken.any():
        return None
    return np.where(np.concatenate([taken, taken], axis=-1), seen.k_mean, np.float32(0))


def value_centre(seen: Observer, options: CalibrateOptions) -> Float32 | None:
    """What is to be taken out of the values, [L, K, D]: in FP8 their mean."""
    if options.centre == "none" or options.method != "envelope" or options.dtype != "fp8":
        return None
    return seen.v_mean


def fit_first(scales: Float32, first: Float32) -> Float32:
    """FP8 scales [L, K, D], none smaller and none an eighth larger, with which the numbers of one row, [L, K, D], are
    E4M3's own: that row is held exactly, and the others are as near as before."""
    sizes = np.abs(first)
    codes = E4M3[np.searchsorted(E4M3[:127], sizes / scales, side="right") - 1]  # the largest that is not above
    usable = (codes >= LEAST_NORMAL) & (sizes <= LIMIT["fp8"] * scales)
    return np.where(usable, sizes / np.maximum(codes, LEAST_NORMAL), scales).astype(np.float32)


def fit_centre(centre: Float32, first: Float32) -> Float32:
    """INT4: a centre of keys near this one, with which the first token's key is held exactly; all are [L, K, D].

    Each mixed channel moves by up to half a cell of that row, but for the largest, which decides how wide cells are.
    """
    left = first - centre
    wanted = mixed(left)
    unscaled = np.ones_like(left)
    held = mixed(dequantize_int4_keys(quantize_int4_keys(left, unscaled), unscaled))
    largest = np.abs(wanted) == np.abs(wanted).max(axis=-1, keepdims=True)
    move = mixed(np.where(largest, np.float32(0), wanted - held)) / np.float32(mixed_channels(left.shape[-1]))
    return (centre + move).astype(np.float32)


def needs_histograms(method: Method) -> bool:
    """Whether the maxima alone will not do."""
    return method != "envelope"


def thresholds(seen: Observer, options: CalibrateOptions) -> tuple[Float32, Float32]:
    """Thresholds of keys and values, each [L, K, D].

    Raises:
        EngineError: one of them is not finite.
    """
    pairs = _statistic(seen.pair_max, seen.pair_histograms, options, rotated=True)  # [L, K, D/2]
    if (taken := centre(seen, options)) is not None:
        assert seen.k_mean is not None
        apart = pair_norms(taken - np.where(taken != 0, seen.k_mean, 0))
        pairs = np.where(pair_norms(taken) > 0, seen.left_max + apart, pairs)
    mean = value_centre(seen, options)
    largest = seen.v_max if mean is None else seen.v_left(mean)
    values = _statistic(largest, seen.v_histograms, options, rotated=False)  # [L, K, D]
    with np.errstate(over="ignore"):  # refused below, with its place
        found = [x * np.float32(options.headroom) for x in (np.concatenate([pairs, pairs], axis=-1), values)]
    for name, array in zip(("key", "value"), found, strict=True):
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            raise EngineError(f"The {name} threshold of layer {bad[0][0]} is not finite: its numbers are out of range.")
    return found[0], found[1]


def _statistic(largest: Float32, histograms: list[Histogram], options: CalibrateOptions, rotated: bool) -> Float32:
    """t of the module's docstring; `largest` is the maxima's array, and the result is of its shape."""
    if options.method == "envelope":
        return largest
    layers = [
        percentile(histogram, options.percentile)
        if options.method == "percentile"
        else least_error(histogram, maxima.reshape(-1), options.dtype, rotated=rotated)
        for histogram, maxima in zip(histograms, largest, strict=True)
    ]
    return np.minimum(np.stack(layers).reshape(largest.shape), largest).astype(np.float32)


def percentile(histogram: Histogram, percent: float) -> Float64:
    """The upper edge of the bin in which each channel's percentile lies, [N]."""
    reached = np.cumsum(histogram.counts, axis=1, dtype=np.float64)  # [N, BINS]
    rank = np.ceil(reached[:, -1:] * percent / 100)
    bins = np.argmax(reached >= rank, axis=1)
    return np.asarray((bins + 1) * histogram.widths, np.float64)


def least_error(histogram: Histogram, largest: Float32, dtype: KVDtype, *, rotated: bool) -> Float64:
    """Of CANDIDATES x largest [N], those with the least expected squared error."""
    counts = histogram.counts @ spread_over_angles() if rotated else histogram.counts.astype(np.float64)
    errors = [expected_error(counts, histogram.widths, ratio * largest, dtype) for ratio in CANDIDATES]
    return np.asarray(CANDIDATES[np.argmin(errors, axis=0)] * largest, np.float64)


def expected_error(counts: Float64, widths: Float64, limits: Float64, dtype: KVDtype) -> Float64:
    """Summed squared error [N] of magnitudes counted [N, BINS] when thresholds are `limits` [N]; 0 where they are 0."""
    scales = np.maximum(limits, 1e-30) / LIMIT[dtype]
    steps = (widths / scales)[:, None]  # [N, 1], a bin's width in units of the scale
    primitive = _primitive(np.arange(BINS + 1) * steps, dtype)  # [N, BINS + 1]
    return np.asarray((counts * np.diff(primitive, axis=1) / steps).sum(axis=1) * scales**2, np.float64)


def _primitive(u: Float64, dtype: KVDtype) -> Float64:
    """The integral from 0 to u of the squared error of a magnitude in units of the scale."""
    codes, borders, joints = _cells(dtype)
    cell = np.searchsorted(borders, u)
    return np.asarray(joints[cell] + (u - codes[cell]) ** 3 / 3, np.float64)


@cache
def _cells(dtype: KVDtype) -> tuple[Float64, Float64, Float64]:
    """Of the codes that are not negative: themselves [n], the borders between them [n-1], and b_i [n]."""
    if dtype == "fp8":
        steps = np.ldexp(1.0, np.arange(-9, 6))  # 2**-9 from 0 on, twice that from 2**-5 on, and so on
        codes = np.unique(np.minimum(np.arange(16) * steps[:, None], LIMIT[dtype]))
    else:
        codes = np.arange(LIMIT[dtype] + 1, dtype=np.float64)
    gaps = np.diff(codes)
    return codes, codes[:-1] + gaps / 2, np.concatenate([[0.0], np.cumsum(gaps**3 / 12)])


@cache
def spread_over_angles() -> Float64:
    """Row i: how a norm in the middle of bin i is distributed over the bins of |norm x cos(angle)|, [BINS, BINS]."""
    norms = np.arange(BINS)[:, None] + 0.5
    edges = np.arange(BINS + 1)[None, :]
    below = 1 - np.arccos(np.minimum(edges / norms, 1)) * 2 / np.pi
    return np.asarray(np.diff(below, axis=1), np.float64)
