"""Answers over a fake engine: events, stopping at any of them, and what the cache holds afterwards.

The oracle is plain lists again: `Held` keeps the numbers of the tokens in the cache; the fake engine's rows say at
which distance each stands. In-cache positions mean: slot i stands `length - i` before the next token, always.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chat import TEMPLATE
from helpers.fake_engine import EOS, FakeEngine, fake_spec
from helpers.schedule import leaving
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.chat import Chat, ChatRequest
from edgekv.engines.base import Engine
from edgekv.errors import EngineError
from edgekv.generate import (
    PREFILL_STEP,
    Event,
    Evicted,
    Finished,
    PrefillProgress,
    Request,
    TextDelta,
    Timeline,
    answer,
)
from edgekv.kv.spec import KVSpec
from edgekv.sampling import SamplingOptions
from edgekv.session import Session
from edgekv.text.prompt import ChatFormat
from edgekv.text.template import ChatTemplate, Message
from edgekv.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_file(Path(__file__).parents[1] / "data" / "llama-fp16" / "tokenizer.json")
SPEC = fake_spec(vocab_size=1024)
GREEDY = SamplingOptions(temperature=0.0)
SAID = "Héllo wörld 😀, and so on: one two three."


def says(text: str, **kv: Any) -> FakeEngine:
    """An engine that answers every prompt with this text."""
    return FakeEngine(KVSpec(**({"capacity": 1024, "sinks": 4} | kv)), SPEC, TOKENIZER.encode(text))


def request(count: int, seed: int = 0, **changes: Any) -> Request:
    """A prompt of `count` random tokens."""
    ids = tuple(np.random.default_rng(seed).integers(3, 1024, count).tolist())
    return Request(
        **({"tokens": ids, "turn_starts": (), "pinned": 4, "eos_ids": frozenset({EOS}), "room": None} | changes)
    )


def run(engine: FakeEngine, prompt: Request, sampling: SamplingOptions = GREEDY) -> tuple[list[Event], Timeline]:
    timeline = Timeline(engine)
    return list(answer(timeline, TOKENIZER, prompt, sampling)), timeline


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def assert_in_place(engine: FakeEngine) -> None:
    """Every slot stands where its number says: positions in the cache."""
    assert engine.distances == list(range(engine.length, 0, -1))


def test_the_fake_is_an_engine() -> None:
    """What the other tests rest on: the protocol, and logits that depend on content and place."""
    engine = FakeEngine(KVSpec(64))
    assert isinstance(engine, Engine)
    first = engine.forward([3, 4, 5], all_logits=True)
    engine.truncate(0)
    np.testing.assert_array_equal(np.stack([engine.forward([token]) for token in (3, 4, 5)]), first)
    engine.truncate(1)
    assert not np.array_equal(engine.forward([5]), first[-1])


def test_events_of_an_answer() -> None:
    """Progress while a long prompt is read, pieces of text, Finished at the end and nothing after it."""
    prompt = request(3 * PREFILL_STEP + 5, room=100)
    events, timeline = run(says(SAID, capacity=2048), prompt)
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [(event.done, event.total) for event in progress] == [(n * PREFILL_STEP, 773) for n in (1, 2, 3)]
    assert text_of(events) == SAID
    (finished,) = [event for event in events if isinstance(event, Finished)]
    assert events[-1] == finished
    assert (finished.text, finished.finish_reason) == (SAID, "stop")
    said = TOKENIZER.encode(SAID)
    usage = finished.usage
    assert (usage.input_tokens, usage.reused_tokens, usage.output_tokens) == (773, 0, len(said))
    assert usage.evicted_tokens == 0
    assert usage.prefill_s > 0
    assert usage.decode_s > 0
    assert timeline.tokens == [*prompt.tokens, *said], "the end-of-text token is not kept"


@pytest.mark.parametrize("eos", [2, 7, 9])
def test_each_end_of_text_id_ends_the_answer(eos: int) -> None:
    """Case C21: the union of all of them; none is shown or kept."""
    engine = FakeEngine(KVSpec(1024), fake_spec(1024, eos_ids=(eos,)), TOKENIZER.encode("abc"))
    events, timeline = run(engine, request(10, eos_ids=frozenset({2, 7, 9})))
    assert (text_of(events), events[-1].finish_reason) == ("abc", "stop")  # type: ignore[union-attr]
    assert len(timeline.tokens) == 13
    ids = TOKENIZER.encode("abcdef")
    engine = FakeEngine(KVSpec(1024), SPEC, [*ids[:2], eos, *ids[2:]])
    events, _ = run(engine, request(10, eos_ids=frozenset({2, 7, 9})))
    assert text_of(events) == "ab"


def test_an_answer_may_be_empty() -> None:
    """EOS at once: no text, and the prompt is kept."""
    events, timeline = run(says(""), request(10))
    assert (text_of(events), events[-1].usage.output_tokens) == ("", 0)  # type: ignore[union-attr]
    assert len(timeline.tokens) == 10


@pytest.mark.parametrize("stop", [("wörld",), ("so on", "two"), (" ",), ("H",), ("three.",), ("😀",), ("nothing",)])
def test_stop_strings(stop: tuple[str, ...]) -> None:
    """Case C22: the text ends before the first of them, which never leaks; the cache holds no token past the text."""
    places = [SAID.find(text) for text in stop if text in SAID]
    wanted = SAID[: min(places)] if places else SAID
    engine, prompt = says(SAID), request(10)
    events, timeline = run(engine, prompt, SamplingOptions(temperature=0.0, stop=stop))
    assert (text_of(events), events[-1].text) == (wanted, wanted)  # type: ignore[union-attr]
    assert events[-1].finish_reason == "stop"  # type: ignore[union-attr]
    assert wanted.startswith(TOKENIZER.decode(timeline.tokens[10:]))
    assert len(timeline.tokens) - 10 == len(TOKENIZER.encode(wanted))


@pytest.mark.parametrize(("most", "room", "count"), [(1, None, 1), (7, None, 7), (None, 5, 5), (9, 3, 3), (3, 9, 3)])
def test_limits(most: int | None, room: int | None, count: int) -> None:
    """Case C02: exactly as many tokens as allowed, by the caller or by the room; the reason says so."""
    events, timeline = run(says(SAID), request(10, room=room), SamplingOptions(temperature=0.0, max_new_tokens=most))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage.output_tokens) == ("length", count)
    assert text_of(events) == TOKENIZER.decode(TOKENIZER.encode(SAID)[:count])
    assert len(timeline.tokens) <= 10 + count


def test_the_last_slot_is_used() -> None:
    """Case C02: prompt and answer fill the cache to the last slot without an eviction."""
    engine = FakeEngine(KVSpec(64), SPEC)
    events, _ = run(engine, request(40, room=24, eos_ids=frozenset()), GREEDY)
    assert events[-1].usage.output_tokens == 24  # type: ignore[union-attr]
    assert engine.evicted == 0


def interrupted_at(index: int, timeline: Timeline, prompt: Request, sampling: SamplingOptions) -> list[Event]:
    """The events up to number `index`, after which the consumer stops."""
    events: list[Event] = []
    stream = answer(timeline, TOKENIZER, prompt, sampling)
    for event in stream:
        events.append(event)
        if len(events) == index + 1:
            break
    stream.close()  # type: ignore[attr-defined]
    return events


@pytest.mark.parametrize("stop", [(), ("three. four",)])
@pytest.mark.parametrize(("capacity", "length"), [(2048, 2 * PREFILL_STEP + 7), (64, 50), (64, 200)])
def test_stopping_at_every_event(capacity: int, length: int, stop: tuple[str, ...]) -> None:
    """Case C12: whenever the consumer stops, the cache holds exactly what was shown, and the next turn goes on from it.

    With and without evictions while reading and answering; the text has characters of several tokens."""
    prompt, sampling = request(length), SamplingOptions(temperature=0.0, stop=stop)
    events, _ = run(says(SAID, capacity=capacity), prompt, sampling)
    for index in range(len(events)):
        engine = says(SAID, capacity=capacity)
        timeline = Timeline(engine)
        seen = interrupted_at(index, timeline, prompt, sampling)
        held = timeline.tokens
        if isinstance(seen[-1], PrefillProgress):
            assert held == list(prompt.tokens[: seen[-1].done])
        assert held[:length] == list(prompt.tokens[: len(held)])
        shown = TOKENIZER.encode(text_of(seen))
        said = held[length:]
        assert said == shown[: len(said)]
        assert len(text_of(seen)) - len(TOKENIZER.decode(said)) <= 1, (
            "all but the newest character, whose last token runs when the next event is asked for"
        )
        assert_in_place(engine)
        following = Request((*held, 50, 51, 52), (), 4, frozenset({EOS}), None)
        last = list(answer(timeline, TOKENIZER, following, GREEDY))[-1]
        assert isinstance(last, Finished)
        assert last.usage.reused_tokens == len(held), "everything that was shown is used again"
        assert last.text == SAID
        assert_in_place(engine)


def test_an_exception_of_the_consumer_settles_too() -> None:
    """Thrown into the generator where it waits: the cache is left as after a close."""
    timeline = Timeline(says(SAID))
    stream = answer(timeline, TOKENIZER, request(10), GREEDY)
    shown = next(stream).text + next(stream).text  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert TOKENIZER.decode(timeline.tokens[10:]) == shown[:-1], "all but the newest character, which had not run whole"


@dataclass
class Held:
    """The list model of a timeline: the numbers of the tokens in the cache, and all tokens that have passed."""

    capacity: int
    stride: int
    pinned: int
    held: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    @property
    def evicted(self) -> int:
        return len(self.passed) - len(self.held)

    def rewind(self, tokens: Sequence[int], pinned: int) -> int:
        """Returns how many tokens of the prompt are kept."""
        same = 0
        while same < min(len(self.passed), len(tokens) - 1) and self.passed[same] == tokens[same]:
            same += 1
        if self.evicted and (pinned != self.pinned or set(range(self.pinned + self.evicted)) - set(range(same))):
            same = 0  # what it lacks is gone
        self.held = [number for number in self.held if number < same]
        if not self.held:
            same = 0
        self.passed, self.pinned = self.passed[:same], pinned
        return same

    def append(self, tokens: Sequence[int], turns: Sequence[int]) -> None:
        for token in tokens:
            gone = leaving(self.held, self.capacity, self.stride, self.pinned, turns)
            self.held = [*(number for number in self.held if number not in gone), len(self.passed)]
            self.passed.append(token)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_timelines_equal_lists(data: st.DataObject) -> None:
    """Cases C07, C08, C12: prompts that go on from, edit or replace what is cached, before and after evictions.

    After each the engine holds the tokens of the list model in their places, `tokens` is all that has passed, `rewind`
    tells how much was kept, and `reusable` had foretold it."""
    stride = data.draw(st.sampled_from([1, 8, 20, 48]))
    sinks = data.draw(st.sampled_from([0, 4, 16]))
    engine = FakeEngine(KVSpec(64, sinks=sinks, stride=stride), SPEC)
    timeline, model = Timeline(engine), Held(64, stride, sinks)
    for _ in range(data.draw(st.integers(1, 6))):
        borders = (0, model.evicted, model.evicted + model.pinned, len(model.passed))
        keep = data.draw(st.integers(0, len(model.passed)) | st.sampled_from(borders))
        count, seed = data.draw(st.integers(1, 150)), data.draw(st.integers(0, 3))
        tokens = [*model.passed[:keep], *np.random.default_rng(seed).integers(3, 9, count).tolist()]
        pinned = max(sinks, data.draw(st.sampled_from([0, 0, 0, 9, 16])))
        turns = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=12)))
        foretold = timeline.reusable(tokens, pinned)
        kept = timeline.rewind(tokens, pinned)
        whole = model.evicted == 0
        possible = model.rewind(tokens, pinned)
        assert kept == possible or (kept == 0 and not whole), "reads again only where tokens have left"
        if not kept:
            model.held, model.passed = [], []
        assert foretold.length + foretold.evicted == kept
        assert (engine.length, engine.evicted) == (foretold.length, foretold.evicted)
        _, evicted = timeline.append(tokens[kept:], turns)
        before = model.evicted
        model.append(tokens[kept:], turns)
        assert evicted == model.evicted - before
        assert list(engine.tokens) == [tokens[number] for number in model.held]
        assert timeline.tokens == model.passed == tokens
        assert (timeline.window.length, timeline.window.evicted) == (len(model.held), model.evicted)
        assert_in_place(engine)


@pytest.mark.parametrize("sinks", [0, 4])
def test_going_back_to_the_oldest_token_held(sinks: int) -> None:
    """Case C01: the shared prefix ends where the window begins, so nothing but the pinned is left of it."""
    engine = FakeEngine(KVSpec(64, sinks=sinks, stride=8), SPEC)
    timeline, ids = Timeline(engine), list(range(3, 73))
    timeline.append(ids)
    tokens = [*ids[: sinks + engine.evicted], 900, 901, 902]
    kept = timeline.rewind(tokens, sinks)
    timeline.append(tokens[kept:])
    assert timeline.tokens == tokens
    assert_in_place(engine)


@settings(max_examples=100, deadline=None)
@given(before=st.integers(65, 200), keep=st.integers(0, 200), more=st.integers(1, 30))
def test_a_prompt_that_fits_is_held_whole(before: int, keep: int, more: int) -> None:
    """Cases C01, C12: after an undo behind evictions, what left must be read again if there is room for it."""
    engine = FakeEngine(KVSpec(64, sinks=4, stride=8), SPEC)
    timeline = Timeline(engine)
    ids = [3 + number % 500 for number in range(before)]
    timeline.append(ids)
    tokens = [*ids[: min(keep, before)], *range(600, 600 + more)]
    timeline.append(tokens[timeline.rewind(tokens, 4) :])
    if len(tokens) <= 64:
        assert list(engine.tokens) == tokens


def test_evictions_while_answering() -> None:
    """Case C04: an answer three times the capacity; every eviction is an event, and the totals agree."""
    engine = FakeEngine(KVSpec(64, sinks=4, stride=8), SPEC)
    sampling = SamplingOptions(temperature=0.0, max_new_tokens=200)
    prompt = request(60, pinned=12, eos_ids=frozenset())
    events, timeline = run(engine, prompt, sampling)
    gone = [event for event in events if isinstance(event, Evicted)]
    assert [event.total for event in gone] == np.cumsum([event.tokens for event in gone]).tolist()
    assert gone[-1].total == engine.evicted == events[-1].usage.evicted_tokens > 2 * 64  # type: ignore[union-attr]
    assert engine.tokens[:12] == list(prompt.tokens[:12])
    assert timeline.tokens[:60] == list(prompt.tokens)
    assert_in_place(engine)


def test_seeds() -> None:
    """Same seed, same answer; another or none, another."""

    def said(seed: int | None) -> str:
        sampling = SamplingOptions(temperature=1.5, seed=seed, max_new_tokens=20)
        return text_of(run(FakeEngine(KVSpec(64), SPEC), request(10, eos_ids=frozenset()), sampling)[0])

    assert said(1) == said(1)
    assert len({said(1), said(2), said(None), said(None)}) == 4


class Fault:
    """Raises at one backend run."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error, self.struck = at, error, False

    def __call__(self, run: int) -> None:
        if run == self.at:
            self.struck = True
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
@pytest.mark.parametrize("length", [30, 200])
def test_a_fault_in_any_run_heals(length: int, error: type[BaseException]) -> None:
    """Case C12: Ctrl-C or a backend error inside any forward or evict, while reading or answering. What is remembered
    afterwards is true, and the same prompt again gives what it gives in a fresh engine."""
    prompt = request(length, turn_starts=(0, 21, 70, 90, 130, 171))
    wanted = text_of(run(says(SAID, capacity=64), prompt)[0])
    for at in range(200):
        engine = says(SAID, capacity=64)
        engine.fault = fault = Fault(at, error)
        timeline = Timeline(engine)
        if not consume(answer(timeline, TOKENIZER, prompt, GREEDY), error):
            break
        assert fault.struck
        held = timeline.tokens
        assert held == [*prompt.tokens, *TOKENIZER.encode(SAID)][: len(held)]
        assert len(held) == engine.length + engine.evicted
        assert_in_place(engine)
        assert text_of(list(answer(timeline, TOKENIZER, prompt, GREEDY))) == wanted
        assert_in_place(engine)
    assert at > 20


def consume(events: Iterator[Event], error: type[BaseException]) -> bool:
    """Run to the end; whether the error came."""
    try:
        list(events)
    except error:
        return True
    return False


class _Interrupting(array):  # type: ignore[type-arg]
    """An array whose next growth is interrupted before or after it has happened."""

    grows = True

    def extend(self, tokens: Any) -> None:
        if self.grows:
            super().extend(tokens)
        raise KeyboardInterrupt


@pytest.mark.parametrize("noted", [False, True])
def test_ctrl_c_between_two_statements_of_an_eviction(noted: bool) -> None:
    """The engine has moved, and the timeline has or has not noted who left: if not, that is seen, and nothing is
    trusted."""
    engine = FakeEngine(KVSpec(64, sinks=4, stride=8), SPEC)
    timeline, ids = Timeline(engine), list(range(3, 67))
    timeline.append(ids)
    timeline._gone = _Interrupting("i")
    timeline._gone.grows = noted
    with pytest.raises(KeyboardInterrupt):
        timeline.append([5])
    assert timeline.tokens == ([*ids, 5] if noted else [])
    assert len(timeline.tokens) == engine.length + engine.evicted
    kept = timeline.rewind([*ids, 5], 4)
    timeline.append([*ids, 5][kept:])
    assert timeline.tokens == [*ids, 5]
    assert_in_place(engine)


def chat_over(engine: FakeEngine) -> Chat:
    return Chat(engine, TOKENIZER, ChatFormat(TOKENIZER, ChatTemplate(TEMPLATE, bos_token="<s>", eos_token="</s>")))


QUESTION = st.text("abcdefghij ", min_size=1, max_size=40)
REPLY = st.text("abcdefghij ", min_size=1, max_size=120)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(QUESTION, REPLY), min_size=2, max_size=5), st.sampled_from([1, 8, 16, 24]))
def test_a_warm_turn_equals_a_restart(turns: list[tuple[str, str]], stride: int) -> None:
    """Cases C07, C12: a conversation kept in the cache and one read at once by a new process hold the same tokens.

    The last turn's prompt has been read in both when they are compared."""
    kv = KVSpec(64, sinks=4, stride=stride)
    warm = FakeEngine(kv, SPEC)
    session = Session(chat_over(warm), sampling=GREEDY)
    for question, reply in turns[:-1]:
        warm.answer_ids = TOKENIZER.encode(reply)
        list(session.send(question, SamplingOptions(temperature=0.0, max_new_tokens=200)))
        assert session.messages[-1]["content"] == reply
    messages = [*session.messages, Message(role="user", content=turns[-1][0])]
    warm.answer_ids = []
    list(session.send(turns[-1][0]))
    cold = FakeEngine(kv, SPEC, [])
    list(chat_over(cold).stream(ChatRequest(messages, GREEDY, "window")))
    assert list(cold.tokens) == list(warm.tokens)
    assert cold.evicted == warm.evicted


def test_evictions_say_which_turns_they_are_from() -> None:
    """Every event names the messages that lose tokens, by the test's own count of who is where; Usage has them all."""
    starts = (0, 4, 21, 40, 75, 90, 118)
    engine = FakeEngine(KVSpec(64, sinks=4, stride=8), SPEC)
    sampling = SamplingOptions(temperature=0.0, max_new_tokens=90)
    prompt = request(120, turn_starts=starts, eos_ids=frozenset())
    events, timeline = run(engine, prompt, sampling)
    oldest, seen = 4, set()
    for event in events:
        if isinstance(event, Evicted):
            owners = {
                max(i for i, start in enumerate(starts) if start <= n) for n in range(oldest, oldest + event.tokens)
            }
            assert set(event.turns) == owners
            oldest, seen = oldest + event.tokens, seen | owners
    assert events[-1].usage.evicted_turns == tuple(sorted(seen))  # type: ignore[union-attr]
    assert seen == {1, 2, 3, 4, 5, 6}
    assert oldest == 4 + timeline.window.evicted


class Clock:
    """Time that a test moves: a step at every look."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize("limit_s", [0.5, 2.5, 4.5, 9.5, 30.5])
def test_a_time_limit_ends_an_answer_anywhere(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """While the prompt is read or between two tokens: the reason is "time", and the cache holds what was shown."""
    monkeypatch.setattr("edgekv.generate.time.perf_counter", Clock(1.0))
    prompt = request(3 * PREFILL_STEP + 5)
    events, timeline = run(says(SAID, capacity=2048), prompt, SamplingOptions(temperature=0.0, max_seconds=limit_s))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "time"
    assert finished.text == text_of(events) == SAID[: len(finished.text)]
    assert (finished.text == "") == (limit_s < 4)
    assert finished.usage.prefill_s > min(limit_s, 4), "reading took time, whether or not it came to a token"
    assert (finished.usage.decode_s > 0) == (finished.text != "")
    assert timeline.tokens == [*prompt.tokens, *TOKENIZER.encode(SAID)][: len(timeline.tokens)]
    assert (len(timeline.tokens) >= len(prompt.tokens)) == (limit_s > 4)


def test_an_edit_costs_at_most_a_stride_of_context() -> None:
    """Behind evictions: after an undo the next prompt finds a cache that is at most one stride emptier than an eviction
    leaves it, or is read afresh; a retry of the same size reads nothing but itself."""
    kv = KVSpec(640, sinks=4, stride=80)
    ids = [3 + number % 500 for number in range(1500)]
    for keep in (900, 1050, 1200, 1350, 1450):
        engine = FakeEngine(kv, SPEC)
        timeline = Timeline(engine)
        timeline.append(ids)
        tokens = [*ids[:keep], *range(600, 610)]
        kept = timeline.rewind(tokens, 4)
        timeline.append(tokens[kept:])
        assert kept in (0, keep)
        assert engine.length >= kv.capacity - 3 * kv.stride
        if keep == 1450:
            assert kept == keep
