"""`edgekv plan`: works from a config alone and loads no tensor library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.engines import choose
from edgekv.errors import ModelNotFound
from edgekv.files import expanded
from edgekv.identity import already_made, is_pulled, pulled_folder
from edgekv.kv.plan import Footprint, make_plan, tokens_that_fit
from edgekv.kv.spec import KVDtype
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel, is_converted, open_converted
from edgekv.model.families import spec_from_config
from edgekv.model.foreign import find_foreign
from edgekv.model.spec import ModelSpec
from edgekv.options import LoadOptions, budget, footprint_of, home_of, plan_request
from edgekv.weights.hub import read_json

ALTERNATIVES: tuple[KVDtype, ...] = ("int4", "k8v4", "int8", "fp8", "fp16", "float")


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@options_of(LoadOptions, leave_out=("overflow", "scales", "threads"))
@click.option("--serve", "server", is_flag=True, help="With what `edgekv serve` takes beside.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(model: str, server: bool, as_json: bool, **values: Any) -> int:
    """Show what MODEL takes in memory. What is not converted yet is estimated, and stays as it is.

    MODEL is a catalog name, a model directory, a GGUF file, a folder with safetensors or an ONNX graph, or a
    config.json.
    """
    options = LoadOptions(**given(LoadOptions, values))
    spec, footprint, converted = _resolve(model, options)
    request, limit = plan_request(spec, options, converted, server=server), budget(options)
    plan = make_plan(spec, footprint, request, None if options.context else limit)
    plan = replace(plan, budget_bytes=limit)
    others = {dtype: replace(options, kv_dtype=dtype) for dtype in ALTERNATIVES}
    requests = {dtype: plan_request(spec, other, converted, server=server) for dtype, other in others.items()}
    requests = {dtype: request for dtype, request in requests.items() if request.runs}
    if options.device == "cpu":
        requests.pop("fp16", None)  # check_combination refuses it
    counts = {dtype: tokens_that_fit(spec, footprint, request, limit) for dtype, request in requests.items()}
    if as_json:
        render.print_json(render.plan_json(plan, counts))
    else:
        render.print_plan(plan, counts)
    return 0 if plan.fits else 2


def _resolve(model: str, options: LoadOptions) -> tuple[ModelSpec, Footprint, ConvertedModel | None]:
    """Geometry, weights and, if it is made already, the model directory."""
    path, home = expanded(model), home_of(options)
    pulled = is_pulled(model)
    folder = pulled_folder(model, home) if pulled else path
    made = open_converted(folder) if is_converted(folder) else None if pulled else already_made(path, home)
    if made is not None:
        return made.spec, footprint_of(made, options), made
    if pulled:
        raise ModelNotFound(f"{model} is not here yet: run `edgekv chat {model}` once.")
    spec, footprint = _published(path)
    if choose(options.engine, options.device, options.kv_dtype).name == "torch":
        footprint = Footprint.in_torch(spec, footprint.weight_bytes, options.device)
    return spec, footprint, None


def _published(path: Path) -> tuple[ModelSpec, Footprint]:
    """Of a checkpoint, another maker's graph or a config, from metadata."""
    if path.is_file() and path.suffix == ".json":
        return _configured(path)
    if (foreign := find_foreign(path)) is not None:
        from edgekv.adopt import recognise

        adapted, spec = recognise(foreign)
        return spec, Footprint.of(spec, adapted.weight_bytes, adapted.scheme)
    from edgekv.holding import ConvertOptions, Holding, held_size
    from edgekv.weights import open_source

    try:
        source = open_source(path)
    except ModelNotFound:
        if not (path / "config.json").is_file():
            raise
        return _configured(path / "config.json")
    options = ConvertOptions()
    matrices = list(Holding(source.quantised, options).forms(source))
    return source.spec, Footprint.of(source.spec, *held_size(matrices, options), exact=False)


def _configured(config: Path) -> tuple[ModelSpec, Footprint]:
    """Of a config.json alone, whatever its publisher quantised."""
    data = read_json(config)
    spec = spec_from_config({key: value for key, value in data.items() if key != "quantization_config"})
    return spec, Footprint.estimate(spec)
