"""`edgekv plan`: works from a config alone and loads no tensor library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.errors import BadCheckpoint, ModelNotFound
from edgekv.kv.plan import Footprint, make_plan, tokens_that_fit
from edgekv.kv.spec import KVDtype
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel, is_converted, open_converted
from edgekv.model.families import spec_from_config
from edgekv.model.spec import ModelSpec
from edgekv.options import LoadOptions, budget, footprint_of, plan_request

ALTERNATIVES: tuple[KVDtype, ...] = ("int4", "k8v4", "int8", "fp16", "float")


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@options_of(LoadOptions, leave_out=("overflow", "scales", "threads"))
@click.option("--serve", "server", is_flag=True, help="With what `edgekv serve` takes beside.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(model: str, server: bool, as_json: bool, **values: Any) -> int:
    """Show what MODEL takes in memory: a model directory, a catalog name, or a config.json (weights are estimated)."""
    options = LoadOptions(**given(LoadOptions, values))
    spec, footprint, converted = _resolve(model, options)
    request, limit = plan_request(spec, options, converted, server=server), budget(options)
    plan = make_plan(spec, footprint, request, None if options.context else limit)
    plan = replace(plan, budget_bytes=limit)
    others = {dtype: replace(options, kv_dtype=dtype) for dtype in ALTERNATIVES}
    requests = {dtype: plan_request(spec, other, converted, server=server) for dtype, other in others.items()}
    requests = {dtype: request for dtype, request in requests.items() if request.runs}
    counts = {dtype: tokens_that_fit(spec, footprint, request, limit) for dtype, request in requests.items()}
    if as_json:
        render.print_json(render.plan_json(plan, counts))
    else:
        render.print_plan(plan, counts)
    return 0 if plan.fits else 2


def _resolve(model: str, options: LoadOptions) -> tuple[ModelSpec, Footprint, ConvertedModel | None]:
    """Geometry, weights and, unless it is only a config, the model."""
    path = Path(model).expanduser()
    known = model in catalog.names()
    folder = catalog.home(None if options.home is None else Path(options.home)) / "models" / model if known else path
    if is_converted(folder):
        converted = open_converted(folder)
        return converted.spec, footprint_of(converted, options), converted
    if known:
        raise ModelNotFound(f"{model} has not been converted yet: run `edgekv chat {model}` once.")
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        raise ModelNotFound(
            f"{model!r} is neither a model directory, a config.json, nor one of {', '.join(catalog.names())}."
        )
    try:
        data = json.loads(config.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{config} cannot be read as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise BadCheckpoint(f"{config} holds no object with fields.")
    spec = spec_from_config({key: value for key, value in data.items() if key != "quantization_config"})
    return spec, Footprint.estimate(spec), None
