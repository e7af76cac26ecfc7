"""A session is asked for something else while its answer's stream is still held: first the answer ends, for good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.chat import make_chat_model

import edgekv
from edgekv.chat import Events
from edgekv.generate import TextDelta
from edgekv.model.converted import ConvertedModel
from edgekv.session import Session


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def runtime(chat_model: ConvertedModel) -> Iterator[edgekv.Runtime]:
    """It, loaded."""
    with edgekv.load(chat_model.folder, memory="4GiB", context=512, threads=1) as loaded:
        yield loaded


@pytest.fixture
def session(runtime: edgekv.Runtime) -> Session:
    """A session with one exchange, Q1."""
    talk = runtime.session(system="Be brief.", max_new_tokens=40)
    list(talk.send("Q1"))
    return talk


def begin(session: Session, text: str = "Q2") -> tuple[Events, str]:
    """A stream that has been read until something was shown, and that."""
    events = session.send(text)
    return events, next(event.text for event in events if isinstance(event, TextDelta))


def said(session: Session) -> list[str]:
    """What the user has said, as the session remembers it."""
    return [message["content"] for message in session.messages if message["role"] == "user"]


def test_undo_takes_the_unfinished_exchange_back(session: Session) -> None:
    """And nothing brings it back when the stream is dropped."""
    events, _ = begin(session)
    assert session.undo()
    assert said(session) == ["Q1"]
    assert list(events) == []
    del events
    assert said(session) == ["Q1"]


@pytest.mark.parametrize("read", [0, 1])
def test_undo_of_an_answer_that_has_shown_nothing(session: Session, read: int) -> None:
    """The question goes, and the exchange before it stays."""
    events = session.send("many words " * 25)  # more than one step reads
    for _ in range(read):
        assert not isinstance(next(events), TextDelta)
    assert session.undo()
    assert said(session) == ["Q1"]
    del events
    assert session.undo()
    assert said(session) == []


def test_reset_forgets_the_unfinished_answer(session: Session) -> None:
    """Dropping its stream brings nothing back."""
    events, _ = begin(session)
    session.reset()
    del events
    assert [message["role"] for message in session.messages] == ["system"]


def test_the_next_question_keeps_what_was_shown(session: Session) -> None:
    """The variable that held the stream is given the next one, as in a loop."""
    events, shown = begin(session)
    events = session.send("Q3")
    assert said(session) == ["Q1", "Q2"]
    assert session.messages[-1] == {"role": "assistant", "content": shown}
    list(events)
    assert said(session) == ["Q1", "Q2", "Q3"]
    assert session.messages[-3] == {"role": "assistant", "content": shown}


def test_load_is_not_undone(session: Session, tmp_path: Path) -> None:
    """What was loaded stays when the stream is dropped; a load that is refused ends nothing."""
    session.save(tmp_path / "talk")
    saved = list(session.messages)
    events, _ = begin(session)
    with pytest.raises(edgekv.SessionError):
        session.load(tmp_path / "nothing")
    assert next(events)
    session.load(tmp_path / "talk")
    del events
    assert session.messages == saved


def test_a_save_has_what_was_shown(session: Session, runtime: edgekv.Runtime, tmp_path: Path) -> None:
    """The file and the session have the same words."""
    events, shown = begin(session)
    session.save(tmp_path / "talk")
    other = runtime.session()
    other.load(tmp_path / "talk")
    del events
    assert other.messages == session.messages
    assert other.messages[-1] == {"role": "assistant", "content": shown}


def test_a_new_system_prompt_stays(session: Session) -> None:
    """And so does what was shown before it."""
    events, shown = begin(session)
    session.set_system("Be long.")
    del events
    assert session.system == "Be long."
    assert session.messages[-1] == {"role": "assistant", "content": shown}


def test_a_stream_that_was_closed_or_dropped_is_not_in_the_way(session: Session) -> None:
    """Closed before its first event it gives its turn back, though it is still held."""
    events = session.send("Q2")
    events.close()
    other: list[bool] = []
    thread = threading.Thread(target=lambda: other.append(bool(list(session.send("Q3")))), daemon=True)
    thread.start()
    thread.join(20)
    assert other == [True]
    assert list(events) == []
    assert said(session) == ["Q1", "Q3"]


@pytest.mark.parametrize("ask", [lambda s: s.send("Q3"), Session.undo, Session.reset])
def test_while_another_thread_is_in_the_answer(
    session: Session, runtime: edgekv.Runtime, ask: Callable[[Session], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That cannot be ended: a sentence says so, and the session is as it was."""
    engine = runtime.chat_state.timeline.engine
    forward, inside, go = engine.forward, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        inside.set()
        go.wait(20)
        return forward(*arguments, **options)

    events, _ = begin(session)
    monkeypatch.setattr(engine, "forward", slow)
    thread = threading.Thread(target=lambda: list(events))
    thread.start()
    inside.wait(20)
    before = list(session.messages)
    try:
        with pytest.raises(edgekv.InvalidOption, match="Another thread"):
            ask(session)
        assert session.messages == before
    finally:
        go.set()
        thread.join(60)
    assert said(session) == ["Q1", "Q2"]
