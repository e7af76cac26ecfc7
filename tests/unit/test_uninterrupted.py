"""Ctrl-C while modules are loaded: edgekv/uninterrupted.py and edgekv/__main__.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgekv.uninterrupted import uninterrupted

MAIN = """
import builtins, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background begins with it ignored
real = builtins.__import__
def interrupted(name, *rest):
    if name == {name!r}:
        signal.raise_signal(signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = interrupted
import sys
sys.argv = ["edgekv", "plan", {config!r}, "--memory", "8GiB"]
from edgekv.__main__ import main
main()
"""


def test_a_ctrl_c_comes_when_the_block_has_ended() -> None:
    """And then as ever; an error of the block goes first."""
    ended: list[bool] = []

    def loading(error: Exception | None = None) -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            ended.append(True)
            if error is not None:
                raise error

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loading()
        with pytest.raises(ImportError):
            loading(ImportError())
        assert ended == [True, True]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_and_threads_of_others_are_left_alone() -> None:
    """A program that looks after Ctrl-C itself goes on doing so; only the main thread may."""
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert told == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[bool] = []

    def elsewhere() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.parametrize("name", ["edgekv.cli", "click", "edgekv.kv.plan"])
def test_a_ctrl_c_while_the_command_line_is_loaded(name: str) -> None:
    """No traceback, and 130 as with any other that a Ctrl-C ends."""
    config = str(Path(__file__).parents[1] / "data" / "llama-fp16" / "config.json")
    script = MAIN.format(name=name, config=config)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr.strip()) == (130, "", "")
