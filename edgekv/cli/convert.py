"""`edgekv convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.holding import ConvertOptions


@click.command
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@options_of(ConvertOptions)
def command(source: Path, out: Path, **values: Any) -> None:
    """Make the model directory OUT from SOURCE: a GGUF file, or a folder with config.json and safetensors.

    What the publisher stored as integers is kept; see the README for what is rounded.
    """
    from edgekv.convert import convert

    options = ConvertOptions(**given(ConvertOptions, values))
    with render.progress_bar() as report:
        done = convert(source, out, options, progress=report)
    render.say(f"{out}: {done}")
    if done.missing_tokenizer:
        render.note(f"The model runs on token ids only. {done.missing_tokenizer}")
    if done.advice:
        render.note(done.advice)
    if options.lossy and done.missing_tokenizer:
        render.note("What the rounding costs is not measured: that needs text, and so a tokenizer.")
    elif options.lossy:
        from edgekv.api import open_engine
        from edgekv.lossy import measured_loss
        from edgekv.options import LoadOptions

        ratio = measured_loss(source, done.model, lambda model, kv: open_engine(model, kv, None, LoadOptions()))
        render.say(f"lossy: perplexity is {ratio:.3f} times that of the faithful conversion, on edgekv's own prompts")
    if done.max_weight_error:
        render.say(f"largest rounding error of a layer: {done.max_weight_error:.2%} of its weights' size")
