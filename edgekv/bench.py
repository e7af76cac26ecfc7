"""`edgekv bench`: what this machine allows, then what was measured, each at several lengths of the cache.

Decoding one token reads every weight once and the whole filled cache once, so the rate at which memory can be read is a
ceiling:

    bytes per token at n tokens   weights (without an embedding that is only looked up) + 2 L K n D x bits / 8
    ceiling, tokens/s             measured read bandwidth / bytes per token

The card with those figures comes first. The traps: one thread cannot saturate a memory bus, so the bandwidth is read
with as many threads as the engine has, and the best of several reads counts; a cache of tens of MB holds a part of a
small model's weights from one token to the next, so a share near (or over) 100 % is no error there; and a machine where
other processes run measures those too: ONNX Runtime's threads wait for each other spinning, and one busy process beside
them has tripled the time of a token. `others` says how many cores were busy with something else.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from edgekv import __version__
from edgekv.about import about
from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption
from edgekv.generate import PREFILL_STEP
from edgekv.kv.plan import cache_bytes
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec
from edgekv.units import MIB

Progress = Callable[[str, int, int], None]
"""Told the stage, how much of it is done, and how much there is."""

READ_BYTES = 256 * MIB
"""Size of the buffer that is read for the bandwidth: beyond the last-level cache of the machines this is for."""

READS = 7

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Raises:
        InvalidOption: a value is out of range.
    """

    lengths: tuple[int, ...] = about("Tokens in the cache at which speed is measured.", default=(128, 2048, 7168))
    steps: int = about("Tokens decoded at each length.", default=30)
    repeats: int = about("How often everything is measured; the medians count.", default=1)
    seed: int = about("Of the random tokens.", default=0)

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("repeats", self.repeats), *(("length", n) for n in self.lengths)):
            if value < 1:
                raise InvalidOption(f"{name} is {value}; it must be at least 1.")
        if not self.lengths:
            raise InvalidOption("There is nothing to measure: give at least one length.")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))


@dataclass(frozen=True)
class Ceiling:
    """What memory allows at one length."""

    length: int
    token_bytes: int  # weights and cache
    tokens_per_s: float


@dataclass(frozen=True)
class Card:
    """What a token costs, and so how fast it can be at best."""

    weight_bytes: int  # read for every token
    bandwidth_bytes_per_s: float
    ceilings: tuple[Ceiling, ...]
    left_out: tuple[int, ...]  # lengths that do not fit the cache


@dataclass(frozen=True)
class Speed:
    """What was measured at one length."""

    length: int
    prefill_tokens_per_s: float  # of all tokens up to here
    decode_tokens_per_s: float  # median
    ceiling_share: float
    others: float  # cores that were busy with other processes


@dataclass(frozen=True)
class Provenance:
    """Where the figures come from."""

    model: str
    scheme: str
    kv_dtype: str
    granularity: str
    capacity: int
    threads: int
    steps: int
    repeats: int
    cpu: str
    edgekv: str
    onnxruntime: str
    numpy: str
    python: str
    date: str


@dataclass(frozen=True)
class BenchReport:
    """The card, the speeds, and their provenance."""

    card: Card
    speeds: tuple[Speed, ...]
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, rounded to what was measured."""
        return {
            "card": {
                "weight_bytes": self.card.weight_bytes,
                "bandwidth_gb_per_s": round(self.card.bandwidth_bytes_per_s / 1e9, 2),
                "left_out": list(self.card.left_out),
            },
            "lengths": [
                {
                    "length": speed.length,
                    "token_bytes": ceiling.token_bytes,
                    "ceiling_tokens_per_s": round(ceiling.tokens_per_s, 2),
                    "prefill_tokens_per_s": round(speed.prefill_tokens_per_s, 2),
                    "decode_tokens_per_s": round(speed.decode_tokens_per_s, 2),
                    "ceiling_share": round(speed.ceiling_share, 4),
                    "others": round(speed.others, 2),
                }
                for ceiling, speed in zip(self.card.ceilings, self.speeds, strict=True)
            ],
            "provenance": asdict(self.provenance),
        }


def bench(
    model: ConvertedModel,
    engine: Engine,
    threads: int,
    options: BenchOptions | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> BenchReport:
    """Make the card and measure. The engine's cache is empty afterwards.

    Raises:
        InvalidOption: no length fits the cache.
    """
    options = options or BenchOptions()
    from edgekv.engines.onnx.engine import OnnxEngine

    packed = isinstance(engine, OnnxEngine) and engine.packed
    card = make_card(model, engine.kv, threads, options, progress, factors=engine.row_factors != "none", packed=packed)
    speeds = measure(engine, card, options, progress)
    return BenchReport(card, speeds, provenance(model, engine.kv, threads, options))


def make_card(
    model: ConvertedModel,
    kv: KVSpec,
    threads: int,
    options: BenchOptions,
    progress: Progress = lambda stage, done, total: None,
    *,
    factors: bool = False,
    packed: bool = False,
) -> Card:
    """Bytes per token and the machine's bandwidth.

    Args:
        factors: whether rows of the cache have them.
        packed: for edgekv's own matmul, which reads weights in the bits that they have.

    Raises:
        InvalidOption: no length fits the cache.
    """
    fitting = [length for length in options.lengths if length + options.steps <= kv.capacity]
    if not fitting:
        larger = "" if kv.holds_all_of(model.spec.max_context) else ", or a larger --context"
        raise InvalidOption(
            f"The cache of {kv.capacity} tokens holds none of the lengths {', '.join(map(str, options.lengths))} and "
            f"{options.steps} steps more: give --lengths that fit{larger}."
        )
    weights = weight_bytes_read(model, packed=packed)
    bandwidth = read_bandwidth(threads, progress=progress)
    ceilings = []
    for length in fitting:
        token_bytes = weights + cache_bytes(model.spec, kv.dtype, length, factors=factors)
        ceilings.append(Ceiling(length, token_bytes, bandwidth / token_bytes))
    left_out = tuple(length for length in options.lengths if length not in fitting)
    return Card(weights, bandwidth, tuple(ceilings), left_out)


def weight_bytes_read(model: ConvertedModel, *, packed: bool = False) -> int:
    """Bytes of weights that one decoded token reads: all of them, but of an embedding that is no head only a row.
    packed: in the bits that they have, where that was noted."""
    from edgekv.engines.onnx.opening import load_graph

    graph = load_graph(model)[0].graph
    lookups = ("GatherBlockQuantized", "Gather")
    looked_up = {name for node in graph.node if node.op_type in lookups for name in node.input}
    read = {name for node in graph.node if node.op_type not in lookups for name in node.input}
    places = {}  # a tied embedding and head are two tensors over one range of the file
    for tensor in graph.initializer:
        where = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key in ("offset", "length")}
        if where and (tensor.name in read or tensor.name not in looked_up):
            places[where["offset"]] = where["length"]
    made = model.description
    return sum(places.values()) - (made.weight_bytes - made.packed_bytes if packed and made.packed_bytes else 0)


def read_bandwidth(
    threads: int,
    size_bytes: int = READ_BYTES,
    reads: int = READS,
    progress: Progress = lambda stage, done, total: None,
) -> float:
    """Bytes a second at which memory is read: the best of several passes over a buffer."""
    parts = np.array_split(np.ones(size_bytes // 8, np.int64), max(1, threads))
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in range(1, reads + 1):
            started = time.perf_counter()
            list(pool.map(_read, parts))
            best = max(best, size_bytes / (time.perf_counter() - started))
            progress("bandwidth", done, reads)
    return best


def _read(values: npt.NDArray[np.int64]) -> int:
    """Touch every byte; numpy lets go of Python's lock meanwhile, and a bitwise reduction is bound by memory alone."""
    return int(np.bitwise_or.reduce(values))


def measure(
    engine: Engine, card: Card, options: BenchOptions, progress: Progress = lambda stage, done, total: None
) -> tuple[Speed, ...]:
    """Prefill to each length and decode there, as a chat does it, with random tokens."""
    lengths = [ceiling.length for ceiling in card.ceilings]
    tokens = np.random.default_rng(options.seed).integers(0, engine.spec.vocab_size, lengths[-1]).tolist()
    engine.reset()
    engine.forward(tokens[:WARM_UP_TOKENS])
    runs = [_run(engine, tokens, lengths, options.steps, progress) for _ in range(options.repeats)]
    engine.reset()
    return tuple(_speed(ceiling, [run[index] for run in runs]) for index, ceiling in enumerate(card.ceilings))


@dataclass(frozen=True)
class _Timing:
    prefill_s: float  # of all tokens from the first
    step_s: float  # median
    others: float


def _run(
    engine: Engine, tokens: Sequence[int], lengths: Sequence[int], steps: int, progress: Progress
) -> list[_Timing]:
    engine.reset()
    timings: list[_Timing] = []
    prefill_s = 0.0
    for length in lengths:
        watch = Others()
        prefill_s += prefill(engine, tokens[engine.length : length], progress)
        step_s = decode(engine, steps, progress)
        timings.append(_Timing(prefill_s, float(np.median(step_s)), watch.cores()))
        engine.truncate(length)
    return timings


def prefill(engine: Engine, tokens: Sequence[int], progress: Progress = lambda stage, done, total: None) -> float:
    """Seconds that it takes to append tokens, in the pieces in which a prompt is read."""
    started = time.perf_counter()
    end = engine.length + len(tokens)
    for start in range(0, len(tokens), PREFILL_STEP):
        engine.forward(tokens[start : start + PREFILL_STEP])
        progress(f"prefill to {end}", min(start + PREFILL_STEP, len(tokens)), len(tokens))
    return time.perf_counter() - started


def decode(engine: Engine, steps: int, progress: Progress = lambda stage, done, total: None) -> list[float]:
    """Seconds of each of so many greedy steps, the choice of the next token included."""
    token, seconds, length = 0, [], engine.length
    for done in range(1, steps + 1):
        started = time.perf_counter()
        token = int(engine.forward([token]).argmax())
        seconds.append(time.perf_counter() - started)
        progress(f"decode at {length}", done, steps)
    return seconds


def _speed(ceiling: Ceiling, timings: Sequence[_Timing]) -> Speed:
    rate = 1 / float(np.median([timing.step_s for timing in timings]))
    return Speed(
        ceiling.length,
        ceiling.length / float(np.median([timing.prefill_s for timing in timings])),
        rate,
        rate / ceiling.tokens_per_s,
        max(timing.others for timing in timings),
    )


class Others:
    """Counts the cores that other processes keep busy from now on."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def cores(self) -> float:
        """How many, on average since the beginning."""
        foreign = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, foreign / max(time.perf_counter() - self._started, 1e-9))


def _busy_s() -> float:
    """CPU seconds that the whole machine has spent on anything."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system


def provenance(model: ConvertedModel, kv: KVSpec, threads: int, options: BenchOptions) -> Provenance:
    """Versions, machine and model."""
    return Provenance(
        model=model.description.name,
        scheme=model.description.scheme,
        kv_dtype=kv.dtype,
        granularity=kv.granularity,
        capacity=kv.capacity,
        threads=threads,
        steps=options.steps,
        repeats=options.repeats,
        cpu=cpu_name(),
        edgekv=__version__,
        onnxruntime=_version("onnxruntime", "onnxruntime-gpu"),
        numpy=np.__version__,
        python=platform.python_version(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        lines = information.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()


def _version(*packages: str) -> str:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


# ---- attention alone ------------------------------------------------------------------------------------------------

ATTENTION_ROUNDS = 15
SPINNING_S = 0.1
"""After this idle threads of ONNX Runtime have gone to sleep."""


@dataclass(frozen=True)
class AttentionSpeed:
    """The attention of one token in all layers, alone, at one length; medians in milliseconds."""

    length: int
    cache_bytes: int
    read_ms: float  # reading the same bytes once
    gqa_ms: float | None  # ONNX Runtime's operator; None where it has no such cache
    native_ms: float | None  # edgekv's; None where it does not serve
    others: float  # cores that were busy with other processes


def bench_attention(
    spec: ModelSpec,
    kv: KVSpec,
    threads: int,
    options: BenchOptions,
    progress: Progress = lambda stage, done, total: None,
) -> tuple[AttentionSpeed, ...]:
    """Both operators beside a plain read of the cache, taking turns, on as many threads each."""
    from edgekv.engines.onnx.attention_alone import decode_runs

    speeds = []
    for length in options.lengths:
        runs = decode_runs(spec, replace(kv, capacity=length, sinks=0, stride=0), threads)
        watch = Others()
        told = partial(progress, f"attention at {length}")
        times = _in_turn(runs, ATTENTION_ROUNDS * options.repeats, told)
        medians = {name: 1e3 * float(np.median(each)) for name, each in times.items()}
        read, gqa, own = (medians.get(name) for name in ("read", "gqa", "native"))
        assert read is not None
        size = cache_bytes(spec, kv.dtype, length)
        speeds.append(AttentionSpeed(length, size, read, gqa, own, watch.cores()))
    return tuple(speeds)


def _in_turn(
    runs: Mapping[str, Callable[[], object]], rounds: int, progress: Callable[[int, int], None]
) -> dict[str, list[float]]:
    """Seconds of each, in rounds; the first round warms up. Threads of a session that has just run go on spinning, and
    slow the next one down (two to four times on two cores): a pause before each, two runs, and the second counts."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(SPINNING_S)
            for counted in (False, True):
                started = time.perf_counter()
                run()
                if done and counted:
                    times[name].append(time.perf_counter() - started)
        progress(done, rounds)
    return times
