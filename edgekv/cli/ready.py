"""From a model's name to a loaded runtime, with the progress that a person wants to see.

Whatever is missing is made on the way: the download, the conversion, and scales if the model ships none that fit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.cli import render
from edgekv.files import exclusive
from edgekv.kv.scales import scales_name
from edgekv.kv.spec import MIN_CAPACITY, KVSpec, scales_dtype
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions, home_of, plan_for

if TYPE_CHECKING:
    from edgekv.api import Runtime
    from edgekv.kv.scales import KVScales


def ready_runtime(target: str, options: LoadOptions, *, chats: bool = False, server: bool = False) -> Runtime:
    """Prepare and load a model.

    Args:
        chats: one without a chat template is refused before anything is made or measured.
        server: plan with what the server takes beside.
    """
    from edgekv.api import check_combination, open_runtime

    model = ready_model(target, options, chats=chats)
    kv = KVSpec(MIN_CAPACITY, options.kv_dtype, options.granularity)
    check_combination(kv, options)
    plan_for(model, options, server=server)  # what does not fit is refused before scales are measured
    if kv.dtype not in ("float", "fp16") and options.scales is None:
        ready_scales(model, kv, options)
    return open_runtime(model, options, server=server)


def ready_model(target: str, options: LoadOptions, *, chats: bool = False) -> ConvertedModel:
    """Pull and convert if need be. chats: refuse what has no chat template."""
    from edgekv.prepare import Watch, prepare

    with render.progress_bar() as report:
        return prepare(target, home=home_of(options), watch=Watch(report, render.note), chats=chats)


def ready_scales(
    model: ConvertedModel,
    kv: KVSpec,
    load: LoadOptions,
    method: str | None = None,
    headroom: float | None = None,
    path: str | os.PathLike[str] | None = None,
) -> KVScales:
    """The scales for a cache: those of a file, or the model's own, measured once if it has none of that kind.

    Args:
        method, headroom: of calibration; scales made so are kept beside the model's own, under a name that says it.
    """
    from edgekv.calibrate.options import CalibrateOptions
    from edgekv.cli.calibrate import calibrate_and_write
    from edgekv.prepare import find_scales

    chosen = {name: value for name, value in (("method", method), ("headroom", headroom)) if value is not None}
    if path is None:
        dtype = scales_dtype(kv.dtype)
        options = CalibrateOptions(dtype=dtype, granularity=kv.granularity, **chosen)  # type: ignore[arg-type]
        own = scales_name(dtype, kv.granularity)
        made = own.replace(".safetensors", f".{options.method}-{options.headroom}.safetensors")
        path = model.folder / (made if chosen else own)
        if not path.exists():
            with exclusive(path.with_name(f".{path.name}.lock"), _waiting):
                if not path.exists():  # another process has not made them meanwhile
                    title = f"{dtype} per {kv.granularity}, {options.method} x {options.headroom}"
                    render.note(f"Measuring KV scales, once for this model (minutes, if it is large): {title}.")
                    calibrate_and_write(model, options, path, load)
    scales = find_scales(model, kv.dtype, kv.granularity, Path(path))
    assert scales is not None, "only a quantised cache is asked for"
    return scales


def _waiting() -> None:
    render.note("Another edgekv process is measuring these KV scales: waiting for it.")
