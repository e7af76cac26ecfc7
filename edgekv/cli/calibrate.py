"""`edgekv calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.calibrate.options import CalibrateOptions
from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_model
from edgekv.files import check_writable
from edgekv.kv.scales import scales_name
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions

if TYPE_CHECKING:
    from edgekv.calibrate.run import CalibrationReport


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--out", type=click.Path(path_type=Path), help="Scales file to write. Default: in the model's folder.")
@options_of(CalibrateOptions)
@click.option("--threads", type=int, default=0, help="CPU threads; 0 is one a core.")
@click.option("--home", type=click.Path(path_type=Path), help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def command(model: str, out: Path | None, threads: int, home: Path | None, **values: Any) -> None:
    """Measure the scales of MODEL's quantised cache, write them, and check them on text they were not made from.

    Without --data the model itself continues short prompts that come with edgekv.
    """
    chosen = given(CalibrateOptions, values)
    if "data" in chosen:
        chosen["data"] = tuple(Path(name) for name in chosen["data"])
    options = CalibrateOptions(**chosen)
    if out is not None:
        check_writable(out)
    load = LoadOptions(kv_dtype=options.dtype, granularity=options.granularity, threads=threads, home=home)
    ready = ready_model(model, load)
    path = out or ready.folder / scales_name(options.dtype, options.granularity)
    render.print_layers(calibrate_and_write(ready, options, path, load))


def calibrate_and_write(
    model: ConvertedModel, options: CalibrateOptions, path: Path, load: LoadOptions
) -> CalibrationReport:
    """Calibrate with a progress bar, write the file, print the verdict."""
    from edgekv.api import open_engine, open_text
    from edgekv.calibrate.run import calibrate
    from edgekv.kv.scales import write_scales

    check_writable(path)
    tokenizer, chat_format = open_text(model)
    with render.progress_bar() as progress:
        report = calibrate(
            model, tokenizer, chat_format, lambda kv, scales: open_engine(model, kv, scales, load), options, progress
        )
    write_scales(path, report.scales)
    render.print_verdict(report)
    render.note(f"{path} written: {report.tokens} tokens observed, {report.seconds:.0f} s")
    return report
