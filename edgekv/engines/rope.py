"""Rotary angles in float64: the tables that a graph reads, re-made whenever tokens have left.

Row i of a table serves cache slot i, which stands for position i + evicted. Angles are computed in float64 because
float32 positions past a few hundred thousand would already blur the fastest pairs.

Two kinds of RoPE depend on how long the text is. transformers decides anew at every call, so that keys cached before
and after a change no longer fit one another. Here a cache has one length for ever, its capacity, and positions are
positions in the cache: `settled` decides from the capacity, once, when the cache is made. `longrope` takes the long
factors if the cache holds more than the original context, and `dynamic` stretches theta as for a text that fills the
cache. Both then agree with transformers on a text of that length (longrope: of any length on the same side of the
original context). The formulas are those of the papers, YaRN (arXiv 2309.00071) and LongRoPE (arXiv 2402.13753), and of
Llama 3.1's model card.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgekv.model.spec import ModelSpec, RopeSpec

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def settled(rope: RopeSpec, head_dim: int, capacity: int) -> RopeSpec:
    """The rotary embedding as a cache of `capacity` slots uses it: no longer dependent on a length."""
    if rope.kind == "longrope":
        factors = rope.long_factors if capacity > rope.original_max_position else rope.factors
        return replace(rope, kind="default", factors=factors, long_factors=())
    if rope.kind == "dynamic":
        channels = rope.channels or head_dim
        stretch = rope.factor * max(capacity / rope.original_max_position, 1.0) - (rope.factor - 1)
        return replace(rope, kind="default", theta=rope.theta * stretch ** (channels / (channels - 2)))
    return rope


def settled_ropes(spec: ModelSpec, capacity: int) -> tuple[RopeSpec, ...]:
    """`spec.ropes` as a cache of `capacity` slots uses them."""
    return tuple(settled(rope, spec.head_dim, capacity) for rope in spec.ropes)


def length_mark(spec: ModelSpec, capacity: int) -> str:
    """What the capacity of a cache decided about its angles; empty where it decides nothing. The contents of two caches
    fit one another only if they have the same mark."""
    pairs = zip(spec.ropes, settled_ropes(spec, capacity), strict=True)
    marks = [
        f"+theta {fixed.theta:.6g}" if rope.kind == "dynamic" else f"+{'long' if long else 'short'} factors"
        for rope, fixed in pairs
        for long in [capacity > rope.original_max_position]
        if fixed != rope
    ]
    return "".join(marks)


def rope_inputs(index: int) -> tuple[str, str]:
    """The names of the graph inputs that the tables of `ModelSpec.ropes[index]` are bound to."""
    return (f"cos.{index}", f"sin.{index}") if index else ("cos", "sin")


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Float64:
    """Radians per position of each pair, [D/2], of a settled RoPE; 0 for pairs that do not turn."""
    assert rope.kind not in ("dynamic", "longrope"), "a RoPE that depends on a length must be settled first"
    channels = rope.channels or head_dim
    frequencies: Float64 = rope.theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope, channels)
    if rope.factors:
        frequencies = frequencies / np.array(rope.factors, np.float64)
    return np.pad(frequencies, (0, (head_dim - channels) // 2))


def amplitudes(rope: RopeSpec, head_dim: int) -> Float64:
    """What cosine and sine of each pair are multiplied by, [D/2]: the attention factor where the pair turns."""
    turning = (rope.channels or head_dim) // 2
    scale: Float64 = np.where(np.arange(head_dim // 2) < turning, rope.attention_factor, 1.0)
    return scale


def rope_tables(rope: RopeSpec, head_dim: int, first: int, count: int) -> tuple[Float32, Float32]:
    """cos and sin for positions first .. first+count-1 of a settled RoPE, each [count, D/2] float32."""
    angles = np.arange(first, first + count, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    scale = amplitudes(rope, head_dim)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def rotate(rows: Float32, cos: Float32, sin: Float32) -> Float32:
    """Turn rows [..., T, D] by tables [T, D/2], channel d with d + D/2; -sin turns them back."""
    low, high = np.split(rows, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rotated_centre(centre: Float32, spec: ModelSpec, capacity: int, first: int, count: int) -> Float32:
    """What keys at positions first .. first+count-1 are held without: a centre [K, D] turned, [K, count, D]."""
    tables = rope_tables(settled(spec.rope, spec.head_dim, capacity), spec.head_dim, first, count)
    return rotate(centre[:, None], *tables)


def _llama3(frequencies: Float64, rope: RopeSpec) -> Float64:
    """Llama 3.1's scaling: slow pairs are divided by the factor, fast ones kept, those between interpolated."""
    wavelengths = 2 * np.pi / frequencies
    ratio = rope.original_max_position / wavelengths
    blend = np.clip((ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Float64, rope: RopeSpec, channels: int) -> Float64:
    """YaRN: pairs that turn more than beta_fast times over the original context are kept, those that turn less than
    beta_slow times are divided by the factor, with a linear ramp over the pairs between."""

    def pair(turns: float) -> float:
        """The pair, as a real number, that turns so often over the original context."""
        return channels * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = np.clip((np.arange(channels // 2) - low) / ((high - low) or 0.001), 0, 1)
    stretched: Float64 = frequencies * (1 - ramp) + frequencies / rope.factor * ramp
    return stretched
