"""`edgekv chat`: the conversation loop. It reads lines, runs a Session and prints; nothing is computed here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from edgekv.chat import Events
from edgekv.cli import render
from edgekv.cli.background import Background
from edgekv.cli.interrupt import Interrupt
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_runtime
from edgekv.conversation import read_conversation, write_conversation
from edgekv.errors import EdgeKVError, InvalidOption, StorageError
from edgekv.files import expanded
from edgekv.generate import Finished
from edgekv.model import catalog, recommended
from edgekv.options import LoadOptions, home_of
from edgekv.sampling import SamplingOptions
from edgekv.session_file import SUFFIX, read_info
from edgekv.session_store import Question, SavedSession, SessionStore
from edgekv.text.precheck import Overflow
from edgekv.units import format_bytes

HELP = """\
/help          this list
/stats         the cache, and what the last answer took
/system TEXT   set the system prompt (without TEXT: show it)
/undo          take back the last exchange
/retry         ask the last question again (also one lost to a kill)
/reset         forget the conversation
/save FILE     write the conversation and its cache (NAME.json: only the words)
/load FILE     go on with one
/quit          leave (Ctrl-D and /exit too); Ctrl-C stops an answer"""

UNSAVED, INTERRUPTED = 2, 130
"""Exit codes: the answer is there and could not be kept; Ctrl-C."""

_ALONE = ("help", "stats", "undo", "retry", "reset")
"""Commands that take nothing."""

_DEFAULTS: dict[str, Any] = {"overflow": "window"}
"""Where the chat's own differ."""

_TOLD = {name: f"the model's own, else {getattr(SamplingOptions, name)}" for name in recommended.FIELDS}


@dataclass(frozen=True)
class Keeping:
    """Whether and where the conversation is kept."""

    resume: bool
    session: str | None
    reread: bool
    no_save: bool
    once: bool = False  # one answer and exit, which is no conversation

    @classmethod
    def taken_from(cls, values: dict[str, Any], *, once: bool) -> Keeping:
        """Take these options out of those of the command."""
        resume, session, reread, no_save = (values.pop(name) for name in ("resume", "session", "reread", "no_save"))
        return cls(resume, session, reread, no_save, once)

    def check(self, store: SessionStore) -> None:
        """Refuse a name that cannot be one, and to go on where nothing is kept, before a model is made ready."""
        if self.session is not None:
            store.path(self.session)
        if self.resume:
            store.require_any() if self.session is None else store.require(self.session)

    def name(self, store: SessionStore, model: str) -> str:
        """What the conversation is called, or '' if it is not kept: one that is typed is, one from a pipe or of a
        single prompt is not."""
        if self.resume:
            return self.session or store.newest(model)
        if self.session or self.no_save or self.once or not sys.stdin.isatty():
            return self.session or ""  # with --no-save it is read and not written
        return store.new_name(model)

    def open(self, stack: ExitStack, store: SessionStore, model: str) -> SavedSession | None:
        """The conversation's place, or None if it is not kept. Where nothing can be written, one that nobody named goes
        on without, and one that is only read goes on as it is."""
        try:
            name = self.name(store, model)
            if self.no_save:
                return store.to_read(name) if name else None
            return stack.enter_context(store.open(name)) if name else None
        except StorageError as error:
            if self.session or self.resume:
                raise
            render.note(f"[this conversation is not saved: {error}]")
            return None


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--prompt", "-p", help="Answer this and exit; text from a pipe is added to it.")
@click.option("--system", "-s", help="System prompt. Default: the one recommended for the model.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON, one a line.")
@click.option("--continue", "resume", is_flag=True, help="Go on with the newest conversation with this model.")
@click.option("--session", help="Name of the conversation: go on with it, or begin it.")
@click.option("--reread", is_flag=True, help="Take only the words of a saved conversation and read them again.")
@click.option("--no-save", is_flag=True, help="Do not save this conversation.")
@options_of(LoadOptions, unset=True, told=_DEFAULTS)
@options_of(SamplingOptions, unset=True, told=_TOLD)
def command(model: str, prompt: str | None, system: str | None, as_json: bool, **values: Any) -> int:
    """Chat with MODEL: a catalog name, a model directory, a GGUF file, or a folder with safetensors or an ONNX graph.

    When the cache is full the oldest turns leave and you are told; the system prompt stays. From a pipe, each line is
    one message. A conversation that is typed is saved after every answer, and --continue goes on with it; what
    --prompt asks is saved with --session or --continue only.
    """
    keeping = Keeping.taken_from(values, once=prompt is not None)
    sampling, overflow = given(SamplingOptions, values), values.get("overflow")
    options = LoadOptions(**(_DEFAULTS | given(LoadOptions, values)))
    SamplingOptions(**sampling)  # refused before anything is downloaded, converted or loaded, as is what follows
    store = SessionStore(home_of(options))
    keeping.check(store)
    text = None if prompt is None else _with_pipe(prompt)
    with ready_runtime(model, options, chats=True) as runtime, ExitStack() as stack:
        session = runtime.session(system=runtime.model.description.system if system is None else system, **sampling)
        saved = keeping.open(stack, store, runtime.model.description.name)
        loop = ChatLoop(runtime, session, as_json=as_json, saved=saved)
        stack.callback(loop.settle)
        if saved is not None and saved.exists:
            loop.resume(reread=keeping.reread, sampling=sampling, system=system, overflow=overflow)
        loop.take_question()
        if keeping.no_save:
            loop.saved = None
        code = loop.run() if text is None else loop.answer(text)
        return code if loop.settle() else code or UNSAVED


def _with_pipe(prompt: str) -> str:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (prompt, piped.strip()) if part.strip())
    if not text:
        raise InvalidOption("There is nothing to answer: --prompt is empty, and no text comes from a pipe.")
    return text


@dataclass
class ChatLoop:
    """Reads messages and commands, prints answers."""

    runtime: Any
    session: Any
    as_json: bool
    saved: SavedSession | None = None
    last: Finished | None = None
    _asked: str = ""  # the last question, if it has no answer in the conversation
    _saving: Background = field(default_factory=Background)

    def resume(self, *, reread: bool, sampling: dict[str, Any], system: str | None, overflow: Overflow | None) -> None:
        """Go on with a saved conversation; options that were typed win over those it was saved with."""
        assert self.saved is not None, "there is a file to go on with"
        self.session.load(self.saved.path, reread=reread)
        self.session.sampling = replace(self.session.sampling, **sampling)
        if "seed" in sampling:
            self.session.restart_random()
        if overflow is not None:
            self.session.overflow = overflow
        if system is not None:
            self.session.set_system(system)
        count = sum(message["role"] == "user" for message in self.session.messages)
        render.note(f"[going on with {self.saved.name}: {count} question{'s' * (count != 1)} so far]")

    def take_question(self) -> None:
        """Have the question ready that was being answered when a process ended."""
        question = Question() if self.saved is None else self.saved.question
        if question.is_open(self._said):
            self._asked = question.text
            render.note(f"[not answered when edgekv ended: {render.shortened(question.text)} - /retry asks it again]")

    def run(self) -> int:
        """Until the input ends; returns the exit code. Ctrl-C ends a pipe; one with a refused line is no success."""
        interactive = sys.stdin.isatty()
        if interactive:
            self._greet()
        code = 0
        for line in _lines(interactive):
            text = line.strip()
            if text in ("/quit", "/exit"):
                break
            if text.startswith("/"):
                code = self._guarded(lambda command=text: self._command(command)) or code
            elif text:
                code = self._guarded(lambda message=text: self.answer(message)) or code
            if code == INTERRUPTED and not interactive:
                break
        return 0 if interactive else code

    def answer(self, text: str) -> int:
        """Send one message and print the answer; what was shown of it is kept, however it ends."""
        report = self.session.precheck(text).require()
        if not self.as_json and self.session.overflow != "summarise":  # which tells what it noted down
            render.print_forecast(report)
        self._asked = text
        self._ask(text)
        printer = render.AnswerPrinter(as_json=self.as_json)
        known = len(self.session.messages)
        events: Events = self.session.send(text)
        self.last = None
        try:
            with Interrupt() as interrupt:
                for event in events:
                    printer.show(event)
                    if isinstance(event, Finished):
                        self.last = event
                    if interrupt.asked:
                        break
        finally:
            events.close()
            grown = len(self.session.messages) > known
            if grown:
                self._asked = ""
                self._save_now()
            printer.end()
        if not grown:
            self._save_now()
        if self.last is not None and not self.as_json:
            plan = self.runtime.plan
            whole = plan.kv.holds_all_of(plan.spec.max_context)
            render.print_limit(self.last, self.session.sampling, self.session.overflow, whole=whole)
        if render.console.is_terminal and not self.as_json:
            render.note(self._status() if self.last else "[stopped] " + self._status())
        return 0 if self.last else INTERRUPTED

    def settle(self) -> bool:
        """Wait for a save that is under way. Whether it succeeded; if not, why is told."""
        with _telling():
            self._saving.wait()
            return True
        return False

    def _save_now(self) -> None:
        """Save the conversation where it is kept, while its user reads; only then its question is no longer open."""
        saved = self.saved
        if saved is None:
            return

        def save() -> None:
            self.session.save(saved.path)
            saved.forget_question()

        self.settle()
        self._saving.start(save)

    def _ask(self, text: str) -> None:
        """Keep a question until its answer is saved."""
        if self.saved is not None:
            with _telling():
                self.saved.ask(Question(text, self._said, self.runtime.model.description.name))

    @property
    def _said(self) -> int:
        """Messages of the conversation, the system prompt not counted."""
        return sum(message["role"] != "system" for message in self.session.messages)

    def _status(self) -> str:
        window = self.runtime.chat_state.timeline.window
        return render.status_line(window.length, window.capacity, window.evicted, self.last)

    def _greet(self) -> None:
        plan = self.runtime.plan
        render.note(
            f"{self.runtime.model.description.name}, {plan.kv.capacity} tokens of {plan.kv.dtype} cache, "
            f"{format_bytes(plan.total_bytes)} in all, {self.runtime.engine_choice.name} engine. "
            "/help lists commands, Ctrl-D leaves."
        )

    def _guarded(self, action: Any) -> int:
        """Run one line, when the save before it has ended; a refusal is printed and the conversation goes on, as it
        does when someone at the keyboard is impatient with Ctrl-C."""
        try:
            self.settle()
            return int(action() or 0)
        except (EdgeKVError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            render.refusal(str(error))
            return 2
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            render.note("\n[stopped]")
            return INTERRUPTED

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        actions: dict[str, Callable[[], None]] = {
            "help": lambda: render.note(HELP),
            "stats": self._stats,
            "system": lambda: self._system(rest.strip()),
            "undo": self._undo,
            "retry": self._retry,
            "reset": self._reset,
            "save": lambda: self._save(rest.strip()),
            "load": lambda: self._load(rest.strip()),
        }
        if name not in actions:
            raise InvalidOption(
                f"There is no command /{name}: /help lists them. To send the text, put a space before it."
            )
        if rest.strip() and name in _ALONE:
            raise InvalidOption(f"/{name} takes no text. To send the line as a message, put a space before it.")
        actions[name]()

    def _gone(self) -> str:
        return render.named_turns(self.session.precheck("").turns_gone)

    def _undo(self) -> None:
        done, self._asked = self.session.undo(), ""
        self._save_now()
        render.note("[taken back]" if done else "[nothing to take back]")

    def _retry(self) -> None:
        asked, before = self._asked or self.session.last_question, list(self.session.messages)
        if not asked:
            raise InvalidOption("There is no question to ask again.")
        if self._asked:
            self.answer(asked)
            return
        self.session.undo()
        try:
            self.answer(asked)
        finally:
            if len(self.session.messages) < len(before):  # refused, or stopped before there was anything to keep
                self.session.messages, self._asked = before, ""
                self._save_now()

    def _system(self, text: str) -> None:
        if text:
            self.session.set_system(text)
            self._save_now()
        render.note(f"[system prompt: {self.session.system or 'none'}]")

    def _reset(self) -> None:
        self.session.reset()
        self._asked = ""
        self._save_now()
        render.note("[forgotten]")

    def _stats(self) -> None:
        window, plan = self.runtime.chat_state.timeline.window, self.runtime.plan
        rows = [
            ["cache", f"{window.length} of {window.capacity} tokens ({window.room} free), {plan.kv.dtype}"],
            ["pinned", f"{window.pinned} tokens, never evicted"],
            ["evicted", f"{window.evicted} tokens since the conversation began{self._gone()}"],
            [
                "memory",
                f"{format_bytes(plan.total_bytes)} planned, cache {format_bytes(plan.cache_bytes)}",
            ],
            ["messages", str(len(self.session.messages))],
        ]
        if self.session.note:
            rows.append(["note", self.session.note])
        if self.last is not None:
            usage = self.last.usage
            new = usage.input_tokens - usage.reused_tokens
            rows += [
                ["last prompt", f"{usage.input_tokens} tokens: {usage.reused_tokens} reused, {new} read"],
                ["last answer", f"{usage.output_tokens} tokens, ended by {self.last.finish_reason}"],
                ["speed", f"{usage.tokens_per_s:.1f} tokens/s, {render.first_token(self.last)}"],
            ]
        render.table("", ["", ""], rows)

    def _save(self, name: str) -> None:
        path = _named(name)
        if not path.parent.is_dir():
            raise InvalidOption(f"{path.parent} is no folder: make it first, or choose another place.")
        if path.suffix == ".json":
            _check_replaced(path, read_conversation)
            write_conversation(path, self.session.messages)
        else:
            path = path.with_name(path.name.removesuffix(SUFFIX) + SUFFIX)
            _check_replaced(path, read_info)
            self.session.save(path)
        render.note(f"[{len(self.session.messages)} messages written to {path}]")

    def _load(self, name: str) -> None:
        path = _named(name)
        if path.suffix == ".json":
            messages = read_conversation(path)
            self.session.reset()
            self.session.messages = messages
        else:
            self.session.load(path if path.exists() else path.with_name(path.name + SUFFIX))
        self._asked = ""
        self._save_now()
        render.note(f"[{len(self.session.messages)} messages read]")


@contextmanager
def _telling() -> Iterator[None]:
    """What cannot be written is told, and the chat goes on."""
    try:
        yield
    except (EdgeKVError, OSError) as error:
        render.note(f"[not saved: {error}]")


def _check_replaced(path: Path, read: Callable[[Path], object]) -> None:
    """A conversation may be written over an older one, and over nothing else: `/save model` may be typed beside a
    model.safetensors."""
    if path.exists():
        try:
            read(path)
        except EdgeKVError:
            raise InvalidOption(f"{path} is there already and is no conversation: choose another name.") from None


def _named(name: str) -> Path:
    if not name:
        raise InvalidOption("Name a file: /save FILE or /load FILE.")
    path = expanded(name)
    if path.name in ("", "..") or "\0" in name:
        raise InvalidOption(f"{name!r} names no file: /save FILE or /load FILE.")
    return path


_MOST_UNEDITED = 4095  # Linux's; input() edits lines, and takes any length, only where its output is a terminal, too


def _lines(interactive: bool) -> Iterator[str]:
    """Lines from the terminal with a prompt and editing, or from a pipe."""
    if not interactive:
        yield from sys.stdin
        return
    try:
        import readline  # gives input() editing and history

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    except ImportError:
        render.note("[no line editing on this system]")
    while True:
        try:
            line = input("> ")
            if len(os.fsencode(line)) >= _MOST_UNEDITED and not sys.stdout.isatty():
                render.refusal(
                    f"The terminal cuts lines of {_MOST_UNEDITED:,} bytes and more while the output goes to a pipe or "
                    "file, and this one may be cut: split it, or give the text with --prompt TEXT < FILE."
                )
                continue
            yield line
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n[Ctrl-D or /quit leaves]", err=True)
