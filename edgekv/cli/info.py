"""`edgekv info`: what is known of a model, from metadata alone. A checkpoint is told about before it is converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from edgekv.cli import render
from edgekv.engines import choose
from edgekv.errors import ModelNotFound, ScalesError
from edgekv.files import called, expanded
from edgekv.identity import already_made, is_pulled, pulled_folder
from edgekv.kv.scales import KVScales, read_scales
from edgekv.kv.spec import MIN_CAPACITY, KVSpec
from edgekv.model import catalog
from edgekv.model.converted import TEMPLATE, ConvertedModel, is_converted, open_converted
from edgekv.model.foreign import ForeignFolder, find_foreign
from edgekv.model.spec import ModelSpec
from edgekv.units import format_bytes
from edgekv.weights.base import Form, Stored, WeightSource

Rows = list[list[str]]


@click.command
@click.argument("model", required=False)
@click.option("--home", type=click.Path(path_type=Path), help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def command(model: str | None, home: Path | None) -> None:
    """Show what MODEL is and how it runs; without MODEL, list what is known and what is ready.

    MODEL is a catalog name, a model directory, a GGUF file, or a folder with safetensors or an ONNX graph; nothing is
    converted.
    """
    folder = catalog.home(home)
    if model is None:
        _list_models(folder)
        return
    pulled = is_pulled(model)
    path = pulled_folder(model, folder) if pulled else expanded(model)
    if pulled and not is_converted(path):
        raise ModelNotFound(f"{model} is not here yet: run `edgekv chat {model}` once.")
    render.table("", ["", ""], _rows(path, folder))


def _rows(path: Path, home: Path) -> Rows:
    if is_converted(path):
        return _converted_rows(open_converted(path))
    foreign, made = find_foreign(path), already_made(path, home)
    return _source_rows(path, made) if foreign is None else _foreign_rows(foreign, made)


def _list_models(home: Path) -> None:
    from edgekv.identity import records

    models = home / "models"
    ready = {path.name for path in models.iterdir() if is_converted(path)} if models.is_dir() else set()
    rows = [
        [name, "ready" if name in ready else "run `edgekv chat` or `edgekv pull`", catalog.entry(name).title]
        for name in catalog.names()
    ]
    sources = {record.conversion: record for record in records(home)}
    for name in sorted(ready - set(catalog.names())):
        record = sources.get(name)
        rows.append([name, "ready", f"made of {record.path} ({record.state()})" if record else ""])
    render.table("", ["model", "state", "what"], rows)


def _spec_rows(spec: ModelSpec) -> Rows:
    return [
        ["family", f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}"],
        ["heads", f"{spec.num_heads} query / {spec.num_kv_heads} key-value heads of {spec.head_dim}"],
        *[["RoPE", _rope_line(spec, index)] for index in range(len(spec.ropes))],
        ["context", f"{spec.max_context} tokens"],
        ["windows", _windows_line(spec)],
        ["output head", "the embedding (tied)" if spec.tied_embeddings else "its own"],
        ["end of text", ", ".join(map(str, spec.eos_ids)) or "none"],
    ]


def _rope_line(spec: ModelSpec, index: int) -> str:
    """One of the rotary embeddings, and in how many layers if not in all."""
    rope, count = spec.ropes[index], spec.rope_layers.count(index)
    kind = rope.kind if rope.factor == 1 else f"{rope.kind} x{rope.factor:g}"
    part = f", {rope.channels} of {spec.head_dim} channels" if rope.channels else ""
    layers = f" in {count} of {spec.num_layers} layers" if count < spec.num_layers else ""
    return f"{kind}, theta {rope.theta:g}{part}{layers}"


def _windows_line(spec: ModelSpec) -> str:
    counts = Counter(window for window in spec.windows if window)
    told = [f"{window} tokens in {count} of {spec.num_layers} layers" for window, count in sorted(counts.items())]
    return ", ".join(told) or "none: every layer sees the whole context"


def _converted_rows(model: ConvertedModel) -> Rows:
    description = model.description
    return [
        ["name", description.name],
        *_spec_rows(model.spec),
        ["published as", description.source_scheme],
        ["held as", f"{description.scheme} (bits/block), {format_bytes(description.weight_bytes)}"],
        ["chat template", _template_line((model.folder / TEMPLATE).exists())],
        *_sampling_rows(model.description.sampling),
        ["fingerprint", model.fingerprint],
        ["engine", str(choose("auto", "cpu", "int8"))],
        ["attention", _attention_line(model.spec)],
        ["matmul", _matmul_line()],
        *[["KV scales", _scales_line(path, model)] for path in sorted(model.folder.glob("kv_scales*.safetensors"))],
    ]


def _foreign_rows(foreign: ForeignFolder, made: ConvertedModel | None) -> Rows:
    """Another maker's graph as it lies, and what edgekv makes of it whenever it is loaded."""
    from edgekv.adopt import recognise
    from edgekv.weights.hub import HubFolder

    adapted, spec = recognise(foreign)
    rows = [
        ["name", foreign.root.resolve().name],
        *_spec_rows(spec),
        ["format", f"ONNX by {adapted.producer}"],
        ["graph", str(foreign.graph)],
        ["held as", f"{adapted.scheme} (bits/block), {format_bytes(adapted.weight_bytes)}, read where it lies"],
        *[["in memory" if not index else "", words] for index, words in enumerate(adapted.changes)],
        ["chat template", _template_line(HubFolder(foreign.root).has_template)],
        ["attention", _attention_line(spec)],
        ["matmul", _matmul_line()],
    ]
    if made is not None:
        scales = sorted(made.folder.glob("kv_scales*.safetensors"))
        return [*rows, *[["KV scales", _scales_line(path, made)] for path in scales]]
    return [*rows, ["state", "not run yet: the first `edgekv chat` compares its logits with the maker's"]]


def _source_rows(path: Path, made: ConvertedModel | None) -> Rows:
    """A checkpoint as it was published, what edgekv will make of it, and what it has made already."""
    from edgekv.convert import advice
    from edgekv.holding import ConvertOptions, Holding, held_size
    from edgekv.weights import open_source

    source, options = open_source(path), ConvertOptions()
    matrices = list(Holding(source.quantised, options).forms(source))
    size, held = held_size(matrices, options)
    floats = [name for name, stored, _ in matrices if stored.is_float]
    rows = [
        ["name", called(path)],
        *_spec_rows(source.spec),
        ["format", source.scheme],
        *map(list, source.facts),
        *([["left in float", _grouped(floats)]] if source.quantised else []),
        *([["tokenizer", source.missing_tokenizer]] if source.missing_tokenizer else []),
        ["chat template", _template_line(source.has_template)],
        *_sampling_rows(source.sampling),
        ["held as", f"{held} (bits/block), about {format_bytes(size)}"],
        *[["", line] for line in _holding_lines(matrices)],
        *[["advice", line] for line in [advice(held)] if line],
        ["attention", _attention_line(source.spec)],
        ["matmul", _matmul_line()],
    ]
    return [*rows, ["state", f"converted: {made.folder}" if made else _unmade_line(source)]]


def _unmade_line(source: WeightSource) -> str:
    if source.missing_tokenizer:
        return "not converted yet: without a tokenizer it cannot chat, only run on token ids"
    return "not converted yet: the first `edgekv chat` on it does that"


_KINDS = {
    "int sum": "two 8-bit matrices that add up to 16 bits",
    "float": "as it is",
    "nf4": "the same codes",
    "fp4": "the same codes",
}
"""What becomes of a matrix."""


def _holding_lines(matrices: Iterable[tuple[str, Stored, Form]]) -> list[str]:
    """How many matrices of each kind there are, and what edgekv makes of them."""
    counts = Counter((stored.label, stored.form, stored.exact, form) for _, stored, form in matrices)
    return [
        f"{count} of {label} -> {form}: {_KINDS.get(form.kind) or _integers_line(read, exact, form)}"
        for (label, read, exact, form), count in counts.most_common()
    ]


def _integers_line(read: Form, exact: bool, form: Form) -> str:
    if read.kind == "float":
        return f"rounded to {form.bits} bits"
    if not exact or read.shifted != form.shifted:
        return f"{form.bits} bits, since fewer would not hold it faithfully"
    added = ", each block with a float that is added" * form.shifted
    return f"the same integers{added}"


def _grouped(names: Iterable[str]) -> str:
    """Names of matrices by part: "embed, head, k (all layers), down (layers 0, 3)"."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, part = name.rpartition(".")
        layers.setdefault(part, []).extend([layer] if layer else [])
    told = [part if not found else f"{part} of layers {', '.join(found)}" for part, found in layers.items()]
    return ", ".join(told) or "none"


def _sampling_rows(sampling: Mapping[str, float]) -> Rows:
    """What the makers recommend, where they do."""
    return [["sampling", ", ".join(f"{name} {value:g}" for name, value in sampling.items())]] if sampling else []


def _template_line(exists: bool) -> str:
    return "yes" if exists else "none: generate() only"


def _attention_line(spec: ModelSpec) -> str:
    """Which operator an INT8 cache runs on here, and why."""
    from edgekv.engines.onnx import native

    reason = native.refusal(spec, KVSpec(MIN_CAPACITY), "cpu")
    return f"edgekv's own operator, {native.instruction_set()}" if reason is None else f"ONNX Runtime's: {reason}"


def _matmul_line() -> str:
    """Which operator multiplies by the weights here, and why."""
    from edgekv.engines.onnx import native

    reason = native.matmul_refusal()
    return (
        f"edgekv's own operator, {native.matmul_instruction_set()}" if reason is None else f"ONNX Runtime's: {reason}"
    )


def _scales_line(path: Path, model: ConvertedModel) -> str:
    try:
        scales: KVScales = read_scales(path)
        scales.check(model.spec, model.fingerprint, scales.dtype, scales.granularity)
    except ScalesError as error:
        return f"{path.name}: {error}"
    made, layers = scales.provenance, scales.centred_layers
    return (
        f"{scales.dtype} per {scales.granularity}, {made.method} x{made.headroom:g} over {made.tokens} tokens "
        f"({made.corpus}); error K {made.k_error:.2%}, V {made.v_error:.2%}, saturated {made.saturated:.1e}"
        + (f"; constants out of the keys of {_layers_line(layers, model)}" if layers else "")
        + ("; means out of the values" if scales.v_centre is not None else "")
    )


def _layers_line(layers: Sequence[int], model: ConvertedModel) -> str:
    whole = len(layers) == model.spec.num_layers
    return "all layers" if whole else f"layers {', '.join(map(str, layers))}"
