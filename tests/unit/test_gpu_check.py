"""scripts/gpu_check.py runs from end to end: what it measures on a CPU means nothing, that it works does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


def test_the_tiny_run(tmp_path: Path) -> None:
    """Every section has its rows, the kernels are right, and the file says what the output says."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text())
    assert report == json.loads(run.stdout.splitlines()[-1])
    assert len(report["kernels"]) == 24
    assert all(row["ok"] for row in report["kernels"])
    assert {(row["dtype"], row["length"]) for row in report["attention"]} == {
        (dtype, length) for dtype in ("fp16", "int8", "fp8") for length in (64, 128)
    }
    assert [row["runs"] for row in report["model"]] == ["edgekv int8", "edgekv fp16", "transformers static float32"]
    assert all(speed > 0 for row in report["model"] for speed in (row["prefill"], *row["decode"].values()))
    assert "no figure counts" in report["provenance"]["device"]


def test_without_a_gpu_it_says_so() -> None:
    """One sentence, no traceback."""
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 1
    assert run.stderr.startswith("No CUDA device was found by torch")
