"""overflow="summarise" on a tiny random model: what is asked, what is pinned, and the bounds on both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.chat import make_chat_model

import edgekv
from edgekv.chat import ChatRequest, Events
from edgekv.generate import Event, Evicted, Finished, NotedDown
from edgekv.model.converted import ConvertedModel
from edgekv.notes import HEADING, OWN_WORDS, Notepad, Task
from edgekv.session import Session
from edgekv.text.precheck import Overflow
from edgekv.text.template import Message

CAPACITY = 1024
SYSTEM = "Be brief."


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def runtime(chat_model: ConvertedModel) -> Iterator[edgekv.Runtime]:
    with edgekv.load(chat_model.folder, memory="4GiB", context=CAPACITY, overflow="summarise", threads=1) as loaded:
        yield loaded


def talk(runtime: edgekv.Runtime, turns: int) -> tuple[Session, list[Event]]:
    """A session after so many turns, and all its events."""
    session = runtime.session(system=SYSTEM, max_new_tokens=12)
    return session, [event for number in range(turns) for event in session.send(f"This is question {number} of a talk")]


def test_a_note_takes_the_place_of_turns(runtime: edgekv.Runtime) -> None:
    """Nothing is evicted, no prompt is over the capacity, the note is within its bound and in the pinned prefix, and
    the session still has every word."""
    session, events = talk(runtime, 50)
    notes = [event for event in events if isinstance(event, NotedDown)]
    chat = runtime.chat_state
    assert len(notes) >= 2
    assert not [event for event in events if isinstance(event, Evicted)]
    assert chat.timeline.window.evicted == 0
    assert all(event.usage.input_tokens < CAPACITY for event in events if isinstance(event, Finished))
    assert all(0 < len(chat.tokenizer.encode(event.note)) <= CAPACITY // 8 for event in notes)
    assert [event.messages for event in notes] == sorted({event.messages for event in notes})
    pinned = chat.tokenizer.decode(chat.timeline.tokens[: chat.timeline.pinned])
    assert f"{SYSTEM}\n\n{HEADING}\n{session.note}" in pinned
    assert len(session.messages) == 101
    assert session.messages[0]["content"] == SYSTEM


def test_the_model_is_asked_behind_the_turns_themselves(runtime: edgekv.Runtime) -> None:
    """They are in the cache, so little more than the request is read for a note; unless a first note was not enough and
    has just changed the system prompt."""
    asked: list[tuple[Sequence[Message], int]] = []
    answered: set[str] = set()  # system prompts, with their notes, behind which a question has been answered
    chat, stream = runtime.chat_state, runtime.chat_state.stream

    def watching(request: ChatRequest) -> Events:
        messages = request.messages
        if "Write a note for yourself" in messages[-1]["content"]:
            report = chat.precheck(request)
            if messages[0]["content"] in answered:
                asked.append((messages, report.new_tokens))
        else:
            answered.add(messages[0]["content"])
        return stream(request)

    chat.stream = watching  # type: ignore[method-assign]
    talk(runtime, 35)
    assert asked
    for messages, new_tokens in asked:
        assert [message["role"] for message in messages[:3]] == ["system", "user", "assistant"]
        assert new_tokens < len(chat.tokenizer.encode(messages[-1]["content"])) + 20


def test_undo_reset_save_and_load(runtime: edgekv.Runtime, tmp_path: Path) -> None:
    """The note is saved with the session; an undo that reaches behind it drops it, a reset too."""
    session, _ = talk(runtime, 25)
    while not session.note or session.precheck("And now?").input_tokens > CAPACITY - 100:  # the next is to take none
        list(session.send("One more question of a talk"))
    note = session.note
    session.save(tmp_path / "talk")
    loaded = runtime.session()
    loaded.load(tmp_path / "talk")
    assert (loaded.note, loaded.overflow) == (note, "summarise")
    *_, last = loaded.send("And now?")
    assert isinstance(last, Finished)
    assert last.usage.reused_tokens > last.usage.input_tokens - 60
    assert session.undo()
    assert session.note == note
    while session.note:
        assert session.undo()
    assert len(session.messages) > 2
    list(session.send("Once more"))
    session.reset()
    assert session.note == ""


@pytest.mark.parametrize("overflow", ["error", "window"])
def test_a_note_is_for_summaries_alone(runtime: edgekv.Runtime, overflow: Overflow) -> None:
    """A session that goes on with another policy sends every word again, and what it tells before is about these."""
    session, _ = talk(runtime, 25)
    assert session.note
    session.overflow = overflow
    report = session.precheck("And now?")
    if overflow == "error":
        assert not report.fits
        with pytest.raises(edgekv.ContextOverflow, match=f"{report.input_tokens} tokens"):
            session.send("And now?")
    else:
        *_, last = session.send("And now?")
        assert isinstance(last, Finished)
        assert last.usage.input_tokens == report.input_tokens


def test_stopping_while_a_note_is_made(runtime: edgekv.Runtime) -> None:
    """The conversation is as it was, and the next try works."""
    session, _ = talk(runtime, 1)
    while not session.note:
        before = list(session.messages)
        events = session.send("This is one more question of a talk")
        next(events, None)
        events.close()
        if session.messages == before:
            assert isinstance(list(session.send("Again"))[-1], Finished)
        else:
            assert session.messages[-1]["role"] == "assistant"


def test_bounds_are_refused_with_numbers(runtime: edgekv.Runtime) -> None:
    """A question that fits no cache, a system prompt that leaves no room for a note, a call without a session."""
    with pytest.raises(edgekv.ContextOverflow, match="One message is"):
        runtime.session(max_new_tokens=5).send("many words " * 400)
    session = runtime.session(system="x. " * 70, max_new_tokens=12)
    session.messages += [{"role": role, "content": "Some words. " * 20} for role in ("user", "assistant") * 2]
    events = session.send("More")
    with pytest.raises(edgekv.ContextOverflow, match="a note needs 16"):
        next(events)
    with pytest.raises(edgekv.InvalidOption, match="needs a session"):
        runtime.chat([{"role": "user", "content": "Hello"}])


def test_what_the_model_sees() -> None:
    """The note stands in the system prompt, which is made if there is none; without a note nothing is changed."""
    messages: list[Message] = [{"role": "user", "content": text} for text in "abc"]
    assert Notepad().view(messages) == messages
    seen = Notepad("N", 2).view(messages)
    assert [message["content"] for message in seen] == [f"{HEADING}\nN", "c"]
    assert Notepad("", 2).view(messages) == messages[2:]
    assert Notepad("N", 2).without(messages[:1]) == Notepad()
    assert Notepad("N", 2).without(messages[:2]) == Notepad("N", 2)


def test_the_users_words_are_kept(runtime: edgekv.Runtime) -> None:
    """Statements stand in the note as they were said, the newest that fit; what only repeats an answer is left out, and
    what is new has half of the note."""
    tokenizer = runtime.chat_state.tokenizer
    answer = "How nice that you are going to Bergen in June."
    about: list[Message] = []
    for text in ("I am Marta.", "Who are you?", "I go to Bergen. " * 20, "No nuts"):
        about += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    task = Task([], edgekv.SamplingOptions(), 600, len(about), about)
    bergen = "I go to Bergen. " * 6 + "..."
    own = f"{OWN_WORDS}\nI am Marta.\n{bergen}\nNo nuts"
    assert task.result(answer, tokenizer) == Notepad(own, 8)
    assert task.result("She goes to Bergen.", tokenizer).note == f"{own}\nShe goes to Bergen."
    assert replace(task, limit=60).result(answer, tokenizer).note == f"{OWN_WORDS}\nNo nuts"
    assert replace(task, about=about[2:4]).result(answer, tokenizer).note == answer
