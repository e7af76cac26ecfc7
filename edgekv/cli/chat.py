"""`edgekv chat`: the conversation loop. It reads lines, runs a Session and prints; nothing is computed here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.interrupt import Interrupt
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_runtime
from edgekv.errors import EdgeKVError, InvalidOption
from edgekv.generate import Event, Finished
from edgekv.model import catalog
from edgekv.options import LoadOptions
from edgekv.sampling import SamplingOptions
from edgekv.units import format_bytes

HELP = """\
/help          this list
/stats         the cache, and what the last answer took
/system TEXT   set the system prompt (without TEXT: show it)
/undo          take back the last exchange
/reset         forget the conversation
/save FILE     write the conversation to a file
/load FILE     read one back
/quit          leave (Ctrl-D too); Ctrl-C stops an answer"""


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--prompt", "-p", help="Answer this and exit; text from a pipe is added to it.")
@click.option("--system", "-s", help="System prompt. Default: the one recommended for the model.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON, one a line.")
@options_of(LoadOptions, unset=True)
@options_of(SamplingOptions, unset=True)
def command(model: str, prompt: str | None, system: str | None, as_json: bool, **values: Any) -> int:
    """Chat with MODEL: a catalog name, a model directory, a GGUF file or a folder of safetensors.

    When the cache is full the oldest turns leave and you are told; the system prompt stays. From a pipe, each line is
    one message.
    """
    sampling = given(SamplingOptions, values)
    options = LoadOptions(**({"overflow": "window"} | given(LoadOptions, values)))
    with ready_runtime(model, options) as runtime:
        session = runtime.session(system=runtime.model.description.system if system is None else system, **sampling)
        loop = ChatLoop(runtime, session, as_json=as_json)
        if prompt is not None:
            return loop.answer(_with_pipe(prompt))
        return loop.run()


def _with_pipe(prompt: str) -> str:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    return f"{prompt}\n\n{piped.strip()}" if piped.strip() else prompt


@dataclass
class ChatLoop:
    """Reads messages and commands, prints answers."""

    runtime: Any
    session: Any
    as_json: bool
    last: Finished | None = None

    def run(self) -> int:
        """Until the input ends; returns the exit code."""
        interactive = sys.stdin.isatty()
        if interactive:
            self._greet()
        code = 0
        for line in _lines(interactive):
            text = line.strip()
            if text in ("/quit", "/exit"):
                break
            if text.startswith("/"):
                code = self._guarded(lambda command=text: self._command(command))
            elif text:
                code = self._guarded(lambda message=line: self.answer(message.strip()))
        return 0 if interactive else code

    def answer(self, text: str) -> int:
        """Send one message and print the answer."""
        report = self.session.precheck(text).require()
        if not self.as_json:
            render.print_forecast(report)
        printer = render.AnswerPrinter(as_json=self.as_json)
        events: Iterator[Event] = self.session.send(text)
        self.last = None
        with Interrupt() as interrupt:
            for event in events:
                printer.show(event)
                if isinstance(event, Finished):
                    self.last = event
                if interrupt.asked:
                    events.close()  # type: ignore[attr-defined]
                    break
        printer.end()
        if render.console.is_terminal and not self.as_json:
            render.note(self._status() if self.last else "[stopped] " + self._status())
        return 0 if self.last else 130

    def _status(self) -> str:
        window = self.runtime.chat_state.timeline.window
        return render.status_line(window.length, window.capacity, window.evicted, self.last)

    def _greet(self) -> None:
        plan = self.runtime.plan
        render.note(
            f"{self.runtime.model.description.name}, {plan.kv.capacity} tokens of {plan.kv.dtype} cache, "
            f"{format_bytes(plan.total_bytes)} in all. /help lists commands, Ctrl-D leaves."
        )

    def _guarded(self, action: Any) -> int:
        """Run one line; a refusal is printed and the conversation goes on."""
        try:
            return int(action() or 0)
        except EdgeKVError as error:
            click.echo(f"error: {error}", err=True)
            return 2

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        actions: dict[str, Callable[[], None]] = {
            "help": lambda: render.note(HELP),
            "stats": self._stats,
            "system": lambda: self._system(rest.strip()),
            "undo": lambda: render.note("[taken back]" if self.session.undo() else "[nothing to take back]"),
            "reset": self._reset,
            "save": lambda: self._save(rest.strip()),
            "load": lambda: self._load(rest.strip()),
        }
        if name not in actions:
            raise InvalidOption(
                f"There is no command /{name}: /help lists them. To send the text, put a space before it."
            )
        actions[name]()

    def _system(self, text: str) -> None:
        if text:
            self.session.set_system(text)
        render.note(f"[system prompt: {self.session.system or 'none'}]")

    def _reset(self) -> None:
        self.session.reset()
        render.note("[forgotten]")

    def _stats(self) -> None:
        window, plan = self.runtime.chat_state.timeline.window, self.runtime.plan
        rows = [
            ["cache", f"{window.length} of {window.capacity} tokens ({window.room} free), {plan.kv.dtype}"],
            ["pinned", f"{window.pinned} tokens, never evicted"],
            ["evicted", f"{window.evicted} tokens since the conversation began"],
            [
                "memory",
                f"{format_bytes(plan.total_bytes)} planned, cache {format_bytes(plan.cache_bytes)}",
            ],
            ["messages", str(len(self.session.messages))],
        ]
        if self.last is not None:
            usage = self.last.usage
            new = usage.input_tokens - usage.reused_tokens
            rows += [
                ["last prompt", f"{usage.input_tokens} tokens: {usage.reused_tokens} reused, {new} read"],
                ["last answer", f"{usage.output_tokens} tokens, ended by {self.last.finish_reason}"],
                ["speed", f"{usage.tokens_per_s:.1f} tokens/s, first token after {usage.prefill_s:.2f} s"],
            ]
        render.table("", ["", ""], rows)

    def _save(self, name: str) -> None:
        from edgekv.conversation import write_conversation

        path = _named(name)
        write_conversation(path, self.session.messages)
        render.note(f"[{len(self.session.messages)} messages written to {path}]")

    def _load(self, name: str) -> None:
        from edgekv.conversation import read_conversation

        messages = read_conversation(_named(name))
        self.session.reset()
        self.session.messages = messages
        render.note(f"[{len(messages)} messages read]")


def _named(name: str) -> Path:
    if not name:
        raise InvalidOption("Name a file: /save FILE or /load FILE.")
    return Path(name).expanduser()


def _lines(interactive: bool) -> Iterator[str]:
    """Lines from the terminal with a prompt and editing, or from a pipe."""
    if not interactive:
        yield from sys.stdin
        return
    try:
        import readline  # noqa: F401  (gives input() editing and history)
    except ImportError:
        render.note("[no line editing on this system]")
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n[Ctrl-D or /quit leaves]", err=True)
