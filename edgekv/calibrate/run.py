"""`edgekv calibrate`: lead a model through text with a float cache, choose scales, and check them on text held out.

    observe    a float engine runs the observed text; only statistics are kept
    scales     thresholds over the largest code, with the rounding error on some of the same text
    check      errors by layer and the float perplexity, on held-out text that the scales have not seen
    compare    the same held-out text again with the quantised cache: the ratio of perplexities is the verdict

Nothing is written here, so a Ctrl-C leaves nothing behind; the caller writes the finished scales in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from edgekv.calibrate.corpus import Excerpts, Passages, open_corpus
from edgekv.calibrate.measure import losses
from edgekv.calibrate.observe import Observer
from edgekv.calibrate.options import CalibrateOptions, Progress
from edgekv.calibrate.thresholds import centre, fit_first, needs_histograms, thresholds, value_centre
from edgekv.engines.base import Engine
from edgekv.errors import UnsupportedModel
from edgekv.evaluate.rows import ErrorMeter, LayerCheck
from edgekv.kv.scales import KVScales, Provenance, from_thresholds
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.text.prompt import ChatFormat
from edgekv.text.tokenizer import Tokenizer

OpenEngine = Callable[[KVSpec, KVScales | None], Engine]

SEEN_AGAIN = 512
"""About how many observed tokens are run again, for the error that goes into the scales' provenance."""


@dataclass(frozen=True)
class CalibrationReport:
    """Scales, and how well they do on text that they were not made from."""

    scales: KVScales
    layers: tuple[LayerCheck, ...]  # on held-out text
    perplexity_float: float  # on held-out text
    perplexity_quantised: float | None  # None where no engine here can hold such a cache
    ratio_error: float | None  # standard error of `ratio`: less than about twice this is noise
    tokens: int  # observed
    held_out_tokens: int
    seconds: float

    @property
    def ratio(self) -> float | None:
        """Perplexity with the quantised cache over that with a float cache."""
        return None if self.perplexity_quantised is None else self.perplexity_quantised / self.perplexity_float


def calibrate(
    model: ConvertedModel,
    tokenizer: Tokenizer,
    chat_format: ChatFormat | None,
    open_engine: OpenEngine,
    options: CalibrateOptions | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> CalibrationReport:
    """Find scales for a model's cache and check them.

    Args:
        open_engine: opens an engine on this model; called once for a float cache, then once for the quantised one,
            the first being closed by then. It may raise UnsupportedModel for the second: the ratio is then unknown.

    Raises:
        InvalidOption: the text cannot be used.
        EngineError: the model produces numbers that are not finite; the message names the layer.
    """
    started = time.perf_counter()
    options = options or CalibrateOptions()
    corpus = open_corpus(model.description, tokenizer, chat_format, options)
    with closing(open_engine(KVSpec(corpus.capacity, "float"), None)) as engine:
        seen, sequences = _observe(engine, corpus.observed, options, progress)
        scales = _make_scales(engine, seen, sequences, model.fingerprint, corpus.name, options)
        meter, held_out = _check(engine, corpus.held_out, scales, progress)
        total = sum(map(len, held_out))
        reference = losses(engine, held_out, lambda done: progress("compare", done, 2 * total))
    quantised = _quantised_losses(
        open_engine, corpus.capacity, scales, held_out, lambda done: progress("compare", total + done, 2 * total)
    )
    return CalibrationReport(
        scales=scales,
        layers=meter.layers(),
        perplexity_float=float(np.exp(reference.mean())),
        perplexity_quantised=None if quantised is None else float(np.exp(quantised.mean())),
        ratio_error=None if quantised is None else _ratio_error(quantised - reference),
        tokens=seen.tokens,
        held_out_tokens=total,
        seconds=time.perf_counter() - started,
    )


def _observe(
    engine: Engine, passages: Passages, options: CalibrateOptions, progress: Progress
) -> tuple[Observer, list[list[int]]]:
    """The statistics of the passages, and the passages themselves."""
    seen = Observer(engine.spec, needs_histograms(options.method))
    sequences = []
    for sequence in passages.run(engine, partial(seen.see, engine)):
        sequences.append(sequence)
        progress("observe", min(seen.tokens, passages.total), passages.total)
    return seen, sequences


def _make_scales(
    engine: Engine, seen: Observer, sequences: list[list[int]], fingerprint: str, corpus: str, options: CalibrateOptions
) -> KVScales:
    """Scales, with the error that they make on an even selection of the observed text."""
    k, v = thresholds(seen, options)
    provenance = Provenance(options.method, options.headroom, seen.tokens, corpus)
    scales = from_thresholds(k, v, options.dtype, options.granularity, fingerprint, provenance)
    scales = replace(scales, k_centre=centre(seen, options), v_centre=value_centre(seen, options))
    if options.dtype == "fp8" and options.granularity == "channel":
        scales = _with_exact_first(scales, seen)
    meter = ErrorMeter(scales)
    step = max(1, seen.tokens // SEEN_AGAIN)
    for _ in Excerpts(tuple(map(tuple, sequences[::step]))).run(engine, partial(meter.see, engine)):
        pass
    found = meter.overall()
    saturated = (found.k_saturated + found.v_saturated) / 2
    measured = replace(provenance, k_error=found.k_error, v_error=found.v_error, saturated=saturated)
    return replace(scales, provenance=measured)


def _with_exact_first(scales: KVScales, seen: Observer) -> KVScales:
    """Scales with which the first token's rows are exact; its key stands at angle 0, as its centre does."""
    centres = (scales.k_centre, scales.v_centre)
    first = (rows if centre is None else rows - centre for rows, centre in zip(seen.first, centres, strict=True))
    k, v = (fit_first(s, rows) for s, rows in zip((scales.k, scales.v), first, strict=True))
    return replace(scales, k=k, v=v)


def _check(
    engine: Engine, passages: Passages, scales: KVScales, progress: Progress
) -> tuple[ErrorMeter, list[list[int]]]:
    """The scales' errors on held-out passages, and the passages themselves."""
    meter = ErrorMeter(scales)
    sequences = []
    for sequence in passages.run(engine, partial(meter.see, engine)):
        sequences.append(sequence)
        progress("check", min(sum(map(len, sequences)), passages.total), passages.total)
    return meter, sequences


def _quantised_losses(
    open_engine: OpenEngine,
    capacity: int,
    scales: KVScales,
    held_out: list[list[int]],
    progress: Callable[[int], None],
) -> npt.NDArray[np.float64] | None:
    """The losses with the quantised cache, or None where the engine at hand cannot hold one of this kind."""
    try:
        opened = open_engine(KVSpec(capacity, scales.dtype, scales.granularity), scales)
    except UnsupportedModel:
        return None
    with closing(opened) as engine:
        return losses(engine, held_out, progress)


def _ratio_error(differences: npt.NDArray[np.float64]) -> float:
    """Standard error of exp(mean difference), taking tokens as independent."""
    return float(np.exp(differences.mean()) * differences.std() / np.sqrt(len(differences)))
