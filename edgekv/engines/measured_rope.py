"""Rotary tables -> the RopeSpec that continues them, for graphs whose maker stored tables and no parameters.

A candidate (a config's RopeSpec) is taken if it gives the tables. Without one the frequencies are measured: the phase
of row 1 is a pair's frequency to the precision of one entry, rows 2, 4, 8 ... refine it, each read with the full turns
that the estimate so far predicts. From them follow theta and a linear factor; llama3 scaling is tried with the
constants that Meta published and the factor that the slowest pair shows. If none of these gives the tables, the
measured frequencies themselves are taken (RopeSpec.factors), as precise as the tables' entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from edgekv.engines.rope import Float32, Float64, inverse_frequencies, rope_tables
from edgekv.errors import UnsupportedModel
from edgekv.model.spec import RopeSpec

COMPARED_ROWS = 2048
TOLERANCE = 2e-3
"""Largest difference of an entry: float16 tables are rounded by up to 5e-4, and angles that were computed in float32
are off by up to 2e-4 at row 2048. A theta of 10,010 instead of 10,000 differs by 7e-3 there."""

_REFINED_ROWS = 1024


def rope_of_tables(cos: Float32, sin: Float32, candidates: Iterable[RopeSpec]) -> RopeSpec:
    """The rotary embedding behind tables [rows, D/2].

    Raises:
        UnsupportedModel: no frequencies give these tables.
    """
    rows = min(len(cos), COMPARED_ROWS)
    cos, sin = cos[:rows], sin[:rows]
    amplitude = _rounded(float(np.hypot(cos, sin).mean()), 5)
    fixed = (rope for rope in candidates if rope.kind not in ("dynamic", "longrope"))
    guesses = (replace(rope, attention_factor=amplitude) for rope in _guesses(measured_frequencies(cos, sin)))
    for rope in (*fixed, *guesses):
        if _largest_difference(rope, cos, sin) < TOLERANCE:
            return rope
    raise UnsupportedModel("The graph's RoPE tables are no cosines and sines of angles that grow with the position.")


def measured_frequencies(cos: Float32, sin: Float32) -> Float64:
    """Radians per position of each pair, [D/2]."""
    phases = np.arctan2(sin.astype(np.float64), cos.astype(np.float64))
    found, row = phases[1], 2
    while row < min(len(phases), _REFINED_ROWS):
        ahead = found * row
        found = (ahead + np.angle(np.exp(1j * (phases[row] - ahead)))) / row
        row *= 2
    return np.asarray(found, np.float64)


def _guesses(frequencies: Float64) -> Iterator[RopeSpec]:
    """Specs with round parameters near the measurement, the roundest first."""
    pairs = len(frequencies)
    if frequencies.min() <= 0:
        return
    middle = pairs // 2 if pairs > 2 else 1
    factor = 1 / frequencies[0]
    for digits in range(1, 8):
        theta = _rounded((frequencies[0] / frequencies[middle]) ** (pairs / middle), digits)
        if abs(factor - 1) < 1e-3:
            yield RopeSpec(theta=theta)
            yield _llama3(frequencies, _rounded((1 / frequencies[1]) ** pairs, digits))
        else:
            yield RopeSpec(theta=theta, kind="linear", factor=_rounded(factor, digits))
    plain = RopeSpec()
    yield replace(plain, factors=tuple(inverse_frequencies(plain, 2 * pairs) / frequencies))


def _llama3(frequencies: Float64, theta: float) -> RopeSpec:
    plain = RopeSpec(theta=theta)
    factor = inverse_frequencies(plain, 2 * len(frequencies))[-1] / frequencies[-1]
    return replace(plain, kind="llama3", factor=_rounded(factor, 3))


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _largest_difference(rope: RopeSpec, cos: Float32, sin: Float32) -> float:
    found = rope_tables(rope, 2 * cos.shape[1], 0, len(cos))
    return float(max(np.abs(found[0] - cos).max(), np.abs(found[1] - sin).max()))
