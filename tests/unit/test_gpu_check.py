"""scripts/gpu_check.py runs from end to end: what it measures on a CPU means nothing, that it works does."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    assert not report["failed"]
    assert len(report["kernels"]) == 40
    assert [row["dtype"] for row in report["engine"]] == ["int4/32 weights", "int4/128 weights", "int8", "fp16"]
    assert all(row["ok"] for section in ("kernels", "engine") for row in report[section])
    assert {(row["dtype"], row["length"]) for row in report["attention"]} == {
        (dtype, length) for dtype in ("fp16", "int8", "fp8") for length in (64, 128)
    }
    runs = ["edgekv int8", "edgekv fp16", "transformers static", "transformers static, captured"]
    assert [row["runs"] for row in report["model"]] == runs
    assert all(speed > 0 for row in report["model"] for speed in (row["prefill"], *row["decode"].values()))
    assert "no figure counts" in report["machine"][0]["device"]


def test_a_part_that_fails_or_hangs_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows found before are kept, and the file is whole after each."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    check = importlib.import_module("gpu_check")
    kept: list[Any] = []
    failed: dict[str, str] = {}

    def part(*sent: Any, hangs: bool = False) -> Any:
        ours, theirs = multiprocessing.Pipe()
        for one in sent:
            theirs.send(one)
        if not hangs:
            theirs.close()
        process = SimpleNamespace(join=lambda seconds=0: None, kill=lambda: kept.append("killed"), exitcode=0)
        return list(check.rows_of(check.Part("kernels", 1), process, ours, 0.2, failed)), theirs

    assert part({"a": 1}, "Traceback: x")[0] == [{"a": 1}]
    assert failed == {"kernels": "Traceback: x"}
    failed.clear()
    assert part({"a": 1}, hangs=True)[0] == [{"a": 1}]
    assert failed == {"kernels": "stopped: it was given 0 s"}
    report = check.Report(kernels=[{"ok": True}])
    assert report.good
    check.keep(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["kernels"] == [{"ok": True}]


def test_without_a_gpu_it_says_so() -> None:
    """One sentence, no traceback."""
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 1
    assert run.stderr.startswith("No CUDA device was found by torch")
