"""What lives long does not grow: loading and closing, calibrating, interrupted answers, a conversation without end.

Each runs in a process of its own, whose resident size is read after every round. The first rounds warm up (imports,
thread pools, allocator arenas); what comes after them may wobble by pages, and a leak of one cache, one graph or one
answer's buffers in every round would be many times the limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.chat import make_chat_model
from helpers.scripts import load_script

import edgekv
from edgekv.model.converted import ConvertedModel

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

ROOT = Path(__file__).parents[2]

PROGRAM = """
import ctypes, gc, json, sys
import edgekv
from edgekv.calibrate import CalibrateOptions, calibrate
from edgekv.engines.onnx.engine import open_engine
from edgekv.engines.onnx.options import OnnxOptions

folder, job, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
load = lambda: edgekv.load(folder, memory="4GiB", context=1024, threads=1)

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def load_and_close():
    with load() as runtime:
        runtime.generate("Hello", max_new_tokens=2)

def calibrated():
    model, chat = runtime.model, runtime.chat_state
    open_one = lambda kv, scales: open_engine(model, kv, scales, OnnxOptions(threads=1))
    calibrate(model, chat.tokenizer, None, open_one, CalibrateOptions(tokens=512))

def interrupted():
    global turn
    turn += 1
    events = runtime.session(overflow="window", temperature=1.0, seed=turn).send(f"Hello {turn}. " * (turn % 10))
    for _ in range(turn % 17):
        next(events, None)
    events.close()

runtime, turn = load(), 0
sizes = [(globals()[job](), resident())[1] for _ in range(rounds)]
print(json.dumps(sizes))
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales."""
    return make_chat_model(ROOT / "tests" / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize(
    ("job", "rounds"),
    [
        ("load_and_close", 50),
        ("calibrated", 10),
        ("interrupted", 200),
        pytest.param("interrupted", 1000, marks=pytest.mark.slow),
    ],
)
def test_rounds_do_not_grow(chat_model: ConvertedModel, job: str, rounds: int) -> None:
    """From a fifth of the way to the end, less than 2 % and 4 MiB come on."""
    command = [sys.executable, "-c", PROGRAM, str(chat_model.folder), job, str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    sizes = json.loads(result.stdout)
    grown = max(sizes[-rounds // 5 :]) - max(sizes[: rounds // 5])
    print(f"{job}: {rounds} rounds, {max(sizes) / 2**20:.0f} MiB, grown by {grown / 2**20:.2f} MiB")
    assert grown < min(4 << 20, 0.02 * max(sizes))


def test_a_short_soak(default_model: ConvertedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/soak.py on the default model, for 600 tokens: all its checks hold but that of speed, left out."""
    soak = load_script("soak")
    monkeypatch.setattr(soak, "ANSWER_TOKENS", 48)
    with edgekv.load(default_model.folder, context=256) as runtime:
        report = soak.soak(runtime, 600)
    assert report.generated_tokens >= 600
    assert report.evicted_tokens > 300
    assert report.failures == []


def test_the_soak_compares_with_a_program_that_has_just_begun(default_model: ConvertedModel) -> None:
    """It answers when it is asked, and ends when nobody asks any more."""
    soak = load_script("soak")
    with soak.fresh_program(["--model", str(default_model.folder), "--capacity", "256"]) as speed:
        assert speed() > 0
    speeds, others = iter([90.0, 100.0, 80.0, 100.0, 100.0]), iter([100.0, 100.0, 110.0, 100.0, 100.0, 100.0])
    assert soak.compared(lambda: next(speeds), lambda: next(others)) == pytest.approx(100 / 105)


def test_the_soak_sees_what_goes_wrong() -> None:
    """Each of its four checks fails on figures that are past its limit."""
    soak = load_script("soak")
    good = {"generated_tokens": 1, "evicted_tokens": 1, "answers": 1, "seconds": 1.0, "memory_ratio": 1.0}
    good |= {"speed_ratio": 0.7, "beside": [1.0, 1.1], "probe_before": 9.0, "probe_after": 9.0, "following": [1.0, 1.0]}
    assert soak.Report(**good).failures == []
    bad = {"memory_ratio": 1.011, "beside": [1.0, 0.89], "probe_after": 9.1, "following": [1.0, 1.06]}
    for name, value in bad.items():
        assert len(soak.Report(**(good | {name: value})).failures) == 1
