"""The graph for CUDA (attention in float16 between casts), run on the CPU: as near to float32 as half floats are.

The CUDA provider itself is not tested here; no machine of the project has had one yet (README, "GPU").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.engines import measured_scales

from edgekv.generate import Timeline
from edgekv.kv.spec import KVSpec

TOKENS = [(37 * i + 11) % 500 for i in range(200)]


@pytest.mark.parametrize(("half_dtype", "dtype"), [("fp16", "float"), ("int8", "int8")])
def test_half_attention_is_near(tiny_models: Any, open_onnx: Callable[..., Any], half_dtype: Any, dtype: Any) -> None:
    """Also across evictions. float16 has 11 bits: relative error of a few 1e-3 on sharp attention, measured 2e-3."""
    model = tiny_models.converted("llama")
    scales = measured_scales(model, "int8", "channel", TOKENS) if dtype == "int8" else None
    half = Timeline(open_onnx(model, KVSpec(96, half_dtype), scales, half_attention=True))
    whole = Timeline(open_onnx(model, KVSpec(96, dtype), scales, attention="gqa"))
    for start in range(0, len(TOKENS), 20):
        a, _ = half.append(TOKENS[start : start + 20], all_logits=True)
        b, _ = whole.append(TOKENS[start : start + 20], all_logits=True)
        error = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
        assert error.max() < 2e-2
    assert half.window.evicted > 50
