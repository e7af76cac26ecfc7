"""The torch engine against the onnx engine on every family and rotary kind, before and after evictions.

Errors are |difference| / |logits| of each position, float cache; bound 1e-3.
The onnx engine's own oracle is in test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import VARIANTS, write_variant
from helpers.reference import relative_errors
from helpers.torch_engines import OpenTorch, random_ids, run

from edgekv.convert import convert
from edgekv.kv.spec import KVSpec

SAME = 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_equals_the_onnx_engine(
    name: str, tmp_path: Path, open_onnx: Callable[..., Any], open_torch: OpenTorch
) -> None:
    """Windows, softcaps, norms of queries and keys, several rotary tables, layers without one, multipliers."""
    model = convert(write_variant(VARIANTS[name], tmp_path / "source"), tmp_path / "model").model
    kv = KVSpec(64, "float", sinks=4, stride=8)
    ids = random_ids(150)
    found, wanted = open_torch(model, kv), open_onnx(model, kv, attention="gqa")
    assert relative_errors(run(found, ids), run(wanted, ids)).max() < SAME
    assert found.evicted > 64
    for layer in range(model.spec.num_layers):
        for a, b in zip(found.rows(layer, 0, found.length), wanted.rows(layer, 0, wanted.length), strict=True):
            assert relative_errors(a, b).max() < SAME
