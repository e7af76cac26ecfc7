"""edgekv beside its peers: `python3 scripts/bench_peers.py`, in an environment with `pip install -e '.[peers]'`.

One model for all: the default model as Q4_0, quantised by llama.cpp itself. edgekv holds its integers unchanged,
OpenVINO reads the same file, and onnxruntime-genai's own builder makes its int4 model from the dequantised weights. A
peer that is not installed, or whose model cannot be made here, is left out with one line. `--model` takes another one:
a catalog name, a GGUF file, or random:1.5b, random weights in the geometry of Qwen2.5-1.5B.

    a measurement     one system in a process of its own: prefill of exactly N random tokens, then greedy steps
    a round           every length, every system, taking turns, so that what slows the machine slows all of them
    the table         median of the rounds and their range; edgekv / peer is the ratio of medians and its range by round

Each system takes the greedy choice from its logits in the same way where it lets us, and has as many threads as the
others. llama.cpp runs twice, with the 8-bit cache that is edgekv's like, and with the float16 one that is its default.
The models are made once and kept in edgekv's cache folder under `bench`. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PEERS_HINT = "pip install -e '.[peers]'"

LENGTHS = (128, 2048, 7168)
PREFILL_FROM = 512
"""Prefill of fewer tokens is over too soon to be worth a row."""

TARGETS = {
    ("llama.cpp", "decode", 128): 1.2,
    ("llama.cpp", "decode", 2048): 1.8,
    ("llama.cpp", "decode", 7168): 3.2,
    ("llama.cpp", "prefill", 2048): 1.5,
    ("llama.cpp", "prefill", 7168): 1.5,
    ("openvino-genai", "decode", 7168): 2.8,
    ("openvino-genai", "prefill", 2048): 1.1,
    ("openvino-genai", "prefill", 7168): 1.1,
    ("edgekv-gqa", "decode", 128): 1.0,
    ("edgekv-gqa", "decode", 2048): 1.0,
    ("edgekv-gqa", "decode", 7168): 1.8,
    ("edgekv-gqa", "prefill", 7168): 2.0,
}
"""What edgekv set out to reach on the default model: its tokens/s over a peer's."""

OTHER_TARGETS = {
    ("llama.cpp", "decode", 128): 1.1,
    ("llama.cpp", "decode", 2048): 1.4,
    ("llama.cpp", "decode", 7168): 2.0,
}
"""The same for any other model."""

RANDOM = "random:"

DISTURBED = 0.15
"""Cores busy with other processes from which on the output says so: two spinning threads suffer from much less."""

PATIENCE_S = 20
"""How long a measurement waits for other processes to finish."""

TIMEOUT_S = 900
WARM_UP_TOKENS = 16
CALIBRATION_TOKENS = 1024
"""Enough for scales that are real; speed does not depend on how good they are."""


class Skipped(Exception):
    """A system that cannot take part, and why."""


# ---- one measurement, in a process of its own -----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker measures."""

    system: str
    model: str  # path
    length: int
    steps: int
    threads: int

    @property
    def tokens(self) -> list[int]:
        """Random tokens, the same for every system; low ids are left out because they are control tokens."""
        import numpy as np

        return [int(token) for token in np.random.default_rng(self.length).integers(100, 1000, self.length)]


@dataclass(frozen=True)
class Measured:
    """What a worker prints."""

    system: str
    length: int
    prefill: float  # tokens/s
    decode: float  # tokens/s, median of the steps
    others: float  # cores busy with other processes meanwhile

    @property
    def disturbed(self) -> bool:
        """Whether that was too much to trust the rest."""
        return self.others > DISTURBED


def run_edgekv(job: Job) -> tuple[float, list[float]]:
    """Seconds of the prefill and of each step; with edgekv's own operator, or with ONNX Runtime's."""
    from edgekv.api import open_engine, plan_for
    from edgekv.bench import decode, prefill
    from edgekv.model.converted import open_converted
    from edgekv.options import LoadOptions
    from edgekv.prepare import find_scales

    model = open_converted(Path(job.model))
    context = min(model.spec.max_context, -(-(job.length + job.steps + 64) // 64) * 64)
    options = LoadOptions(context=context, threads=job.threads)
    scales = find_scales(model, options.kv_dtype, options.granularity)
    attention = "gqa" if job.system.endswith("gqa") else "auto"
    engine = open_engine(model, plan_for(model, options).kv, scales, options, attention=attention)
    engine.forward(job.tokens[:WARM_UP_TOKENS])
    engine.reset()
    return prefill(engine, job.tokens), decode(engine, job.steps)


def run_llama_cpp(job: Job) -> tuple[float, list[float]]:
    """Through llama-cpp-python, with flash attention; the greedy choice is numpy's, its own sampler being slower."""
    import llama_cpp
    import numpy as np

    kind = llama_cpp.GGML_TYPE_F16 if job.system.endswith("f16") else llama_cpp.GGML_TYPE_Q8_0
    model = llama_cpp.Llama(
        job.model, n_ctx=max(2048, job.length + job.steps + 64), n_batch=512, verbose=False,
        n_threads=job.threads, n_threads_batch=job.threads, flash_attn=True, type_k=kind, type_v=kind,
    )  # fmt: skip

    def step() -> None:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        model.eval([int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())])

    model.eval(job.tokens[:WARM_UP_TOKENS])
    model.reset()
    return timed(lambda: model.eval(job.tokens)), [timed(step) for _ in range(job.steps)]


def run_genai(job: Job) -> tuple[float, list[float]]:
    """onnxruntime-genai with its default float cache."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(job.model)
    threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": job.threads}}}}
    config.overlay(json.dumps(threads))
    model = onnxruntime_genai.Model(config)

    def generator(tokens: Sequence[int], steps: int) -> Any:
        options = onnxruntime_genai.GeneratorParams(model)
        total = len(tokens) + steps + 2
        options.set_search_options(max_length=total, min_length=total, do_sample=False)
        return onnxruntime_genai.Generator(model, options)

    generator(job.tokens[:WARM_UP_TOKENS], 1).append_tokens(job.tokens[:WARM_UP_TOKENS])
    running = generator(job.tokens, job.steps)
    prefill_s = timed(lambda: (running.append_tokens(job.tokens), running.generate_next_token()))
    return prefill_s, [timed(running.generate_next_token) for _ in range(job.steps)]


def run_openvino(job: Job) -> tuple[float, list[float]]:
    """OpenVINO GenAI with its default 8-bit cache, on the GGUF file; the times are its own metrics."""
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(job.model, "CPU", INFERENCE_NUM_THREADS=job.threads)

    def generate(tokens: Sequence[int], steps: int) -> Any:
        ids = np.array([tokens], np.int64)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = steps + 1
        config.do_sample, config.ignore_eos = False, True
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return pipeline.generate(inputs, config).perf_metrics

    generate(job.tokens[:WARM_UP_TOKENS], 1)
    metrics = generate(job.tokens, job.steps)
    return metrics.get_ttft().mean / 1e3, [float(us) / 1e6 for us in metrics.raw_metrics.m_durations]


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def work(job: Job, run: Callable[[Job], tuple[float, list[float]]] | None = None) -> Measured:
    """Run one job in this process."""
    from edgekv.bench import Others

    watch = Others()
    prefill_s, step_s = (run or SYSTEMS[job.system].run)(job)
    others = watch.cores()
    return Measured(job.system, job.length, job.length / prefill_s, 1 / statistics.median(step_s), others)


# ---- the models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workshop:
    """Where the models are made: `folder` for one source model, `gguf` in it for everybody."""

    folder: Path
    gguf: Path
    threads: int


def open_workshop(model: str, home: Path, threads: int) -> Workshop:
    """The folder of a model, with its GGUF file.

    A random model or a file is taken as it is. A model of the catalog is pulled and quantised to Q4_0 with llama.cpp;
    without that package the file stays as published.
    """
    folder = home / "bench" / model.removeprefix("hf:").replace("/", "--").replace(":", "-")
    if model.startswith(RANDOM):
        return Workshop(folder, random_model(model.removeprefix(RANDOM), folder, home), threads)
    if Path(model).is_file():
        return Workshop(home / "bench" / Path(model).stem, Path(model), threads)
    source = published(model, home)
    if find_spec("llama_cpp") is None:
        note("The published file is used as it is: only llama-cpp-python can make it Q4_0.")
        return Workshop(folder, source, threads)
    target = folder / "q4_0.gguf"
    if not target.exists():
        note("making the Q4_0 file")
        quantise(source, target, threads)
    return Workshop(folder, target, threads)


def published(model: str, home: Path) -> Path:
    """The file of a catalog name, downloaded."""
    from edgekv.model.pull import pull

    return pull(model, home=home, progress=lambda stage, done, total: None)


def random_model(geometry: str, folder: Path, home: Path) -> Path:
    """Random weights with the default model's tokenizer."""
    from _random_gguf import GEOMETRIES, write_random_gguf

    from edgekv.files import atomic_file
    from edgekv.model.catalog import DEFAULT_MODEL

    target = folder / "random.gguf"
    if not target.exists():
        note(f"making a random model, {geometry}")
        with atomic_file(target) as part:
            write_random_gguf(part, GEOMETRIES[geometry], published(DEFAULT_MODEL, home))
    return target


def quantise(source: Path, target: Path, threads: int) -> None:
    """llama.cpp's own quantiser, GGUF to GGUF."""
    import llama_cpp

    from edgekv.files import atomic_file

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    options.nthread = threads
    with atomic_file(target) as part:
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(options))
        if code:
            raise Skipped(f"llama.cpp could not quantise {source.name} (code {code})")


def make_edgekv(shop: Workshop) -> Path:
    """Convert the file, which keeps its integers, and measure the cache's scales."""
    from edgekv.calibrate import CalibrateOptions
    from edgekv.cli.calibrate import calibrate_and_write
    from edgekv.kv.scales import DEFAULT_NAME
    from edgekv.options import LoadOptions
    from edgekv.prepare import prepare

    model = prepare(str(shop.gguf), home=shop.folder)
    scales = model.folder / DEFAULT_NAME
    if not scales.exists():
        note("measuring the KV cache's scales")
        calibrate_and_write(
            model, CalibrateOptions(tokens=CALIBRATION_TOKENS), scales, LoadOptions(threads=shop.threads)
        )
    return model.folder


def make_genai(shop: Workshop) -> Path:
    """onnxruntime-genai's builder makes an int4 model from float safetensors, and those come from the GGUF file."""
    from edgekv.files import atomic_directory

    target = shop.folder / "genai-int4"
    if (target / "genai_config.json").exists():
        return target
    missing = [name for name in ("torch", "transformers", "onnx_ir") if find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise Skipped(f"its builder needs {packages} once, to make the model: pip install {packages}")
    note("making the onnxruntime-genai model")
    with atomic_directory(target) as made, tempfile.TemporaryDirectory(dir=shop.folder) as floats:
        run_child([sys.executable, __file__, "--dequantise", str(shop.gguf), floats])
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", floats, "-o", str(made)]
        extra = ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
        run_child([*builder, "-p", "int4", "-e", "cpu", "-c", f"{floats}/cache", *extra])
    return target


def dequantise(gguf: Path, out: Path) -> None:
    """A GGUF file as a float32 transformers folder; the copy without its quantisation is what can be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


@dataclass(frozen=True)
class System:
    """One that takes part."""

    module: str
    packages: tuple[str, ...]  # whose versions are told
    make: Callable[[Workshop], Path]
    run: Callable[[Job], tuple[float, list[float]]]
    what: str


SYSTEMS = {
    "edgekv": System("edgekv", ("edgekv", "onnxruntime"), make_edgekv, run_edgekv, "calibrated INT8 cache"),
    "edgekv-gqa": System(
        "edgekv", ("edgekv", "onnxruntime"), make_edgekv, run_edgekv, "the same, attention by ONNX Runtime's operator"
    ),
    "llama.cpp": System("llama_cpp", ("llama-cpp-python",), lambda shop: shop.gguf, run_llama_cpp, "q8_0 cache"),
    "llama.cpp-f16": System("llama_cpp", ("llama-cpp-python",), lambda shop: shop.gguf, run_llama_cpp, "f16 cache"),
    "onnxruntime-genai": System("onnxruntime_genai", ("onnxruntime-genai",), make_genai, run_genai, "float cache"),
    "openvino-genai": System(
        "openvino_genai", ("openvino-genai",), lambda shop: shop.gguf, run_openvino, "u8 cache, its default"
    ),
}


# ---- the rounds -----------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """What has been measured so far."""

    rounds: dict[tuple[str, int], list[Measured]] = field(default_factory=dict)  # (system, length) -> one a round
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        """Take in one measurement."""
        self.rounds.setdefault((measured.system, measured.length), []).append(measured)

    def rates(self, system: str, measure: str, length: int) -> list[float]:
        """Tokens/s by round."""
        return [getattr(measured, measure) for measured in self.rounds.get((system, length), [])]

    def disturbed(self, length: int, *systems: str) -> bool:
        """Whether other processes ran beside any of these measurements."""
        return any(one.disturbed for system in systems for one in self.rounds.get((system, length), []))

    def skip(self, system: str, reason: str) -> None:
        """Leave a system out from now on."""
        self.skipped[system] = reason
        self.rounds = {key: value for key, value in self.rounds.items() if key[0] != system}
        note(f"{system} is left out: {reason}")


def make_models(systems: Iterable[str], shop: Workshop, results: Results) -> dict[str, Path]:
    """Each system's model, made if need be; those that cannot have one are left out."""
    models = {}
    for name in systems:
        try:
            if find_spec(SYSTEMS[name].module) is None:
                raise Skipped(f"{SYSTEMS[name].module} is not installed: {PEERS_HINT}")
            models[name] = SYSTEMS[name].make(shop)
        except Skipped as reason:
            results.skip(name, str(reason))
    return models


def run_rounds(models: Mapping[str, Path], options: argparse.Namespace, results: Results) -> None:
    """Every round: every length, every system; who begins changes from round to round."""
    names = list(models)
    for number in range(options.rounds):
        first = number % max(1, len(names))
        for length in options.lengths:
            for name in names[first:] + names[:first]:
                if name not in results.skipped:
                    job = Job(name, str(models[name]), length, options.steps, options.threads)
                    run_job(job, f"round {number + 1} of {options.rounds}", results)


def run_job(job: Job, title: str, results: Results) -> None:
    """One measurement; a system that fails takes no further part."""
    wait_until_quiet()
    try:
        measured = read_measured(run_child(worker_command(job)))
    except Skipped as reason:
        results.skip(job.system, str(reason))
        return
    results.add(measured)
    note(
        f"{title}: {job.system} at {job.length}: decode {measured.decode:.1f}, prefill {measured.prefill:.0f} tokens/s"
        + (f" (disturbed: {measured.others:.1f} cores)" if measured.disturbed else "")
    )


def wait_until_quiet(patience_s: float = PATIENCE_S, look_s: float = 0.5) -> None:
    """Give other processes a chance to finish."""
    from edgekv.bench import Others

    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        watch = Others()
        time.sleep(look_s)
        if watch.cores() <= DISTURBED:
            return


def worker_command(job: Job) -> list[str]:
    """How a job is handed to a process of its own."""
    return [sys.executable, __file__, "--worker", json.dumps(asdict(job))]


def read_measured(output: str) -> Measured:
    """The last line of a worker's output."""
    lines = output.strip().splitlines()
    try:
        return Measured(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        raise Skipped(f"its worker said {lines[-1] if lines else 'nothing'!r} instead of a result") from None


def run_child(command: Sequence[str]) -> str:
    """A child process's output.

    Raises:
        Skipped: it failed or took too long; with the last line that it wrote to stderr.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Skipped(f"it took more than {TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Skipped(f"it failed with code {done.returncode}: {lines[-1][:200]}")
    return done.stdout


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median and its range over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of some values."""
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.least:{spec}}-{self.most:{spec}})"


@dataclass(frozen=True)
class Row:
    """One system's speed in one measure."""

    measure: str  # prefill or decode
    length: int
    system: str
    rate: Spread  # tokens/s
    ratio: Spread | None  # edgekv / this one
    target: float | None
    disturbed: bool  # other processes ran beside this system's measurements or edgekv's


def make_rows(
    results: Results, systems: Sequence[str], lengths: Sequence[int], targets: Mapping[tuple[str, str, int], float]
) -> list[Row]:
    """Everything that was measured, decode first."""
    wanted = [("decode", n) for n in lengths] + [("prefill", n) for n in lengths if n >= PREFILL_FROM]
    rows = []
    for measure, length in wanted:
        ours = results.rates("edgekv", measure, length)
        for system in systems:
            if rates := results.rates(system, measure, length):
                ratio = None if system == "edgekv" or not ours else ratio_of(ours, rates)
                target = targets.get((system, measure, length))
                disturbed = results.disturbed(length, "edgekv", system)
                rows.append(Row(measure, length, system, Spread.of(rates), ratio, target, disturbed))
    return rows


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ratio of the medians, with the range of the ratios within a round."""
    by_round = [a / b for a, b in zip(ours, theirs, strict=False)]
    return Spread(statistics.median(ours) / statistics.median(theirs), min(by_round), max(by_round))


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text."""
    cells = [("", "system", "tokens/s", "edgekv / peer", "target")]
    before = ""
    for row in rows:
        title = f"{row.measure} at {row.length}"
        digits = ".1f" if row.rate.median < 100 else ".0f"
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        cells.append((title if title != before else "", row.system, f"{row.rate:{digits}}", ratio, verdict(row)))
        before = title
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def verdict(row: Row) -> str:
    """The target and whether it is reached; a disturbed measurement decides nothing."""
    if row.target is None or row.ratio is None:
        return ""
    met = "disturbed" if row.disturbed else "met" if row.ratio.median >= row.target else "MISSED"
    return f">= {row.target:.2f} {met}"


def to_json(results: Results, rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """The rows, what was left out, and where it all comes from."""
    measured = [one for many in results.rounds.values() for one in many]
    return {
        "rows": [
            asdict(row) | {"rate": rounded(row.rate), "ratio": rounded(row.ratio) if row.ratio else None}
            for row in rows
        ],
        "skipped": results.skipped,
        "most_others": round(max((one.others for one in measured), default=0.0), 2),
        "provenance": dict(about),
    }


def rounded(spread: Spread) -> dict[str, float]:
    """Four digits are more than any of it is worth."""
    return {name: float(f"{value:.4g}") for name, value in asdict(spread).items()}


def provenance(options: argparse.Namespace, systems: Iterable[str], weights: str) -> dict[str, Any]:
    """Versions, machine, model and settings."""
    from edgekv import __version__
    from edgekv.bench import cpu_name

    packages = sorted({package for name in systems for package in SYSTEMS[name].packages} - {"edgekv"})
    return {
        "model": options.model,
        "weights": weights,
        "threads": options.threads,
        "rounds": options.rounds,
        "steps": options.steps,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": {"edgekv": __version__, "python": sys.version.split()[0]}
        | {name: version(name) for name in packages},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


# ---- the command ----------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """A line about what is going on."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    from edgekv.model.catalog import DEFAULT_MODEL

    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    def systems(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in SYSTEMS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(SYSTEMS)}")
        return names

    parser = argparse.ArgumentParser(description="Measure edgekv beside its peers on this machine.")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a catalog name, hf:ORG/REPO/FILE.gguf, a GGUF file or random:1.5b (%(default)s)",
    )
    parser.add_argument("--systems", type=systems, default=list(SYSTEMS), help=", ".join(SYSTEMS) + "; default: all")
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS), help="tokens in the cache (128,2048,7168)")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="tokens decoded a measurement (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--home", type=Path, help="cache folder; default: EDGEKV_HOME, or the user's")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dequantise", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> int:
    """Make the models, run the rounds, print the table."""
    from edgekv.model.catalog import DEFAULT_MODEL, home

    shop = open_workshop(options.model, home(options.home), options.threads)
    results = Results()
    models = make_models(options.systems, shop, results)
    run_rounds(models, options, results)
    targets = TARGETS if options.model == DEFAULT_MODEL else OTHER_TARGETS
    rows = make_rows(results, options.systems, options.lengths, targets)
    about = provenance(options, models, shop.gguf.name)
    report = to_json(results, rows, about)
    print_report(rows, report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(json.dumps(report), flush=True)
    return 0 if rows else 1


def print_report(rows: Sequence[Row], report: Mapping[str, Any]) -> None:
    """The table and what belongs to it."""
    about = report["provenance"]
    print(f"{about['model']}, {about['weights']}, {about['threads']} threads, {about['cpu']}, {about['date']}")
    print(f"Median of {about['rounds']} rounds (least-most).\n")
    print("\n".join(table(rows)) + "\n")
    for name in dict.fromkeys(row.system for row in rows):
        packages = ", ".join(f"{package} {about['versions'][package]}" for package in SYSTEMS[name].packages)
        print(f"{name}: {SYSTEMS[name].what}; {packages}")
    for name, reason in report["skipped"].items():
        print(f"{name} was left out: {reason}")
    if report["most_others"] > DISTURBED:
        print(f"Other processes kept up to {report['most_others']} cores busy: run this on a quiet machine.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, or do a child's part of it."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.worker:
        print(json.dumps(asdict(work(Job(**json.loads(options.worker))))), flush=True)
        return 0
    if options.dequantise:
        dequantise(*options.dequantise)
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
