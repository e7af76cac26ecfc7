"""The command line as a user meets it: whole transcripts, exit codes, and one clear sentence for every refusal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chat import make_chat_model
from rich.console import Console

from edgekv import cli
from edgekv.api import load
from edgekv.cli import COMMANDS, render
from edgekv.cli.chat import UNSAVED, ChatLoop, Keeping
from edgekv.cli.eval_plan import planned, together_bytes
from edgekv.cli.interrupt import Interrupt
from edgekv.convert import convert
from edgekv.engines.onnx import native
from edgekv.errors import EngineError, StorageError
from edgekv.evaluate.settings import REFERENCE, Setting
from edgekv.files import called, check_writable
from edgekv.generate import Finished, PrefillProgress, TextDelta, Usage
from edgekv.kv.scales import read_scales, write_scales
from edgekv.kv.spec import MIN_CAPACITY
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions
from edgekv.prepare import prepare
from edgekv.sampling import SamplingOptions
from edgekv.session import Session
from edgekv.session_file import read_session
from edgekv.session_store import Question, SavedSession, SessionStore
from edgekv.text.precheck import Overflow
from edgekv.units import MIB

DATA = Path(__file__).parents[1] / "data" / "llama-fp16"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales."""
    return make_chat_model(DATA, tmp_path_factory.mktemp("chat"))


def edgekv(*arguments: object, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = os.environ | ({"EDGEKV_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "edgekv", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a refusal, after checking that it is one: exit code 2, no traceback, nothing on stdout."""
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_help_names_every_command() -> None:
    """`edgekv --help` lists them, and each has help of its own."""
    text = edgekv("--help").stdout
    for name in COMMANDS:
        assert name in text
        own = edgekv(name, "--help")
        assert own.returncode == 0
        assert own.stdout.startswith(f"Usage: edgekv {name}")


def test_the_help_of_chat_tells_its_own_defaults() -> None:
    """It evicts, which a program has to ask for, and samples as the model's maker says."""
    told = " ".join(edgekv("chat", "--help").stdout.split())
    assert "when a prompt does not fit. [default: window]" in told
    assert "[default: the model's own, else 0.7]" in told


def test_a_full_disk_does_not_end_the_chat(
    chat_model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the question nor the answer can be kept: both are told, and the answer is there."""

    def full(*arguments: object) -> None:
        raise StorageError("Could not write: no space left.")

    with load(chat_model.folder, memory="4GiB", context=128) as runtime, SessionStore(tmp_path).open("talk") as saved:
        for name in ("ask", "forget_question"):
            monkeypatch.setattr(SavedSession, name, full)
        loop = ChatLoop(runtime, runtime.session(max_new_tokens=4), as_json=False, saved=saved)
        assert loop.answer("Hello") == 0
        assert not loop.settle()
        assert loop.settle()  # there is nothing more
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert printed.err.count("[not saved: Could not write") == 2


def test_a_question_that_was_stopped_before_its_answer_is_what_retry_asks(
    chat_model: ConvertedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange before it stays as it is."""
    stopping = False

    class Stopped(Interrupt):
        def __enter__(self) -> Interrupt:
            self.asked = stopping
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr("edgekv.cli.chat.Interrupt", Stopped)
    with load(chat_model.folder, memory="4GiB", context=1024) as runtime:
        loop = ChatLoop(runtime, runtime.session(max_new_tokens=4), as_json=False)
        loop.answer("Hello")
        before = list(loop.session.messages)
        long, stopping = "word " * 100, True
        assert loop.answer(long) == 130
        assert loop.session.messages == before
        stopping = False
        loop._command("/retry")
        assert loop.session.messages[:-2] == before
        assert loop.session.last_question == long
        loop._command("/retry")  # that one has an answer now, which goes
        assert loop.session.messages[:-2] == before


def test_a_refused_retry_takes_nothing_back(chat_model: ConvertedModel) -> None:
    """The system prompt has become too long for the question."""
    with load(chat_model.folder, memory="4GiB", context=256) as runtime:
        loop = ChatLoop(runtime, runtime.session(max_new_tokens=4), as_json=False)
        for text in ("One", "Two"):
            loop.answer(text)
        loop.session.set_system("word " * 300)
        before = list(loop.session.messages)
        for _ in range(3):
            assert loop._guarded(lambda: loop._command("/retry")) == 2
        assert loop.session.messages == before


def test_the_same_words_asked_twice_are_two_questions(
    chat_model: ConvertedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process ended during the second answer to "go on": /retry asks that one again, and the first stays."""
    store = SessionStore(tmp_path)
    with load(chat_model.folder, memory="4GiB", context=256) as runtime:
        name = runtime.model.description.name
        with store.open("talk") as saved:
            loop = ChatLoop(runtime, runtime.session(max_new_tokens=4), as_json=False, saved=saved)
            loop.answer("go on")
            loop.settle()
            saved.ask(Question("go on", 2, name))
            first = list(loop.session.messages)
        with store.open("talk") as saved:
            loop = ChatLoop(runtime, runtime.session(), as_json=False, saved=saved)
            loop.resume(reread=False, sampling={}, system="Be kind.", overflow=None)
            loop.take_question()
            assert 'not answered when edgekv ended: "go on"' in capsys.readouterr().err
            loop._command("/retry")
            assert [message["content"] for message in loop.session.messages[1:3]] == [m["content"] for m in first]
            assert len(loop.session.messages) == 5
            loop.settle()


def test_options_that_are_typed_win_over_saved_ones(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """The policy for a full cache and the seed among them: with that the answer is that of a new conversation."""
    with load(chat_model.folder, memory="4GiB", context=256) as runtime, SessionStore(tmp_path).open("talk") as saved:
        fresh = ChatLoop(
            runtime, runtime.session(max_new_tokens=6, temperature=1.0, seed=5), as_json=False, saved=saved
        )
        fresh.answer("Hello")
        fresh.settle()
        again = ChatLoop(runtime, runtime.session(), as_json=False, saved=saved)
        again.resume(reread=False, sampling={"seed": 5}, system=None, overflow="summarise")
        assert (again.session.overflow, again.session.sampling.temperature) == ("summarise", 1.0)
        again.session.reset()
        again.answer("Hello")
        assert again.session.messages == fresh.session.messages
        again.settle()


@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
def test_what_was_shown_is_saved_however_the_answer_ends(
    chat_model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
) -> None:  # fmt: skip
    """A second Ctrl-C, a failing engine: the answer's line ends, and the words are in the file."""
    with load(chat_model.folder, memory="4GiB", context=256) as runtime, SessionStore(tmp_path).open("talk") as saved:
        loop = ChatLoop(runtime, runtime.session(max_new_tokens=50), as_json=False, saved=saved)
        show, shown = render.AnswerPrinter.show, []

        def showing(printer: render.AnswerPrinter, event: Any) -> None:
            show(printer, event)
            shown.append(isinstance(event, TextDelta))
            if sum(shown) == 3:
                raise error("it ended")

        monkeypatch.setattr(render.AnswerPrinter, "show", showing)
        with pytest.raises(error):
            loop.answer("Hello")
        assert loop.settle()
        words = read_session(saved.path, None).messages
        assert words == tuple(loop.session.messages)
        printed = capsys.readouterr().out
        assert printed.endswith("\n")
        assert words[-1]["content"] in printed
        assert saved.question == Question()


def test_an_impatient_ctrl_c_ends_the_answer_and_not_the_chat(
    chat_model: ConvertedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the keyboard; in a script it ends everything."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with load(chat_model.folder, memory="4GiB", context=128) as runtime:
        loop = ChatLoop(runtime, runtime.session(), as_json=False)
        monkeypatch.setattr(loop.session, "precheck", interrupted)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        assert loop._guarded(lambda: loop.answer("Hello")) == 130
        monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
        with pytest.raises(KeyboardInterrupt):
            loop._guarded(lambda: loop.answer("Hello"))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr(loop, "settle", interrupted)
        assert loop._guarded(lambda: 0) == 130, "while the answer before is being saved"


def test_what_cannot_be_written_does_not_end_the_chat(chat_model: ConvertedModel) -> None:
    """/proc takes no files: its refusal is told as any other."""
    result = edgekv("chat", chat_model.folder, "--context", "128", stdin="/save /proc/talk\n/stats\n")
    assert "error: Could not write /proc/talk.safetensors" in result.stderr
    assert "0 of 128 tokens" in result.stdout


def test_a_file_that_is_no_conversation_is_not_written_over(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """A model's weights may lie where someone types /save model. A conversation of before is written over."""
    weights, other, words, talk = (
        tmp_path / name for name in ("model.safetensors", "package.json", "words.json", "talk.safetensors")
    )
    shutil.copy(DATA / "model.safetensors", weights)
    other.write_text("{}")
    typed = [f"/save {path}" for path in (tmp_path / "model", other, *(words, talk) * 2)]
    result = edgekv("chat", chat_model.folder, "--context", "128", stdin="\n".join(typed))
    assert [line.split(" is there already")[0] for line in result.stderr.splitlines() if "already" in line] == [
        f"error: {weights}",
        f"error: {other}",
    ]
    assert result.stderr.count("messages written") == 4
    assert weights.read_bytes() == (DATA / "model.safetensors").read_bytes()
    assert other.read_text() == "{}"


def test_saving_makes_no_folders(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """A name with a mistake in it is told, as other programs do."""
    typed = "\n".join(f"/save {tmp_path / name}" for name in ("none/talk", "none/talk.json", "talk"))
    result = edgekv("chat", chat_model.folder, "--context", "128", stdin=typed)
    assert result.stderr.count(f"error: {tmp_path / 'none'} is no folder: make it first") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["talk.safetensors"]


def test_names_that_are_none(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Neither ends the chat, nor shows a traceback: folders, a home of nobody, half a pasted binary."""
    typed = "\n".join(
        f"/{verb} {name}" for verb in ("save", "load") for name in (".", "..", "/", "~nobody-here/x", "a\0b")
    )
    result = edgekv("chat", chat_model.folder, "--context", "128", stdin=f"{typed}\n/stats\n")
    assert "Traceback" not in result.stderr
    assert len(re.findall("^error: .*(names no file|is no folder|cannot be read)", result.stderr, re.M)) == 10
    assert "0 of 128 tokens" in result.stdout
    for command in (("chat", "~nobody-here/x", "-p", "x"), ("plan", "~nobody-here/x"), ("info", "~nobody-here/x")):
        assert "~nobody-here/x" in refused(edgekv(*command, home=tmp_path))
    assert edgekv("sessions", "list", "--home", "~nobody-here/x").returncode == 0


def test_the_line_of_progress_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the answer's first words, and where there are none."""
    monkeypatch.setattr(render, "console", Console(stderr=True, force_terminal=True))
    for events in ([PrefillProgress(256, 300), TextDelta("Hi")], [PrefillProgress(256, 300)]):
        printer = render.AnswerPrinter(as_json=False)
        for event in events:
            printer.show(event)
        printer.end()
        assert capsys.readouterr().err == "\rreading 256 of 300 tokens\r"  # click leaves codes out here


def test_tables_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is cut in two can neither be copied nor be found by grep."""
    render.table("", ["name", "size"], [["n" * 90, "1"], ["\u6f22\u5b57", "20"]], right=[1])
    assert capsys.readouterr().out == f"{'name':90}  size\n{'n' * 90}     1\n\u6f22\u5b57{' ' * 86}    20\n"


def test_a_table_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """What a conversation began with may colour, clear or rename the terminal."""
    render.table("", ["began with", "n"], [["\x1b[31mred\x07\ttab\nline", "1"]])
    assert capsys.readouterr().out == "began with          n\n [31mred  tab line  1\n"


def test_a_model_does_not_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answer may hold a sequence that writes to the clipboard or clears the screen; a pipe gets it as it is."""
    answer = "a\x1b]52;c;eA==\x07b\x9b2J\tc\r\n\U0001f469\u200d\U0001f680\n"
    for terminal, shown in ((True, "a ]52;c;eA== b 2J\tc\r\n\U0001f469\u200d\U0001f680\n"), (False, answer)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        render.AnswerPrinter(as_json=False).show(TextDelta(answer))
        assert capsys.readouterr().out == shown


def test_a_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes without columns that can be spared, which is told, and shows what it cuts of the last one; names stay."""
    columns, row = ["name", "saved", "tokens", "began with"], ["n" * 30, "2026-11-30", "7", "\u6f22" * 20]
    lines = {}
    for width in (120, 80, 52, 40, 20):
        terminal = Console(width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr(render, "out", terminal)
        render.table("", columns, [row], right=[2], spare=(2, 1))
        printed = capsys.readouterr()
        lines[width] = printed.out.splitlines()
        assert [name for name in columns if name not in lines[width][0] and name in printed.err] == {
            120: [], 80: [], 52: ["saved", "tokens"], 40: ["saved", "tokens"], 20: ["saved", "tokens"],
        }[width]  # fmt: skip
        assert lines[width][1].startswith("n" * 30)
    assert lines[120][1].endswith("7  " + "\u6f22" * 20)
    assert lines[80][1].endswith("7  " + "\u6f22" * 13 + " \u2026")
    assert lines[52][1] == "n" * 30 + "  " + "\u6f22" * 9 + " \u2026"
    assert lines[40][1] == "n" * 30 + "  " + "\u6f22" * 3 + " \u2026"


def test_on_a_terminal_lines_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not inside of them, nor in a path, which is to be copied; a pipe gets the line whole, and no emoji for a name."""
    text = "[3 messages written to /home/someone/with/a/long/name/holiday.safetensors, :smile: and so on]"
    render.note(text)
    assert capsys.readouterr().err == text + "\n"
    monkeypatch.setattr(render, "console", Console(stderr=True, width=30, force_terminal=True, color_system=None))
    render.note(text)
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in lines if len(line) > 30] == ["/home/someone/with/a/long/name/holiday.safetensors,"]
    assert " ".join(" ".join(lines).split()) == text


def test_no_answer_is_cut_in_silence(chat_model: ConvertedModel) -> None:
    """Each limit says that it was one."""
    for limit, words in (
        (("--max-new-tokens", 4), "may have 4 tokens (--max-new-tokens)"),
        (("--overflow", "error"), "may have 40 tokens (the cache has no room for more: a larger --context has)"),
        (("--max-seconds", 1e-6), "may take 1e-06 s (--max-seconds)"),
    ):
        result = edgekv("chat", chat_model.folder, "--context", 64, "-p", "Hello", "--seed", 1, *limit)
        assert result.returncode == 0
        assert f"[cut: the answer {words}" in result.stderr, result.stderr


def test_no_larger_context_is_advised_where_there_is_none(chat_model: ConvertedModel) -> None:
    """The cache is as large as the model's own context: what else helps is told."""
    most = chat_model.spec.max_context
    long = "word " * most
    for options, words in (
        (("-p", long), "split the message, or take a model with a longer context (the cache holds all of this one's)."),
        (("-p", long, "--overflow", "error"), "send at most {allowed} tokens, or use overflow='window'."),
        (("-p", "x", "--system", long), "shorten it, or take a model with a longer context"),
        (("-p", "x", "--system", long, "--overflow", "summarise"), "shorten it, or take a model with a longer context"),
    ):
        message = refused(edgekv("chat", chat_model.folder, "--context", most, *options))
        assert words.format(allowed=most - 1) in message


@pytest.mark.parametrize(
    ("overflow", "whole", "words"),
    [
        ("error", True, "the cache has no room for more, which --overflow window makes"),
        ("summarise", False, "the cache has no room for more: a larger --context has"),
        ("window", True, "as many as the cache holds: --max-new-tokens may ask for more"),
    ],
)
def test_what_ended_an_answer_is_told_with_what_helps(
    capsys: pytest.CaptureFixture[str], overflow: Overflow, whole: bool, words: str
) -> None:
    """An answer that nobody limited, in a cache that is full."""
    usage = Usage(input_tokens=5, output_tokens=64, reused_tokens=0, evicted_tokens=0, prefill_s=0.1, decode_s=1.0)
    render.print_limit(Finished("text", "length", usage), SamplingOptions(), overflow, whole=whole)
    assert capsys.readouterr().err == f"[cut: the answer may have 64 tokens ({words})]\n"


def test_an_answer_without_a_token_is_not_told_one() -> None:
    """An answer whose time was up while its prompt was read says what it waited for."""
    read = Usage(input_tokens=5000, reused_tokens=0, prefill_s=2.0)
    assert "no token within 2.00 s" in render.status_line(9, 99, 0, Finished("", "time", read))
    assert "first token after 2.00 s" in render.status_line(9, 99, 0, Finished("", "stop", read))


def test_no_save_saves_nothing(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Not even what has a name, and what is gone on with stays as it was."""
    talk = ("chat", chat_model.folder, "--context", 256, "--max-new-tokens", 4, "--session", "talk")
    file = tmp_path / "sessions" / "talk.safetensors"
    edgekv(*talk, "--no-save", "-p", "Hello", home=tmp_path)
    assert not file.exists()
    edgekv(*talk, "-p", "Hello", home=tmp_path)
    before = file.read_bytes()
    with SessionStore(tmp_path).open("talk"):  # elsewhere: it is only read
        result = edgekv(*talk, "--no-save", "-p", "Hello again", home=tmp_path)
    assert "going on with talk: 1 question so far]" in result.stderr
    assert file.read_bytes() == before
    other = edgekv(*talk[:-1], "other", "--no-save", "-p", "Hello", home=tmp_path)
    assert "going on" not in other.stderr


def test_an_answer_that_cannot_be_kept_is_no_success(
    chat_model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that names a session relies on it."""

    def full(*arguments: object) -> None:
        raise StorageError("Could not write: no space left.")

    monkeypatch.setattr(Session, "save", full)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    arguments = ["chat", str(chat_model.folder), "--context", "128", "--max-new-tokens", "4", "-p", "Hello"]
    assert cli.run([*arguments, "--home", str(tmp_path)]) == 0
    assert cli.run([*arguments, "--home", str(tmp_path), "--session", "talk"]) == UNSAVED


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--top-p", 2, "-p", "Hello"), "top_p is 2.0"),
        (("-p", " "), "nothing to answer"),
        (("--continue", "-p", "Hello"), "no saved conversation in"),
        (("--continue", "--session", "talk", "-p", "Hello"), "no session 'talk' in"),
        (("--session", "../talk", "-p", "Hello"), "'../talk' cannot name a session"),
        (("--session", "", "-p", "Hello"), "'' cannot name a session"),
    ],
)
def test_a_chat_is_refused_before_anything_is_made(tmp_path: Path, options: tuple[object, ...], words: str) -> None:
    """What takes minutes to get ready is not made ready for nothing."""
    assert words in refused(edgekv("chat", "smollm2-135m-instruct", *options, home=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_there_is_a_chat_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is not saved, and says so. One that was named is refused."""
    typed = io.StringIO()
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    (tmp_path / "file").touch()
    store = SessionStore(tmp_path / "file")
    with ExitStack() as stack:
        assert Keeping(False, None, False, False).open(stack, store, "tiny") is None
        assert "this conversation is not saved: Could not write" in capsys.readouterr().err
        with pytest.raises(StorageError):
            Keeping(False, "talk", False, False).open(stack, store, "tiny")


def test_a_single_prompt_is_no_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`edgekv chat -p` at a terminal leaves nothing, unless it is to be kept; what is typed is."""
    typed = io.StringIO()
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    store = SessionStore(tmp_path)
    with ExitStack() as stack:
        assert Keeping(False, None, False, False, once=True).open(stack, store, "tiny") is None
        assert list(tmp_path.iterdir()) == []
        for keeping in (Keeping(False, "talk", False, False, once=True), Keeping(False, None, False, False)):
            assert keeping.open(stack, store, "tiny") is not None


def test_sessions_of_another_home(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """--home says where, as in `edgekv chat`; the words are printed as they were."""
    there = ("--home", tmp_path)
    edgekv("chat", chat_model.folder, "--session", "talk", "-p", "  two  spaces :smile:", "--max-new-tokens", 2, *there)
    assert "talk" in edgekv("sessions", "list", *there).stdout
    assert "user:   two  spaces :smile:\n" in edgekv("sessions", "show", "talk", *there).stdout
    assert "1 deleted" in edgekv("sessions", "rm", "talk", *there).stderr
    assert "No saved conversations" in edgekv("sessions", "list", *there).stderr


def test_what_cannot_be_read_is_listed_and_deleted(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """A damaged file, and a question whose answer was lost: `rm --all` leaves nothing of what was said."""
    talk = ("chat", chat_model.folder, "--max-new-tokens", 2, "-p", "Hello", "--session", "talk")
    assert edgekv(*talk, home=tmp_path).returncode == 0
    folder = tmp_path / "sessions"
    (folder / "broken.safetensors").write_bytes(b"x" * 30)
    for name in ("asked.v2", "alone"):
        (folder / f"{name}.asked").write_text("Why?")
    listed = edgekv("sessions", "list", home=tmp_path)
    assert listed.returncode == 0
    assert "[broken cannot be read: `edgekv sessions rm broken` deletes it]" in listed.stderr
    assert "[asked.v2 is a question alone" in listed.stderr
    assert edgekv("sessions", "rm", "alone", home=tmp_path).returncode == 0
    assert "There is no session 'alone'" in refused(edgekv("sessions", "rm", "alone", home=tmp_path))
    assert "3 deleted" in edgekv("sessions", "rm", "--all", home=tmp_path).stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(chat_model: ConvertedModel, closed: str) -> None:
    """As services are started: nothing is read or written there."""
    command = (
        f"{sys.executable} -m edgekv chat '{chat_model.folder}' --context 128 --max-new-tokens 4 -p Hello {closed}"
    )
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0
    assert result.stderr == ("" if "2>&-" in closed else "[cut: the answer may have 4 tokens (--max-new-tokens)]\n")
    assert bool(result.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("encoding", ["ascii:strict", "cp1252:strict"])
def test_streams_that_are_not_utf8(
    chat_model: ConvertedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """As pipes on Windows are: what they do not take is spelled out, JSON stays JSON, and what is typed into one is
    understood or refused."""
    talk = ("chat", chat_model.folder, "--context", 256, "--max-new-tokens", 8, "--session", "talk")
    edgekv(*talk, "-p", "\U0001f999", home=tmp_path)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    shown = edgekv("sessions", "show", "talk", home=tmp_path)
    assert shown.returncode == 0, shown.stderr
    spelled = "\\U0001f999" if "cp1252" in encoding else "\U0001f999"  # click takes UTF-8 for ASCII
    assert f"user: {spelled}\n" in shown.stdout
    answered = edgekv(*talk, "-p", "\U0001f999", "--json", home=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert [json.loads(line) for line in answered.stdout.splitlines()][-1]["event"] == "Finished"
    typed = edgekv(*talk, stdin="\u0081\n/stats\n", home=tmp_path)  # as UTF-8, in which 0x81 is no letter of cp1252
    assert "not valid Unicode" in typed.stderr
    assert "Traceback" not in typed.stderr
    assert "tokens" in typed.stdout


def test_a_reader_that_goes_away_is_no_error(chat_model: ConvertedModel) -> None:
    """`| head -1`"""
    command = f"{sys.executable} -m edgekv chat '{chat_model.folder}' --context 128 --json -p Hello --max-new-tokens 50"
    script = f"{command} | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_pasted_lines_are_one_message(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """In a terminal that says what is pasted, as all do by now."""
    readline = pytest.importorskip("readline")
    if "libedit" in readline.__doc__:
        pytest.skip("libedit takes every line for itself")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "edgekv", "chat", str(chat_model.folder), "--context", "256", "--no-save"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "4"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    shown = b""

    def until(mark: bytes) -> None:
        nonlocal shown
        while mark not in shown:
            shown += os.read(ours, 4096)
        shown = b""

    until(b"\x1b[?2004h> ")  # which asks the terminal to say what is pasted
    os.write(ours, b"\x1b[200~first line\rsecond line\x1b[201~\r")
    until(b"first token after")
    words = tmp_path / "words.json"
    os.write(ours, f"/save {words}\r".encode())
    until(b"messages written")
    os.write(ours, b"/quit\r")
    assert process.wait(60) == 0
    os.close(ours)
    asked = [message["content"] for message in json.loads(words.read_text())["messages"] if message["role"] == "user"]
    assert [text.split() for text in asked] == [["first", "line", "second", "line"]]


@pytest.mark.skipif(sys.platform != "linux", reason="other terminals have other limits")
def test_a_line_that_the_terminal_cuts_is_not_answered(chat_model: ConvertedModel) -> None:
    """`edgekv chat | tee talk.txt`, and a long text is pasted: no part of it is taken for the whole."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "edgekv", "chat", str(chat_model.folder), "--context", "256", "--no-save"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "4"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    os.write(ours, b"a" * 5000 + b"\n")
    os.write(ours, b"/stats\n\x04")
    printed, told = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    assert "error: The terminal cuts lines of 4,095 bytes and more" in told
    assert re.search(r"messages +0\b", printed)
    assert "last prompt" not in printed


def test_one_answer_and_exit(chat_model: ConvertedModel) -> None:
    """--prompt prints the answer to stdout and nothing else; text from a pipe is added to it."""
    result = edgekv("chat", chat_model.folder, "-p", "Hello", "--max-new-tokens", 5, "--context", 256)
    assert result.returncode == 0
    assert result.stdout.strip()
    longer = edgekv("chat", chat_model.folder, "-p", "Hello", "--max-new-tokens", 5, "--context", 256, stdin="more")
    assert longer.stdout != result.stdout


def test_a_conversation_through_a_pipe(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Each line is a message or a command; a wrong command does not end the conversation."""
    saved = tmp_path / "talk.json"
    commands = ("One", "/nope", "", "/stats", "Two", "/undo", f"/save {saved}", "/reset", f"/load {saved}", "/stats")
    script = "\n".join((*commands, "/system Be kind.", "/quit", "Never"))
    result = edgekv("chat", chat_model.folder, "--context", 256, "--max-new-tokens", 4, "--seed", 1, stdin=script)
    assert result.returncode == 2, result.stderr
    assert "There is no command /nope" in result.stderr
    assert "[taken back]" in result.stderr
    assert "[system prompt: Be kind.]" in result.stderr
    assert re.search(r"last prompt +\d+ tokens: 0 reused", result.stdout)
    assert [message["content"] for message in json.loads(saved.read_text())["messages"]][:1] == ["One"]


def test_a_conversation_goes_on_in_another_process(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """--session begins and goes on, --continue takes the newest; `sessions` lists, shows and deletes; a session with
    another dtype is refused with the reason, and --reread takes its words."""
    usual = ("chat", chat_model.folder, "--context", 256, "--max-new-tokens", 4)
    first = edgekv(*usual, "--session", "talk", stdin="One\nTwo\n", home=tmp_path)
    assert first.returncode == 0, first.stderr
    second = edgekv(*usual, "--continue", stdin="Three\n/stats\n", home=tmp_path)
    assert "[going on with talk: 2 questions so far]" in second.stderr
    found = re.search(r"last prompt +\d+ tokens: (\d+) reused, (\d+) read", second.stdout)
    assert found
    reused, read = map(int, found.groups())
    assert read < 40 < reused
    assert re.search(r"talk +\d{4}-\d\d-\d\d .* 7? ", edgekv("sessions", "list", home=tmp_path).stdout)
    words = edgekv("sessions", "show", "talk", home=tmp_path).stdout
    assert re.findall(r"user: (\w+)", words) == ["One", "Two", "Three"]
    float_cache = (*usual, "--session", "talk", "--kv-dtype", "float")
    assert "another KV dtype: int8, not float" in refused(edgekv(*float_cache, stdin="Four\n", home=tmp_path))
    assert edgekv(*float_cache, "--reread", stdin="Four\n", home=tmp_path).returncode == 0
    assert edgekv("sessions", "rm", "talk", home=tmp_path).returncode == 0
    assert "No saved conversations" in edgekv("sessions", "list", home=tmp_path).stderr
    assert "no saved conversation in" in refused(edgekv(*usual, "--continue", stdin="x", home=tmp_path))


def test_stats_show_that_only_new_tokens_are_read(chat_model: ConvertedModel) -> None:
    """The second turn reuses the whole cached prefix."""
    result = edgekv(
        "chat", chat_model.folder, "--context", 512, "--max-new-tokens", 6, stdin="First\n/stats\nSecond\n/stats\n"
    )
    prompts = re.findall(r"last prompt +(\d+) tokens: (\d+) reused, (\d+) read", result.stdout)
    (first, none, all_of_it), (second, reused, read) = [tuple(map(int, row)) for row in prompts]
    assert (none, all_of_it) == (0, first)
    assert reused + read == second
    assert reused >= first + 5  # the prompt and the answer but for its last token


def test_json_events(chat_model: ConvertedModel) -> None:
    """--json prints one event a line; the deltas joined are the answer."""
    result = edgekv("chat", chat_model.folder, "-p", "Hi", "--json", "--max-new-tokens", 8, "--context", 256)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert "".join(event["text"] for event in events if event["event"] == "TextDelta") == events[-1]["text"]
    assert events[-1]["usage"]["output_tokens"] == 8


def test_a_long_conversation_says_what_leaves(chat_model: ConvertedModel) -> None:
    """case C03, C04: with a full cache the chat goes on, and says how many tokens and which messages leave."""
    lines = "".join(f"This is line number {n} of a long talk.\n" for n in range(20))
    result = edgekv("chat", chat_model.folder, "--context", 128, "--max-new-tokens", 8, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert re.search(r"the cache is full: the \d+ oldest tokens \(messages? \d+", " ".join(result.stderr.split()))


def test_plan_table_and_json(tmp_path: Path) -> None:
    """Works from a config alone and reproduces 2 GiB for 32 layers, 32 KV heads of 128 in fp16 at 4096. In INT8 a row
    has two bytes more where edgekv's own operator runs."""
    row = 128 if native.unavailable() else 130
    config = json.loads((DATA / "config.json").read_text()) | {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
        "intermediate_size": 11008, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for heads, dtype, size in ((32, "fp16", 2 << 30), (8, "fp16", 512 << 20), (8, "int8", (2 << 20) * row)):
        path.write_text(json.dumps(config | {"num_key_value_heads": heads}))
        result = edgekv("plan", path, "--kv-dtype", dtype, "--context", 4096, "--memory", "100GiB", "--json")
        assert json.loads(result.stdout)["cache_bytes"] == size
    table = edgekv("plan", path, "--memory", "3GiB", "--context", 4096, "--kv-dtype", "float")
    assert table.returncode == 2
    assert "DOES NOT FIT" in table.stdout
    assert edgekv("plan", path, "--memory", "8GiB").returncode == 0


@pytest.mark.parametrize("name", ["llama-awq-g128", "llama-bnb-nf4", "onnx/genai-web", "onnx/optimum-llama"])
def test_plan_of_what_is_not_converted_yet(tmp_path: Path, name: str) -> None:
    """A checkpoint, and another maker's graph, from metadata: nothing is made, and what is made then takes no more."""
    source, home = DATA.parent / name, tmp_path / "home"

    def plan(model: Path) -> dict[str, Any]:
        result = edgekv("plan", model, "--json", "--home", home, "--memory", "4GiB")
        assert result.returncode == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    before = plan(source)
    assert not home.exists()
    made = prepare(str(source), home=home)
    after = plan(source)
    assert after == plan(made.folder)
    assert before["cache_bytes"] == after["cache_bytes"]
    expected, held = (found["lines"][0]["size_bytes"] for found in (before, after))
    assert 0.7 * expected < held <= 1.02 * expected  # of float32 factors, which may turn out to be float16
    assert "fp16" not in after["tokens_that_fit"]


def test_convert_calibrate_and_chat(tmp_path: Path) -> None:
    """The commands one after another, as the README tells them."""
    made = edgekv("convert", DATA, tmp_path / "model")
    assert made.returncode == 0, made.stderr
    assert "peak memory" in made.stdout
    measured = edgekv("calibrate", tmp_path / "model", "--tokens", 256)
    assert measured.returncode == 0, measured.stderr
    assert "times the perplexity of a float cache" in " ".join(measured.stderr.split())
    assert read_scales(tmp_path / "model" / "kv_scales.safetensors").provenance.tokens >= 256
    info = edgekv("info", tmp_path / "model")
    assert "int8 per channel, envelope" in " ".join(info.stdout.split())


def test_scales_are_measured_once_by_two_processes(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Two that begin together: one measures for minutes on a small device, the other waits for it."""
    model = tmp_path / "model"
    shutil.copytree(chat_model.folder, model, ignore=shutil.ignore_patterns("kv_scales*"))
    command = [sys.executable, "-m", "edgekv", "chat", str(model), "--context", "128", "-p", "Hello"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = "".join(process.communicate(timeout=120)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert told.count("safetensors written") == 1


def test_eval_prints_json_last(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Perplexity of a file through a small cache."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 60)
    result = edgekv("eval", chat_model.folder, "--data", tmp_path / "text.txt", "--tokens", 500, "--context", 128)
    assert result.returncode == 0, result.stderr
    reference, int8 = json.loads(result.stdout.splitlines()[-1])["lanes"]
    assert int8["evicted"] > 300
    assert int8["tokens"] == 500
    assert 0.9 < int8["ratio"] < 1.1
    assert reference["cache"]["dtype"] == "float"


def test_eval_of_several_settings_writes_files(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Two settings and needles; everything in a JSON file; a setting that is not understood is refused."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 60)
    common = ("eval", chat_model.folder, "--data", tmp_path / "text.txt", "--context", 128)
    options = ("--setting", "int8", "--setting", "float,sinks=0", "--needles", 1, "--tokens", 200)
    result = edgekv(*common, *options, "--json", tmp_path / "out.json")
    assert result.returncode == 0, result.stderr
    lanes = json.loads((tmp_path / "out.json").read_text())["lanes"]
    assert [lane["name"] for lane in lanes] == ["float", "int8", "float,sinks=0"]
    assert len(lanes[1]["layers"]) == 2
    assert {depth["expected"] for depth in lanes[2]["needles"]} <= {"held", "evicted", "cut"}
    assert "int8,sinks" in refused(edgekv(*common, "--setting", "int8,sinks"))


def test_eval_keeps_to_the_memory_that_all_its_caches_have(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Each has an engine with weights of its own: capacity shrinks with their number, and what cannot be is refused."""
    load, settings = LoadOptions(memory="150MiB"), [Setting("int8"), Setting("float"), Setting("k8v4", context=96)]
    alone = planned(chat_model, load, settings[:1], against_float=False)
    together = planned(chat_model, load, settings, against_float=True)
    small, large = (together_bytes(chat_model, load, kv, [*settings, REFERENCE]) for kv in (together, alone))
    assert MIN_CAPACITY <= together.capacity < alone.capacity == chat_model.spec.max_context
    assert small <= 150 * MIB < large
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 60)
    command = ("eval", chat_model.folder, "--data", tmp_path / "text.txt")
    message = refused(edgekv(*command, "--memory", "140MiB", "--context", 2048, "--setting", "float,sinks=0"))
    assert "2 caches of this run (float,sinks=0, float)" in message
    too_long = ("--setting", f"int8,context={2 * chat_model.spec.max_context}")
    assert "more than the model's own" in refused(edgekv(*command, *too_long))


def test_a_picture_of_no_known_kind_is_refused_before_a_run(tmp_path: Path) -> None:
    """It was found out at the end, with the figures lost."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat.")
    command = ("eval", "--data", tmp_path / "text.txt", "--plot", tmp_path / "curves.xyz")
    assert "curves.xyz is no kind of picture" in refused(edgekv(*command, home=tmp_path / "home"))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("command", ["plan", "info"])
def test_a_hub_model_is_found_where_it_was_made(chat_model: ConvertedModel, tmp_path: Path, command: str) -> None:
    """By the name that it was pulled by."""
    name = "hf:org/some-model/file.gguf"
    assert f"{name} is not here yet: run `edgekv chat {name}`" in refused(edgekv(command, name, home=tmp_path))
    shutil.copytree(chat_model.folder, tmp_path / "models" / "org--some-model--file.gguf")
    result = edgekv(command, name, home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2048" in result.stdout


def test_commands_that_take_nothing_say_so(chat_model: ConvertedModel) -> None:
    """What follows them might have been meant as a message."""
    typed = "Hello\n/retry with more detail\n/stats now\n/undo\n/stats\n"
    result = edgekv("chat", chat_model.folder, "--context", "256", "--max-new-tokens", 4, stdin=typed)
    assert result.returncode == 2
    assert re.findall("error: /(.*) takes no text", result.stderr) == ["retry", "stats"]
    assert re.search(r"messages +0\b", result.stdout)


def test_eval_tells_of_a_text_that_is_too_short(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """A table of three tokens looks like any other."""
    (tmp_path / "text.txt").write_text("Hello world.")
    result = edgekv("eval", chat_model.folder, "--data", tmp_path / "text.txt", "--context", 128, "--tokens", 100)
    tokens = json.loads(result.stdout.splitlines()[-1])["lanes"][0]["tokens"]
    assert f"has {tokens} tokens to foretell, not the 100 that are asked for]" in result.stderr


def test_a_memory_without_its_unit_is_told(chat_model: ConvertedModel) -> None:
    """Nobody means 512 bytes."""
    assert "did you mean 512MiB?" in refused(edgekv("plan", chat_model.folder, "--memory", 512))


def test_a_model_is_called_as_its_folder_is(tmp_path: Path) -> None:
    """Versions have dots; hubs keep files under their hashes, and link to them."""
    shutil.copytree(DATA, tmp_path / "Tiny-3.2-1B")
    assert re.search(r"name +Tiny-3.2-1B\n", edgekv("info", tmp_path / "Tiny-3.2-1B", home=tmp_path).stdout)
    (tmp_path / "3f8a1c9d2b7e").touch()
    (tmp_path / "tiny-3.2.Q4_0.gguf").symlink_to(tmp_path / "3f8a1c9d2b7e")
    assert [called(path) for path in (tmp_path / "tiny-3.2.Q4_0.gguf", tmp_path / "Tiny-3.2-1B" / ".")] == [
        "tiny-3.2.Q4_0",
        "Tiny-3.2-1B",
    ]


def test_rounding_without_a_tokenizer_is_not_measured(tmp_path: Path) -> None:
    """There is no text to measure it on; the model is there all the same."""
    shutil.copytree(DATA, tmp_path / "source", ignore=shutil.ignore_patterns("tokenizer*"))
    result = edgekv("convert", tmp_path / "source", tmp_path / "out", "--lossy", "int8")
    assert result.returncode == 0, result.stderr
    assert "is not measured: that needs text" in result.stderr
    assert "largest rounding error" in result.stdout


def test_deeply_nested_json_is_refused(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Python's parser gives up on it with an error that is no ValueError."""
    file = tmp_path / "config.json"
    file.write_text("[" * 200_000)
    for command in (("plan", file), ("scales", "import", chat_model.folder, "--file", file, "--from", "genai")):
        assert "config.json" in refused(edgekv(*command, home=tmp_path))


def test_what_does_not_fit_is_refused_before_scales_are_measured(tmp_path: Path) -> None:
    """The measurement takes a minute and more on a large model."""
    shutil.copytree(make_chat_model(DATA, tmp_path / "made").folder, tmp_path / "model")
    for scales in (tmp_path / "model").glob("kv_scales*"):
        scales.unlink()
    result = edgekv("chat", tmp_path / "model", "--memory", "100MiB", "-p", "Hello", home=tmp_path)
    assert "give at least --memory" in refused(result)
    assert "Measuring" not in result.stderr


@pytest.mark.parametrize("options", [("eval", "--json"), ("eval", "--checkpoint"), ("calibrate", "--out")])
def test_what_cannot_be_written_is_told_before_a_long_run(tmp_path: Path, options: tuple[str, str]) -> None:
    """Not at its end; nothing is downloaded for it either. What can be written leaves nothing before."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 60)
    command, flag = options
    for path in (tmp_path, tmp_path / "text.txt" / "inside", Path("/proc/none")):
        message = refused(edgekv(command, "--data", tmp_path / "text.txt", flag, path, home=tmp_path / "home"))
        assert f"Could not write {path}" in message
    check_writable(tmp_path / "new" / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


class TestRefusals:
    """Bad input: one sentence with numbers and a remedy, exit code 2, nothing half-written."""

    def test_a_truncated_gguf(self, tmp_path: Path) -> None:
        """Half a file."""
        (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\x10" * 40)
        message = refused(edgekv("convert", tmp_path / "half.gguf", tmp_path / "out"))
        assert "48 bytes" in message
        assert "download it again" in message
        assert [path.name for path in tmp_path.iterdir()] == ["half.gguf"]

    def test_a_directory_that_is_no_model(self, tmp_path: Path) -> None:
        """An empty folder."""
        assert "holds neither" in refused(edgekv("chat", tmp_path, "-p", "x", home=tmp_path / "home"))

    def test_an_unknown_name(self, tmp_path: Path) -> None:
        """The known ones are listed."""
        assert "smollm2-135m-instruct" in refused(edgekv("chat", "smolm2", "-p", "x", home=tmp_path))

    def test_the_name_of_a_repository(self, tmp_path: Path) -> None:
        """As model hubs write it: it is told how to say that."""
        for name in ("Org/A-Model_0.5B", "Org/A-Model/Q4_0.gguf"):
            assert f"hf:{name}." in refused(edgekv("chat", name, "-p", "x", home=tmp_path))

    def test_a_model_that_cannot_chat(self, tmp_path: Path) -> None:
        """Without a chat template, or a tokenizer: refused before it is converted, and before scales are measured."""
        source, home = tmp_path / "source", tmp_path / "home"
        shutil.copytree(DATA, source)
        assert "no chat template" in refused(edgekv("chat", source, "-p", "x", home=home))
        (source / "tokenizer.json").unlink()
        assert "tokenizer.json: copy" in refused(edgekv("chat", source, "-p", "x", home=home))
        assert not (home / "models").exists()
        made = convert(DATA, tmp_path / "made").model
        assert "no chat template" in refused(edgekv("chat", made.folder, "-p", "x", home=home))
        assert not list(made.folder.glob("kv_scales*"))

    def test_too_little_memory(self, chat_model: ConvertedModel) -> None:
        """--memory 50MB: the table, and a number that helps."""
        message = refused(edgekv("chat", chat_model.folder, "-p", "x", "--memory", "50MB"))
        wanted = re.search(r"--memory (\d+MiB)", message)
        assert wanted
        assert (
            edgekv("chat", chat_model.folder, "-p", "x", "--memory", wanted[1], "--max-new-tokens", 2).returncode == 0
        )

    def test_a_prompt_over_capacity(self, chat_model: ConvertedModel) -> None:
        """One message larger than the window; both numbers."""
        message = refused(edgekv("chat", chat_model.folder, "-p", "word " * 400, "--context", 128))
        assert re.search(r"One message is \d+ tokens, but the window .* holds \d+", message)

    def test_scales_of_another_model(self, chat_model: ConvertedModel, tmp_path: Path) -> None:
        """case C11: scales of another model or dtype."""
        scales = read_scales(chat_model.folder / "kv_scales.safetensors")
        for change in ({"fingerprint": "0" * 16}, {"dtype": "int4"}, {"k": np.ones((9, 2, 64), np.float32)}):
            other = tmp_path / "other.safetensors"
            changed = {**vars(scales), **change}
            changed["v"] = np.ones_like(changed["k"])
            write_scales(other, type(scales)(**changed))
            assert "edgekv calibrate" in refused(edgekv("chat", chat_model.folder, "-p", "x", "--scales", other))

    def test_a_damaged_model(self, chat_model: ConvertedModel, tmp_path: Path) -> None:
        """A data file that lost its end."""
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(chat_model.folder, copy)
        with (copy / "model.onnx.data").open("r+b") as file:
            file.truncate(1000)
        assert "1,000 bytes instead of" in refused(edgekv("chat", copy, "-p", "x"))
        (copy / "edgekv.json").write_text("{}")
        assert "convert the model again" in refused(edgekv("chat", copy, "-p", "x"))

    def test_options_out_of_range(self, chat_model: ConvertedModel) -> None:
        """Numbers that cannot be."""
        for options in (
            ["--context", 8],
            ["--context", 10**6],
            ["--sinks", 9999],
            ["--temperature", -1],
            ["--memory", "lots"],
        ):
            refused(edgekv("chat", chat_model.folder, "-p", "x", *options))

    def test_calibration_text(self, chat_model: ConvertedModel, tmp_path: Path) -> None:
        """A file that is missing, and one that is too short."""
        refused(edgekv("calibrate", chat_model.folder, "--data", tmp_path / "none.txt"))
        (tmp_path / "short.txt").write_text("short")
        refused(edgekv("calibrate", chat_model.folder, "--data", tmp_path / "short.txt"))
        assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
