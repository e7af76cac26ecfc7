"""Sampling against a plain float64 reference and against transformers' own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgekv import sampling
from edgekv.errors import InvalidOption
from edgekv.sampling import Sampler, SamplingOptions, softmax

GRID = 4000


def logits_of(seed: int, size: int = 24, spread: float = 2.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def reference(logits: Any, options: SamplingOptions) -> Any:
    """The distribution in the words of the documentation: temperature, top-k, top-p, min-p, by a full sort."""
    x = np.asarray(logits, np.float64) / options.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if options.top_k:
        p[order[options.top_k :]] = 0
        p /= p.sum()
    kept, total = np.zeros(len(p), bool), 0.0
    for token in order:
        if total >= options.top_p and options.top_p < 1:
            break
        kept[token] = True
        total += p[token]
    p = np.where(kept, p, 0)
    p = np.where(p >= options.min_p * p.max(), p, 0)
    return p / p.sum()


class Grid:
    """A random generator that goes through 0 .. 1 evenly, so that frequencies are exact."""

    def __init__(self) -> None:
        self.step = 0

    def random(self) -> float:
        self.step += 1
        return (self.step - 0.5) / GRID


def frequencies(logits: Any, options: SamplingOptions, monkeypatch: pytest.MonkeyPatch, recent: Any = ()) -> Any:
    """How often each token is chosen over an even grid of random numbers: the distribution, to one part in GRID."""
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Grid())
        sampler = Sampler(options)
    chosen = [sampler(logits, recent) for _ in range(GRID)]
    return np.bincount(chosen, minlength=len(logits)) / GRID


OPTIONS = [
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.5, "top_p": 1.0},
    {"temperature": 2.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 999},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 9, "min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 3},
]


@pytest.mark.parametrize("values", OPTIONS, ids=str)
def test_the_distribution(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Support and probabilities are those of the plain reference."""
    options, logits = SamplingOptions(**values), logits_of(1)
    wanted, found = reference(logits, options), frequencies(logits, options, monkeypatch)
    assert set(np.flatnonzero(wanted > 1 / GRID)) <= set(np.flatnonzero(found)) <= set(np.flatnonzero(wanted))
    np.testing.assert_allclose(found, wanted, atol=1.5 / GRID)


@pytest.mark.parametrize("values", OPTIONS[:5] + OPTIONS[6:7] + OPTIONS[8:9] + OPTIONS[10:], ids=str)
def test_the_distribution_is_transformers(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same processors in the same order as transformers runs them."""
    options, logits, recent = SamplingOptions(**values, repetition_penalty=1.4), logits_of(2), [3, 5, 5, 11]
    scores, ids = torch.from_numpy(logits)[None], torch.tensor([recent])
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(options.temperature)]
    steps += [TopKLogitsWarper(options.top_k)] if options.top_k else []
    steps += [TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    steps += [MinPLogitsWarper(options.min_p)] if options.min_p else []
    for step in steps:
        scores = step(ids, scores)
    wanted = scores.softmax(-1)[0].numpy()
    np.testing.assert_allclose(frequencies(logits, options, monkeypatch, recent), wanted, atol=1.5 / GRID)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), temperature=st.floats(0.05, 5), top_k=st.integers(0, 40), top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)  # fmt: skip
def test_only_allowed_tokens_are_chosen(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Property: whatever the options, tokens come from the reference's support (its border within rounding)."""
    logits = logits_of(seed)
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    widened = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=max(0.0, min_p - 1e-5)
    )
    allowed = set(np.flatnonzero(reference(logits, widened)))
    sampler = Sampler(options)
    assert {sampler(logits) for _ in range(30)} <= allowed


def test_frequencies_of_the_real_generator() -> None:
    """Chi-square over 20,000 draws: below the 99.99 % point of 11 degrees of freedom (37.4), seed fixed."""
    logits, options = logits_of(3, size=12, spread=1.0), SamplingOptions(temperature=1.0, top_p=1.0, seed=5)
    sampler, wanted = Sampler(options), reference(logits, options) * 20_000
    found = np.bincount([sampler(logits) for _ in range(20_000)], minlength=12)
    assert float(((found - wanted) ** 2 / wanted).sum()) < 37.4


def test_greedy() -> None:
    """Temperature 0 is the most likely token, whatever else is set; so is one that float32 cannot tell from it."""
    logits = logits_of(4)
    best = int(np.argmax(logits))
    for values in ({}, {"top_p": 0.1, "top_k": 3, "min_p": 0.5}, {"seed": 1}):
        assert Sampler(SamplingOptions(temperature=0, **values))(logits) == best
    for temperature in (1e-300, 1e-40, 1e-6):
        assert Sampler(SamplingOptions(temperature=temperature, seed=0))(logits) == best
    assert Sampler(SamplingOptions(temperature=1e-4, seed=0))(logits) == best


def test_same_seed_same_tokens() -> None:
    """One seed, one stream; another seed, another; none, a different one every time."""

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=1.5, seed=seed))
        return [sampler(logits_of(step, size=500)) for step in range(40)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)
    assert draw(0) == draw(0)


@pytest.mark.parametrize(
    "values",
    [{"top_p": 0.95}, {"top_p": 0.5}, {"top_p": 1.0}, {"top_p": 0.9, "min_p": 0.01}, {"top_p": 1.0, "top_k": 600},
     {"top_p": 0.8, "top_k": 40}, {"top_p": 0.499}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_the_partial_sort_changes_nothing(
    values: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorting only the likely tokens gives the very same tokens for the same seed, also where many tie: logits are
    rounded to quarters, and with no spread at all they are all alike."""
    options = SamplingOptions(temperature=1.0, seed=11, **values)
    inputs = [np.round(logits_of(seed, size=1024, spread=spread) * 4) / 4 for seed in range(40)]
    partial = Sampler(options)
    found = [partial(logits) for logits in inputs]
    monkeypatch.setattr(sampling, "_PARTIAL", 1 << 20)
    monkeypatch.setattr(
        sampling,
        "_most_likely",
        lambda p, top_k, top_p: np.argsort(-p, kind="stable")[: top_k or len(p)],
    )
    whole = Sampler(options)
    assert found == [whole(logits) for logits in inputs]


# ---- penalty ---------------------------------------------------------------------------------------------------------


def test_repetition_penalty_formula() -> None:
    """CTRL: positive logits are divided, negative multiplied, once each however often seen; the input stays."""
    logits = np.array([2.0, -1.0, 1.5, 0.0, 1.9], np.float32)
    before = logits.copy()
    greedy = Sampler(SamplingOptions(temperature=0, repetition_penalty=1.5))
    assert greedy(logits) == 0
    assert greedy(logits, [0, 0, 0]) == 4  # 2 / 1.5 = 1.33 < 1.5 < 1.9
    assert greedy(logits, [0, 4]) == 2  # 1.33 and 1.27 against 1.5
    assert greedy(logits, [0, 4, 2]) == 0  # 1.33, 1.27, 1.0
    np.testing.assert_array_equal(logits, before)
    negative = np.array([-1.0, -1.2], np.float32)
    assert greedy(negative, [0]) == 1  # -1.5 < -1.2


def test_penalty_window() -> None:
    """Only the last tokens count; a window of 0 looks at none."""
    logits = np.array([2.0, 1.9], np.float32)

    def choose(window: int, recent: list[int]) -> int:
        return Sampler(SamplingOptions(temperature=0, repetition_penalty=1.5, penalty_window=window))(logits, recent)

    assert choose(2, [0, 1, 1]) == 0  # 0 has left the window
    assert choose(3, [0, 0, 0]) == 1
    assert choose(1, [1, 0]) == 1
    assert choose(1, [0, 1]) == 0
    assert choose(0, [0, 0, 0]) == 0
    assert choose(256, []) == 0


def test_softmax() -> None:
    """Sums to one, survives large logits, works along the last axis."""
    wide = np.array([[1e4, 1e4 - 1, -1e4], [0, 0, 0]], np.float32)
    found = softmax(wide)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(found[1], 1 / 3, rtol=1e-6)
    assert found[0, 0] / found[0, 1] == pytest.approx(np.e, rel=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1}, {"temperature": 101}, {"temperature": float("nan")}, {"temperature": "hot"},
        {"top_k": -1}, {"top_k": 2.5}, {"top_p": 0}, {"top_p": -0.1}, {"top_p": 1.01}, {"top_p": float("nan")},
        {"min_p": -0.01}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
        {"penalty_window": -1}, {"penalty_window": 1.5}, {"seed": -1}, {"seed": 1.5}, {"seed": "x"},
        {"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": 2.5}, {"stop": "END"}, {"stop": ("",)},
        {"stop": ("a", "")},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    """When the options are made, by name, and not in the middle of an answer."""
    with pytest.raises(InvalidOption, match=next(iter(values))):
        SamplingOptions(**values)


def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    """The smallest top_p vanishes in its product with what top_k left."""
    options = SamplingOptions(temperature=1.0, top_p=5e-324, top_k=4)
    logits = logits_of(3)
    assert Sampler(options, random=np.random.default_rng(0))(logits, []) == int(logits.argmax())


def test_extreme_options_are_possible() -> None:
    """What is allowed also runs."""
    logits = logits_of(6, size=700)
    for values in ({"temperature": 100}, {"top_k": 1 << 31}, {"min_p": 1.0}, {"top_p": 1e-9}, {"max_new_tokens": 1},
                   {"repetition_penalty": 100.0}, {"stop": ("a", "bc")}):  # fmt: skip
        assert 0 <= Sampler(SamplingOptions(**values))(logits, [1, 2]) < 700
