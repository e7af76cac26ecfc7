"""`edgekv eval`: open the caches, run the text through them in step, ask for needles, and sum up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgekv.about import about
from edgekv.engines.base import Engine
from edgekv.errors import InvalidOption
from edgekv.evaluate import checkpoint
from edgekv.evaluate.compare import Comparison, Lane, Score, Text, blocks, score
from edgekv.evaluate.needle import Depth, Haystack, bury, probe
from edgekv.evaluate.rows import LayerCheck
from edgekv.evaluate.settings import REFERENCE, Setting, has_reference, parse_setting
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec
from edgekv.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
OpenCache = Callable[[Setting, KVSpec], tuple[Engine, KVScales | None]]

SAVE_EVERY = 8192
"""Tokens between two checkpoints: minutes, where writing one takes seconds at most."""

NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class EvalOptions:
    """What is measured.

    Raises:
        InvalidOption: a value is out of range.
    """

    tokens: int = about("How many tokens of the text.", default=4096)
    segment: int = about("Empty the caches after so many tokens; 0 is one stream that evicts.", default=0)
    block: int = about("Also the perplexity of each block of so many tokens.", default=2000)
    setting: tuple[str, ...] = about(
        "A cache to try, DTYPE[,name=value...], e.g. int8,granularity=head,sinks=0 (may be given several times). "
        "Names: granularity, context, sinks, stride, attention, method, headroom, scales. Default: as --kv-dtype says.",
        default=(),
    )
    against: Literal["float", "none"] = about("What the settings are compared with.", default="float")
    activations: Literal["int8", "float"] = about(
        "What matrices are multiplied with: as the engine does it, or floats, where nothing but the cache is rounded.",
        default="int8",
    )
    needles: int = about("Also bury so many facts at each of six depths, and ask for them.", default=0)
    needle_tokens: int = about("Length of the text they are buried in. 0: half as long again as the cache.", default=0)

    def __post_init__(self) -> None:
        for name, low in (("tokens", 1), ("segment", 0), ("block", 1), ("needles", 0), ("needle_tokens", 0)):
            if getattr(self, name) < low:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be at least {low}.")
        if self.segment == 1:
            raise InvalidOption("A segment of 1 token predicts nothing: give at least 2, or 0 for one stream.")

    def settings(self, default: Setting) -> list[Setting]:
        """The caches to try."""
        return [parse_setting(text) for text in self.setting] or [default]


@dataclass(frozen=True)
class EvalReport:
    """What was measured, lane by lane; the reference first where there is one."""

    scores: tuple[Score, ...]
    curves: tuple[tuple[float, ...], ...]  # perplexity of each block, a lane each
    layers: tuple[tuple[LayerCheck, ...], ...]  # errors by layer, a lane each; empty without scales or reference
    needles: tuple[tuple[Depth, ...], ...]  # a lane each; empty where none was buried
    kv: tuple[KVSpec, ...]
    complete: bool

    def to_json(self) -> list[dict[str, Any]]:
        """One object a lane."""
        parts = zip(self.scores, self.kv, self.curves, self.layers, self.needles, strict=True)
        return [
            asdict(found)
            | {"cache": asdict(kv), "blocks": list(curve)}
            | {"layers": [asdict(layer) for layer in layers], "needles": [asdict(depth) for depth in depths]}
            for found, kv, curve, layers, depths in parts
        ]


def evaluate(
    comparison: Comparison,
    options: EvalOptions,
    haystacks: Sequence[Haystack],
    tokenizer: Tokenizer,
    pause: Callable[[int], bool],
    progress: Progress = lambda stage, done, total: None,
) -> EvalReport:
    """Run the text to its end (or until `pause`), then the needles, and sum up."""
    total = len(comparison.text.ids)

    def after_step(done: int) -> bool:
        progress("perplexity", done, total)
        return pause(done)

    complete = comparison.run(after_step)
    lanes = comparison.everything()
    scores = tuple(score(lane, comparison.reference) for lane in lanes)
    needles: list[tuple[Depth, ...]] = [() for _ in lanes]
    if complete and haystacks:
        for index, lane in enumerate(lanes):
            progress("needles", index, len(lanes))
            needles[index] = tuple(probe(lane, haystacks, tokenizer, comparison.text.first))
    return EvalReport(
        scores=scores,
        curves=tuple(tuple(blocks(np.concatenate(lane.losses), options.block)) for lane in lanes),
        layers=tuple(lane.meter.layers() if lane.meter and comparison.reference else () for lane in lanes),
        needles=tuple(needles),
        kv=tuple(lane.engine.kv for lane in lanes),
        complete=complete,
    )


@contextmanager
def opened(
    settings: Sequence[Setting], base: KVSpec, text: Text, options: EvalOptions, open_cache: OpenCache
) -> Iterator[Comparison]:
    """All engines of a run, closed at the end."""
    with ExitStack() as stack:

        def lane(setting: Setting) -> Lane:
            engine, scales = open_cache(setting, setting.kv(base))
            return Lane(setting.name, stack.enter_context(closing(engine)), scales)

        reference = lane(REFERENCE) if has_reference(settings, against_float=options.against == "float") else None
        yield Comparison(text, [lane(setting) for setting in settings], reference)


def buried(filler: str, tokenizer: Tokenizer, capacity: int, options: EvalOptions) -> list[Haystack]:
    """The haystacks of the needle test, each with other facts.

    Raises:
        InvalidOption: the text is too short.
    """
    tokens = options.needle_tokens or capacity + capacity // 2
    return [bury(filler, tokenizer, tokens, NEEDLE_DEPTHS, seed) for seed in range(options.needles)]


def pauses(
    path: Path | None, comparison: Comparison, fingerprint: str, asked: Callable[[], bool]
) -> Callable[[int], bool]:
    """Go on from the checkpoint at `path` if there is one; return the `pause` that writes it as the run goes.

    Raises:
        InvalidOption: the file is another run's, or damaged.
    """
    if path is None:
        return lambda done: asked()
    key = checkpoint.run_key(comparison, fingerprint)
    if path.exists():
        checkpoint.load(path, comparison, key)
    last = comparison.done

    def pause(done: int) -> bool:
        nonlocal last
        stop = asked()
        if stop or done - last >= SAVE_EVERY:
            last = done
            checkpoint.save(path, comparison, key)
        return stop

    return pause
