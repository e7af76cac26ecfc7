"""Evaluation: several caches in step, the divergence between them, needles, and a run that is stopped and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import measured_scales, open_test_engine
from helpers.fake_engine import FakeEngine, fake_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import InvalidOption
from edgekv.evaluate import checkpoint, stream_loss
from edgekv.evaluate.compare import Comparison, Lane, Text, blocks, divergence, score, set_log_softmax
from edgekv.evaluate.needle import Fact, Haystack, ask, bury, expectation, probe
from edgekv.evaluate.run import EvalOptions, buried, evaluate, pauses
from edgekv.evaluate.settings import Setting, parse_setting
from edgekv.generate import Timeline
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Window
from edgekv.text.tokenizer import Tokenizer

# Settings


def test_a_setting_is_read_and_written() -> None:
    setting = parse_setting("int8,granularity=head,context=512,sinks=0,method=mse,headroom=1.0")
    assert setting == Setting("int8", "head", 512, 0, method="mse", headroom=1.0)
    assert parse_setting(setting.name) == setting
    assert parse_setting("float").name == "float"


def test_a_setting_takes_the_rest_from_the_command() -> None:
    base = KVSpec(1024, "float", "tensor", sinks=8, stride=100)
    assert parse_setting("int4").kv(base) == KVSpec(1024, "int4", "tensor", sinks=8, stride=100)
    assert parse_setting("int8,context=512").kv(base) == KVSpec(512, "int8", "tensor", sinks=8, stride=64)


@pytest.mark.parametrize("text", ["int7", "int8,colour=red", "int8,sinks", "int8,sinks=many", "int8,headroom=x", ""])
def test_a_setting_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_setting(text)


# The text


@given(st.integers(2, 400), st.integers(0, 200).filter(lambda n: n != 1), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_steps_cover_the_text_once_and_respect_segments(tokens: int, segment: int, resumed: int) -> None:
    text = Text(tuple(range(tokens)), segment)
    steps = list(text.steps(0))
    assert [token for start, stop in steps for token in range(start, stop)] == list(range(tokens))
    size = segment or tokens
    assert all(start // size == (stop - 1) // size for start, stop in steps)
    after = steps[: min(resumed, len(steps))]
    begin = after[-1][1] if after else 0
    assert list(text.steps(begin)) == steps[len(after) :]


# Numbers


def test_the_divergence_is_that_of_torch() -> None:
    random = np.random.default_rng(0)
    p, q = (random.normal(size=(5, 1000)).astype(np.float32) * 3 for _ in range(2))
    exact = torch.log_softmax(torch.from_numpy(p).double(), -1).numpy()
    for logits in (p, q):
        set_log_softmax(logits)
    assert p == pytest.approx(exact, abs=2e-6)
    wanted = torch.nn.functional.kl_div(
        torch.from_numpy(q).double(), torch.from_numpy(p).double(), reduction="none", log_target=True
    )
    assert divergence(p, q) == pytest.approx(wanted.sum(-1).numpy(), rel=1e-5)
    assert divergence(p, p) == pytest.approx(np.zeros(5), abs=0)


def ids_of(count: int) -> list[int]:
    return np.random.default_rng(4).integers(0, 1000, count).tolist()  # type: ignore[no-any-return]


def open_lane(tiny_models: Any, name: str, ids: Sequence[int], kv: KVSpec) -> Lane:
    model = tiny_models.converted("llama-fp16")
    scales = None if kv.dtype == "float" else measured_scales(model, kv.dtype, kv.granularity, ids)
    return Lane(name, open_test_engine(model, kv, scales), scales)


@pytest.fixture
def lanes(tiny_models: Any) -> Any:
    ids = ids_of(300)
    made = [
        open_lane(tiny_models, "float", ids, KVSpec(128, "float")),
        open_lane(tiny_models, "int8", ids, KVSpec(128, "int8")),
        open_lane(tiny_models, "again", ids, KVSpec(128, "float")),
    ]
    yield made
    for lane in made:
        lane.engine.close()


def test_caches_in_step_are_what_each_is_alone(lanes: list[Lane]) -> None:
    reference, int8, again = lanes
    comparison = Comparison(Text(ids_of(300)), [int8, again], reference)
    assert comparison.run()
    alone = stream_loss(Timeline(reference.engine), ids_of(300))
    assert np.concatenate(reference.losses) == pytest.approx(alone.losses, abs=1e-5)
    assert score(reference, reference).evicted == alone.evicted > 100
    same = score(again, reference)
    assert (same.ratio, same.kl, same.top1) == (1.0, 0.0, 1.0)
    other = score(int8, reference)
    assert other.kl is not None
    assert 0 < other.kl < 1e-3
    assert other.tokens == 299
    assert int8.meter is not None
    assert all(0.001 < check.k_error < 0.02 for check in int8.meter.layers())
    assert len(blocks(np.concatenate(int8.losses), 100)) == 3


def test_segments_are_texts_of_their_own(lanes: list[Lane]) -> None:
    reference = lanes[0]
    comparison = Comparison(Text(ids_of(250), segment=100), [], reference)
    assert comparison.run()
    parts = [stream_loss(Timeline(reference.engine), ids_of(250)[i : i + 100]).losses for i in (0, 100, 200)]
    assert np.concatenate(reference.losses) == pytest.approx(np.concatenate(parts), abs=1e-5)
    assert len(np.concatenate(parts)) == comparison.text.scored


# Stopping


def test_a_stopped_run_goes_on_to_the_same_numbers(lanes: list[Lane], tmp_path: Path) -> None:
    """Stopped between two steps with evictions behind it; the lanes go on in a new run."""
    path, text = tmp_path / "run.npz", Text(ids_of(300))
    reference, int8, again = lanes
    whole = Comparison(text, [int8], reference)
    whole.run()
    expected, errors = score(int8, reference), int8.meter.sums.copy()  # type: ignore[union-attr]
    for lane in lanes:
        lane.engine.reset()

    first = Comparison(text, [Lane("int8", int8.engine, int8.scales)], Lane("float", reference.engine))
    pause = pauses(path, first, "model", lambda: first_asked(first))
    assert not first.run(pause)
    assert first.done == 192
    again.engine.reset()
    reference.engine.reset()
    int8.engine.reset()
    second = Comparison(text, [Lane("int8", int8.engine, int8.scales)], Lane("float", again.engine))
    assert second.run(pauses(path, second, "model", lambda: False))
    assert score(second.lanes[0], second.reference) == expected
    assert np.array_equal(second.lanes[0].meter.sums, errors)  # type: ignore[union-attr]


def first_asked(comparison: Comparison) -> bool:
    """Asked to stop during the third step."""
    return comparison.done >= 192


def test_another_runs_checkpoint_is_refused(lanes: list[Lane], tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    comparison = Comparison(Text(ids_of(80)), [lanes[1]], lanes[0])
    comparison.run(pauses(path, comparison, "model", lambda: True))
    other = Comparison(Text(ids_of(81)), [lanes[1]], lanes[0])
    with pytest.raises(InvalidOption, match="another model, text or settings"):
        pauses(path, other, "model", lambda: True)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InvalidOption, match="not a whole checkpoint"):
        checkpoint.load(path, comparison, checkpoint.run_key(comparison, "model"))


# Needles


class Copier(FakeEngine):
    """Continues with the token that followed where the latest tokens agree longest with earlier ones: a perfect reader
    of what its cache holds, and of nothing else."""

    def _logits(self, held: Sequence[int]) -> Any:
        longest, found = 0, 0
        for end in range(len(held) - 1):
            length = 0
            while length <= end and held[end - length] == held[-1 - length]:
                length += 1
            if length > longest:
                longest, found = length, held[end + 1]
        return np.where(np.arange(self.spec.vocab_size) == found, 9, 0).astype(np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(Path(__file__).parents[1] / "data" / "llama-fp16" / "tokenizer.json")


FILLER = "It was a bright cold day in spring, and the clocks of the town were striking. " * 300


def test_held_facts_are_found_and_evicted_ones_are_not(tokenizer: Tokenizer) -> None:
    kv = KVSpec(512, "float")
    lane = Lane("copier", Copier(kv, fake_spec(vocab_size=1024)))
    options = EvalOptions(needles=3)
    rows = probe(lane, buried(FILLER, tokenizer, kv.capacity, options), tokenizer)
    by_kind = {row.expected: row for row in rows}
    assert {"held", "evicted"} <= by_kind.keys()
    for row in rows:
        assert row.asked <= 3
        assert row.found == {"held": row.asked, "evicted": 0}.get(row.expected, row.found), row


def test_everything_is_held_in_a_large_cache(tokenizer: Tokenizer) -> None:
    lane = Lane("copier", Copier(KVSpec(4096, "float"), fake_spec(vocab_size=1024)))
    rows = probe(lane, buried(FILLER, tokenizer, 512, EvalOptions(needles=2)), tokenizer, first=[1])
    assert [(row.expected, row.found) for row in rows] == [("held", 2)] * 6


def test_facts_lie_where_they_are_said_to(tokenizer: Tokenizer) -> None:
    haystack = bury(FILLER, tokenizer, 400, (0.0, 0.5, 0.9), seed=1)
    for fact in haystack.facts:
        assert (
            tokenizer.decode(haystack.ids[fact.start : fact.stop]).strip() == f"{fact.question}{fact.answer}.".strip()
        )
    assert len({fact.question for fact in haystack.facts}) == 3
    assert bury(FILLER, tokenizer, 400, (0.0, 0.5, 0.9), seed=1) == haystack
    with pytest.raises(InvalidOption, match="needs 400"):
        bury("short", tokenizer, 400, (0.0,), seed=1)


@given(st.integers(64, 200), st.integers(0, 16), st.integers(0, 600), st.integers(1, 30), st.data())
@settings(max_examples=200, deadline=None)
def test_expectations_are_those_of_a_list_of_tokens(
    capacity: int, sinks: int, tokens: int, question: int, data: Any
) -> None:
    """Against a list from which the oldest are deleted when it is full."""
    start = data.draw(st.integers(0, max(tokens - 1, 0)))
    fact = Fact(0.5, "", "", start, start + 7)
    window = Window(capacity, capacity // 8, sinks).forecast(tokens)
    held: list[int] = []
    for token in range(tokens + question + 8):
        if len(held) == capacity:
            del held[sinks : sinks + capacity // 8]
        held.append(token)
    kept = len(set(held) & set(range(fact.start, fact.stop)))
    if fact.stop <= tokens:
        wanted = "held" if kept == 7 else "evicted" if kept == 0 else "cut"
        assert expectation(fact, window, question) == wanted


# The whole


def test_needles_and_scores_in_one_report(lanes: list[Lane], tokenizer: Tokenizer) -> None:
    options = EvalOptions(tokens=200, block=100, needles=1, needle_tokens=150)
    comparison = Comparison(Text(ids_of(201)), [lanes[1]], lanes[0])
    stacks: list[Haystack] = buried(FILLER, tokenizer, 128, options)
    report = evaluate(comparison, options, stacks, tokenizer, lambda done: False)
    assert report.complete
    reference, int8 = report.to_json()
    assert reference["ratio"] is None
    assert int8["cache"]["dtype"] == "int8"
    assert len(int8["layers"]) == 2
    assert sum(depth["asked"] for depth in int8["needles"]) == 6
    assert [len(lane["blocks"]) for lane in (reference, int8)] == [2, 2]


def test_questions_leave_the_cache_as_they_found_it(tokenizer: Tokenizer) -> None:
    lane = Lane("copier", Copier(KVSpec(256, "float"), fake_spec(vocab_size=1024)))
    haystack = bury(FILLER, tokenizer, 200, (0.5, 0.9), seed=0)
    assert ask(lane, haystack, tokenizer) == ask(lane, haystack, tokenizer)


@pytest.mark.parametrize("change", [{"tokens": 0}, {"segment": 1}, {"block": 0}, {"needles": -1}])
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        EvalOptions(**change)
