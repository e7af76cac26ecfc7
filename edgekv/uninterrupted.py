"""Ctrl-C while modules are loaded.

Python raises KeyboardInterrupt between any two of its steps. In the middle of an import that leaves a library half
made: ONNX Runtime's says "initialization failed", and it or onnx's ends the process with a segmentation fault (12 of
400 tries). So it is kept until the import is over.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep a Ctrl-C until the block has ended. Where someone has a handler of their own, it is theirs."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked.is_set():
        raise KeyboardInterrupt
