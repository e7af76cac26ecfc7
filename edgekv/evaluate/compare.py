"""Several caches in step: one text through all of them, each token's distribution beside that of the reference.

The reference is a float cache that evicts as the command's options say. After every STEP tokens, for each setting:

    loss     -log q(next token)                 its mean's exponential is the perplexity
    kl       sum_v p(v) log(p(v) / q(v))        p of the reference, q of the setting, in nats
    top-1    whether argmax q = argmax p

A ratio of perplexities is a noisy thing (its standard error stands beside it); the divergence is not, since it looks at
the whole distribution. One number a token is kept and no logits, so memory does not grow with the text to speak of.

With `segment` the caches are emptied after so many tokens, as other programs measure perplexity; without, the text is
one stream that evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import Engine, Logits
from edgekv.engines.memory import joined
from edgekv.evaluate.losses import STEP
from edgekv.evaluate.rows import ErrorMeter
from edgekv.kv.scales import KVScales
from edgekv.kv.window import Window

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Text:
    """The tokens to run: `first` (a BOS, or nothing) begins every segment and is not scored."""

    ids: Sequence[int]
    segment: int = 0  # tokens after which the caches are emptied; 0: never
    first: tuple[int, ...] = ()

    def steps(self, start: int) -> Iterator[tuple[int, int]]:
        """(from, to) of each step from token `start` on; a step lies within one segment."""
        borders = range(0, len(self.ids), self.segment or len(self.ids))
        for begin, end in pairwise([*borders, len(self.ids)]):
            for step in range(max(begin, start), end, STEP):
                yield step, min(step + STEP, end)

    def begins(self, token: int) -> bool:
        """Whether a segment begins at this token."""
        return token == 0 or bool(self.segment and token % self.segment == 0)

    @property
    def scored(self) -> int:
        """How many tokens have a loss: all but the first of each segment, which nothing predicts."""
        return len(self.ids) - len(range(0, len(self.ids), self.segment or len(self.ids)))


@dataclass
class Lane:
    """One cache in the run: its engine, and what was measured so far.

    losses, kl: one number a scored token, in nats; agree: whether the top choice is the reference's. For the reference
    itself `kl` and `agree` stay empty.
    """

    name: str
    engine: Engine
    scales: KVScales | None = None  # of a quantised cache, for the errors by layer
    losses: list[Float64] = field(default_factory=list)
    kl: list[Float64] = field(default_factory=list)
    agree: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    evicted: int = 0  # over all segments
    meter: ErrorMeter | None = None

    def __post_init__(self) -> None:
        if self.scales is not None:
            self.meter = ErrorMeter(self.scales, self.engine.kv.dtype, self.engine.row_factors)

    def append(self, tokens: Sequence[int]) -> Logits:
        """Run tokens, evicting as a chat would, and return all logits, [T, V]."""
        parts: list[Logits] = []
        while tokens:
            if self.engine.length == self.engine.kv.capacity:
                move = self.window().next_move()
                self.engine.evict(move)
                self.evicted += move.count
            room = self.engine.kv.capacity - self.engine.length
            parts.append(self.engine.forward(tokens[:room], all_logits=True))
            tokens = tokens[room:]
        return joined(parts)

    def window(self) -> Window:
        """The cache's state in integers."""
        engine = self.engine
        return Window(engine.kv.capacity, engine.kv.stride, engine.kv.sinks, engine.length, engine.evicted)


@dataclass
class Comparison:
    """A run of lanes over a text; `reference` is None where there is nothing to compare with."""

    text: Text
    lanes: list[Lane]
    reference: Lane | None
    done: int = 0  # tokens
    metered: bool = True  # errors by layer, from the reference's rows

    def run(self, pause: Callable[[int], bool] = lambda done: False) -> bool:
        """Go on to the end; `pause` is asked after each step and may end the run early. True: it is complete."""
        for start, stop in self.text.steps(self.done):
            self._step(start, stop)
            self.done = stop
            if pause(stop):
                break
        return self.done == len(self.text.ids)

    def everything(self) -> list[Lane]:
        """All lanes, the reference first."""
        return [*([self.reference] if self.reference else []), *self.lanes]

    def _step(self, start: int, stop: int) -> None:
        ids, fresh = list(self.text.ids[start:stop]), self.text.begins(start)
        targets = list(self.text.ids[start + 1 : stop + 1])
        if stop == len(self.text.ids) or self.text.begins(stop):
            targets = targets[: stop - start - 1]
        expected = None if self.reference is None else self._advance(self.reference, ids, targets, fresh, None)
        for lane in self.lanes:
            self._advance(lane, ids, targets, fresh, expected)

    def _advance(
        self, lane: Lane, ids: list[int], targets: list[int], fresh: bool, expected: Logits | None
    ) -> Logits | None:
        """Run one step of one lane and score it against the reference's log probabilities, [T, V]."""
        if fresh:
            lane.engine.reset()
        first = self.text.first if fresh else ()
        found = lane.append([*first, *ids])[len(first) :][: len(targets)]
        set_log_softmax(found)
        lane.losses.append(-found[np.arange(len(targets)), targets].astype(np.float64))
        if expected is not None:
            lane.kl.append(divergence(expected, found))
            lane.agree.append(expected.argmax(-1) == found.argmax(-1))
        elif lane is self.reference and self.metered:
            self._measure_rows(lane.engine, len(ids))
        return found

    def _measure_rows(self, engine: Engine, count: int) -> None:
        start = max(engine.length - count, 0)
        for lane in self.lanes:
            if lane.meter is not None:
                lane.meter.see(engine, start, engine.length)


def set_log_softmax(logits: Logits) -> None:
    """Make logits, [T, V], each row's log probabilities, in place; the sum is made in float64."""
    for row in logits:
        row -= row.max()
        row -= np.log(np.exp(row).sum(dtype=np.float64))


def divergence(expected: Logits, found: Logits) -> Float64:
    """KL(expected || found) of each row of log probabilities, [T, V] twice -> [T], in nats."""
    rows = zip(expected, found, strict=True)
    return np.array([(np.exp(p) * (p - q)).sum(dtype=np.float64) for p, q in rows], np.float64)


@dataclass(frozen=True)
class Score:
    """What one lane came to. Against the reference: ratio, kl, top1; None where there is none."""

    name: str
    tokens: int  # scored
    perplexity: float
    evicted: int
    ratio: float | None = None  # of perplexities
    ratio_error: float | None = None  # its standard error, taking tokens as independent
    kl: float | None = None  # mean, in nats
    kl_error: float | None = None
    top1: float | None = None  # share of tokens


def score(lane: Lane, reference: Lane | None) -> Score:
    """Sum up a lane."""
    losses = np.concatenate(lane.losses)
    found = Score(lane.name, len(losses), float(np.exp(losses.mean())), lane.evicted)
    if reference is None or reference is lane:
        return found
    difference, kl = losses - np.concatenate(reference.losses), np.concatenate(lane.kl)
    ratio = float(np.exp(difference.mean()))
    return Score(
        **(vars(found) | {
            "ratio": ratio,
            "ratio_error": ratio * standard_error(difference),
            "kl": float(kl.mean()),
            "kl_error": standard_error(kl),
            "top1": float(np.concatenate(lane.agree).mean()),
        })
    )  # fmt: skip


def standard_error(values: Float64) -> float:
    """Of the mean."""
    return float(values.std() / np.sqrt(len(values)))


def blocks(losses: Float64, size: int) -> list[float]:
    """Perplexity of each block of `size` scored tokens along the text."""
    return [float(np.exp(losses[i : i + size].mean())) for i in range(0, len(losses), size)]
