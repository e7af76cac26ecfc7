"""Case C15: what a loaded model takes is what the plan said, within 5 %, for each KV dtype and two capacities.

A process of its own loads the default model through the public door, reads a text up to the last slot and one token
more, so that it evicts. Its VmHWM is the peak of everything: Python, packages, weights, cache. Where an embedding is
mapped, its rows become resident as they are looked up, so the text matters: English prose uses a thirtieth of the
vocabulary, and ids spread evenly use nearly every page. edgekv's own matmul maps none: the embedding is looked up in
the packed head, and no page of the data file is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import measured_scales
from helpers.prose import prose, prose_ids

from edgekv.engines.onnx import native
from edgekv.kv.scales import write_scales

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")

PROGRAM = """
import json, sys
import edgekv

folder, context, dtype, scales, text = sys.argv[1:]
runtime = edgekv.load(folder, context=int(context), kv_dtype=dtype, scales=scales or None, threads=2)
timeline = runtime.chat_state.timeline
spread = [1 + i * 37 % 49000 for i in range(int(context))]
ids = runtime.chat_state.tokenizer.encode(open(text).read())[:int(context)] if text else spread
timeline.append(ids)
assert timeline.engine.length == int(context)
timeline.append([5])
assert timeline.engine.evicted > 0
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
mapped = sum(line.split()[-1].endswith("model.onnx.data") for line in open("/proc/self/maps"))
print(json.dumps({
    "mapped": mapped,
    "peak": int(status["VmHWM"].split()[0]) * 1024,
    "plan": runtime.plan.total_bytes,
    "lines": {line.name: line.size_bytes for line in runtime.plan.lines},
}))
"""


@pytest.fixture(scope="module")
def scales_file(default_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """INT8 scales for the default model, from a little text."""
    path = tmp_path_factory.mktemp("scales") / "kv_scales.safetensors"
    write_scales(path, measured_scales(default_model, "int8", "channel", prose_ids(default_model, 256)))
    return path


@pytest.mark.parametrize(
    ("context", "dtype", "text"),
    [
        (2048, "int8", "prose"),
        pytest.param(2048, "int8", "spread", marks=pytest.mark.slow),
        (2048, "float", "spread"),
        pytest.param(8192, "int8", "spread", marks=pytest.mark.slow),
        pytest.param(8192, "float", "spread", marks=pytest.mark.slow),
    ],
)
def test_peak_is_what_the_plan_said(
    default_model: Any, scales_file: Path, tmp_path: Path, context: int, dtype: str, text: str
) -> None:
    """Case C15: float and INT8, 2,048 and 8,192 tokens."""
    (tmp_path / "prose.txt").write_text(prose(8 * context), "utf-8")
    command = [sys.executable, "-c", PROGRAM, str(default_model.folder), str(context), dtype]
    command += [str(scales_file) if dtype == "int8" else "", str(tmp_path / "prose.txt") if text == "prose" else ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["mapped"] or native.matmul_refusal() is not None
    assert found["peak"] == pytest.approx(found["plan"], rel=0.05), found
