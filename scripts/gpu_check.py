"""Everything that only a GPU can show, in one command: `python3 scripts/gpu_check.py [--out FILE] [--tiny]`.

Needs the extra `torch` and no network; takes at most six minutes on a GPU. Random weights of real geometry stand for
models, since nothing that is measured here depends on what they say:

    kernels    Triton's against their twins in float64, over head sizes, group ratios, wrapped rings, scales, dtypes
    attention  one decode step's attention at several lengths: bytes of rows read a second, as a share of the card's
               own copy bandwidth measured in the same run, for INT8, FP8 and 16 bits
    model      decode and prefill of 4-bit models, beside transformers with its static cache, SDPA and the same
               packed weights
    memory     what the plan says of the device's memory against what torch's allocator saw

The last line is JSON. `--tiny` runs the same program on a CPU with small shapes (Triton interpreted): its figures mean
nothing, but a test runs it, so that the program works when a GPU is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 360


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
    max_position_embeddings: int = 32768
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
    copy_bytes: int


QWEN = Geometry("Qwen2.5-1.5B", "qwen2", 28, 1536, 8960, 12, 2, 151936)
LLAMA = Geometry("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128256, rope_theta=5e5)
TINY = Geometry("tiny", "qwen2", 2, 64, 128, 4, 2, 320, 1024)
FULL_SIZES = Sizes("cuda", (QWEN, LLAMA), (2048, 8192, 32768), 2048, 32, 5, 1 << 30)
TINY_SIZES = Sizes("cpu", (TINY,), (64, 128), 48, 2, 1, 1 << 20)
GROUP = 128


@dataclass
class Report:
    """What was found, section by section."""

    provenance: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    model: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)


class Clock:
    """Seconds of a function on the device: the median of some runs after one for warming up."""

    def __init__(self, torch: Any, sizes: Sizes) -> None:
        self._torch, self._sizes = torch, sizes

    def __call__(self, function: Callable[[], Any]) -> float:
        function()
        return statistics.median(self._once(function) for _ in range(self._sizes.repeats))

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
    """Run everything that the time allows; returns 1 if a kernel was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Write the JSON here, too.")
    parser.add_argument("--tiny", action="store_true", help="Small shapes on a CPU, to see that the program works.")
    arguments = parser.parse_args()
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    sys.path.insert(0, str(ROOT))
    report = check(TINY_SIZES if arguments.tiny else FULL_SIZES)
    text = json.dumps(asdict(report))
    if arguments.out:
        arguments.out.write_text(text + "\n", "utf-8")
    print_tables(report)
    print(text)
    return 0 if all(row["ok"] for row in report.kernels) else 1


def check(sizes: Sizes) -> Report:
    """All sections, in order of what they tell."""
    import torch

    started = time.perf_counter()
    if sizes.device == "cuda" and not torch.cuda.is_available():
        sys.exit("No CUDA device was found by torch: run this on a GPU machine, or with --tiny to try the program.")
    report = Report(provenance=provenance(torch, sizes))
    report.kernels = check_kernels(torch, sizes)
    bandwidth = copy_bandwidth(torch, sizes)
    report.provenance["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
    for geometry in sizes.models:
        report.attention += measure_attention(torch, sizes, geometry, bandwidth)
    for geometry in sizes.models:
        if time.perf_counter() - started > LIMIT_S * 0.6:
            report.skipped.append(f"{geometry.name}: no time left")
            continue
        report.model += measure_model(torch, sizes, geometry)
    report.seconds = round(time.perf_counter() - started, 1)
    return report


def provenance(torch: Any, sizes: Sizes) -> dict[str, Any]:
    """What ran where."""
    import transformers
    import triton

    on_gpu = sizes.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, Triton interpreted: no figure counts",
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
        "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def layer_case(torch: Any, sizes: Sizes, shape: tuple[int, int, int, int], dtype: str, **place: int) -> dict[str, Any]:
    """One layer's random cache and queries. shape: heads, KV heads, head size, capacity."""
    from edgekv.engines.torch.cache import STORED, LayerRows, Place

    heads, kv_heads, size, capacity = shape
    random = torch.Generator(sizes.device).manual_seed(size + capacity)
    options = {"device": sizes.device, "generator": random}
    stored = STORED[dtype]  # type: ignore[index]
    spread = {"int8": 40.0, "fp8": 100.0}.get(dtype, 1.0)
    parts = [(torch.randn((kv_heads, capacity, size), **options) * spread).clamp(-127, 127).to(stored) for _ in "kv"]
    scaled = dtype in ("int8", "fp8")
    scales = [torch.rand((kv_heads, size), **options) / spread + 1e-3 if scaled else None for _ in "kv"]
    state = torch.zeros(4, dtype=torch.int32, device=sizes.device)
    where = Place(capacity, state, evicted=place.get("evicted", 0), pinned=place.get("pinned", 0))
    where.set(place.get("length", capacity) - 1)
    queries = [torch.randn((heads, 1, size), **options) for _ in range(2)]
    return {"rows": LayerRows(*parts, *scales), "place": where, "queries": queries, "shape": shape}


def check_kernels(torch: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Triton's attention against float64, each (head size, group ratio, ring, dtype)."""
    from edgekv.engines.torch.kernels.fused import TritonKernels

    capacity = 4096 if sizes.device == "cuda" else 128
    rows = []
    for dtype in ("int8", "fp8", "fp16", "float"):
        for size, group in ((64, 1), (64, 7), (96, 3), (128, 4), (128, 8), (256, 4)):
            shape = (2 * group, 2, size, capacity)
            case = layer_case(torch, sizes, shape, dtype, evicted=1000, pinned=min(100, capacity // 4))
            kernels = TritonKernels(2 * group, 2, size, capacity, torch.device(sizes.device))
            found = kernels.attend(*case["queries"], case["rows"], case["place"], scaling=size**-0.5)
            wanted = exact_attention(torch, case)
            error = ((found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
            bound = 1e-4 if dtype == "float" else 4e-3
            rows.append({"dtype": dtype, "size": size, "group": group, "error": error, "ok": bool(error < bound)})
    return rows


def exact_attention(torch: Any, case: dict[str, Any]) -> Any:
    """The same in float64, row by row in the order of places."""
    rows, place, (heads, kv_heads, size, _) = case["rows"], case["place"], case["shape"]
    slots = place.slots(0, place.past + 1)
    parts = []
    for stored, scale in ((rows.keys, rows.k_scale), (rows.values, rows.v_scale)):
        values = stored.float()[:, slots].double()
        values = values if scale is None else values * scale[:, None].double()
        parts.append(values.repeat_interleave(heads // kv_heads, 0))
    own, pinned = ((queries.double() @ parts[0].transpose(1, 2)) for queries in case["queries"])
    first = torch.arange(len(slots), device=own.device) < place.pinned
    scores = torch.where(first & (place.evicted > 0), pinned, own) * size**-0.5
    return scores.softmax(-1) @ parts[1]


def copy_bandwidth(torch: Any, sizes: Sizes) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / Clock(torch, sizes)(lambda: target.copy_(source))


def measure_attention(torch: Any, sizes: Sizes, geometry: Geometry, bandwidth: float) -> list[dict[str, Any]]:
    """One layer's decode attention, over caches that together exceed the card's own cache."""
    from edgekv.engines.torch.kernels.fused import TritonKernels

    heads, kv_heads, size = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim
    found = []
    for length in sizes.lengths:
        for dtype in ("fp16", "int8", "fp8"):
            layers = range(min(geometry.num_hidden_layers, 8))
            cases = [layer_case(torch, sizes, (heads, kv_heads, size, length), dtype) for _ in layers]
            kernels = TritonKernels(heads, kv_heads, size, length, torch.device(sizes.device))

            def step(cases: Any = cases, kernels: Any = kernels) -> None:
                for case in cases:
                    kernels.attend(*case["queries"], case["rows"], case["place"], scaling=size**-0.5)

            seconds = Clock(torch, sizes)(step) / len(cases)
            read = 2 * kv_heads * length * size * (2 if dtype == "fp16" else 1)
            found.append({
                "model": geometry.name, "dtype": dtype, "length": length, "us": round(seconds * 1e6, 1),
                "gb_per_s": round(read / seconds / 1e9, 1), "of_copy": round(read / seconds / bandwidth, 3),
            })  # fmt: skip
    return found


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
            made: Any = random.standard_normal((rows, columns), np.float32) * np.float32(0.05)
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


def measure_model(torch: Any, sizes: Sizes, geometry: Geometry) -> list[dict[str, Any]]:
    """Whole decode and prefill, edgekv's beside transformers', on the same packed weights."""
    from tempfile import TemporaryDirectory

    from edgekv.engines.torch.loader import Published

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(geometry.config()))
        source = RandomSource(geometry)
        published = Published(Path(folder), source, source.matrix)  # type: ignore[arg-type]
        rows = [measure_edgekv(torch, sizes, geometry, published, dtype) for dtype in ("int8", "fp16")]
        rows.append(measure_transformers(torch, sizes, geometry, published))
    return rows


def measure_edgekv(torch: Any, sizes: Sizes, geometry: Geometry, published: Any, dtype: Any) -> dict[str, Any]:
    """Decode at each length and prefill, and the device's memory beside the plan."""
    import numpy as np

    from edgekv.engines.torch.engine import TorchEngine, TorchOptions
    from edgekv.kv.scales import KVScales, Provenance
    from edgekv.kv.spec import KVSpec

    spec, capacity = published.source.spec, max(sizes.lengths) + sizes.steps
    kv = KVSpec(capacity, dtype)
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    scales = KVScales(*[np.full(shape, 0.03, np.float32)] * 2, dtype, "channel", "", Provenance("", 1, 0, ""))
    before = device_memory(torch, sizes)
    engine = TorchEngine(published, kv, scales if dtype == "int8" else None, TorchOptions(device=sizes.device))
    row: dict[str, Any] = {"model": geometry.name, "runs": f"edgekv {dtype}"}
    ids = (np.arange(max(sizes.lengths)) % (spec.vocab_size - 5) + 3).tolist()

    def prefill() -> None:
        engine.reset()
        engine.forward(ids[: sizes.prompt])

    row["prefill"] = round(sizes.prompt / Clock(torch, sizes)(prefill))
    row["decode"] = {}
    for length in sizes.lengths:
        fill(engine, ids, length)

        def decode(length: int = length) -> None:
            engine.truncate(length)
            engine.decode(5, sizes.steps)

        row["decode"][length] = round(sizes.steps / Clock(torch, sizes)(decode), 1)
    row["memory_bytes"] = device_memory(torch, sizes) - before
    row["planned_bytes"] = planned_bytes(spec, kv, sizes)
    engine.close()
    return row


def fill(engine: Any, ids: list[int], length: int) -> None:
    """Bring the cache to a length."""
    if engine.length > length:
        engine.truncate(length)
    if engine.length < length:
        engine.forward(ids[engine.length : length])


def planned_bytes(spec: Any, kv: Any, sizes: Sizes) -> int:
    """The lines of the plan that lie on the device: everything but the process."""
    from edgekv.kv.plan import Footprint, PlanRequest, make_plan

    weights = Footprint.estimate(spec, group=GROUP).weight_bytes
    footprint = Footprint.in_torch(spec, weights, sizes.device)
    request = PlanRequest(kv.dtype, context=kv.capacity, torch=True, runtime_bytes=0)
    return make_plan(spec, footprint, request, None).total_bytes


def device_memory(torch: Any, sizes: Sizes) -> int:
    """The most that the allocator has reserved; 0 on a CPU, where there is none to ask."""
    return int(torch.cuda.max_memory_reserved()) if sizes.device == "cuda" else 0


def measure_transformers(torch: Any, sizes: Sizes, geometry: Geometry, published: Any) -> dict[str, Any]:
    """transformers' own model, static cache and SDPA, with edgekv's packed linear layers in the place of its own."""
    from transformers import AutoConfig, StaticCache

    from edgekv.engines.torch.loader import load_model

    dtype = torch.bfloat16 if sizes.device == "cuda" else torch.float32
    device = torch.device(sizes.device)
    model = load_model(published, dtype, device)
    model.set_attn_implementation("sdpa")
    config = AutoConfig.from_pretrained(published.path)
    rotary = type(model.base_model.rotary_emb)(config)  # its tables were made on the meta device
    model.base_model.rotary_emb = rotary.to(device)
    cache = StaticCache(config=config, max_cache_len=max(sizes.lengths) + sizes.steps)
    row: dict[str, Any] = {"model": geometry.name, "runs": f"transformers static {str(dtype).removeprefix('torch.')}"}

    @torch.inference_mode()
    def run(start: int, count: int) -> None:
        ids = torch.arange(count, device=device)[None] % geometry.vocab_size
        positions = torch.arange(start, start + count, device=device)[None]
        options = {"use_cache": True, "cache": cache, "logits_to_keep": 1}
        model(input_ids=ids, position_ids=positions, **options)

    @torch.inference_mode()
    def fill_afresh(length: int) -> None:
        cache.reset()
        for start in range(0, length, sizes.prompt):
            run(start, min(sizes.prompt, length - start))

    run(0, 1)  # makes the cache's tensors
    row["prefill"] = round(sizes.prompt / Clock(torch, sizes)(lambda: fill_afresh(sizes.prompt)))
    row["decode"] = {}
    for length in sizes.lengths:
        fill_afresh(length)
        row["decode"][length] = round(1 / Clock(torch, sizes)(lambda length=length: run(length, 1)), 1)
    return row


def print_tables(report: Report) -> None:
    """The report for people."""
    for name, value in report.provenance.items():
        print(f"{name}: {value}")
    wrong = [row for row in report.kernels if not row["ok"]]
    print(f"\nkernels: {len(report.kernels)} cases, {len(wrong)} wrong {wrong or ''}")
    for rows in (report.attention, report.model):
        if rows:
            print("\n" + "  ".join(f"{name:>14}" for name in rows[0]))
        for row in rows:
            print("  ".join(f"{value!s:>14}" for value in row.values()))
    print(f"\n{report.seconds} s {'; '.join(report.skipped)}")


if __name__ == "__main__":
    sys.exit(main())
