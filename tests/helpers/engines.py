"""Opening engines and measuring scales the plain way, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.engines.onnx.engine import OnnxEngine, open_engine
from edgekv.engines.onnx.options import OnnxOptions
from edgekv.kv.scales import KVScales, Provenance, from_thresholds
from edgekv.kv.spec import Granularity, KVDtype, KVSpec
from edgekv.model.converted import ConvertedModel

HEADROOM = 1.1


def measured_scales(
    model: ConvertedModel, dtype: KVDtype, granularity: Granularity, tokens: Sequence[int], headroom: float = HEADROOM
) -> KVScales:
    """Envelope scales from what a float cache holds after `tokens`: K by pair norm, V by magnitude, times headroom."""
    kv = KVSpec(capacity=max(64, len(tokens)), dtype="float")
    engine = open_test_engine(model, kv)
    engine.forward(list(tokens))
    k_limits, v_limits = [], []
    for layer in range(model.spec.num_layers):
        k, v = engine.rows(layer, 0, engine.length)  # each [K, T, D]
        half = model.spec.head_dim // 2
        norms = np.sqrt(k[..., :half] ** 2 + k[..., half:] ** 2).max(1)
        k_limits.append(np.concatenate([norms, norms], -1))
        v_limits.append(np.abs(v).max(1))
    engine.close()
    provenance = Provenance("envelope", headroom, len(tokens), "test")
    limits = [np.stack(x).astype(np.float32) * np.float32(headroom) for x in (k_limits, v_limits)]
    return from_thresholds(limits[0], limits[1], dtype, granularity, model.fingerprint, provenance)


def open_test_engine(
    model: ConvertedModel, kv: KVSpec, scales: KVScales | None = None, *, level: int = 1, **options: Any
) -> OnnxEngine:
    """An engine with float32 activations (level 1), so that only the cache can make a difference.

    One thread for tiny models: more only wait for one another, above all where other programs run."""
    threads = 1 if model.spec.hidden_size < 512 else 2
    return open_engine(model, kv, scales, OnnxOptions(accuracy_level=level, threads=threads, **options))
