"""`edgekv eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli import render
from edgekv.cli.interrupt import Interrupt
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_model, ready_scales
from edgekv.errors import InvalidOption
from edgekv.evaluate.run import EvalOptions
from edgekv.files import atomic_file, check_writable
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions

if TYPE_CHECKING:
    from edgekv.engines.base import Engine
    from edgekv.evaluate.compare import Text
    from edgekv.evaluate.run import EvalReport
    from edgekv.evaluate.settings import Setting
    from edgekv.kv.scales import KVScales
    from edgekv.kv.spec import KVSpec
    from edgekv.text.tokenizer import Tokenizer

FILE = click.Path(path_type=Path)


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--data", type=FILE, required=True, help="A UTF-8 text file.")
@click.option("--json", "json_path", type=FILE, help="Write everything here, errors by layer included.")
@click.option("--plot", type=FILE, help="Draw perplexity along the text (edgekv[plots]).")
@click.option("--checkpoint", type=FILE, help="Where a stopped run is kept; the same command then goes on from it.")
@options_of(EvalOptions)
@options_of(LoadOptions, leave_out=("overflow",))
def command(
    model: str, data: Path, json_path: Path | None, plot: Path | None, checkpoint: Path | None, **values: Any
) -> None:
    """How a text fares in MODEL's cache: perplexity, divergence from a float cache, errors by layer, needles.

    The text streams through the cache, which evicts when it is full. Ctrl-C ends the run after its current step; with
    --checkpoint the same command goes on later. The last line is JSON.
    """
    from edgekv.api import open_text
    from edgekv.cli.eval_plan import planned
    from edgekv.evaluate.plot import check_plot, plot_blocks
    from edgekv.evaluate.run import buried, evaluate, opened, pauses
    from edgekv.evaluate.settings import Setting

    options = EvalOptions(**given(EvalOptions, values))
    load = LoadOptions(**given(LoadOptions, values))
    if plot is not None:
        check_plot(plot)
    for path in filter(None, (json_path, plot, checkpoint)):
        check_writable(path)
    ready = ready_model(model, load)
    tokenizer, _ = open_text(ready)
    settings = options.settings(Setting(load.kv_dtype))
    base = planned(ready, load, settings, against_float=options.against == "float")
    filler = _read(data)
    text = _text(ready, tokenizer, filler, data, options)
    if len(text.ids) <= options.tokens:
        known = len(text.ids) - 1
        render.note(f"[{data} has {known:,} tokens to foretell, not the {options.tokens:,} that are asked for]")
    haystacks = buried(filler, tokenizer, base.capacity, options)
    with opened(settings, base, text, options, _opener(ready, load, options)) as comparison, Interrupt() as interrupt:
        pause = pauses(checkpoint, comparison, f"{ready.fingerprint} {options.activations}", lambda: interrupt.asked)
        with render.progress_bar() as progress:
            report = evaluate(comparison, options, haystacks, tokenizer, pause, progress)
        _finish(report, checkpoint, comparison.done)
    render.print_eval(report)
    about = {"model": ready.description.name, "data": data.name, "segment": options.segment}
    try:
        if json_path is not None:
            _write_json(report, json_path, about)
        if plot is not None:
            curves = {found.name: curve for found, curve in zip(report.scores, report.curves, strict=True)}
            plot_blocks(plot, curves, options.block, ready.description.name)
    finally:  # a full disk may refuse both
        _print_json(report, about)


def _opener(model: ConvertedModel, load: LoadOptions, options: EvalOptions) -> Any:
    """A function that opens the engine of a setting, with scales made if the model has none of that kind."""
    from edgekv.api import open_engine

    def open_cache(setting: Setting, kv: KVSpec) -> tuple[Engine, KVScales | None]:
        own = load.scales if setting.scales is None else setting.scales
        scales = ready_scales(model, kv, load, setting.method, setting.headroom, own) if setting.quantised else None
        return open_engine(
            model, kv, scales, load, attention=setting.attention, activations=options.activations
        ), scales

    return open_cache


def _text(model: ConvertedModel, tokenizer: Tokenizer, text: str, path: Path, options: EvalOptions) -> Text:
    """The first tokens of a text, one more than are asked for; a model whose tokenizer adds BOS gets it."""
    from edgekv.evaluate.compare import Text

    ids = tokenizer.encode(text[: 16 * options.tokens])[: options.tokens + 1]
    if len(ids) < 2:
        raise InvalidOption(f"{path} gives {len(ids)} tokens; at least 2 are needed.")
    bos = model.spec.bos_id if model.description.add_bos else None
    return Text(tuple(ids), options.segment, () if bos is None else (bos,))


def _finish(report: EvalReport, checkpoint: Path | None, done: int) -> None:
    """Say how to go on with a run that was stopped; a complete one needs its checkpoint no more."""
    if report.complete:
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        return
    how = f"the same command goes on from {checkpoint}" if checkpoint else "with --checkpoint it could go on"
    render.note(f"Stopped after {done:,} tokens; {how}. So far:")


def _print_json(report: EvalReport, about: dict[str, Any]) -> None:
    """What matters most, as the last line."""
    brief = [{name: value for name, value in lane.items() if name != "layers"} for lane in report.to_json()]
    render.print_json(about | {"complete": report.complete, "lanes": brief})


def _write_json(report: EvalReport, path: Path, about: dict[str, Any]) -> None:
    """Everything, into a file."""
    with atomic_file(path) as part:
        whole = about | {"complete": report.complete, "lanes": report.to_json()}
        part.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidOption(f"The text {path} could not be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path} is not UTF-8 text (byte {error.start}).") from None
