"""`edgekv sessions`: the saved conversations, listed, shown and removed."""

from __future__ import annotations

import time

import click

from edgekv.cli import render
from edgekv.errors import SessionError
from edgekv.model.catalog import home as cache_home
from edgekv.session_file import read_session
from edgekv.session_store import SessionStore
from edgekv.units import format_bytes


@click.group(name="sessions")
def command() -> None:
    """Saved conversations: `list` them, `show` one, or `rm` some. `edgekv chat --continue` goes on with the newest."""


@command.command(name="list")
def list_sessions() -> None:
    """List the saved conversations, newest first."""
    store = _store()
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
        for info in store.list()
    ]
    if rows:
        columns = ["name", "saved", "model", "messages", "tokens", "evicted", "size", "began with"]
        render.table("", columns, rows, right=range(3, 7))
    else:
        render.note(f"No saved conversations in {store.folder}.")


@command.command
@click.argument("name")
def show(name: str) -> None:
    """Print the words of a conversation, after checking that its file is whole."""
    state = read_session(_store().existing(name), None)
    for message in state.messages:
        render.say(f"{message['role']}: {message['content']}\n")
    if state.note:
        render.say(f"note on the first {state.noted} messages: {state.note}")


@command.command
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them.")
def rm(names: tuple[str, ...], everything: bool) -> None:
    """Delete conversations."""
    store = _store()
    if not names and not everything:
        raise SessionError("Name the sessions to delete, or say --all: `edgekv sessions list` shows them.")
    chosen = [info.path.stem for info in store.list()] if everything else list(names)
    for name in chosen:
        store.existing(name)
    for name in chosen:
        with store.open(name) as saved:
            saved.remove()
    render.note(f"[{len(chosen)} deleted]")


def _store() -> SessionStore:
    return SessionStore(cache_home(None))
