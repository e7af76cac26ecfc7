"""Saving while a person reads: edgekv/cli/background.py."""

from __future__ import annotations

import threading

import pytest

from edgekv.cli.background import Background
from edgekv.cli.chat import ChatLoop
from edgekv.errors import StorageError


def test_one_after_another() -> None:
    """`start` returns while its task runs; the next task and `wait` come after it."""
    background, go, order = Background(), threading.Event(), []

    def first() -> None:
        go.wait(10)
        order.append("first")

    background.start(first)
    assert order == []
    go.set()
    background.start(lambda: order.append("second"))
    background.wait()
    background.wait()
    assert order == ["first", "second"]


def test_a_failure_is_told_once() -> None:
    """To whoever waits next."""
    background = Background()

    def fail() -> None:
        raise StorageError("The disk is full.")

    background.start(fail)
    with pytest.raises(StorageError, match="full"):
        background.wait()
    background.wait()


@pytest.mark.parametrize(("error", "words"), [(MemoryError(), "MemoryError"), (KeyError("x"), r"KeyError\('x'\)")])
def test_any_other_failure_is_told_too(error: Exception, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As one of those that whoever waits knows, with its cause; the thread itself prints nothing."""
    background = Background()

    def fail() -> None:
        raise error

    background.start(fail)
    with pytest.raises(StorageError, match=words) as told:
        background.wait()
    assert told.value.__cause__ is error
    background.wait()
    assert capfd.readouterr().err == ""


def test_the_chat_tells_that_it_has_not_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the reason."""

    def fail() -> None:
        raise MemoryError

    loop = ChatLoop(None, None, as_json=False)
    loop._saving.start(fail)
    loop.settle()
    assert "[not saved: " in capsys.readouterr().err
