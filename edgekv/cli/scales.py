"""`edgekv scales`: take a model's KV scales to another runtime, and others' to this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekv.cli import render
from edgekv.errors import InvalidOption, ScalesError
from edgekv.kv.spec import GRANULARITIES, KV_DTYPES, Granularity, KVDtype, scales_dtype
from edgekv.model import catalog
from edgekv.options import LoadOptions

if TYPE_CHECKING:
    from edgekv.kv.interchange import Float32
    from edgekv.kv.scales import KVScales
    from edgekv.model.converted import ConvertedModel

FORMATS = click.Choice(["genai", "vllm"])
DTYPES = click.Choice([name for name in KV_DTYPES if scales_dtype(name) == name and name not in ("fp16", "float")])
FILE = click.Path(path_type=Path)


@click.group
def command() -> None:
    """Take KV scales to onnxruntime-genai or vLLM, or bring theirs here."""


@command.command("export")
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--to", "target", type=FORMATS, required=True, help="Whose format.")
@click.option("--out", type=FILE, required=True, help="A file; for vllm also a folder of safetensors to add them to.")
@click.option("--scales", type=FILE, help="A scales file of edgekv. Default: the model's own.")
@click.option("--kv-dtype", type=DTYPES, default="int8", show_default=True, help="For genai; vllm has FP8 alone.")
@click.option("--granularity", type=click.Choice(GRANULARITIES), help="Default: channel for genai, head for vllm.")
@click.option("--home", type=FILE, help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def export(
    model: str,
    target: str,
    out: Path,
    scales: Path | None,
    kv_dtype: KVDtype,
    granularity: Granularity | None,
    home: Path | None,
) -> None:
    """Write MODEL's scales as another runtime reads them."""
    from edgekv.cli.ready import ready_model
    from edgekv.kv.interchange import add_to_checkpoint, retarget, to_genai, to_vllm
    from edgekv.kv.scales import DEFAULT_NAME, read_scales

    ready = ready_model(model, LoadOptions(home=home))
    own = read_scales(scales or ready.folder / DEFAULT_NAME)
    _check(own, ready)
    if target == "genai":
        _write_json(out, to_genai(retarget(own, kv_dtype, granularity or own.granularity)))
    elif out.is_dir():
        out = add_to_checkpoint(out, own, granularity or "head")
    else:
        _write_tensors(out, to_vllm(own, granularity or "head"))
    render.note(f"{out} written.")


@command.command("import")
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--from", "target", type=FORMATS, required=True, help="Whose format.")
@click.option("--file", "source", type=FILE, required=True, help="What to read: a JSON file, or safetensors.")
@click.option("--kv-dtype", type=DTYPES, default="int8", show_default=True, help="The cache they shall serve.")
@click.option("--out", type=FILE, help="Scales file to write. Default: in the model's folder.")
@click.option("--home", type=FILE, help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def import_(model: str, target: str, source: Path, kv_dtype: KVDtype, out: Path | None, home: Path | None) -> None:
    """Read scales that another runtime's tools made for MODEL."""
    from edgekv.cli.ready import ready_model
    from edgekv.kv.interchange import from_genai, from_vllm, retarget
    from edgekv.kv.scales import scales_name, write_scales

    ready = ready_model(model, LoadOptions(home=home))
    if target == "genai":
        found = from_genai(_read_json(source), ready.spec, kv_dtype, ready.fingerprint, source.name)
    else:
        theirs = from_vllm(_read_tensors(source), ready.spec, ready.fingerprint, source.name)
        found = retarget(theirs, kv_dtype, theirs.granularity)
    path = out or ready.folder / scales_name(found.dtype, found.granularity)
    write_scales(path, found)
    render.note(f"{path} written: {found.dtype} per {found.granularity}; it serves --granularity {found.granularity}.")


def _check(scales: KVScales, model: ConvertedModel) -> None:
    scales.check(model.spec, model.fingerprint, scales.dtype, scales.granularity)


def _write_json(path: Path, data: object) -> None:
    from edgekv.files import atomic_file

    with atomic_file(path) as part:
        part.write_text(json.dumps(data) + "\n", "utf-8")


def _write_tensors(path: Path, tensors: dict[str, Float32]) -> None:
    from safetensors.numpy import save_file

    from edgekv.files import atomic_file

    with atomic_file(path) as part:
        save_file(tensors, part)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScalesError(f"{path} cannot be read ({error}).") from None


def _read_tensors(path: Path) -> dict[str, Float32]:
    """The KV scales among the tensors of a file, or of all files of a folder."""
    from edgekv.weights.tensors import TensorFiles

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InvalidOption(f"{path} holds no safetensors.")
    tensors = TensorFiles(path, files)
    wanted = [name for name in tensors.names if ".self_attn." in name and name.endswith(("k_scale", "v_scale"))]
    return {name: tensors.floats(name) for name in wanted}
