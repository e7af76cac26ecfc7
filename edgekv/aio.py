"""AsyncRuntime: a Runtime for event loops.

    async with await edgekv.AsyncRuntime.load("smollm2-135m-instruct") as runtime:
        async for event in runtime.stream([{"role": "user", "content": "Hello"}]):
            ...

One thread owns the runtime and makes the answers, in the order they were asked for; the loop only passes events on. An
answer that nobody wants any more (its task was cancelled, its stream closed, or dropped as by a `break`) leaves the
line or ends between two events, with the cache left as after any interrupt. `max_waiting` bounds the line, `wait_s` the
time in it: both raise `Busy`, and nothing has run then.

The thread does not wait for the reader: an answer's events are kept until they are read, at most one answer's worth.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from edgekv.chat import Events
from edgekv.errors import Busy, InvalidOption
from edgekv.generate import Event, Finished
from edgekv.text.precheck import LengthReport
from edgekv.text.template import Message

if TYPE_CHECKING:
    from edgekv.api import Reply, Runtime


class AsyncRuntime:
    """A loaded model for an event loop. Use it as an async context manager, or `await close()`.

    Args:
        runtime: it is closed together with this. max_waiting: how many may wait besides the one that is answered; None
            is no limit.
    """

    def __init__(self, runtime: Runtime, *, max_waiting: int | None = None) -> None:
        self.runtime, self.max_waiting = runtime, max_waiting
        self._worker = ThreadPoolExecutor(1, "edgekv")
        self._line: set[_Answer] = set()
        self._closed = False

    @classmethod
    async def load(
        cls, model: str | os.PathLike[str], *, max_waiting: int | None = None, **options: Any
    ) -> AsyncRuntime:
        """`edgekv.load` without blocking the loop; arguments and errors as there."""
        from edgekv.api import load

        runtime = await asyncio.to_thread(partial(load, model, **options))
        return cls(runtime, max_waiting=max_waiting)

    async def __aenter__(self) -> AsyncRuntime:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """How many answers have been asked for and have not begun."""
        return sum(not answer.begun for answer in self._line)

    @property
    def running(self) -> int:
        """How many answers are being made: 0 or 1."""
        return len(self._line) - self.waiting

    def stream(self, messages: Sequence[Message], *, wait_s: float | None = None, **options: Any) -> AsyncEvents:
        """Answer messages as an async iterator of events. Nothing blocks here: errors come with the first event.

        Args:
            wait_s: the longest that the answer may wait for its turn. options: those of `Runtime.stream`.

        Raises:
            Busy: `max_waiting` others wait already. InvalidOption: it is closed.
        """
        return self._ask(partial(self.runtime.stream, messages, **options), wait_s)

    def stream_text(self, prompt: str, *, wait_s: float | None = None, **sampling: Any) -> AsyncEvents:
        """Continue plain text, without a chat template. Otherwise as `stream`."""
        return self._ask(partial(self.runtime.stream_text, prompt, **sampling), wait_s)

    async def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """Answer messages, whole. Arguments and errors as for `stream`."""
        return await _last(self.stream(messages, **options))

    async def generate(self, prompt: str, **options: Any) -> Reply:
        """Continue plain text, whole. Arguments and errors as for `stream`."""
        return await _last(self.stream_text(prompt, **options))

    async def precheck(self, messages: Sequence[Message], **options: Any) -> LengthReport:
        """`Runtime.precheck`, when the answers asked for before have been made.

        Raises:
            InvalidOption: it is closed.
        """
        self._check_open()
        work = partial(self.runtime.precheck, messages, **options)
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def end(self, error: Exception) -> None:
        """End all answers, begun or waiting: whoever reads one is given this error, and none of it is made any more."""
        for answer in tuple(self._line):
            answer.end(error)

    async def close(self) -> None:
        """End all answers and free the engine. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            line = tuple(self._line)
            for answer in line:  # all of them before any is waited for: none of those that wait may begin
                answer.drop()
            for answer in line:
                await answer.settled.wait()
            await asyncio.get_running_loop().run_in_executor(self._worker, self.runtime.close)
            self._worker.shutdown()

    def _ask(self, start: Callable[[], Events], wait_s: float | None) -> AsyncEvents:
        self._check_open()
        if self.max_waiting is not None and len(self._line) > self.max_waiting:
            raise Busy(f"{self.waiting} requests wait for an answer, which is the most: try again later.", full=True)
        answer = _Answer(start, wait_s, self._line)
        self._worker.submit(answer.work)
        return AsyncEvents(answer)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOption("This runtime is closed: load the model again.")


class AsyncEvents(AsyncIterator[Event]):
    """One answer's events. `aclose`, cancelling the reader, or dropping it ends the answer.

    Only its readers hold it: neither the worker nor the line does.
    """

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    @property
    def begun(self) -> bool:
        """Whether the answer has been begun, or refused."""
        return self._answer.begun

    async def begin(self) -> None:
        """Wait until the prompt has been accepted and its reading begins.

        Raises:
            Busy: that took longer than `wait_s`. What `Runtime.stream` raises: the prompt is refused.
        """
        await self._answer.begin()

    async def __anext__(self) -> Event:
        return await self._answer.next()

    async def aclose(self) -> None:
        """End the answer, and wait until the cache is settled."""
        self.drop()
        await self._answer.settled.wait()

    def drop(self) -> None:
        """Nobody wants the answer any more. If it has not begun it leaves the line now, and never begins."""
        self._answer.drop()

    async def __aenter__(self) -> AsyncEvents:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._answer.drop_from_anywhere()


class _Answer:
    """One answer on its way from the worker to the loop."""

    def __init__(self, start: Callable[[], Events], wait_s: float | None, line: set[_Answer]) -> None:
        self._start, self._wait_s, self._line = start, wait_s, line
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()  # None: the end
        self._lock = threading.Lock()  # between the worker that takes it up and the loop that drops it
        self._unwanted = self._taken_up = False
        self._begun, self.settled = asyncio.Event(), asyncio.Event()
        self._refusal: BaseException | None = None
        line.add(self)

    @property
    def begun(self) -> bool:
        """Whether it has been begun, or refused."""
        return self._begun.is_set()

    async def begin(self) -> None:
        """What `AsyncEvents.begin` does."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._begun.wait()
        except TimeoutError:
            self.drop()
            raise Busy(
                f"The request has waited {self._wait_s:g} s for its turn: try again later.", full=False
            ) from None
        except asyncio.CancelledError:
            self.drop()
            raise
        if self._refusal is not None:
            raise self._refusal

    async def next(self) -> Event:
        """The next event.

        Raises:
            StopAsyncIteration: there is none, or nobody is to have it. What `Runtime.stream` or its events raise.
        """
        await self.begin()
        if self._unwanted:  # what was made in the meantime is not for anybody
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self.drop()
            raise
        if isinstance(item, Event):
            return item
        self._queue.put_nowait(None)  # whoever reads on is told the end again
        raise StopAsyncIteration if item is None else item

    def drop(self) -> None:
        """Nobody wants it any more. Until the worker has taken it up it leaves the line now, and never begins; from
        then on the worker uses the engine, and tells when it has ended."""
        with self._lock:
            self._unwanted, taken_up = True, self._taken_up
        if not taken_up:
            self._queue.put_nowait(None)
            self._settle()

    def end(self, error: Exception) -> None:
        """Drop it and tell whoever reads it why, now, whatever the worker is in the middle of."""
        self._refusal = error
        self._queue.put_nowait(error)
        self.drop()
        self._begun.set()

    def drop_from_anywhere(self) -> None:
        """As `drop`, from whatever thread collects garbage, in the middle of whatever it does: no lock is taken."""
        self._unwanted = True
        if not self.settled.is_set():
            self._call(self.drop)

    def work(self) -> None:
        """What the worker does: make the answer and hand its events to the loop."""
        try:
            with self._lock:
                self._taken_up = not self._unwanted
            if self._taken_up:
                self._make()
            self._call(self._queue.put_nowait, None)
        except BaseException as error:  # whatever it is, the reader is to have it
            self._call(self._fail, error)
        finally:
            self._call(self._settle)

    def _make(self) -> None:
        events = self._start()
        try:
            self._call(self._begun.set)
            if self._unwanted:  # meanwhile: not one step is made
                return
            for event in events:
                if self._unwanted:
                    break
                self._call(self._queue.put_nowait, event)
        finally:
            events.close()

    def _fail(self, error: BaseException) -> None:
        if self.begun:
            self._queue.put_nowait(error)
        else:
            self._refusal = error

    def _settle(self) -> None:
        self._line.discard(self)
        self._begun.set()
        self.settled.set()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has been closed: nobody reads any more
            self._unwanted = True


async def _last(events: AsyncEvents) -> Reply:
    async with events:
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise AssertionError("a stream that was not interrupted ends with Finished")
