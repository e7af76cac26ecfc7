"""A fact in a long text, asked for at its end: what the window still holds can be found, what has left cannot be known.

One haystack holds a fact at each of several depths ("The number of the red box is 4127."), each of other colours and
digits, so no fact can be guessed from the text; one pass serves them all, since the cache is saved before the first
question and put back after each. The question repeats the fact without its number, which is how even a base model
without a chat format can be asked; the answer counts if the greedy continuation begins with the number.

What is to be expected follows from the window's arithmetic alone, before anything runs:

    held      every token of the fact is in the cache when the question begins: found as often as a float cache finds it
    evicted   none is: it cannot be known (a random four-digit number would be right once in 9,000 times)
    cut       the eviction's border runs through it: no expectation
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgekv.errors import InvalidOption
from edgekv.evaluate.compare import Lane
from edgekv.kv.window import Window
from edgekv.text.tokenizer import Tokenizer

Expected = Literal["held", "evicted", "cut"]

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey", "orange", "purple")
ANSWER_TOKENS = 8
"""Enough for a space and four digits, however a tokenizer cuts them."""


@dataclass(frozen=True)
class Fact:
    """One fact in the haystack."""

    depth: float  # 0: at the text's beginning, 1: at its end
    question: str
    answer: str
    start: int  # first token
    stop: int


@dataclass(frozen=True)
class Haystack:
    """Text with facts in it."""

    ids: tuple[int, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Depth:
    """How often the facts at one depth were found."""

    depth: float
    expected: Expected
    asked: int
    found: int


def bury(filler: str, tokenizer: Tokenizer, tokens: int, depths: Sequence[float], seed: int) -> Haystack:
    """A haystack of about `tokens` tokens of filler with a fact at each depth.

    Raises:
        InvalidOption: the filler is too short, or there are more depths than colours.
    """
    if len(depths) > len(COLOURS):
        raise InvalidOption(f"{len(depths)} depths are more than the {len(COLOURS)} facts there are.")
    straw = tokenizer.encode(filler[: 16 * tokens])[:tokens]
    if len(straw) < tokens:
        raise InvalidOption(f"The text gives {len(straw)} tokens of filler; the needle test needs {tokens}.")
    random_source = random.Random(seed)
    colours = random_source.sample(COLOURS, len(depths))
    ids: list[int] = []
    facts: list[Fact] = []
    for depth, colour, after in zip(depths, colours, [*depths[1:], 1.0], strict=True):
        if not facts:
            ids += straw[: round(depth * tokens)]
        question, answer = f"The number of the {colour} box is", f" {random_source.randint(1000, 9999)}"
        fact = tokenizer.encode(f"\n{question}{answer}.\n")
        facts.append(Fact(depth, f"\n{question}", answer, len(ids), len(ids) + len(fact)))
        ids += [*fact, *straw[round(depth * tokens) : round(after * tokens)]]
    return Haystack(tuple(ids), tuple(facts))


def expectation(fact: Fact, window: Window, question: int) -> Expected:
    """Whether a cache in state `window` holds the fact once `question` more tokens have been read and answered."""
    later = window.forecast(question + ANSWER_TOKENS)
    gone = range(later.pinned, later.pinned + later.evicted)
    lost = len(range(max(fact.start, gone.start), min(fact.stop, gone.stop)))
    return "held" if lost == 0 else "evicted" if lost == fact.stop - fact.start else "cut"


def ask(lane: Lane, haystack: Haystack, tokenizer: Tokenizer, first: Sequence[int] = ()) -> list[tuple[Expected, bool]]:
    """For each fact: what the window makes of it, and whether its number was found."""
    engine = lane.engine
    engine.reset()
    for start in range(0, len(haystack.ids), 64):
        lane.append([*(first if start == 0 else ()), *haystack.ids[start : start + 64]])
    state, results = engine.save(), []
    for fact in haystack.facts:
        engine.load(state)
        question = tokenizer.encode(fact.question)
        expected = expectation(_shifted(fact, len(first)), lane.window(), len(question))
        results.append((expected, _answer(lane, question, tokenizer).strip().startswith(fact.answer.strip())))
    engine.reset()
    return results


def probe(
    lane: Lane,
    haystacks: Sequence[Haystack],
    tokenizer: Tokenizer,
    first: Sequence[int] = (),
) -> list[Depth]:
    """Ask for every fact of every haystack; one row a depth and expectation."""
    counts: dict[tuple[float, Expected], list[bool]] = {}
    for haystack in haystacks:
        for fact, (expected, found) in zip(haystack.facts, ask(lane, haystack, tokenizer, first), strict=True):
            counts.setdefault((fact.depth, expected), []).append(found)
    return [Depth(depth, expected, len(found), sum(found)) for (depth, expected), found in sorted(counts.items())]


def _shifted(fact: Fact, by: int) -> Fact:
    return Fact(fact.depth, fact.question, fact.answer, fact.start + by, fact.stop + by)


def _answer(lane: Lane, question: Sequence[int], tokenizer: Tokenizer) -> str:
    """The greedy continuation."""
    output: list[int] = []
    logits = lane.append(question)
    for _ in range(ANSWER_TOKENS):
        output.append(int(logits[-1].argmax()))
        logits = lane.append(output[-1:])
    return tokenizer.decode(output)
