"""`edgekv info`."""

from __future__ import annotations

from pathlib import Path

import click

from edgekv.cli import render
from edgekv.errors import ScalesError
from edgekv.kv.scales import KVScales, read_scales
from edgekv.kv.spec import MIN_CAPACITY, KVSpec
from edgekv.model import catalog
from edgekv.model.converted import TEMPLATE, ConvertedModel, is_converted, open_converted
from edgekv.units import format_bytes


@click.command
@click.argument("model", required=False)
@click.option("--home", type=click.Path(path_type=Path), help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def command(model: str | None, home: Path | None) -> None:
    """Show what MODEL is and how it runs; without MODEL, list what is known and what is ready."""
    folder = catalog.home(home)
    if model is None:
        _list_models(folder / "models")
        return
    path = folder / "models" / model if model in catalog.names() else Path(model).expanduser()
    _describe(open_converted(path))


def _list_models(models: Path) -> None:
    ready = {path.name for path in models.iterdir() if is_converted(path)} if models.is_dir() else set()
    rows = [
        [name, "ready" if name in ready else "run `edgekv chat` or `edgekv pull`", catalog.entry(name).title]
        for name in catalog.names()
    ]
    rows += [[name, "ready", ""] for name in sorted(ready - set(catalog.names()))]
    render.table("", ["model", "state", "what"], rows)


def _describe(model: ConvertedModel) -> None:
    description, spec = model.description, model.spec
    rope = spec.rope.kind if spec.rope.kind == "default" else f"{spec.rope.kind} x{spec.rope.factor:g}"
    rows = [
        ["name", description.name],
        ["family", f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}"],
        ["attention", f"{spec.num_heads} query / {spec.num_kv_heads} key-value heads of {spec.head_dim}"],
        ["RoPE", f"{rope}, theta {spec.rope.theta:g}"],
        ["context", f"{spec.max_context} tokens"],
        ["published as", description.source_scheme],
        ["held as", f"{description.scheme} (bits/block), {format_bytes(description.weight_bytes)}"],
        ["chat template", "yes" if (model.folder / TEMPLATE).exists() else "none: generate() only"],
        ["end of text", ", ".join(map(str, spec.eos_ids)) or "none"],
        ["fingerprint", model.fingerprint],
        ["attention", _attention_line(model)],
        *[["KV scales", _scales_line(path, model)] for path in sorted(model.folder.glob("kv_scales*.safetensors"))],
    ]
    render.table("", ["", ""], rows)


def _attention_line(model: ConvertedModel) -> str:
    """Which operator an INT8 cache runs on here, and why."""
    from edgekv.engines.onnx import native

    reason = native.refusal(model.spec, KVSpec(MIN_CAPACITY), "cpu")
    return f"edgekv's own operator, {native.instruction_set()}" if reason is None else f"ONNX Runtime's: {reason}"


def _scales_line(path: Path, model: ConvertedModel) -> str:
    try:
        scales: KVScales = read_scales(path)
        scales.check(model.spec, model.fingerprint, scales.dtype, scales.granularity)
    except ScalesError as error:
        return f"{path.name}: {error}"
    made = scales.provenance
    return (
        f"{scales.dtype} per {scales.granularity}, {made.method} x{made.headroom:g} over {made.tokens} tokens "
        f"({made.corpus}); error K {made.k_error:.2%}, V {made.v_error:.2%}, saturated {made.saturated:.1e}"
    )
