"""One Chat for several threads: one answer at a time, and whoever asked first is answered first.

A stream has the engine from the call that starts it until it has ended, been closed or been dropped. Meanwhile other
threads that ask for something wait in line. The thread that loaded the model is the exception, as a person at a prompt
expects: when it starts another answer, its own earlier one ends, unless another thread reads that one. (A pool's
threads could not have that: there a thread starts one request's answer and others carry it on. So a thread that waits
for an answer of its own, which then cannot go on, is told so only after a while in which no other thread has touched
that answer.)
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from edgekv.chat import Chat, ChatRequest, Events
from edgekv.errors import InvalidOption
from edgekv.generate import Event
from edgekv.sampling import SamplingOptions
from edgekv.text.precheck import LengthReport, Overflow

OWN_WAIT_S = 5.0
"""How long a thread waits for an answer that it has begun itself and that no other thread has in its hands."""


class Turn:
    """A place in the line. `release` may be called from any thread and more than once."""

    def __init__(self, line: Turns) -> None:
        self._line = line
        self.thread = threading.current_thread()
        self._others: set[threading.Thread] = set()
        self._begun: SimpleQueue[None] = SimpleQueue()  # which is made to be put into by whoever collects garbage

    def begin(self) -> None:
        """Let whoever waits for it go on."""
        self._begun.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for `begin`, once; False: it has not come."""
        with suppress(Empty):
            self._begun.get(timeout=timeout_s)
            return True
        return False

    @property
    def shared(self) -> bool:
        """Whether another thread than the one that took it has made use of it, and may again."""
        return any(_lives(thread) for thread in tuple(self._others))

    def used(self) -> None:
        """Note which thread makes use of it."""
        thread = threading.current_thread()
        if thread is not self.thread:
            self._others.add(thread)

    def release(self) -> None:
        """Leave; the next in line begins."""
        self._line.leave(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _lives(thread: threading.Thread) -> bool:
    with suppress(RuntimeError):  # what a thread that Python did not start says when it has ended
        return thread.is_alive()
    return False


class Turns:
    """The line: the first in it has its turn.

    A stream that is garbage leaves in whatever thread collects it, between any two steps of what that thread does here.
    So the lock is one that its holder may take again, what is done under it is done in single steps of the interpreter,
    and nothing with a lock of its own (an Event, a Condition) tells who is first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._line: deque[Turn] = deque()

    def take(self) -> Turn:
        """Wait for a turn.

        Raises:
            InvalidOption: it would never come, because this thread holds an unfinished answer itself.
        """
        turn = Turn(self)
        try:
            with self._lock:
                self._line.append(turn)
                self._begin_first()
            while not turn.wait(OWN_WAIT_S):
                self._check_other(turn)
        except BaseException:  # Ctrl-C while waiting
            turn.release()
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        """What `Turn.release` does."""
        with self._lock:
            with suppress(ValueError):  # it has left already
                self._line.remove(turn)
            self._begin_first()

    def _begin_first(self) -> None:
        with suppress(IndexError):  # nobody is in line
            self._line[0].begin()

    def _check_other(self, turn: Turn) -> None:
        """Refuse to wait for a turn that nobody but the one who waits can end."""
        with self._lock:
            first = self._line[0]
        if first.thread is turn.thread and not first.shared and first is not turn:
            raise InvalidOption(
                "This thread waits for an answer that it has begun itself and not read to its end: close that stream "
                "(stream.close()) or read it to its end before starting another one."
            )


class TurnEvents(Generator[Event, None, None]):
    """A stream of events that has its turn until it ends."""

    def __init__(self, events: Events, turn: Turn) -> None:
        self._events, self._turn = events, turn
        self.thread = turn.thread

    @property
    def shared(self) -> bool:
        """Whether another thread has it in its hands."""
        return self._turn.shared

    @property
    def between_events(self) -> bool:
        """Whether it goes on, and this thread alone reads it: then nobody uses the engine just now."""
        own = self.thread is threading.current_thread() and not self.shared
        return own and getgeneratorstate(self._events) != GEN_CLOSED

    def send(self, value: None) -> Event:
        """The next event."""
        self._turn.used()
        try:
            return self._events.send(value)
        except BaseException:
            self._release()
            raise

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Event:
        """Raise in the stream, which ends it."""
        self._turn.used()
        try:
            return self._events.throw(kind if value is None else value)
        finally:
            self._release()

    def close(self) -> None:
        """End the stream; what it gave out stays in the cache."""
        try:
            self._events.close()
        finally:
            self._release()

    def _release(self) -> None:
        """Give the turn back, unless another thread is in the stream just now: it still needs the engine."""
        if getgeneratorstate(self._events) != GEN_RUNNING:
            self._turn.release()

    def __del__(self) -> None:
        self.close()


class SharedChat(Chat):
    """A Chat that several threads may use at once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns, self._home = Turns(), threading.current_thread()
        self._stream: Callable[[], TurnEvents | None] = lambda: None  # weak: one that is dropped ends

    def precheck(self, request: ChatRequest) -> LengthReport:
        """As `Chat.precheck`; between two events of this thread's own answer it does not wait."""
        current = self._stream()
        if current is not None and current.between_events:
            return super().precheck(request)
        with self._turns.take():
            return super().precheck(request)

    def stream(self, request: ChatRequest) -> Events:
        """As `Chat.stream`, when it is this thread's turn."""
        return self._in_turn(lambda: super(SharedChat, self).stream(request))

    def stream_text(self, text: str, sampling: SamplingOptions, overflow: Overflow) -> Events:
        """As `Chat.stream_text`, when it is this thread's turn."""
        return self._in_turn(lambda: super(SharedChat, self).stream_text(text, sampling, overflow))

    def stop(self) -> None:
        """End this thread's own answer, if it is the thread that loaded the model and alone reads it."""
        current = self._stream()
        at_home = threading.current_thread() is self._home
        if current is not None and current.thread is self._home and at_home and not current.shared:
            current.close()

    def exclusive(self) -> Turn:
        """A turn for whatever changes the cache; a context manager."""
        self.stop()
        return self._turns.take()

    def _in_turn(self, start: Callable[[], Events]) -> Events:
        turn = self.exclusive()
        try:
            events = TurnEvents(start(), turn)
        except BaseException:
            turn.release()
            raise
        self._stream = weakref.ref(events)
        return events
