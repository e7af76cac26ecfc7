"""The fidelity report: `python3 scripts/fidelity.py WORK MODEL.gguf TEXT`, in an environment with '.[dev,peers]'.

    edgekv       `edgekv eval` on the real engine: several caches in step beside a float one
    llama.cpp    its f16, q8_0 and q4_0 caches (flash attention) on the same tokens, the latter two against the first
    simulated    what no engine stores yet: transformers in float32 whose attention sees keys and values quantised and
                 dequantised by `edgekv.kv.quant`, with the thresholds that `edgekv calibrate` measured

All of them empty their caches after every SEGMENT tokens, because llama.cpp has no sinks; `stream` runs evict instead.
Each run leaves a JSON file in WORK and is not repeated while that file is there; a run that is stopped goes on where it
was. `--only NAME` does one of them, `--report` prints the page that is committed as models/FIDELITY.md. TEXT is a text
file, or a folder of HTML whose text is taken (Debian's package `anarchism`, say). Neither texts nor weights are ours to
commit.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SEGMENT = 1024
SKIP_CHARS = 200_000
"""Tables of contents and front matter."""


@dataclass(frozen=True)
class Run:
    """One row of measurements."""

    name: str
    tokens: int
    settings: tuple[str, ...]
    stream: int = 0  # capacity of an evicting cache; 0: segments
    options: tuple[str, ...] = ()


FLOAT = ("--activations", "float")
"""Matrices multiply in float32, so that nothing but the cache is rounded."""

RUNS = (
    Run("granularity", 8192, ("int8", "int8,granularity=head", "int8,granularity=tensor", "int4"), options=FLOAT),
    Run("methods", 8192, ("int8,method=envelope,headroom=1.0", "int8,method=mse,headroom=1.0"), options=FLOAT),
    Run("cache", 8192, ("int8", "int8,attention=gqa"), options=FLOAT),
    Run("mixed", 12_288, ("int8", "k8v4", "int4", "fp8"), options=FLOAT),
    Run("long", 50_000, ("int8",), options=FLOAT),
    Run("stream512", 8192, ("int8", "int8,sinks=0"), stream=512),
    Run("stream1024", 8192, ("int8", "int8,sinks=0"), stream=1024),
    Run("stream4096", 8192, ("int8", "int8,sinks=0"), stream=4096),
)
LLAMA_TOKENS = 8192
SIMULATED_TOKENS = 4096


def edgekv_run(job: Run, gguf: Path, text: Path, out: Path, threads: int) -> None:
    """`edgekv eval` in a process of its own."""
    size = job.stream or SEGMENT
    segment = () if job.stream else ("--segment", SEGMENT)
    settings = [part for setting in job.settings for part in ("--setting", setting)]
    command = ["eval", gguf, "--data", text, "--tokens", job.tokens, "--context", size, *segment, *settings]
    command += ["--json", out, "--checkpoint", out.with_suffix(".npz"), "--threads", threads, *job.options]
    subprocess.run([sys.executable, "-m", "edgekv", *map(str, command)], check=True)


def token_ids(gguf: Path, text: Path, count: int) -> tuple[Any, list[int], tuple[int, ...]]:
    """(converted model, ids, what begins a segment) exactly as `edgekv eval` takes them."""
    from edgekv.api import open_text
    from edgekv.model import catalog
    from edgekv.prepare import prepare

    model = prepare(str(gguf), home=catalog.home())
    ids = open_text(model)[0].encode(text.read_text("utf-8")[: 16 * count])[: count + 1]
    bos = model.spec.bos_id if model.description.add_bos else None
    return model, ids, () if bos is None else (bos,)


class Stepper:
    """What `edgekv.evaluate.compare.Lane` needs of an engine, over a function that runs tokens after `past` others."""

    def __init__(self, spec: Any, run: Callable[[Sequence[int], int], Any]) -> None:
        from edgekv.kv.spec import KVSpec

        self.spec, self.kv, self._run = spec, KVSpec(SEGMENT + 64, "float"), run
        self.length = self.evicted = 0

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Any:
        """Logits of each token, [T, V]."""
        logits = self._run(tokens, self.length)
        self.length += len(tokens)
        return logits

    def reset(self) -> None:
        """Begin anew; the next run is told that nothing came before."""
        self.length = 0


def compare(names: Sequence[str], engines: Sequence[Stepper], ids: list[int], first: tuple[int, ...]) -> list[Any]:
    """Score all against the first, in step."""
    from edgekv.evaluate.compare import Comparison, Lane, Text, score

    lanes = [Lane(name, engine) for name, engine in zip(names, engines, strict=True)]  # type: ignore[arg-type]
    comparison = Comparison(Text(ids, SEGMENT, first), lanes[1:], lanes[0])
    comparison.run(lambda done: print(f"{done} of {len(ids)}", file=sys.stderr, end="\r") is not None)
    return [asdict(score(lane, lanes[0])) for lane in lanes]


def llama_run(gguf: Path, text: Path, out: Path, threads: int, tokens: int) -> None:
    """llama.cpp's caches on the same tokens."""
    import llama_cpp

    kinds = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}
    model, ids, first = token_ids(gguf, text, tokens)

    def stepper(kind: int) -> Stepper:
        llama = llama_cpp.Llama(
            str(gguf), n_ctx=SEGMENT + 64, n_batch=64, n_threads=threads, n_threads_batch=threads, logits_all=True,
            type_k=kind, type_v=kind, flash_attn=True, verbose=False,
        )  # fmt: skip

        def run(tokens: Sequence[int], past: int) -> Any:
            if past == 0:
                llama.reset()
            llama.eval(tokens)
            return llama.scores[past : past + len(tokens)].copy()

        return Stepper(model.spec, run)

    scores = compare(list(kinds), [stepper(kind) for kind in kinds.values()], ids, first)
    out.write_text(json.dumps({"lanes": scores}, indent=1))


def simulated_run(gguf: Path, text: Path, out: Path, threads: int, tokens: int) -> None:
    """Caches that transformers only pretends to have."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, ids, first = token_ids(gguf, text, tokens)
    hf = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    caches = {"float": None} | simulated_caches(model)
    scores = compare(list(caches), [simulated_stepper(hf, model.spec, cache) for cache in caches.values()], ids, first)
    out.write_text(json.dumps({"lanes": scores}, indent=1))


def simulated_caches(model: Any) -> dict[str, Any]:
    """Functions of (0 for keys or 1 for values, layer, rows [K, T, D]), with the model's own INT8 thresholds."""
    from edgekv.cli.ready import ready_scales
    from edgekv.kv import rows as native
    from edgekv.kv.interchange import retarget
    from edgekv.kv.quant import LIMIT, fake_quantize
    from edgekv.kv.spec import KVSpec
    from edgekv.options import LoadOptions

    own = ready_scales(model, KVSpec(SEGMENT), LoadOptions()).without_centre()  # calibrated if there are none yet

    def static(k: Any, v: Any, granularity: Any = "channel") -> Any:
        scales = (retarget(own, k, granularity).k, retarget(own, v, granularity).v)
        return lambda part, layer, rows: fake_quantize(rows, scales[part][layer][:, None], (k, v)[part])

    def by_row(dtype: Any) -> Any:
        scales = (retarget(own, dtype, "channel").k, retarget(own, dtype, "channel").v)

        def quantise(part: int, layer: int, rows: Any) -> Any:
            scale = scales[part][layer][:, None]
            reach = np.abs(rows / scale).max(-1, keepdims=True) / LIMIT[dtype]
            return fake_quantize(rows, scale * np.clip(reach, 1e-3, 1), dtype)

        return quantise

    def own_operator(part: int, layer: int, rows: Any) -> Any:
        """As edgekv's own operator holds INT8, but with keys whole."""
        scale = (own.k, own.v)[part][layer][:, None]
        if part == 0:
            return native.dequantize_keys(native.quantize_keys(rows, scale), scale)
        return native.dequantize_values(native.quantize_values(rows, scale), scale)

    return {
        "int8 as edgekv's own operator": own_operator,
        "int8 per channel": static("int8", "int8"),
        "int8, first 4 rows exact": exact_first(static("int8", "int8")),
        "int8 per channel and row": by_row("int8"),
        "blocks of 32 in 8 bits": lambda part, layer, rows: in_blocks(rows, 127),
        "fp8 per channel": static("fp8", "fp8"),
        "fp8 per head": static("fp8", "fp8", "head"),
        "fp8 per tensor": static("fp8", "fp8", "tensor"),
        "fp8, first 4 rows exact": exact_first(static("fp8", "fp8")),
        "K int8, V int4": static("int8", "int4"),
        "K int8, V int4, first 4 rows exact": exact_first(static("int8", "int4")),
        "int4 per channel": static("int4", "int4"),
        "int4 per channel and row, first 4 rows exact": exact_first(by_row("int4")),
        "blocks of 32 in 4 bits": lambda part, layer, rows: in_blocks(rows, 7),
    }


def exact_first(cache: Any, count: int = 4) -> Any:
    """The same cache, but the rows of the first tokens are floats."""
    return lambda part, layer, rows: np.concatenate([rows[:, :count], cache(part, layer, rows)[:, count:]], axis=1)


def in_blocks(rows: Any, limit: int) -> Any:
    """A scale of its own for each 32 channels of each row: what a dynamic format such as q8_0 does."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True) / limit, 1e-8)
    return (np.rint(blocks / scale) * scale).reshape(rows.shape).astype(np.float32)


def simulated_stepper(hf: Any, spec: Any, cache: Any) -> Stepper:
    """Runs with a cache of its own; the attention of all of them is replaced while this one runs."""
    import torch
    from transformers import DynamicCache

    state: dict[str, Any] = {}

    def run(tokens: Sequence[int], past: int) -> Any:
        if past == 0:
            state["past"] = DynamicCache(config=hf.config)
        with attention_of(hf, cache):
            return hf(torch.tensor([list(tokens)]), cache=state["past"]).logits[0].numpy()

    return Stepper(spec, run)


@contextmanager
def attention_of(hf: Any, cache: Any) -> Iterator[None]:
    """Attention over keys (rotated) and values as `cache` would hold them."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
        if cache is not None:
            key, value = (
                torch.from_numpy(cache(part, module.layer_idx, rows[0].numpy()))[None]
                for part, rows in enumerate((key, value))
            )
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    ALL_ATTENTION_FUNCTIONS.register("edgekv", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("edgekv", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before, hf.config._attn_implementation = hf.config._attn_implementation, "edgekv"
    yield
    hf.config._attn_implementation = before


def plain_text(source: Path, work: Path) -> Path:
    """The text to read, without front matter: a file's, or that of a folder's HTML."""
    target = work / "text.txt"
    if not target.exists():
        files = sorted(source.glob("*.html")) if source.is_dir() else [source]
        text = "\n\n".join(path.read_text("utf-8", "replace") for path in files)
        if source.is_dir():
            text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style|head).*?</\1>", "", text)))
            text = re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text))
        target.write_text(text[SKIP_CHARS if len(text) > 4 * SKIP_CHARS else 0 :], "utf-8")
    return target


def row(lane: dict[str, Any]) -> str:
    """A line of a table."""
    if lane.get("ratio") is None:
        return f"| {lane['name']} | {lane['perplexity']:.3f} | | | |"
    return (
        f"| {lane['name']} | {lane['perplexity']:.3f} | {lane['ratio']:.4f} ± {lane['ratio_error']:.4f} | "
        f"{1000 * lane['kl']:.2f} ± {1000 * lane['kl_error']:.2f} | {lane['top1']:.2%} |"
    )


def report(work: Path) -> str:
    """Tables of everything that WORK holds."""
    parts = []
    for path in sorted(work.glob("*.json")):
        lanes = json.loads(path.read_text())["lanes"]
        head = f"### {path.stem}, {lanes[0]['tokens']:,} tokens\n\n| cache | perplexity | ratio | KL / 1000 | top-1 |"
        parts.append("\n".join([head, "|---|---|---|---|---|", *map(row, lanes)]))
    return "\n\n".join(parts)


def main() -> None:
    """Do what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for results, one a model and text")
    parser.add_argument("gguf", type=Path, nargs="?")
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--only", action="append", help="run names: " + ", ".join([*RUN_NAMES]))
    parser.add_argument("--tokens", type=int, help="of every run, for a trial")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="print the tables of what was measured")
    chosen = parser.parse_args()
    if chosen.report:
        print(report(chosen.work))
        return
    chosen.work.mkdir(parents=True, exist_ok=True)
    text = plain_text(chosen.text, chosen.work)
    for name in chosen.only or RUN_NAMES:
        out = chosen.work / f"{name}.json"
        if not out.exists():
            measure(name, chosen, text, out)


RUN_NAMES = (*(job.name for job in RUNS), "llama", "simulated")


def measure(name: str, chosen: argparse.Namespace, text: Path, out: Path) -> None:
    """One run."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    if name == "llama":
        llama_run(chosen.gguf, text, out, chosen.threads or 2, chosen.tokens or LLAMA_TOKENS)
    elif name == "simulated":
        simulated_run(chosen.gguf, text, out, chosen.threads or 2, chosen.tokens or SIMULATED_TOKENS)
    else:
        job = next(job for job in RUNS if job.name == name)
        edgekv_run(replace(job, tokens=chosen.tokens or job.tokens), chosen.gguf, text, out, chosen.threads)


if __name__ == "__main__":
    main()
