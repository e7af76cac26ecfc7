"""From a model's name to a loaded runtime, with the progress that a person wants to see.

Whatever is missing is made on the way: the download, the conversion, and scales if the model ships none that fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.cli import render
from edgekv.kv.scales import scales_name
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions, home_of

if TYPE_CHECKING:
    from edgekv.api import Runtime


def ready_runtime(target: str, options: LoadOptions) -> Runtime:
    """Prepare and load a model."""
    from edgekv.api import open_runtime

    model = ready_model(target, options)
    if options.kv_dtype not in ("float", "fp16") and options.scales is None:
        _calibrate_if_needed(model, options)
    return open_runtime(model, options)


def ready_model(target: str, options: LoadOptions) -> ConvertedModel:
    """Pull and convert if need be."""
    from edgekv.prepare import prepare

    with render.progress_bar() as report:
        return prepare(target, home=home_of(options), progress=report)


def _calibrate_if_needed(model: ConvertedModel, options: LoadOptions) -> None:
    path = model.folder / scales_name(options.kv_dtype, options.granularity)
    if path.exists() or options.kv_dtype == "fp8":
        return
    from edgekv.calibrate.options import CalibrateOptions
    from edgekv.cli.calibrate import calibrate_and_write

    kind = f"{options.kv_dtype} per {options.granularity}"
    render.note(f"{model.description.name} has no KV scales for {kind} yet: measuring them once.")
    calibrate_and_write(model, CalibrateOptions(dtype=options.kv_dtype, granularity=options.granularity), path, options)
