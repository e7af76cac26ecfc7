"""The folder of saved conversations: home/sessions, one file each (session_file.py).

NAME.safetensors   the conversation as it was after its last answer
NAME.asked         a question whose answer is being made; it outlives a killed process, the answer does not
.NAME.lock         held by the process that has the conversation open
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from edgekv.errors import SessionError
from edgekv.files import atomic_file, exclusive, remove_leftovers
from edgekv.session_file import SUFFIX, SessionInfo, read_info

_ASKED = ".asked"
_NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True)
class Question:
    """What was asked last, kept until its answer is saved."""

    text: str = ""
    after: int = 0  # messages before it, the system prompt not counted
    model: str = ""

    def is_open(self, messages: int) -> bool:
        """Whether a conversation of so many messages lacks its answer: a process may end between saving that and
        forgetting the question."""
        return bool(self.text) and messages <= self.after


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
    def question(self) -> Question:
        """The one that was kept last; an empty one if there is none."""
        try:
            return Question(**json.loads(self._question.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return Question()

    def ask(self, question: Question) -> None:
        """Keep a question until its answer is saved."""
        with atomic_file(self._question, private=True) as part:
            part.write_text(json.dumps(asdict(question)), "utf-8")

    def forget_question(self) -> None:
        """Keep it no longer."""
        self._question.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete what a killed process left half-written. The caller has the conversation to itself."""
        for path in (self.path, self._question):
            remove_leftovers(path)

    def remove(self) -> None:
        """Delete it."""
        self.path.unlink(missing_ok=True)
        self.forget_question()

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
        saved, lock = SavedSession(self.path(name)), self.folder / f".{name}.lock"
        with exclusive(lock, lambda: _taken(name)):
            saved.remove_leftovers()
            try:
                yield saved
            finally:
                if name not in self.names():
                    with suppress(OSError):  # Windows keeps what is open
                        lock.unlink(missing_ok=True)

    def to_read(self, name: str) -> SavedSession:
        """One conversation that stays as it is; another process may have it open, since files are replaced whole.

        Raises:
            SessionError: the name cannot be one.
        """
        return SavedSession(self.path(name))

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
            raise self._unknown(name)
        return path

    def require(self, name: str) -> None:
        """Refuse to go on with a conversation of which nothing is kept, not even a question.

        Raises:
            SessionError: there is none of that name.
        """
        if not self.path(name).exists() and name not in self._questions():
            raise self._unknown(name)

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
        """The name of the last conversation with a model of that name; its first question may have no answer yet.

        Raises:
            SessionError: there is none.
        """
        found = [(info.saved_at, info.path.stem) for info in self.list() if info.identity.name == model]
        found += [(at, name) for name, (question, at) in self._questions().items() if question.model == model]
        if not found:
            raise self._none(f"with {model} ")
        return max(found)[1]

    def require_any(self) -> None:
        """Refuse to go on where nothing is saved.

        Raises:
            SessionError: there is no conversation with any model.
        """
        if not self.list() and not self._questions():
            raise self._none("")

    def new_name(self, model: str) -> str:
        """A name for a new conversation: model and time. One that has never been saved may be open elsewhere."""
        plain = re.sub(r"[^\w.-]", "-", model).lstrip(".-")[:60] or "session"
        base = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = {path.stem for path in self.folder.glob(f"*{SUFFIX}")}
        taken |= {path.stem.removeprefix(".") for path in self.folder.glob(".*.lock")}
        return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 1000))) if name not in taken)

    def _questions(self) -> dict[str, tuple[Question, float]]:
        """By name the questions that began a conversation and never had an answer, and when they were asked."""
        found = {}
        for path in self.folder.glob(f"[!.]*{_ASKED}"):
            with suppress(OSError):
                saved = SavedSession(path.with_suffix(SUFFIX))
                if saved.question.text and not saved.exists:
                    found[saved.name] = saved.question, path.stat().st_mtime
        return found

    def _unknown(self, name: str) -> SessionError:
        return SessionError(f"There is no session {name!r} in {self.folder}: `edgekv sessions list` shows them.")

    def _none(self, kind: str) -> SessionError:
        return SessionError(f"There is no saved conversation {kind}in {self.folder}: begin one without --continue.")


def _taken(name: str) -> NoReturn:
    raise SessionError(f"The session {name} is open in another edgekv: leave that one first, or begin another session.")
