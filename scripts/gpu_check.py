"""Everything that only a GPU can show, in one command: `python3 scripts/gpu_check.py [--out FILE] [--tiny]`.

Needs the extra `torch` and no network; takes at most six minutes on a GPU. Random weights of real geometry stand for
models, since nothing that is measured here depends on what they say:

    machine    what ran where, and the bandwidth of a copy
    kernels    Triton's against their twins: bytes stored, and attention over head sizes, group ratios, wrapped rings,
               scales, centres, dtypes, one token and many
    engine     the same through a whole engine with 4-bit weights, prefill and captured decode step
    attention  one decode step's attention at several lengths, as a CUDA graph: bytes of rows read a second, as a share
               of the card's own copy bandwidth measured in the same run, for INT8, FP8 and 16 bits
    model      decode and prefill of 4-bit models, beside transformers with its static cache, SDPA and the same
               packed weights, as it comes and as a CUDA graph; and what the plan says of the device's memory against
               what torch's allocator saw

Each part is a process of its own with a limit in seconds, so that one that fails or hangs costs no other. Every row is
printed when it is found, and FILE is then written anew: it is whole at any time. The last line is the same JSON.
`--tiny` runs the same program on a CPU with small shapes (Triton interpreted): its figures mean nothing, but a test
runs it, so that the program works when a GPU is there.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 350


@dataclass(frozen=True)
class Geometry:
    """A model's sizes, under the names of its config."""

    name: str
    family: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 131072
    rope_theta: float = 1e6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def config(self) -> dict[str, Any]:
        fields = {key: value for key, value in asdict(self).items() if key not in ("name", "family")}
        return fields | {
            "model_type": self.family, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": self.head_dim,
        }  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is run: on a GPU, or in a test."""

    device: str
    models: tuple[Geometry, ...]
    lengths: tuple[int, ...]
    prompt: int
    steps: int
    repeats: int
    tokens: int  # of the runs that kernels are checked with, beside single ones
    copy_bytes: int
    ring_bytes: int  # that the layers of an attention measurement read at least


QWEN = Geometry("Qwen2.5-1.5B", "qwen2", 28, 1536, 8960, 12, 2, 151936)
LLAMA = Geometry("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128256, rope_theta=5e5)
TINY = Geometry("tiny", "qwen2", 2, 64, 128, 4, 2, 320)
FULL_SIZES = Sizes("cuda", (QWEN, LLAMA), (2048, 8192, 32768), 2048, 32, 5, 70, 1 << 30, 1 << 29)
TINY_SIZES = Sizes("cpu", (TINY,), (64, 128), 48, 2, 1, 9, 1 << 20, 0)
GROUP = 128


Row = dict[str, Any]


@dataclass
class Report:
    """What was found, part by part, and which parts failed, with what they said."""

    machine: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    engine: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    model: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether everything ran and nothing was wrong."""
        return not self.failed and all(row["ok"] for row in (*self.kernels, *self.engine))


@dataclass(frozen=True)
class Part:
    """One process. section: of the report, and the function in MEASURES; model: which of `Sizes.models`."""

    section: str
    limit_s: float
    model: int = 0

    @property
    def name(self) -> str:
        """What it is called where it fails."""
        return f"{self.section} {self.model}" if self.section == "model" else self.section


class Clock:
    """Seconds of a function on the device: the median of some runs after one for warming up."""

    def __init__(self, torch: Any, sizes: Sizes) -> None:
        self._torch, self._sizes = torch, sizes

    def __call__(self, function: Callable[[], Any]) -> float:
        function()
        return statistics.median(self._once(function) for _ in range(self._sizes.repeats))

    def captured(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function as a CUDA graph, which is how decoding runs; on a CPU the function itself."""
        if self._sizes.device != "cuda":
            return function
        cuda = self._torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            function()
            function()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            function()
        return lambda: graph.replay()

    def _once(self, function: Callable[[], Any]) -> float:
        self._wait()
        started = time.perf_counter()
        function()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._sizes.device == "cuda":
            self._torch.cuda.synchronize()


def main() -> int:
    """Run everything that the time allows; returns 1 if something failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Keep the JSON here, too.")
    parser.add_argument("--tiny", action="store_true", help="Small shapes on a CPU, to see that the program works.")
    arguments = parser.parse_args()
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    sys.path.insert(0, str(ROOT))
    report = check(TINY_SIZES if arguments.tiny else FULL_SIZES, arguments.out)
    print_tables(report)
    print(json.dumps(asdict(report)))
    return 0 if report.good else 1


def parts(sizes: Sizes) -> list[Part]:
    """In order of what they tell."""
    models = [Part("model", 110, index) for index in range(len(sizes.models))]
    return [Part("machine", 60), Part("kernels", 120), Part("engine", 60), Part("attention", 80), *models]


def check(sizes: Sizes, out: Path | None) -> Report:
    """Run the parts one after another; each is started while the one before it runs, and waits."""
    started, report, todo = time.perf_counter(), Report(), parts(sizes)
    waiting = start(todo[0], sizes)
    for part, following in zip(todo, [*todo[1:], None], strict=True):
        process, pipe = waiting
        if following is not None:
            waiting = start(following, sizes)
        limit_s = min(part.limit_s, LIMIT_S - (time.perf_counter() - started)) if sizes.device == "cuda" else 600
        for row in rows_of(part, process, pipe, limit_s, report.failed):
            getattr(report, part.section).append(row)
            report.seconds = round(time.perf_counter() - started, 1)
            keep(report, out)
            print(f"{report.seconds:6.1f} s  {part.name}: {json.dumps(row)}", flush=True)
        if not report.machine:
            sys.exit(report.failed[part.name])
        if part.name in report.failed:
            print(f"{part.name} FAILED: {report.failed[part.name]}", file=sys.stderr, flush=True)
    report.seconds = round(time.perf_counter() - started, 1)
    keep(report, out)
    return report


def keep(report: Report, out: Path | None) -> None:
    """Write the report so that the file is whole at any time."""
    if out is not None:
        beside = out.with_name(out.name + ".new")
        beside.write_text(json.dumps(asdict(report)) + "\n", "utf-8")
        beside.replace(out)


def start(part: Part, sizes: Sizes) -> tuple[Any, Any]:
    """A process that imports what the part needs and then waits for a word; and the pipe to it."""
    context = multiprocessing.get_context("spawn")  # a fork would share what CUDA has begun
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(part, sizes, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def measure(part: Part, sizes: Sizes, pipe: Any) -> None:
    """In its own process: send every row, or at the end what went wrong."""
    try:
        import torch
        import transformers

        del transformers  # imported while another part runs
        pipe.recv()
        for row in MEASURES[part.section](torch, sizes, sizes.models[part.model]):
            pipe.send(row)
    except BaseException as error:
        said = str(error) if isinstance(error, SystemExit) else traceback.format_exc()[-3000:]
        pipe.send(said)


def rows_of(part: Part, process: Any, pipe: Any, limit_s: float, failed: dict[str, str]) -> Iterator[Row]:
    """What a part finds, as it comes; it is stopped at its limit. Notes in `failed` what went wrong."""
    deadline = time.perf_counter() + limit_s
    with suppress(OSError):  # it has failed already, and what it said is still to be read
        pipe.send("go")
    try:
        while pipe.poll(max(0.0, deadline - time.perf_counter())):
            found = pipe.recv()
            if isinstance(found, str):
                failed[part.name] = found
            else:
                yield found
        failed[part.name] = f"stopped: it was given {limit_s:.0f} s"
    except (EOFError, OSError):
        pass
    finally:
        process.join(0 if part.name in failed else 10)  # what failed may never end
        process.kill()
        process.join()
        if process.exitcode:
            failed.setdefault(part.name, f"its process ended with {process.exitcode}")


def describe_machine(torch: Any, sizes: Sizes, geometry: Geometry) -> Iterator[Row]:
    """What ran where."""
    import transformers
    import triton

    on_gpu = sizes.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("No CUDA device was found by torch: run this on a GPU machine, or with --tiny to try the program.")
    yield {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, Triton interpreted: no figure counts",
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
        "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        "copy_gb_per_s": round(copy_bandwidth(torch, sizes) / 1e9, 1),
    }  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One layer and one run: dtype, D, H/K, new tokens; whether keys and values are held without constants."""

    dtype: str
    size: int
    group: int
    count: int = 1
    centred: bool = False
    window: int | None = None
    kv_heads: int = 2


def layer_case(torch: Any, sizes: Sizes, shape: Shape, capacity: int, evicted: int = 0, pinned: int = 0) -> Row:
    """A layer's full cache of random rows and a run's queries [H, T, D], keys and values [K, T, D]."""
    from edgekv.engines.torch.cache import STORED, LayerRows, Part, Place, Turns
    from edgekv.kv.spec import ROW_FACTORS
    from edgekv.model.spec import RopeSpec

    device, size, heads = torch.device(sizes.device), shape.size, shape.kv_heads * shape.group
    random = torch.Generator(device).manual_seed(size + capacity)

    def normal(*counts: int) -> Any:
        return torch.randn(counts, device=device, generator=random)

    def uniform(count: int) -> Any:
        return torch.rand((shape.kv_heads, count), device=device, generator=random)

    spread = {"int8": 40.0, "fp8": 100.0}.get(shape.dtype, 1.0)

    def part(centre: float) -> Any:
        stored = (normal(shape.kv_heads, capacity, size) * spread).clamp(-127, 127)
        made = Part(stored.to(STORED[shape.dtype]))  # type: ignore[index]
        if spread > 1:
            made = replace(made, scale=uniform(size) / spread + 1e-3)
        if shape.dtype in ROW_FACTORS:
            made = replace(made, factors=(uniform(capacity) + 0.01).bfloat16())
        return replace(made, centre=centre * normal(shape.kv_heads, size)) if shape.centred else made

    rows = LayerRows(part(10), part(1), Turns.of(RopeSpec(), size, capacity, device) if shape.centred else None)
    place = Place(capacity, torch.zeros(4, dtype=torch.int32, device=device), evicted=evicted, pinned=pinned)
    place.set(capacity - shape.count)
    queries = [normal(heads, shape.count, size) for _ in range(2)]
    new = [normal(shape.kv_heads, shape.count, size) for _ in "kv"]
    return {"rows": rows, "place": place, "queries": queries, "new": new}


def kernel_shapes(tokens: int) -> list[Shape]:
    """What the kernels are checked with."""
    sizes = ((64, 7), (96, 3), (128, 4), (256, 4))
    kinds = [Shape("int8", size, group) for size, group in ((64, 1), (128, 8), *sizes)]
    kinds += [Shape(dtype, size, group, centred=True) for dtype in ("int8", "fp8") for size, group in sizes]
    kinds += [Shape(dtype, size, group) for dtype in ("fp16", "float") for size, group in ((64, 7), (128, 4))]
    kinds += [Shape("int8", 256, 4, window=50), Shape("int8", 128, 4, window=50, centred=True)]
    return [replace(kind, count=count) for kind in kinds for count in (1, tokens)]


def check_kernels(torch: Any, sizes: Sizes, geometry: Geometry) -> Iterator[Row]:
    """Triton's kernels against their plain twins on the same device, in a ring that has wrapped round."""
    from edgekv.engines.torch.kernels import twin
    from edgekv.engines.torch.kernels.fused import TritonKernels

    capacity = 4096 if sizes.device == "cuda" else 128
    for shape in kernel_shapes(sizes.tokens):
        fused = TritonKernels(2 * shape.group, 2, shape.size, capacity, torch.device(sizes.device))
        outputs, stored = [], []
        for kernels in (fused, twin):
            case = layer_case(torch, sizes, shape, capacity, 1000, min(100, capacity // 4))
            options = {"scaling": shape.size**-0.5, "window": shape.window, "softcap": 20.0 if shape.window else None}
            kernels.store(*case["new"], case["rows"], case["place"])
            outputs.append(kernels.attend(*case["queries"], case["rows"], case["place"], **options).double())
            stored.append([held.float() for part in (case["rows"].keys, case["rows"].values)
                           for held in (part.stored, part.factors) if held is not None])  # fmt: skip
        error = ((outputs[0] - outputs[1]).norm(dim=-1) / outputs[1].norm(dim=-1)).max().item()
        differing = sum(int((found != wanted).sum()) for found, wanted in zip(*stored, strict=True))
        bound = 1e-4 if shape.dtype == "float" else 4e-3
        yield asdict(shape) | {"error": error, "differing": differing, "ok": error < bound and differing == 0}


def check_product(torch: Any, sizes: Sizes, group: int) -> float:
    """How far the product with packed 4-bit weights is from the dense one: its scales are bfloat16."""
    import numpy as np

    from edgekv.engines.torch.linear import dense, linear
    from edgekv.weights import BlockWeight

    random, device = np.random.default_rng(group), torch.device(sizes.device)
    codes, zeros = random.integers(0, 16, (256, 512), np.uint8), random.integers(0, 16, (256, 512 // group), np.uint8)
    held = BlockWeight(codes, random.random((256, 512 // group), np.float32) + np.float32(0.5), zeros, 4, group)
    x = torch.from_numpy(random.standard_normal((33, 512), np.float32)).to(device, torch.bfloat16)
    found = linear(held, None, torch.bfloat16, device)(x).double()
    wanted = x.double() @ dense(held, torch.float32).to(device).double().T
    return float((found - wanted).norm() / wanted.norm())


def check_engine(torch: Any, sizes: Sizes, geometry: Geometry) -> Iterator[Row]:
    """The product with packed weights; then logits with Triton's kernels and captured steps against those with plain
    ones, which nothing captures."""
    for group in (32, 128):
        error = check_product(torch, sizes, group)
        yield {"dtype": f"int4/{group} weights", "error": error, "ok": error < 0.01}
    geometry = replace(geometry, num_hidden_layers=min(4, geometry.num_hidden_layers))
    with random_model(geometry) as published:
        for dtype in ("int8", "fp16"):
            logits = []
            for kernels in ("triton", "plain"):
                engine = open_engine(torch, sizes, published, 1024, dtype, kernels=kernels)
                ids = random_ids(geometry, 40)
                logits.append([engine.forward(ids), *(engine.forward([token]) for token in ids[:4])])
                engine.close()
            errors = [
                float(((found - wanted) ** 2).sum() ** 0.5 / (wanted**2).sum() ** 0.5)
                for found, wanted in zip(*logits, strict=True)
            ]
            yield {"dtype": dtype, "prefill_error": errors[0], "step_error": max(errors[1:]), "ok": max(errors) < 0.05}


def copy_bandwidth(torch: Any, sizes: Sizes) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / Clock(torch, sizes)(lambda: target.copy_(source))


def measure_attention(torch: Any, sizes: Sizes, geometry: Geometry) -> Iterator[Row]:
    """Decode attention of layers whose caches together exceed the card's own cache, one after another."""
    from edgekv.engines.torch.kernels.fused import TritonKernels
    from edgekv.kv.plan import row_extra_bytes

    clock, bandwidth = Clock(torch, sizes), copy_bandwidth(torch, sizes)
    for model in sizes.models:
        kv_heads, size = model.num_key_value_heads, model.head_dim
        group = model.num_attention_heads // kv_heads
        for length in sizes.lengths:
            for dtype, centred in (("fp16", False), ("int8", False), ("int8", True), ("fp8", True)):
                shape = Shape(dtype, size, group, centred=centred, kv_heads=kv_heads)
                read = 2 * kv_heads * length * (size * (2 if dtype == "fp16" else 1) + row_extra_bytes(dtype, True))
                layers = min(128, max(2, -(-sizes.ring_bytes // read)))
                cases = [layer_case(torch, sizes, shape, length) for _ in range(layers)]
                kernels = TritonKernels(kv_heads * group, kv_heads, size, length, torch.device(sizes.device))

                def step(cases: Any = cases, kernels: Any = kernels, size: int = size) -> None:
                    for case in cases:
                        kernels.attend(*case["queries"], case["rows"], case["place"], scaling=size**-0.5)

                seconds = clock(clock.captured(step)) / layers
                yield {
                    "model": model.name, "dtype": dtype, "centred": centred, "length": length,
                    "us": round(seconds * 1e6, 1), "gb_per_s": round(read / seconds / 1e9, 1),
                    "of_copy": round(read / seconds / bandwidth, 3),
                }  # fmt: skip


class RandomSource:
    """A WeightSource of random 4-bit weights: one layer's, which all layers share, so that it is made at once."""

    quantised = True
    scheme = "random int4/128"
    files: tuple[str, ...] = ()

    def __init__(self, geometry: Geometry) -> None:
        from edgekv.model.families import spec_from_config

        self.spec = spec_from_config(geometry.config())
        self._made: dict[str, Any] = {}

    def matrix(self, name: str) -> Any:
        """A matrix whose products keep their input's size."""
        import numpy as np

        from edgekv.weights import BlockWeight
        from edgekv.weights.names import shape

        part = name.rpartition(".")[2]
        if part in self._made:
            return self._made[part]
        rows, columns = shape(self.spec, name)
        random = np.random.default_rng(rows + columns)
        if part in ("embed", "head"):
            few = random.standard_normal((min(rows, 4096), columns), np.float32) * np.float32(0.05)
            made: Any = np.tile(few, (-(-rows // len(few)), 1))[:rows]
        else:
            codes = random.integers(0, 16, (rows, columns), np.uint8)
            group = min(GROUP, columns)
            scales = np.full((rows, columns // group), 0.2 * columns**-0.5, np.float32)
            made = BlockWeight(codes, scales, None, 4, group)
        self._made[part] = made
        return made

    def vector(self, name: str) -> Any:
        """Norms of one, biases of zero."""
        import numpy as np

        from edgekv.weights.names import shape

        make = np.zeros if name.endswith(".bias") else np.ones
        return make(shape(self.spec, name), np.float32)


@contextmanager
def random_model(geometry: Geometry) -> Iterator[Any]:
    """A checkpoint of random weights. All layers have the same, which are packed once and copied on the device."""
    from edgekv.engines.torch import loader

    real, packed = loader.linear, {}

    def copied(held: Any, bias: Any, dtype: Any, device: Any) -> Any:
        if id(held) not in packed:
            packed[id(held)] = held, real(held, bias, dtype, device)  # with what is held, whose id stays its own
        return deepcopy(packed[id(held)][1])

    with TemporaryDirectory() as folder, patch.object(loader, "linear", copied):
        Path(folder, "config.json").write_text(json.dumps(geometry.config()))
        source = RandomSource(geometry)
        yield loader.Published(Path(folder), source, source.matrix)  # type: ignore[arg-type]


def random_ids(geometry: Geometry, count: int) -> list[int]:
    """Ids of a prompt."""
    return [(index * 7919) % (geometry.vocab_size - 5) + 3 for index in range(count)]


def open_engine(torch: Any, sizes: Sizes, published: Any, capacity: int, dtype: Any, **options: Any) -> Any:
    """An engine with scales that fit random activations."""
    import numpy as np

    from edgekv.engines.torch.engine import TorchEngine, TorchOptions
    from edgekv.kv.scales import KVScales, Provenance
    from edgekv.kv.spec import KVSpec

    spec = published.source.spec
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    scales = KVScales(*[np.full(shape, 0.03, np.float32)] * 2, dtype, "channel", "", Provenance("", 1, 0, ""))
    given = scales if dtype == "int8" else None
    return TorchEngine(published, KVSpec(capacity, dtype), given, TorchOptions(device=sizes.device, **options))


def measure_model(torch: Any, sizes: Sizes, geometry: Geometry) -> Iterator[Row]:
    """Whole decode and prefill, edgekv's beside transformers', on the same packed weights."""
    with random_model(geometry) as published:
        load(torch, sizes, published)  # packs the weights, which then count as no engine's own
        for dtype in ("int8", "fp16"):
            yield measure_edgekv(torch, sizes, geometry, published, dtype)
        yield from measure_transformers(torch, sizes, geometry, published)


def measure_edgekv(torch: Any, sizes: Sizes, geometry: Geometry, published: Any, dtype: Any) -> Row:
    """Decode at each length and prefill, tokens a second, and the device's memory beside the plan."""
    from edgekv.kv.spec import KVSpec

    spec, capacity, clock = published.source.spec, max(sizes.lengths) + sizes.steps, Clock(torch, sizes)
    before = reserved_bytes(torch, sizes, afresh=True)
    engine = open_engine(torch, sizes, published, capacity, dtype)
    row: Row = {"model": geometry.name, "runs": f"edgekv {dtype}"}
    ids = random_ids(geometry, max(sizes.lengths))

    def prefill() -> None:
        engine.reset()
        engine.forward(ids[: sizes.prompt])

    row["prefill"] = round(sizes.prompt / clock(prefill))
    row["decode"] = {}
    for length in sizes.lengths:

        def decode(length: int = length) -> None:
            engine._tokens[:] = ids[:length]  # what rows hold does not change how fast they are read
            engine.decode(5, sizes.steps)

        row["decode"][length] = round(sizes.steps / clock(decode), 1)
    row["memory_bytes"] = reserved_bytes(torch, sizes) - before
    row["planned_bytes"] = planned_bytes(spec, KVSpec(capacity, dtype), sizes)
    engine.close()
    return row


def planned_bytes(spec: Any, kv: Any, sizes: Sizes) -> int:
    """The lines of the plan that lie on the device: everything but the process."""
    from edgekv.kv.plan import Footprint, PlanRequest, make_plan

    weights = Footprint.estimate(spec, group=GROUP).weight_bytes
    footprint = Footprint.in_torch(spec, weights, sizes.device)
    request = PlanRequest(kv.dtype, context=kv.capacity, torch=True, runtime_bytes=0)
    return make_plan(spec, footprint, request, None).total_bytes


def reserved_bytes(torch: Any, sizes: Sizes, *, afresh: bool = False) -> int:
    """The most that the allocator has reserved, `afresh` from now on; 0 on a CPU, where there is none to ask."""
    if sizes.device != "cuda":
        return 0
    if afresh:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.max_memory_reserved())


def measure_transformers(torch: Any, sizes: Sizes, geometry: Geometry, published: Any) -> Iterator[Row]:
    """transformers' own model, static cache and SDPA, with edgekv's packed linear layers in the place of its own: as it
    comes, then with decoding captured in a graph."""
    run, fill = transformers_model(torch, sizes, published)
    clock, name = Clock(torch, sizes), {"model": geometry.name, "runs": "transformers static"}
    prefill = round(sizes.prompt / clock(lambda: fill(sizes.prompt)))
    for how, one in (("", lambda function: function), (", captured", clock.captured)):
        decode = {}
        for length in sizes.lengths:
            fill(length)
            ids, positions = (torch.full((1, 1), value, device=sizes.device) for value in (7, length))
            decode[length] = round(1 / clock(one(lambda ids=ids, positions=positions: run(ids, positions))), 1)
        yield name | {"runs": name["runs"] + how, "prefill": prefill, "decode": decode}


def load(torch: Any, sizes: Sizes, published: Any) -> Any:
    """transformers' model with edgekv's linear layers, in the type that the engine would choose."""
    from edgekv.engines.torch.engine import TorchOptions
    from edgekv.engines.torch.loader import load_model

    return load_model(published, TorchOptions(device=sizes.device).dtype, torch.device(sizes.device))


def transformers_model(torch: Any, sizes: Sizes, published: Any) -> tuple[Callable[..., Any], Callable[[int], None]]:
    """Functions that run tokens (ids and positions [1, T]), and that fill the cache afresh with so many."""
    from transformers import AutoConfig, StaticCache

    device, model = torch.device(sizes.device), load(torch, sizes, published)
    model.set_attn_implementation("sdpa")
    config = AutoConfig.from_pretrained(published.path)
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config).to(device)  # its tables were on meta
    cache = StaticCache(config=config, max_cache_len=max(sizes.lengths) + sizes.steps)
    names = inspect.signature(model.forward).parameters
    options = {"use_cache": True, "logits_to_keep": 1, "cache" if "cache" in names else "past_key_values": cache}

    @torch.inference_mode()
    def run(ids: Any, positions: Any) -> None:
        model(input_ids=ids, position_ids=positions, **options)

    @torch.inference_mode()
    def fill(length: int) -> None:
        cache.reset()
        for start in range(0, length, sizes.prompt):
            positions = torch.arange(start, min(start + sizes.prompt, length), device=device)[None]
            run(positions % 256, positions)
        if int(cache.get_seq_length()) != length:
            raise RuntimeError(f"transformers' cache holds {cache.get_seq_length()} tokens after {length}.")

    run(*[torch.zeros((1, 1), dtype=torch.int64, device=device)] * 2)  # makes the cache's tensors
    return run, fill


MEASURES = {
    "machine": describe_machine,
    "kernels": check_kernels,
    "engine": check_engine,
    "attention": measure_attention,
    "model": measure_model,
}


def print_tables(report: Report) -> None:
    """The report for people."""
    for name, value in report.machine[0].items():
        print(f"{name}: {value}")
    for section in ("kernels", "engine"):
        rows: Sequence[Row] = getattr(report, section)
        wrong = [row for row in rows if not row["ok"]]
        print(f"\n{section}: {len(rows)} cases, {len(wrong)} wrong {wrong or ''}")
    for rows in (report.attention, report.model):
        if rows:
            print("\n" + "  ".join(f"{name:>14}" for name in rows[0]))
        for row in rows:
            print("  ".join(f"{value!s:>14}" for value in row.values()))
    print(f"\n{report.seconds} s {'; '.join(f'{name} failed' for name in report.failed)}")


if __name__ == "__main__":
    sys.exit(main())
