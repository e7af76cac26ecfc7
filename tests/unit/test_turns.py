"""Whose turn it is, whatever moment an unfinished stream is collected at, and whoever reads it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgekv.sharing import Turn, TurnEvents, Turns


@pytest.fixture(autouse=True)
def _collected_on_demand() -> Iterator[None]:
    """Garbage is collected only where the test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def words() -> Iterator[Any]:
    """An answer that never ends by itself."""
    while True:
        yield None


def lose_a_stream(turns: Turns) -> None:
    """An unfinished stream that has its turn becomes garbage, in a cycle."""
    stream: Any = TurnEvents(words(), turns.take())
    next(stream)
    stream.itself = stream


def collects_at(step: int, work: Callable[[], object]) -> bool:
    """Do the work in another thread, which collects garbage at that call of a function. False: the work was done, or
    had to wait, before it came so far; then it is collected here."""
    calls, collected = 0, threading.Event()

    def count(*what: object) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            gc.collect()
            collected.set()

    def target() -> None:
        sys.setprofile(count)
        work()
        sys.setprofile(None)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    collected.wait(0.5)
    if not collected.is_set():
        gc.collect()
    thread.join(2)
    assert not thread.is_alive(), f"it hangs when garbage is collected at call {step}"
    return collected.is_set()


def collects_everywhere(work_in: Callable[[Turns], Callable[[], object]]) -> None:
    """Have a stream collected at every single call that a thread's work in a line makes; nobody is in line then."""
    step, goes_on = 0, True
    while goes_on:
        step += 1
        turns = Turns()
        lose_a_stream(turns)
        goes_on = collects_at(step, work_in(turns))
        assert not turns._line
    assert step > 5


def test_collected_in_the_thread_that_waits() -> None:
    """It gets its turn at once, wherever in its waiting that happens."""
    collects_everywhere(lambda turns: lambda: turns.take().release())


def test_collected_in_a_thread_that_leaves() -> None:
    """Somebody who gave up waiting: then nobody is in line."""

    def leaving(turns: Turns) -> Callable[[], object]:
        waiting = Turn(turns)
        turns._line.append(waiting)
        return waiting.release

    collects_everywhere(leaving)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a wait for a lock is not interrupted")
def test_waiting_can_be_interrupted() -> None:
    """Ctrl-C ends the wait at once and leaves the line."""
    turns, taken = Turns(), []
    thread = threading.Thread(target=lambda: taken.append(turns.take()))
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of a shell's background
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        turns.take()
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 2
    assert list(turns._line) == taken
