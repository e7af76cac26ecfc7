"""AsyncRuntime over a runtime whose answers never end by themselves: whoever goes away frees the worker."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edgekv.aio import AsyncRuntime
from edgekv.chat import Events
from edgekv.generate import Event, Finished, TextDelta, Usage

USAGE = Usage(input_tokens=1, reused_tokens=0)
HELLO = [{"role": "user", "content": "Hello"}]


class EndlessRuntime:
    """Says one word for ever, or as many words as are asked for.

    Attributes:
        steps: how many words were made. open: answers that have begun and not ended. starting: is called in `stream`.
    """

    def __init__(self) -> None:
        self.steps, self.open = 0, 0
        self.starting: Callable[[], object] = lambda: None

    def stream(self, messages: Any, max_new_tokens: int = 1 << 30) -> Events:
        self.starting()
        return self._words(max_new_tokens)

    def _words(self, count: int) -> Events:
        self.open += 1
        try:
            for _ in range(count):
                self.steps += 1
                time.sleep(0.001)
                yield TextDelta("word ")
            yield Finished("", "length", USAGE)
        finally:
            self.open -= 1

    def close(self) -> None:
        assert not self.open


def run(scenario: Callable[[AsyncRuntime, EndlessRuntime], Awaitable[None]]) -> None:
    """Run a scenario in a fresh loop, for at most ten seconds."""

    async def main() -> None:
        endless = EndlessRuntime()
        shared = AsyncRuntime(endless)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(10):
                await scenario(shared, endless)
        finally:
            await shared.close()

    asyncio.run(main())


async def check_free(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
    """The next one is answered, and nobody else's answer goes on."""
    await shared.chat(HELLO, max_new_tokens=1)
    assert (shared.waiting, shared.running, endless.open) == (0, 0, 0)


def test_breaking_out_of_a_loop_ends_the_answer() -> None:
    """No `aclose`, no `async with`: as with the stream of a plain Runtime."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        async for _ in shared.stream(HELLO):
            break
        await check_free(shared, endless)

    run(scenario)


def test_a_generator_over_a_stream_is_dropped_at_its_yield() -> None:
    """As a web framework drops the body of a response whose client has gone away while it was written to."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        async def body() -> Any:
            events = shared.stream(HELLO)
            await events.begin()
            return (event async for event in events if isinstance(event, TextDelta))

        texts = await body()
        assert await anext(texts)
        del texts
        await check_free(shared, endless)

    run(scenario)


def test_a_stream_that_is_dropped_before_it_begins_never_does() -> None:
    """Nothing is run for it, and the line is shorter at once."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        first, second = shared.stream(HELLO), shared.stream(HELLO)
        await first.begin()
        assert shared.waiting == 1
        del second
        await asyncio.sleep(0)
        assert shared.waiting == 0
        del first
        await check_free(shared, endless)

    run(scenario)


def test_a_stream_in_a_cycle_is_collected_by_another_thread() -> None:
    """The worker itself may be the one that collects it."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        stream = shared.stream(HELLO)
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        await asyncio.to_thread(gc.collect)
        await check_free(shared, endless)

    run(scenario)


def test_a_stream_that_was_read_to_its_end_is_dropped_in_peace() -> None:
    """Also after the loop is gone."""
    kept: list[Any] = []

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        stream = shared.stream(HELLO, max_new_tokens=3)
        events: list[Event] = [event async for event in stream]
        assert isinstance(events[-1], Finished)
        assert [event async for event in stream] == []
        kept.append(stream)

    run(scenario)
    kept.clear()


@pytest.mark.parametrize("dropping", [False, True])
def test_a_prompt_that_is_being_taken_is_waited_for(dropping: bool) -> None:
    """The worker has begun, and the loop has not heard of it: closing waits until the worker has left the runtime, the
    line says so meanwhile, and not one step is made."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        inside, go = threading.Event(), threading.Event()
        endless.starting = lambda: (inside.set(), go.wait(10))
        stream = shared.stream(HELLO)
        await asyncio.to_thread(inside.wait, 10)
        if dropping:
            stream.drop()
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        assert shared.waiting + shared.running == 1
        go.set()
        await closing
        assert (shared.waiting, shared.running, endless.open, endless.steps) == (0, 0, 0, 0)

    run(scenario)


def test_an_end_is_told_while_a_prompt_is_being_taken() -> None:
    """Whoever waits for the answer to begin has the error at once, though the worker is not done."""

    async def scenario(shared: AsyncRuntime, endless: EndlessRuntime) -> None:
        inside, go = threading.Event(), threading.Event()
        endless.starting = lambda: (inside.set(), go.wait(10))
        stream = shared.stream(HELLO)
        reading = asyncio.create_task(anext(stream))
        await asyncio.to_thread(inside.wait, 10)
        shared.end(RuntimeError("the end"))
        with pytest.raises(RuntimeError, match="the end"):
            await asyncio.wait_for(reading, 1)
        assert (shared.waiting, shared.running) == (0, 1)
        go.set()
        await stream.aclose()
        assert (shared.waiting, shared.running, endless.steps) == (0, 0, 0)

    run(scenario)
