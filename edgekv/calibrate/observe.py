"""Statistics of keys and values, taken from a float cache row by row as text passes; the rows themselves are not kept.

Keys are seen rotated, so only what a rotation leaves alone is worth recording: the norm of each RoPE pair,
sqrt(k_d^2 + k_{d+D/2}^2), which bounds both channels at every position. (A plain maximum per channel holds only at the
positions seen: it cost 11.7 % of perplexity over a stream of 12k tokens, where the norm cost 0.003 %.) Values are
recorded as they are. Always the maxima; where the method asks for more, a histogram for each pair and value channel.

Keys may carry a large constant that is there before the rotation (Qwen2's K bias: up to 240, where the rest of the key
is about 10). So they are seen a second time less their mean, turned as they are; thresholds.py decides what of it is
used. Of values the mean and both extremes do, from which the largest distance from the mean follows. The rows of the
first token of all are kept: a stream's first rows get larger weights than any others, and never change.

A histogram's range is a power of two and doubles when it is exceeded, adjacent bins being joined. A value's bin is
found by exact arithmetic (a division by a power of two), so the counts are the same as if the final range had been
known from the beginning.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import Engine
from edgekv.engines.rope import rope_tables, rotate, settled
from edgekv.errors import EngineError
from edgekv.kv.quant import pair_norms
from edgekv.model.spec import ModelSpec

Float32 = npt.NDArray[np.float32]

MEAN_TOKENS = 64
"""The least tokens that a mean of keys is taken from: the first passage that has them."""

SINKS = 4
"""First tokens that a mean leaves out, because theirs are like no others' keys."""

BINS = 1024
"""Per channel, 4 KiB: a threshold read from it is within 1/512 of the exact one, or better."""

_LOWEST_EXPONENT = -126


class Histogram:
    """Counts of magnitudes, for N channels at once, in BINS equal bins from 0 to 2**exponent."""

    def __init__(self, channels: int) -> None:
        self.counts = np.zeros((channels, BINS), np.uint32)  # [N, BINS]
        self.exponents = np.full(channels, _LOWEST_EXPONENT, np.int32)  # [N]

    @property
    def widths(self) -> npt.NDArray[np.float64]:
        """The width of a channel's bins, [N]."""
        return np.ldexp(1.0 / BINS, self.exponents)

    def add(self, magnitudes: Float32) -> None:
        """Count magnitudes [N, T], none of them negative."""
        largest = magnitudes.max(axis=1)
        self._widen(np.where(largest > 0, np.frexp(largest)[1], _LOWEST_EXPONENT))  # frexp: x < 2**exponent
        bins = (magnitudes / self.widths[:, None]).astype(np.intp)
        flat = bins + np.arange(len(bins))[:, None] * BINS
        self.counts += (
            np.bincount(flat.ravel(), minlength=self.counts.size).reshape(self.counts.shape).astype(np.uint32)
        )

    def _widen(self, exponents: npt.NDArray[np.int32]) -> None:
        """Make ranges at least 2**exponents."""
        shifts = np.maximum(exponents - self.exponents, 0)
        for shift in np.unique(shifts[shifts > 0]):
            rows = shifts == shift
            joined = min(2 ** int(shift), BINS)  # BINS: everything lands in the first bin
            counts = self.counts[rows].reshape(-1, BINS // joined, joined).sum(-1, dtype=np.uint32)
            self.counts[rows] = np.pad(counts, ((0, 0), (0, BINS - counts.shape[1])))
        self.exponents += shifts


class Observer:
    """What has been seen of a model's keys and values so far."""

    def __init__(self, spec: ModelSpec, histograms: bool) -> None:
        layers, heads, size = spec.num_layers, spec.num_kv_heads, spec.head_dim
        self.tokens = 0
        self.pair_max = np.zeros((layers, heads, size // 2), np.float32)  # [L, K, D/2]
        self.v_low = np.full((layers, heads, size), np.inf, np.float32)  # [L, K, D]
        self.v_high = -self.v_low  # [L, K, D]
        self._v_sum, self._v_count = np.zeros((layers, heads, size)), 0  # [L, K, D], of how many tokens
        self.first = np.zeros((2, layers, heads, size), np.float32)  # [K or V, L, K, D]
        self.k_mean: Float32 | None = None  # [L, K, D], before the rotation; of one passage
        self.left_max = np.zeros_like(self.pair_max)  # [L, K, D/2], of pairs less that mean
        self._k_sum, self._k_count = np.zeros((layers, heads, size)), 0  # [L, K, D], from that passage on
        self._centred = can_centre(spec)
        counted = layers if histograms else 0
        self.pair_histograms = [Histogram(heads * size // 2) for _ in range(counted)]  # [L] of [K D/2, BINS]
        self.v_histograms = [Histogram(heads * size) for _ in range(counted)]  # [L] of [K D, BINS]

    @property
    def v_max(self) -> Float32:
        """The largest magnitudes of values, [L, K, D]."""
        return np.asarray(np.maximum(self.v_high, -self.v_low), np.float32)

    @property
    def whole_k_mean(self) -> Float32 | None:
        """The mean of keys before the rotation, [L, K, D], of the passage that k_mean is of and all after it."""
        return None if self.k_mean is None else (self._k_sum / self._k_count).astype(np.float32)

    @property
    def v_mean(self) -> Float32 | None:
        """The mean of values, [L, K, D], of all tokens but the first of each passage; None before there are some."""
        return None if self._v_count < MEAN_TOKENS else (self._v_sum / self._v_count).astype(np.float32)

    def v_left(self, centre: Float32) -> Float32:
        """The largest magnitudes of values less a centre, [L, K, D]."""
        return np.asarray(np.maximum(self.v_high - centre, centre - self.v_low), np.float32)

    def see(self, engine: Engine, start: int, stop: int) -> None:
        """Take in the rows of slots start .. stop-1 of a float cache, all of which every layer must still hold.

        Raises:
            EngineError: a key or value is not finite.
        """
        learn = self._centred and self.k_mean is None and stop - start >= MEAN_TOKENS
        if learn:
            self.k_mean = np.zeros_like(self.v_low)
        cos, sin = _tables(engine, start, stop) if self.k_mean is not None else (None, None)
        late = slice(max(0, SINKS - start), None)  # behind a passage's first tokens
        for layer in range(engine.spec.num_layers):
            keys, values = engine.rows(layer, start, stop)  # each [K, T, D]
            assert keys.shape[1] == stop - start, "a layer's own ring no longer holds these rows"
            check_finite(layer, keys, values)
            self._see_layer(layer, pair_norms(keys), values)
            if self.tokens == start == 0:
                self.first[:, layer] = keys[:, 0], values[:, 0]
            self._v_sum[layer] += values[:, late].sum(axis=1)
            if cos is not None and sin is not None:
                unturned = rotate(keys, cos, -sin)
                self._see_unturned(layer, unturned, learn)
                self._k_sum[layer] += unturned[:, late].sum(axis=1)
        counted = max(0, stop - max(start, SINKS))
        self.tokens += stop - start
        self._v_count += counted
        self._k_count += counted if cos is not None else 0

    def _see_unturned(self, layer: int, keys: Float32, learn: bool) -> None:
        """Take in keys [K, T, D] before their rotation, less their mean; `learn`: the mean is theirs."""
        assert self.k_mean is not None
        if learn:
            self.k_mean[layer] = keys[:, SINKS:].mean(axis=1)
        left = pair_norms(keys - self.k_mean[layer][:, None]).max(axis=1)
        np.maximum(self.left_max[layer], left, out=self.left_max[layer])

    def _see_layer(self, layer: int, pairs: Float32, values: Float32) -> None:
        """Take in pair norms [K, T, D/2] and values [K, T, D]."""
        np.maximum(self.pair_max[layer], pairs.max(axis=1), out=self.pair_max[layer])
        np.minimum(self.v_low[layer], values.min(axis=1), out=self.v_low[layer])
        np.maximum(self.v_high[layer], values.max(axis=1), out=self.v_high[layer])
        if self.pair_histograms:
            self.pair_histograms[layer].add(_channels_first(pairs))
            self.v_histograms[layer].add(_channels_first(np.abs(values)))


def _tables(engine: Engine, start: int, stop: int) -> tuple[Float32, Float32]:
    """cos and sin at the angles of the keys in slots start .. stop-1."""
    size = engine.spec.head_dim
    return rope_tables(settled(engine.spec.rope, size, engine.kv.capacity), size, start, stop - start)


def can_centre(spec: ModelSpec) -> bool:
    """Whether keys of all layers turn in one way that leaves lengths alone: only then a mean is worth taking out."""
    return not any(spec.rope_layers) and spec.rope.attention_factor == 1.0 and not any(spec.windows)


def check_finite(layer: int, keys: Float32, values: Float32) -> None:
    """Refuse keys or values that are not numbers, and say where they are.

    Raises:
        EngineError: there are some.
    """
    for name, rows in (("keys", keys), ("values", values)):
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            head, _, channel = (int(index) for index in bad[0])
            raise EngineError(
                f"Layer {layer} of the model produced {name} that are not finite (head {head}, channel {channel}): "
                "no scales can be made. The weights are damaged, or the model does not run at this precision."
            )


def _channels_first(rows: Float32) -> Float32:
    """[K, T, D] -> [K D, T]."""
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1, rows.shape[1])
