"""Saving while a person reads: edgekv/cli/background.py."""

from __future__ import annotations

import threading

import pytest

from edgekv.cli.background import Background
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
