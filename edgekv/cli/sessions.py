"""`edgekv sessions`: the saved conversations, listed, shown and removed."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgekv.cli import render
from edgekv.errors import SessionError
from edgekv.model.catalog import home as cache_home
from edgekv.session_file import read_session
from edgekv.session_store import SessionStore
from edgekv.units import format_bytes

_home = click.option(
    "--home", type=click.Path(path_type=Path), help="Cache folder. Default: EDGEKV_HOME, or the user's."
)


@click.group(name="sessions")
def command() -> None:
    """Saved conversations: `list` them, `show` one, or `rm` some. `edgekv chat --continue` goes on with the newest."""


@command.command(name="list")
@_home
def list_sessions(home: Path | None) -> None:
    """List the saved conversations, newest first."""
    store = _store(home)
    found = store.list()
    rows = [
        [
            info.path.stem,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved_at)),
            info.identity.name,
            str(info.messages),
            str(info.length),
            str(info.evicted),
            format_bytes(info.size_bytes),
            info.title,
        ]
        for info in found
    ]
    if rows:
        columns = ["name", "saved", "model", "messages", "tokens", "evicted", "size", "began with"]
        render.table("", columns, rows, right=range(3, 7), spare=(5, 3, 2, 4, 6, 1))  # all but name and beginning
    else:
        render.note(f"No saved conversations in {store.folder}.")
    for name in sorted({*store.names()} - {info.path.stem for info in found}):
        what = "cannot be read" if store.path(name).exists() else "is a question alone, that never had an answer"
        render.note(f"[{name} {what}: `edgekv sessions rm {name}` deletes it]")


@command.command
@click.argument("name")
@_home
def show(name: str, home: Path | None) -> None:
    """Print the words of a conversation, after checking that its file is whole."""
    state = read_session(_store(home).existing(name), None)
    for message in state.messages:
        click.echo(render.spoken(f"{message['role']}: {message['content']}\n"))
    if state.note:
        render.say(f"note on the first {state.noted} messages: {state.note}")


@command.command
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@_home
def rm(names: tuple[str, ...], everything: bool, home: Path | None) -> None:
    """Delete conversations."""
    store = _store(home)
    if not names and not everything:
        raise SessionError("Name the sessions to delete, or say --all: `edgekv sessions list` shows them.")
    known = store.names()
    chosen = known if everything else names
    for name in chosen:
        if name not in known:
            store.existing(name)  # which says that there is none
    for name in chosen:
        with store.open(name) as saved:
            saved.remove()
    render.note(f"[{len(chosen)} deleted]")


def _store(home: Path | None) -> SessionStore:
    return SessionStore(cache_home(home))
