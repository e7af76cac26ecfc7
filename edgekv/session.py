"""One dialogue over a chat's cache.

It holds the messages, and after every answer, finished or interrupted, the text that was shown is what is remembered.
Whatever reads or changes the messages ends an answer that is still being made, whoever holds its stream: when that is
dropped later it changes nothing any more.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edgekv.chat import Chat, ChatRequest, Dialogue, Events
from edgekv.errors import InvalidOption
from edgekv.generate import Event, Finished, NotedDown, PrefillProgress, TextDelta
from edgekv.notes import Notepad, Task, next_task
from edgekv.sampling import SamplingOptions
from edgekv.session_file import CacheIdentity, read_session, write_session
from edgekv.session_state import SessionState
from edgekv.text.precheck import OVERFLOWS, LengthReport, Overflow
from edgekv.text.template import Message


class Recorded(Generator[Event, None, None]):
    """An answer that its session records. Closed before its first event it closes what it would have passed on, which a
    generator that never started does not."""

    def __init__(self, recording: Events, events: Events) -> None:
        self._recording, self._events = recording, events

    @property
    def state(self) -> str:
        """As `inspect.getgeneratorstate` names it."""
        return getgeneratorstate(self._recording)

    def send(self, value: None) -> Event:
        """The next event."""
        return self._recording.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Event:
        """Raise in the stream, which ends it."""
        return self._recording.throw(kind if value is None else value)

    def close(self) -> None:
        """End the answer; what was shown of it is remembered."""
        self._recording.close()
        self._events.close()


class Session:
    """One dialogue, for one thread at a time.

    Args:
        chat: the cache it runs on. system: the system prompt. sampling, overflow: defaults of every answer.
    """

    def __init__(
        self, chat: Chat, *, system: str = "", sampling: SamplingOptions | None = None, overflow: Overflow = "window"
    ) -> None:
        if overflow not in OVERFLOWS:
            raise InvalidOption(f"Unknown overflow policy {overflow!r}: choose {' or '.join(OVERFLOWS)}.")
        self._chat = chat
        self.sampling = sampling or SamplingOptions()
        self.overflow: Overflow = overflow
        self.messages: list[Message] = []
        self._pad = Notepad()
        self._answer: Callable[[], Recorded | None] = lambda: None  # weak: one that is dropped ends
        self._dialogue = Dialogue(self.sampling.seed)
        if system:
            self.set_system(system)

    @property
    def system(self) -> str:
        """The system prompt, or an empty string."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Set, change or (with an empty text) remove the system prompt."""
        self._end_answer()
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [Message(role="system", content=text), *rest] if text else rest

    def restart_random(self) -> None:
        """Begin the random stream anew, with the seed of `sampling`."""
        self._dialogue.random = np.random.default_rng(self.sampling.seed)

    def precheck(self, text: str, sampling: SamplingOptions | None = None) -> LengthReport:
        """What sending this text would do to the cache; nothing is run."""
        messages, policy = [*self.messages, Message(role="user", content=text)], self.overflow
        if policy == "summarise":
            messages, policy = self._pad.view(messages), "window"
        return self._chat.precheck(self._request(messages, sampling or self.sampling, policy))

    @property
    def note(self) -> str:
        """What the model noted down of turns that have left (overflow="summarise"), or an empty string."""
        return self._pad.note

    def send(self, text: str, sampling: SamplingOptions | None = None) -> Events:
        """Say something and stream the answer. If the text is refused, the conversation is as it was.

        Raises:
            ContextOverflow: the text does not fit. TemplateError: the template refuses it. InvalidOption: another
            thread is in the answer before, which would have to end.
        """
        self._end_answer()
        messages = [*self.messages, Message(role="user", content=text)]
        chosen = sampling or self.sampling
        if chosen.seed is not None and chosen.seed != self.sampling.seed:
            self._dialogue.random = np.random.default_rng(chosen.seed)
        if self.overflow == "summarise":
            self.precheck(text, chosen).require()
            events = self._with_notes(messages, chosen)
        else:
            events = self._chat.stream(self._request(messages, chosen, self.overflow))
        answer = Recorded(self._record(messages, events), events)
        self._answer = weakref.ref(answer)
        return answer

    @property
    def last_question(self) -> str:
        """What the user said last, or an empty string."""
        said = [message["content"] for message in self.messages if message["role"] == "user"]
        return said[-1] if said else ""

    def undo(self) -> bool:
        """Take back the last exchange, also one that is still being answered; False if there is none."""
        before = self.messages
        if self._end_answer() and self.messages is before:  # nothing was shown, so there is nothing more to take back
            return True
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        if last >= 0:
            del self.messages[last:]
            self._pad = self._pad.without(self.messages)
        return last >= 0

    def reset(self) -> None:
        """Forget the dialogue; the system prompt stays."""
        self._end_answer()
        self._chat.reset(self._dialogue)
        self._pad = Notepad()
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write messages, cache and random stream to a file, atomically; returns its SHA-256.

        Raises:
            StorageError: it cannot be written; what was there is untouched. InvalidOption: the cache has no identity.
        """
        identity = self._identity()
        self._end_answer()
        with self._chat.exclusive():
            return write_session(Path(path), self._state(), identity, self._chat.timeline.engine.kv.capacity)

    def load(self, path: str | os.PathLike[str], *, reread: bool = False) -> None:
        """Go on with a saved session, as if it had never stopped; this one is as it was if that is refused.

        Args:
            reread: take only the words; they are read again with the next message.

        Raises:
            SessionError: it is missing, damaged, or for another model, dtype, scales or capacity.
            InvalidOption: layers with a window keep more tokens in this cache than in the saved one.
        """
        identity, kv = (None, None) if reread else (self._identity(), self._chat.timeline.engine.kv)
        state = read_session(Path(path), identity, kv)
        self._end_answer()
        with self._chat.exclusive():
            self._chat.restore(self._dialogue, state.chat)
        self.messages, self.sampling, self.overflow = list(state.messages), state.sampling, state.overflow
        self._dialogue.random.bit_generator.state = state.random
        self._pad = Notepad(state.note, state.noted)

    def _end_answer(self) -> bool:
        """End the answer that is being made, so that what was shown of it is remembered now and nothing later; False if
        there is none.

        Raises:
            InvalidOption: another thread is in it.
        """
        answer = self._answer()
        if answer is None or answer.state == GEN_CLOSED:
            return False
        if answer.state == GEN_RUNNING:
            raise InvalidOption("Another thread reads this session's answer just now: close that stream first.")
        answer.close()
        return True

    def _identity(self) -> CacheIdentity:
        if self._chat.identity is None:
            raise InvalidOption("This session's cache does not say what it holds, so it cannot be saved or loaded.")
        return self._chat.identity

    def _state(self) -> SessionState:
        random = dict(self._dialogue.random.bit_generator.state)
        chat = self._chat.state(self._dialogue)
        words, pad = tuple(self.messages), self._pad
        return SessionState(words, self.sampling, self.overflow, random, chat, pad.note, pad.noted)

    def _with_notes(self, messages: list[Message], sampling: SamplingOptions) -> Events:
        """Note down what must leave for these messages to have room, then answer them."""
        kv = self._chat.timeline.engine.kv
        wanted = min(sampling.max_new_tokens or kv.stride, kv.max_pinned)
        while (found := self._measure(self._pad.view(messages)).input_tokens) + wanted > kv.capacity:
            yield from self._take_note(next_task(self._pad, messages, self._measure))
        room = min(sampling.max_new_tokens or kv.capacity, kv.capacity - found)
        chosen = replace(sampling, max_new_tokens=room)
        events = self._chat.stream(self._request(self._pad.view(messages), chosen, "error"))
        try:
            yield from events
        finally:
            events.close()

    def _take_note(self, task: Task) -> Events:
        events = self._chat.stream(self._request(task.messages, task.sampling, "error"))
        text = ""
        try:
            for event in events:
                if isinstance(event, Finished):
                    text = event.text
                elif isinstance(event, PrefillProgress):
                    yield event
        finally:
            events.close()
        self._pad = task.result(text, self._chat.tokenizer)
        yield NotedDown(self._pad.note, self._pad.noted)

    def _measure(self, messages: Sequence[Message]) -> LengthReport:
        return self._chat.precheck(self._request(messages, self.sampling, "window"))

    def _request(self, messages: Sequence[Message], sampling: SamplingOptions, overflow: Overflow) -> ChatRequest:
        return ChatRequest(messages, sampling, overflow, dialogue=self._dialogue)

    def _record(self, messages: list[Message], events: Events) -> Events:
        """Pass the events on; at the end, however it comes, remember what was shown."""
        shown, finished = "", False
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    shown += event.text
                finished = isinstance(event, Finished) and event.finish_reason != "time"
                yield event
        finally:
            events.close()
            if shown or finished:
                self.messages = [*messages, Message(role="assistant", content=shown)]
