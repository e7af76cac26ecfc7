"""The folder of saved conversations: home/sessions, one file each (session_file.py).

NAME.safetensors   the conversation as it was after its last answer
NAME.asked         a question whose answer is being made; it outlives a killed process, the answer does not
.NAME.lock         held by the process that has the conversation open
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from edgekv.errors import SessionError
from edgekv.files import atomic_file, exclusive, remove_leftovers
from edgekv.session_file import SUFFIX, SessionInfo, read_info

_ASKED = ".asked"
_NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True)
class SavedSession:
    """One conversation of the folder, held open."""

    path: Path

    @property
    def name(self) -> str:
        """What it is called."""
        return self.path.stem

    @property
    def exists(self) -> bool:
        """Whether it has been saved at all."""
        return self.path.exists()

    @property
    def asked(self) -> str:
        """The question that was being answered when a process ended, or ''."""
        try:
            return self._question.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def ask(self, text: str) -> None:
        """Keep a question until its answer is saved, or with '' no more."""
        if text:
            with atomic_file(self._question, private=True) as part:
                part.write_text(text, "utf-8", "replace")
        else:
            self._question.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete what a killed process left half-written. The caller has the conversation to itself."""
        for path in (self.path, self._question):
            remove_leftovers(path)

    def remove(self) -> None:
        """Delete it."""
        self.path.unlink(missing_ok=True)
        self.ask("")

    @property
    def _question(self) -> Path:
        return self.path.with_name(self.name + _ASKED)


class SessionStore:
    """The saved conversations below a home folder."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "sessions"

    @contextmanager
    def open(self, name: str) -> Iterator[SavedSession]:
        """One conversation, saved or new, while no other process may have it.

        Raises:
            SessionError: the name cannot be one, or another process has it open.
        """
        saved = SavedSession(self.path(name))
        with exclusive(self.folder / f".{name}.lock", lambda: _taken(name)):
            saved.remove_leftovers()
            yield saved

    def path(self, name: str) -> Path:
        """Where a conversation of that name is.

        Raises:
            SessionError: the name cannot be one.
        """
        if not _NAME.fullmatch(name):
            raise SessionError(f"{name!r} cannot name a session: use letters, digits, '-', '_' and '.', at most 100.")
        return self.folder / f"{name}{SUFFIX}"

    def existing(self, name: str) -> Path:
        """The file of a saved conversation.

        Raises:
            SessionError: there is none of that name.
        """
        path = self.path(name)
        if not path.exists():
            raise SessionError(f"There is no session {name!r} in {self.folder}: `edgekv sessions list` shows them.")
        return path

    def list(self) -> list[SessionInfo]:
        """All that can be read, newest first."""
        found = []
        for path in self.folder.glob(f"[!.]*{SUFFIX}"):
            with suppress(SessionError):
                found.append(read_info(path))
        return sorted(found, key=lambda info: info.saved_at, reverse=True)

    def names(self) -> tuple[str, ...]:
        """All of which something is kept: also files that cannot be read, and questions that never had an answer."""
        kept = (path for suffix in (SUFFIX, _ASKED) for path in self.folder.glob(f"[!.]*{suffix}"))
        return tuple(sorted({path.stem for path in kept}))

    def newest(self, model: str) -> str:
        """The name of the last conversation with a model of that name.

        Raises:
            SessionError: there is none.
        """
        for info in self.list():
            if info.identity.name == model:
                return info.path.stem
        raise self._none(f"with {model} ")

    def require_any(self) -> None:
        """Refuse to go on where nothing is saved.

        Raises:
            SessionError: there is no conversation with any model.
        """
        if not self.list():
            raise self._none("")

    def new_name(self, model: str) -> str:
        """A name for a new conversation: model and time. One that has never been saved may be open elsewhere."""
        plain = re.sub(r"[^\w.-]", "-", model).lstrip(".-")[:60] or "session"
        base = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = {path.stem for path in self.folder.glob(f"*{SUFFIX}")}
        taken |= {path.stem.removeprefix(".") for path in self.folder.glob(".*.lock")}
        return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 1000))) if name not in taken)

    def _none(self, kind: str) -> SessionError:
        return SessionError(f"There is no saved conversation {kind}in {self.folder}: begin one without --continue.")


def _taken(name: str) -> NoReturn:
    raise SessionError(f"The session {name} is open in another edgekv: leave that one first, or begin another session.")
