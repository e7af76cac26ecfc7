"""Reference numerics of the quantised cache, in numpy: slow, obvious, and the oracle for every fast path.

A cache row x (one token, one KV head, D channels) is stored as

    int8:  q = clip(round_half_even(x / s), -127, 127)      int4:  the same with -7 .. 7, two channels a byte
    fp8:   the nearest E4M3 number to x / s, saturating at 448 (Micikevicius et al., arXiv 2209.05433)

with a symmetric static scale s per channel, per head or per tensor. ONNX Runtime's operator clamps at -128 and -8
instead; a value that far out is saturated either way, by one step.
edgekv's own operator holds INT8 and INT4 rows in another way (kv/rows.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kv.spec import Granularity, KVDtype

Float32 = npt.NDArray[np.float32]

LIMIT: dict[KVDtype, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest magnitude each dtype stores: scale = threshold / LIMIT. fp16 and float have no scales."""


def round_e4m3(x: Float32) -> Float32:
    """The nearest FP8 E4M3 number, ties to even, saturating at 448. Subnormals step by 2**-9."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent.astype(np.float32) - 4, -9))
    return np.clip(np.round(x / step) * step, -448, 448).astype(np.float32)


def _e4m3_numbers() -> Float32:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.asarray(np.where(bits < 128, sizes, -sizes), np.float32)


E4M3: Float32 = _e4m3_numbers()
"""What each byte of FP8 stands for, [256]. The two that are no numbers, 127 and 255, are never stored."""


def quantize(x: Float32, scales: Float32, dtype: KVDtype) -> Float32:
    """Codes of `x`, as floats (integers for int8 and int4, E4M3 values for fp8).

    Args:
        x: [..., K, T, D] keys or values.
        scales: broadcastable to x, e.g. [K, 1, D].
    """
    scaled = x / scales
    if dtype == "fp8":
        return round_e4m3(scaled.astype(np.float32))
    limit = LIMIT[dtype]
    return np.asarray(np.clip(np.rint(scaled), -limit, limit), np.float32)


def fake_quantize(x: Float32, scales: Float32, dtype: KVDtype) -> Float32:
    """What the attention sees of `x`: quantised and dequantised."""
    return (quantize(x, scales, dtype) * scales).astype(np.float32)


def count_saturated(x: Float32, scales: Float32, dtype: KVDtype) -> int:
    """How many numbers are clipped: they lie more than half a step, of codes there, beyond the largest code."""
    half_step = 16 if dtype == "fp8" else 0.5  # E4M3's next number after 448 would be 480
    return int(np.count_nonzero(np.abs(x) > (LIMIT[dtype] + half_step) * scales))


def pair_norms(keys: Float32) -> Float32:
    """sqrt(k_d^2 + k_{d+D/2}^2) for each RoPE pair: [..., D] -> [..., D/2]. A rotation does not change it."""
    half = keys.shape[-1] // 2
    return np.asarray(np.hypot(keys[..., :half], keys[..., half:]), np.float32)


def coarsen(thresholds: Float32, granularity: Granularity) -> Float32:
    """Per-channel thresholds [..., K, D] made equal over a head or over all heads, by their maximum."""
    if granularity == "channel":
        return thresholds
    axes: Any = -1 if granularity == "head" else (-2, -1)
    return np.broadcast_to(thresholds.max(axis=axes, keepdims=True), thresholds.shape).astype(np.float32)
