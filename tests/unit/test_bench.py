"""edgekv.bench and scripts/bench_peers.py: what is measured, what is told, and what the figures are made of."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import TinyModels
from helpers.chat import make_chat_model
from helpers.fake_engine import FakeEngine
from helpers.scripts import load_script

import edgekv.bench as bench
from edgekv.bench import BenchOptions, Card, Ceiling, bench_attention
from edgekv.engines.onnx import attention_alone, native
from edgekv.errors import InvalidOption
from edgekv.kv.plan import cache_bytes
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import DATA


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """scripts/bench_peers.py as a module."""
    return load_script("bench_peers")


# ---- edgekv.bench ---------------------------------------------------------------------------------------------------


def card(*lengths: int) -> Card:
    """A card of a machine that reads 1000 bytes a second."""
    return Card(60, 1000.0, tuple(Ceiling(n, 60 + n, 1000 / (60 + n)) for n in lengths), ())


def test_it_runs_the_tokens_that_it_says() -> None:
    """Prefill in the pieces of a chat, exactly up to each length; decoded tokens do not count towards the next one."""
    engine = FakeEngine(KVSpec(1024, "float"))
    bench.measure(engine, card(40, 300), BenchOptions((40, 300), steps=3))
    run = [("forward", 40), *[("forward", 1)] * 3, ("truncate", 40)]
    run += [("forward", 256), ("forward", 4), *[("forward", 1)] * 3, ("truncate", 300)]
    assert engine.log == [("forward", bench.WARM_UP_TOKENS), *run]
    assert engine.length == 0


def test_tokens_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed fixes them, and all are in the vocabulary (the fake refuses others)."""
    seen: list[list[int]] = []
    for seed in (0, 0, 1):
        engine = FakeEngine(KVSpec(1024, "float"))
        monkeypatch.setattr(engine, "truncate", lambda length, engine=engine: seen.append(list(engine.tokens)))
        bench.measure(engine, card(50), BenchOptions((50,), steps=1, seed=seed))
    assert seen[0] == seen[1] != seen[2]


def test_speeds_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill counts all tokens from the first, decoding is the median step, and repeats are joined by their median."""
    prefills, steps = iter([1.0, 2.0, 1.0, 4.0, 1.0, 8.0]), iter([[0.1, 0.2, 9.0], [0.5]] * 3)
    monkeypatch.setattr(bench, "prefill", lambda engine, tokens, progress: next(prefills))
    monkeypatch.setattr(bench, "decode", lambda engine, count, progress: next(steps))
    engine = FakeEngine(KVSpec(1024, "float"))
    monkeypatch.setattr(engine, "truncate", lambda length: None)
    short, long = bench.measure(engine, card(40, 300), BenchOptions((40, 300), steps=3, repeats=3))
    assert short.prefill_tokens_per_s == 40 / 1.0
    assert long.prefill_tokens_per_s == 300 / 5.0  # of 3, 5 and 9 s
    assert short.decode_tokens_per_s == 1 / 0.2
    assert short.ceiling_share == pytest.approx(5 / (1000 / 100))
    assert long.ceiling_share == pytest.approx(2 / (1000 / 360))


def test_the_card_adds_up(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes per token are weights and cache, the ceiling is bandwidth over them; lengths that do not fit are told."""
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, progress: threads * 1e9)
    model = tiny_models.converted("llama-fp16")
    options = BenchOptions((64, 96, 4096), steps=8)
    found = bench.make_card(model, KVSpec(128, "int8"), 2, options)
    assert [ceiling.length for ceiling in found.ceilings] == [64, 96]
    assert found.left_out == (4096,)
    assert found.bandwidth_bytes_per_s == 2e9
    for ceiling in found.ceilings:
        assert ceiling.token_bytes == found.weight_bytes + cache_bytes(model.spec, "int8", ceiling.length)
        assert ceiling.tokens_per_s == pytest.approx(found.bandwidth_bytes_per_s / ceiling.token_bytes)


@pytest.mark.parametrize("name", ["llama-fp16", "qwen2-fp16"])
def test_weights_that_are_read(tiny_models: Any, name: str) -> None:
    """Everything in the data file but padding and, where it is no head as well, the embedding."""
    model = tiny_models.converted(name)
    spec, size = model.spec, (model.folder / DATA).stat().st_size
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size * (1 + 4 / 32)
    padding = 4096 * 12 * spec.num_layers
    assert size - looked_up - padding <= bench.weight_bytes_read(model) <= size - looked_up


def test_no_length_fits(tiny_models: Any) -> None:
    """That is refused, with the numbers."""
    with pytest.raises(InvalidOption, match=r"cache of 128 tokens holds none of the lengths 128, 2048.*--context"):
        bench.make_card(tiny_models.converted("llama-fp16"), KVSpec(128), 2, BenchOptions((128, 2048)))


@pytest.mark.parametrize("values", [{"lengths": ()}, {"lengths": (0,)}, {"steps": 0}, {"repeats": -1}])
def test_options_are_checked(values: dict[str, Any]) -> None:
    """Nothing to measure is refused."""
    with pytest.raises(InvalidOption):
        BenchOptions(**values)


def test_lengths_come_in_order() -> None:
    """However they are given."""
    assert BenchOptions((300, 40, 300)).lengths == (40, 300)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bandwidth_is_positive(threads: int) -> None:
    """Whatever the number of threads."""
    assert bench.read_bandwidth(threads, size_bytes=1 << 20, reads=2) > 0


def test_report_with_a_real_engine(tiny_models: Any, open_onnx: Callable[..., Any]) -> None:
    """The whole way, with progress at every stage and a report that is JSON and names no folder of this machine."""
    model = tiny_models.converted("llama-fp16")
    engine = open_onnx(model, KVSpec(256, "float"))
    stages: dict[str, tuple[int, int]] = {}
    options = BenchOptions((32, 64, 1024), steps=4)
    report = bench.bench(model, engine, 2, options, lambda stage, done, total: stages.__setitem__(stage, (done, total)))
    assert all(done == total for done, total in stages.values())
    assert list(stages) == ["bandwidth", "prefill to 32", "decode at 32", "prefill to 64", "decode at 64"]
    data = json.loads(json.dumps(report.to_json()))
    assert data["card"]["left_out"] == [1024]
    assert [row["length"] for row in data["lengths"]] == [32, 64]
    assert all(row["decode_tokens_per_s"] > 0 and row["prefill_tokens_per_s"] > 0 for row in data["lengths"])
    assert {"edgekv", "onnxruntime", "numpy", "python", "threads", "cpu", "date", "model", "scheme"} <= set(
        data["provenance"]
    )
    assert str(model.folder) not in json.dumps(data)


def test_cpu_name(tmp_path: Path) -> None:
    """From /proc/cpuinfo where there is one, and something anyway where there is none."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\nmodel name\t: another\n")
    assert bench.cpu_name(tmp_path / "cpuinfo") == "A Fast One @ 3 GHz"
    assert bench.cpu_name(tmp_path / "missing")


def test_others_sees_another_process() -> None:
    """A busy process counts; this one's own work does not."""
    program = "import time\nend = time.time() + 1.2\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        watch = bench.Others()
        child.wait()
    assert watch.cores() > 0.3


# ---- scripts/bench_peers.py -----------------------------------------------------------------------------------------


def test_worker_protocol(peers: ModuleType, tmp_path: Path) -> None:
    """A worker is handed a job as JSON and answers with one line of JSON, the last of its output."""
    model = make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path)
    job = peers.Job("edgekv", str(model.folder), length=100, steps=3, threads=1)
    measured = peers.read_measured(peers.run_child(peers.worker_command(job)))
    assert (measured.system, measured.length) == ("edgekv", 100)
    assert measured.prefill > 0
    assert measured.decode > 0
    assert measured.others >= 0


def test_a_worker_measures_its_system(peers: ModuleType) -> None:
    """Tokens a second from seconds: the whole prefill, the median step."""
    job = peers.Job("edgekv", "", length=100, steps=3, threads=1)
    measured = peers.work(job, lambda job: (4.0, [0.5, 0.1, 7.0]))
    assert (measured.prefill, measured.decode) == (25.0, 2.0)


def test_every_system_gets_the_same_tokens(peers: ModuleType) -> None:
    """They depend on the length alone."""
    jobs = [peers.Job(system, "", 50, 3, 1) for system in peers.SYSTEMS]
    assert len({tuple(job.tokens) for job in jobs}) == 1
    assert len(jobs[0].tokens) == 50


@pytest.mark.parametrize("output", ["", "loading\n", "{}", '{"system": "edgekv"}', "[1]", "a\n{broken"])
def test_a_worker_that_talks_nonsense(peers: ModuleType, output: str) -> None:
    """That is no result."""
    with pytest.raises(peers.Skipped, match="instead of a result"):
        peers.read_measured(output)


def test_a_worker_that_fails(peers: ModuleType) -> None:
    """The last line of its stderr is the reason."""
    program = "import sys; print('first', file=sys.stderr); sys.exit('no such file')"
    with pytest.raises(peers.Skipped, match=r"code 1: no such file$"):
        peers.run_child([sys.executable, "-c", program])


def made_up(peers: ModuleType, *, others: float = 0.0) -> Any:
    """Three rounds of two systems at two lengths."""
    results = peers.Results()
    speeds = {("edgekv", 128): [100, 120, 110], ("llama.cpp", 128): [100, 100, 50]}
    speeds |= {("edgekv", 2048): [50, 50, 50], ("llama.cpp", 2048): [50, 50, 50]}
    for (system, length), rates in speeds.items():
        for rate in rates:
            results.add(peers.Measured(system, length, prefill=rate * 10.0, decode=float(rate), others=others))
    return results


AIMS = {("llama.cpp", "decode", 128): 1.05, ("llama.cpp", "decode", 2048): 1.25, ("llama.cpp", "prefill", 2048): 1.0}


def test_ratios(peers: ModuleType) -> None:
    """Of the medians; the range is that of the ratios within a round."""
    rows = peers.make_rows(made_up(peers), ["edgekv", "llama.cpp"], [128, 2048], AIMS)
    assert [(row.measure, row.length, row.system) for row in rows] == [
        (measure, length, system)
        for measure, length in (("decode", 128), ("decode", 2048), ("prefill", 2048))
        for system in ("edgekv", "llama.cpp")
    ]
    assert rows[0].rate == peers.Spread(110, 100, 120)
    assert rows[0].ratio is None
    assert rows[1].ratio == peers.Spread(1.1, 1.0, 2.2)


def test_table(peers: ModuleType) -> None:
    """A row a system, with the ratio and what was aimed at."""
    lines = peers.table(peers.make_rows(made_up(peers), ["edgekv", "llama.cpp"], [128, 2048], AIMS))
    assert lines[1].split() == ["decode", "at", "128", "edgekv", "110", "(100-120)"]
    assert lines[2].split() == ["llama.cpp", "100", "(50-100)", "1.10", "(1.00-2.20)", ">=", "1.05", "met"]
    assert lines[4].endswith(">= 1.25 MISSED")
    assert lines[6].endswith("1.00 (1.00-1.00)  >= 1.00 met")


def test_disturbed_measurements_decide_nothing(peers: ModuleType) -> None:
    """Where other processes ran, a target is neither met nor missed, and the JSON says how much they took."""
    results = made_up(peers, others=0.8)
    rows = peers.make_rows(results, ["edgekv", "llama.cpp"], [128, 2048], AIMS)
    assert [line.split()[-1] for line in peers.table(rows) if ">=" in line] == ["disturbed"] * 3
    assert peers.to_json(results, rows, {})["most_others"] == 0.8


def test_json(peers: ModuleType) -> None:
    """The rows with their spreads, and what was left out."""
    results = made_up(peers)
    results.skip("openvino-genai", "it is not installed")
    rows = peers.make_rows(results, ["edgekv"], [128], {})
    data = json.loads(json.dumps(peers.to_json(results, rows, {"rounds": 3})))
    assert data["skipped"] == {"openvino-genai": "it is not installed"}
    assert data["rows"][0]["rate"] == {"median": 110, "least": 100, "most": 120}
    assert data["provenance"] == {"rounds": 3}


def test_a_missing_peer_is_left_out(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line that says what to install."""
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    results = peers.Results()
    shop = peers.Workshop(tmp_path, tmp_path / "q4_0.gguf", 2)
    assert peers.make_models(["llama.cpp", "openvino-genai"], shop, results) == {}
    assert list(results.skipped) == ["llama.cpp", "openvino-genai"]
    for line in capsys.readouterr().err.splitlines():
        assert line.endswith("is not installed: pip install -e '.[peers]'")


def test_rounds_take_turns(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round runs every system at every length, another one beginning; one that fails takes no further part."""
    order: list[tuple[str, int]] = []

    def answer(command: list[str]) -> str:
        job = peers.Job(**json.loads(command[-1]))
        order.append((job.system, job.length))
        if job.system == "openvino-genai":
            raise peers.Skipped("it failed with code 1: out of memory")
        return "some noise\n" + json.dumps(asdict(peers.Measured(job.system, job.length, 1.0, 1.0, 0.0)))

    monkeypatch.setattr(peers, "run_child", answer)
    monkeypatch.setattr(peers, "wait_until_quiet", lambda: None)
    results = peers.Results()
    models = {name: Path(name) for name in ("edgekv", "openvino-genai", "llama.cpp")}
    peers.run_rounds(models, argparse.Namespace(rounds=2, lengths=[128, 600], steps=2, threads=2), results)
    first = [("edgekv", 128), ("openvino-genai", 128), ("llama.cpp", 128), ("edgekv", 600), ("llama.cpp", 600)]
    second = [("llama.cpp", 128), ("edgekv", 128), ("llama.cpp", 600), ("edgekv", 600)]
    assert order == first + second
    assert results.skipped == {"openvino-genai": "it failed with code 1: out of memory"}
    assert {key: len(rounds) for key, rounds in results.rounds.items()} == {
        (system, length): 2 for system in ("edgekv", "llama.cpp") for length in (128, 600)
    }


def test_command_line(peers: ModuleType) -> None:
    """Numbers and names are lists; an unknown system is refused."""
    options = peers.parse(["--systems", "edgekv,llama.cpp", "--lengths", "2048,128", "--rounds", "1"])
    assert (options.systems, options.lengths, options.threads) == (["edgekv", "llama.cpp"], [128, 2048], 2)
    with pytest.raises(SystemExit):
        peers.parse(["--systems", "vllm"])


def test_attention_alone(tiny_models: TinyModels) -> None:
    """One line a length, each with its own cache; the operator of edgekv's only where it serves."""
    spec = tiny_models.converted("llama").spec
    options = BenchOptions(lengths=(64, 200))
    own = native.unavailable() is None
    for dtype, served in (("int8", own), ("int4", own), *([("k8v4", True)] if own else [])):
        speeds = bench_attention(spec, KVSpec(64, dtype), 1, options)
        assert [speed.length for speed in speeds] == [64, 200]
        assert [speed.cache_bytes for speed in speeds] == [cache_bytes(spec, dtype, n) for n in (64, 200)]
        assert all(speed.read_ms > 0 for speed in speeds)
        assert all(dtype == "k8v4" if speed.gqa_ms is None else speed.gqa_ms > 0 for speed in speeds)
        assert all((speed.native_ms is not None) == served for speed in speeds)


def test_both_operators_are_timed_on_the_same_attention(tiny_models: TinyModels) -> None:
    """With float caches of the same rows their outputs agree, so neither is timed doing less."""
    spec, kv = tiny_models.converted("llama").spec, KVSpec(100, "float")
    if native.refusal(spec, kv, "cpu") is not None:
        pytest.skip("the operator is not built")
    found = [attention_alone.output_of(spec, kv, which) for which in ("native", "gqa")]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)
