"""Saved sessions and several sessions on one engine, on a tiny random model: going on equals never having stopped."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.chat import make_chat_model
from safetensors import safe_open

import edgekv
from edgekv import parking, session_file
from edgekv.cli import run
from edgekv.errors import SessionError, StorageError
from edgekv.generate import Finished, TextDelta
from edgekv.kv.scales import read_scales, write_scales
from edgekv.model.converted import ConvertedModel, open_converted, write_description
from edgekv.parking import ParkingLot
from edgekv.session import Session
from edgekv.session_file import read_info, read_session, write_session
from edgekv.session_state import ChatState, SessionState
from edgekv.session_store import Question, SessionStore

Load = Callable[..., edgekv.Runtime]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def load(chat_model: ConvertedModel, tmp_path: Path) -> Iterator[Load]:
    """Loads it with a cache of 256 tokens, or as told."""
    opened = []

    def load_one(folder: Path = chat_model.folder, **options: Any) -> edgekv.Runtime:
        usual = {"memory": "4GiB", "context": 256, "overflow": "window", "threads": 1, "home": tmp_path / "home"}
        opened.append(edgekv.load(folder, **(usual | options)))
        return opened[-1]

    yield load_one
    for runtime in opened:
        runtime.close()


def talk(runtime: edgekv.Runtime, **options: Any) -> Session:
    """A session that says something else every time."""
    return runtime.session(**({"system": "Be brief.", "max_new_tokens": 16, "temperature": 1.0} | options))


def say(session: Session, text: str) -> tuple[str, edgekv.Usage]:
    """One turn: the answer's text and what it took."""
    *events, last = session.send(text)
    assert isinstance(last, Finished)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.usage


@pytest.mark.parametrize("turns", [1, 3, 14])
def test_going_on_equals_never_having_stopped(load: Load, tmp_path: Path, turns: int) -> None:
    """Random sampling without a seed, before and after evictions: text, tokens, positions and what is reused."""
    runtime = load()
    first = talk(runtime)
    for number in range(turns):
        say(first, f"This is question {number} of a talk")
    assert (runtime.chat_state.timeline.window.evicted > 0) == (turns > 10)
    first.save(tmp_path / "talk.safetensors")
    wanted = [say(first, text)[0] for text in ("And then?", "What else?")]
    tokens = runtime.chat_state.timeline.tokens
    other = load()
    second = talk(other, temperature=0.2)
    say(second, "Something else")
    second.load(tmp_path / "talk.safetensors")
    answers = [say(second, text) for text in ("And then?", "What else?")]
    assert [text for text, _ in answers] == wanted
    assert other.chat_state.timeline.tokens == tokens
    assert second.messages == first.messages
    assert answers[0][1].input_tokens - answers[0][1].reused_tokens < 50, "only the new message is read"


def test_the_file_is_safetensors(load: Load, tmp_path: Path) -> None:
    """Its own library reads it; what the metadata says is what the cache had. Only the owner may read it."""
    runtime = load()
    session, path = talk(runtime), tmp_path / "talk.safetensors"
    say(session, "Hello")
    sha256 = session.save(path)
    timeline = runtime.chat_state.timeline
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        assert file.get_tensor("tokens").tolist() == list(timeline.engine.tokens)
        np.testing.assert_array_equal(file.get_tensor("k.1"), timeline.engine.save().keys[1])
    assert metadata["sha256"] == sha256 == read_info(path).sha256
    assert metadata["model"] == runtime.model.fingerprint
    assert (int(metadata["length"]), metadata["title"]) == (timeline.window.length, "Hello")
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_before_anything_departed(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions wrote the words and ids of all that had been said: such a file is gone on with all the same."""
    runtime, path = load(), tmp_path / "talk"
    session = talk(runtime)
    monkeypatch.setattr(runtime.chat_state, "_staying", lambda prompt, state: prompt.encoded)
    for number in range(14):
        say(session, f"This is question {number} of a talk")
    dialogue = SessionState.dialogue
    with monkeypatch.context() as patch:
        patch.setattr(SessionState, "dialogue", lambda state: dialogue(state) | {"departed": None})
        session.save(path)
    assert runtime.chat_state.timeline.window.evicted
    wanted = say(session, "And then?")
    other = talk(load())
    other.load(path)
    text, usage = say(other, "And then?")
    assert (text, usage.reused_tokens, usage.input_tokens) == (
        wanted[0],
        wanted[1].reused_tokens,
        wanted[1].input_tokens,
    )
    assert usage.input_tokens - usage.reused_tokens < 50


def test_another_capacity(load: Load, tmp_path: Path) -> None:
    """It may grow, also after evictions, and shrink as long as the content fits; else the sentence has both numbers."""
    session, path = talk(load()), tmp_path / "talk"
    for number in range(14):
        say(session, f"This is question {number} of a talk")
    session.save(path)
    length = read_info(path).length
    for capacity in (512, length + 8):  # neither holds the whole talk, which would be read afresh
        runtime = load(context=capacity)
        other = talk(runtime)
        other.load(path)
        _, usage = say(other, "Go on")
        assert usage.reused_tokens > usage.input_tokens - 50
    with pytest.raises(SessionError, match=f"holds {length} tokens, but the cache has room for 128"):
        talk(load(context=128)).load(path)
    small = talk(load(context=128))
    small.load(path, reread=True)
    assert small.messages == session.messages


def test_a_smaller_cache_that_cannot_pin_as_much(load: Load, tmp_path: Path) -> None:
    """Refused before anything changes: pinned tokens that leave no window stopped all sessions of the runtime."""
    session, path = talk(load(context=2048), system="word " * 85), tmp_path / "talk"
    say(session, "Hello")
    session.save(path)
    pinned, length = session._chat.timeline.pinned, read_info(path).length
    runtime = load(context=length + 8)
    kv = runtime.chat_state.timeline.engine.kv
    assert kv.capacity - kv.stride < pinned, "there is a window, if a small one"
    with pytest.raises(SessionError, match=f"pins {pinned} tokens, .* --context of {4 * pinned} or more"):
        talk(runtime).load(path)
    assert say(talk(runtime), "Hello")[0]
    talk(load(context=4 * pinned)).load(path)


def test_what_does_not_fit_is_refused(load: Load, chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Another model, dtype or scales: refused with the reason, and the session is as it was."""
    import shutil

    session, path = talk(load()), tmp_path / "talk"
    say(session, "Hello")
    session.save(path)
    other = tmp_path / "other"
    shutil.copytree(chat_model.folder, other)
    scales_file = other / "kv_scales.safetensors"
    scales = read_scales(scales_file)
    write_scales(scales_file, replace(scales, k=scales.k * np.float32(1.5)))
    renamed = tmp_path / "renamed"
    shutil.copytree(chat_model.folder, renamed)
    write_description(renamed, replace(open_converted(renamed).description, source_sha256="0" * 64))
    for options, reason in (
        ({"kv_dtype": "float"}, "another KV dtype: int8, not float"),
        ({"folder": other}, "another KV scales"),
        ({"folder": renamed, "kv_dtype": "float"}, "another model"),
    ):
        runtime = load(**options)
        refusing = talk(runtime)
        say(refusing, "Before")
        before, tokens = list(refusing.messages), runtime.chat_state.timeline.tokens
        with pytest.raises(SessionError, match=reason):
            refusing.load(path)
        assert refusing.messages == before
        assert runtime.chat_state.timeline.tokens == tokens


def test_rows_of_the_other_operator_are_refused(load: Load, tmp_path: Path) -> None:
    """As those of files from before rows had factors of their own; the words can be read again."""
    session, path = talk(load()), tmp_path / "talk"
    say(session, "Hello")
    own = session._identity()
    other = "channel" if own.granularity == "channel and row" else "channel and row"
    write_session(path, session._state(), replace(own, granularity=other), 512)
    with pytest.raises(SessionError, match=f"another granularity: {other}, not {own.granularity}.*--reread"):
        talk(load()).load(path)
    anew = talk(load())
    anew.load(path, reread=True)
    assert anew.messages == session.messages


def test_damage_is_found(load: Load, tmp_path: Path) -> None:
    """Any byte changed, any end cut off, no session at all: one sentence, never a traceback or wrong numbers."""
    session, path = talk(load()), tmp_path / "talk"
    say(session, "Hello")
    session.save(path)
    whole = path.read_bytes()
    broken = tmp_path / "broken"
    random = np.random.default_rng(0)
    places = [0, 8, 9, *random.integers(0, len(whole), 60).tolist(), len(whole) - 1]
    for place in places:
        broken.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        with pytest.raises(SessionError):
            session.load(broken)
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:size])
        with pytest.raises(SessionError):
            session.load(broken)
    with pytest.raises(SessionError, match="No such file"):
        session.load(tmp_path / "nothing")
    with pytest.raises(SessionError, match="not a session"):
        read_session(Path(__file__).parents[1] / "data" / "llama-fp16" / "model.safetensors", None)
    session.load(path)


@pytest.mark.parametrize("name", ["tokens", "text.starts", "dialogue", "k.0", "v.0", "k.1", "v.1"])
def test_a_missing_tensor_is_told(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also when all the rest is whole, checksum and all; and nothing has changed."""
    runtime = load()
    session, path = talk(runtime), tmp_path / "talk"
    say(session, "Hello")
    write, rows = session_file._write, session_file._rows

    def write_others(file: Any, metadata: Any, small: dict[str, Any], engine: Any) -> str:
        return write(file, metadata, {key: array for key, array in small.items() if key != name}, engine)

    with monkeypatch.context() as patch:
        patch.setattr(session_file, "_write", write_others)
        patch.setattr(session_file, "_rows", lambda engine: [item for item in rows(engine) if item[0] != name])
        session.save(path)
    messages, tokens = list(session.messages), runtime.chat_state.timeline.tokens
    with pytest.raises(SessionError, match="not a session that edgekv wrote"):
        session.load(path)
    assert (session.messages, runtime.chat_state.timeline.tokens) == (messages, tokens)


def test_half_a_character_in_a_title(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words from a JSON file may hold half of a surrogate pair: the file is one that safetensors' own reader takes."""
    session, path = talk(load()), SessionStore(tmp_path).path("d")
    path.parent.mkdir()
    session.messages = [{"role": "user", "content": "Half \ud83d of it"}, {"role": "assistant", "content": "\ude00"}]
    session.save(path)
    assert read_info(path).title == "Half \\ud83d of it"
    with safe_open(path, framework="np") as file:
        assert "tokens" in file.keys()  # noqa: SIM118
    again = talk(load())
    again.load(path)
    assert again.messages == session.messages
    assert run(["sessions", "show", "d", "--home", str(tmp_path)]) == 0
    assert "user: Half \\ud83d of it" in capsys.readouterr().out


def test_a_header_that_safetensors_refuses(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions wrote for such a title: one sentence."""
    session, store = talk(load()), SessionStore(tmp_path)
    store.folder.mkdir()
    session.messages = [{"role": "user", "content": "Half \ud83d of it"}]
    monkeypatch.setattr(session_file, "_encodable", lambda text: text)
    session.save(store.path("d"))
    with pytest.raises(SessionError, match="not a session that edgekv wrote"):
        session.load(store.path("d"))
    assert run(["sessions", "show", "d", "--home", str(tmp_path)]) == 2
    assert "not a session" in capsys.readouterr().err


def test_a_failed_save_keeps_the_old(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the newest state, not the one before it."""
    session, path = talk(load()), tmp_path / "talk"
    say(session, "Hello")
    sha256 = session.save(path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    say(session, "More")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        session.save(path)
    assert read_info(path).sha256 == sha256
    assert os.listdir(tmp_path) == ["talk"]


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_sessions_take_turns_on_one_engine(load: Load, memory_bytes: int) -> None:
    """Each says what it would say alone, through evictions; what is parked comes back from memory or from disk, and
    nothing but new messages is read again. A stateless call in between disturbs neither."""
    questions = [f"This is question {number} of a talk" for number in range(9)]
    alone = []
    for seed in (1, 2):
        session = talk(load(), seed=seed)
        alone.append([say(session, text)[0] for text in questions])
    runtime = load()
    runtime.chat_state._lot = lot = ParkingLot(memory_bytes)
    encode = runtime.chat_state.tokenizer.encode  # an answer's last token is text when it comes back
    most = len(encode(f"<extra_1023></s>\n<s>user\n{questions[0]}</s>\n<s>assistant\n"))
    sessions = [talk(runtime, seed=seed) for seed in (1, 2)]
    found: list[list[str]] = [[], []]
    for text in questions:
        for number, session in enumerate(sessions):
            answer, usage = say(session, text)
            found[number].append(answer)
            assert usage.input_tokens - usage.reused_tokens <= most or text == questions[0]
            assert session.precheck("Now?").reused_tokens > 0
        runtime.chat([{"role": "user", "content": text}], max_new_tokens=2)
    assert found == alone
    assert (lot.memory_bytes > 0) == (memory_bytes > 0)
    del sessions, session
    runtime.chat([{"role": "user", "content": "Hello"}], max_new_tokens=2)
    assert lot.memory_bytes == 0, "what nobody can ask for is freed"


def test_the_disk_has_a_limit(load: Load) -> None:
    """Beyond it whoever has waited longest is read again, and answered; the newest comes back from the disk. A limit
    that not even one fits costs a reading, too."""
    runtime = load()
    sessions = [talk(runtime, temperature=0.0) for _ in range(4)]
    say(sessions[0], "Hello there")
    size = 2 * runtime.chat_state.state(sessions[0]._dialogue).timeline.engine.size_bytes
    runtime.chat_state._lot = lot = ParkingLot(0, disk_bytes=size)
    for number, session in enumerate(sessions[1:], 1):
        say(session, "Hello there" if number < 3 else "Something else altogether")
        assert 0 < lot.disk_bytes <= size
    waiting = [session._dialogue.seat.parked is not None for session in sessions]
    assert waiting == [False, True, True, False]
    runtime.chat_state._lot = ParkingLot(0, disk_bytes=1)
    for session in sessions[1:]:
        say(session, "And on")
    assert sessions[1]._dialogue.seat.parked is None


class FullDisk(io.FileIO):
    """A file on a disk that has no room for it."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_a_reading(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found when rows are parked, however few they are, and not when they are needed."""
    runtime = load()
    runtime.chat_state._lot = lot = ParkingLot(0)

    def opened(dir: object) -> io.BufferedRandom:
        return io.BufferedRandom(FullDisk(tmp_path / "full", "w+"), buffer_size=1 << 20)

    monkeypatch.setattr(parking, "tempfile", SimpleNamespace(TemporaryFile=opened))
    first, second = (talk(runtime, temperature=0.0) for _ in range(2))
    answer, _ = say(first, "Hello")
    say(second, "Something else")
    assert first._dialogue.seat.parked is None
    assert lot.disk_bytes == 0
    first.undo()
    assert say(first, "Hello")[0] == answer


@pytest.mark.parametrize("how", ["cut", "broken"])
def test_parked_rows_that_cannot_be_read_cost_a_reading(load: Load, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A disk that fails, or a file that has become shorter: the words are read again, through evictions, too."""
    questions = [f"This is question {number} of a talk" for number in range(12)]
    runtime = load()
    runtime.chat_state._lot = ParkingLot(0)
    first, second = (talk(runtime, temperature=0.0) for _ in range(2))
    for text in questions:
        say(first, text)
    assert runtime.chat_state.timeline.window.evicted > 0
    say(second, "Something else")
    parked = first._dialogue.seat.parked
    assert parked is not None
    file = parked.timeline.engine.values._tail._file  # type: ignore[attr-defined]
    if how == "cut":
        os.ftruncate(file.fileno(), 100)
    else:
        monkeypatch.setattr(parking._Filed, "__getitem__", broken)
    del parked, file
    _, usage = say(first, "And on")
    assert usage.reused_tokens == 0
    monkeypatch.undo()
    _, again = say(first, "And on")
    assert again.reused_tokens > 0


def broken(*arguments: Any) -> None:
    """A disk that fails."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_pinned_rows_are_within_the_limits(load: Load) -> None:
    """System prompts that nobody shares are counted like all other rows, in memory and on the disk; the answers are the
    same wherever they waited."""
    prompts = [f"{name} has a long system prompt of its own here." for name in ("Anna", "Bert", "Carl", "Dora")]
    said, one = [], 0
    for memory_bytes in (1 << 30, 60_000, 20_000, 0):
        runtime = load()
        runtime.chat_state._lot = lot = ParkingLot(memory_bytes)
        sessions = [talk(runtime, system=prompt, temperature=0.0) for prompt in prompts]
        said.append([say(session, text) for text in ("Hello", "And on") for session in sessions])
        parked = [session._dialogue.seat.parked for session in sessions[:-1]]
        held = [part for state in parked if state for part in parts_of(state)]
        in_memory = sum(part.size_bytes for part in held if isinstance(part, parking._Kept))
        assert in_memory == lot.memory_bytes <= memory_bytes
        one = one or in_memory
        assert in_memory + lot.disk_bytes == one > 60_000
        assert (in_memory > 0) == (memory_bytes > 0)
    texts = [[text for text, _ in answers] for answers in said]
    reused = [[usage.reused_tokens for _, usage in answers] for answers in said]
    assert texts[1:] == texts[:1] * 3
    assert reused[1:] == reused[:1] * 3
    assert min(reused[0][4:]) > 50


def parts_of(state: ChatState) -> list[Any]:
    """The pinned and the other rows, of keys and of values."""
    engine = state.timeline.engine
    return [getattr(rows, part) for rows in (engine.keys, engine.values) for part in ("_head", "_tail")]


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_pinned_rows_are_parked_once(load: Load, memory_bytes: int) -> None:
    """Sessions with the same system prompt share its rows, in memory and on the disk."""
    runtime = load()
    runtime.chat_state._lot = lot = ParkingLot(memory_bytes)
    sessions = [talk(runtime, system="One and the same long system prompt for everybody.") for _ in range(4)]
    for session in sessions:
        say(session, "Hello")
    assert len(lot._heads) == 2, "keys and values"
    parked = [session._dialogue.seat.parked for session in sessions[:3]]
    assert len({id(state.timeline.engine.keys._head) for state in parked if state}) == 1
    held = {id(part): part.size_bytes for state in parked if state for part in parts_of(state)}
    assert len(held) == 2 * (1 + 3)
    assert lot.memory_bytes + lot.disk_bytes == sum(held.values())


def test_the_store(load: Load, tmp_path: Path) -> None:
    """Names, the newest of a model, a lock against a second process, a question that outlives one."""
    store = SessionStore(tmp_path)
    session = talk(load())
    say(session, "Hello")
    for name in ("b", "a"):
        with store.open(name) as saved:
            assert not saved.exists
            session.save(saved.path)
            saved.ask(Question("Why?", 2, "tiny-chat"))
            with pytest.raises(SessionError, match="open in another edgekv"), store.open(name):
                pass
        os.utime(store.path(name), (1, 1 if name == "b" else 2))
    assert [info.path.stem for info in store.list()] == ["a", "b"]
    assert store.newest("tiny-chat") == "a"
    (store.folder / ".a.safetensors.x.part").write_bytes(b"left by a killed process")
    with store.open("a") as saved:
        assert saved.question == Question("Why?", 2, "tiny-chat")
        saved.forget_question()
        assert saved.question == Question()
        saved.remove()
    assert sorted(path.name for path in store.folder.iterdir()) == [".b.lock", "b.asked", "b.safetensors"]
    assert store.new_name("org/some model").startswith("org-some-model-")
    for name in ("", "../x", ".x", "a/b", "x" * 101):
        with pytest.raises(SessionError, match="cannot name"):
            store.path(name)
    with pytest.raises(SessionError, match="no saved conversation"):
        store.newest("other")
    with pytest.raises(SessionError, match="no session 'a'"):
        store.existing("a")


def test_a_question_alone_is_a_conversation(tmp_path: Path) -> None:
    """A process may end during the first answer. A damaged file is no question."""
    store = SessionStore(tmp_path)
    with pytest.raises(SessionError, match="no saved conversation"):
        store.require_any()
    with store.open("first") as saved:
        saved.ask(Question("Why? \ud800", 0, "tiny-chat"))
    (store.folder / "broken.asked").write_bytes(b"\xff{")
    (store.folder / "plain.asked").write_text("Why?")
    store.require_any()
    store.require("first")
    assert store.newest("tiny-chat") == "first"
    with store.open("first") as saved:
        assert not saved.exists
        assert saved.question.text == "Why? \ud800"
    for name in ("broken", "plain", "other"):
        with pytest.raises(SessionError, match=f"no session '{name}'"):
            store.require(name)
    with pytest.raises(SessionError, match="no saved conversation with other"):
        store.newest("other")


@pytest.mark.parametrize(("messages", "is_open"), [(0, True), (4, True), (5, False), (6, False)])
def test_a_question_with_an_answer_is_not_open(messages: int, is_open: bool) -> None:
    """It was forgotten too late: the answer was saved before the process ended."""
    assert Question("Why?", after=4).is_open(messages) == is_open
    assert not Question("", after=4).is_open(messages)
