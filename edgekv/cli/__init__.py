"""The command line. Commands are one small file each and are imported when they run; this file names them and turns
every expected failure into one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from edgekv import __version__
from edgekv.errors import EdgeKVError
from edgekv.uninterrupted import uninterrupted

COMMANDS = {
    "chat": "Chat with a model in the terminal.",
    "serve": "Serve a chat page and OpenAI's interface on this machine.",
    "sessions": "List, show or delete saved conversations.",
    "pull": "Download a model.",
    "convert": "Make a model directory from a GGUF file or safetensors.",
    "calibrate": "Measure the KV cache's scales.",
    "scales": "Take KV scales to another runtime, or bring theirs.",
    "plan": "Show what a model takes in memory, before loading it.",
    "info": "Show what a model or a checkpoint is and how it runs.",
    "eval": "Fidelity of the cache: perplexity, KL divergence, needles.",
    "bench": "Measure speed against this machine's ceiling.",
}


class _ReaderGone(Exception):
    """Whoever read our output has gone."""


class _Commands(click.Group):
    """Knows the commands by name and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with uninterrupted():
            command = import_module(f"edgekv.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would end with 1, which is a bug's
            raise _ReaderGone from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgekv")
def group() -> None:
    """Chat with a 4-bit model for as long as you like, in a fixed amount of memory."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 2 refused with a reason, 130 interrupted, 1 a bug."""
    _open_streams()
    try:
        result: Any = group.main(arguments, prog_name="edgekv", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except EdgeKVError as error:
        return _refuse(str(error))
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("", err=True)
        return 130
    except (_ReaderGone, BrokenPipeError):  # keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _refuse(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
    except MemoryError:
        return _refuse("The system ran out of memory: give a smaller --memory or --context.")


def _open_streams() -> None:
    """Where a standard stream was closed before we began, Python has None: nothing is read or written there then. Where
    it is not UTF-8 (a pipe on Windows, an old locale), what cannot be written is spelled out, and what cannot be read
    is told where the text is checked."""
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _refuse(message: str) -> int:
    from edgekv.cli import render

    render.refusal(message)
    return 2
