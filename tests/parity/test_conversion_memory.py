"""Conversion takes at most 1.5 times the largest tensor in extra memory.

Extra is the process's peak less what it had when everything was imported. Two counts of it: `RssAnon`, the memory that
only swap could free, sampled every 5 ms; and `VmHWM`, which also counts pages of the source file that are mapped at the
moment and that the system may drop at any time. The largest tensor is counted as it is stored.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.synthetic import Size, write_floats, write_gguf, write_gptq

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status is Linux's")

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import gguf, onnx, tokenizers
import edgekv.engines.onnx.adapt, edgekv.engines.onnx.build
from edgekv.convert import convert
from edgekv.weights import gguf as _, safetensors as _

def status():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024

before, peak, running = status(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, status()[0])
        time.sleep(0.005)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
started = time.perf_counter()
convert(Path(sys.argv[1]), Path(sys.argv[2]))
seconds, running = time.perf_counter() - started, False
thread.join()
print(json.dumps({"anonymous": peak - before[0], "resident": status()[1] - before[1], "seconds": seconds}))
"""
Write = Callable[[Size, Path], int]
MEGA = 1e6


def measured(write: Write, size: Size, folder: Path) -> tuple[int, dict[str, float]]:
    """The largest tensor in bytes, and what the conversion took."""
    largest = write(size, folder / "source")
    command = [sys.executable, "-c", PROGRAM, str(folder / "source"), str(folder / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    stored = sum(file.stat().st_size for file in (folder / "source").iterdir())
    print(
        f"\n{write.__name__}, vocabulary {size.vocab}: {stored / 1e9:.1f} GB, largest tensor {largest / MEGA:.0f} MB, "
        f"extra {found['anonymous'] / MEGA:.0f} MB anonymous ({found['anonymous'] / largest:.2f}x), "
        f"{found['resident'] / MEGA:.0f} MB resident ({found['resident'] / largest:.2f}x), {found['seconds']:.0f} s"
    )
    return largest, found


@pytest.mark.parametrize("write", [write_floats, write_gptq, write_gguf], ids=lambda write: write.__name__)
def test_extra_memory(write: Write, tmp_path: Path) -> None:
    """A large vocabulary on one layer: with the whole embedding in float32 this is twice to four times the bound."""
    largest, found = measured(write, Size(1, 1024, 2048, 60_000), tmp_path)
    assert found["anonymous"] < 1.5 * largest, (largest, found)
    assert found["resident"] < 1.5 * largest, (largest, found)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "layers"), [(32_000, 8), (128_256, 4)], ids=["32k", "128k"])
@pytest.mark.parametrize("write", [write_floats, write_gptq, write_gguf], ids=lambda write: write.__name__)
def test_extra_memory_of_several_gigabytes(write: Write, vocab: int, layers: int, tmp_path: Path) -> None:
    """The layers of a 7B model, 8 or 4 of them."""
    largest, found = measured(write, Size(layers, 4096, 11008, vocab), tmp_path)
    assert found["anonymous"] < 1.5 * largest
    assert found["resident"] < 1.5 * largest
