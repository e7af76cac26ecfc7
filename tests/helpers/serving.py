"""A server in a thread of the test's own process, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import edgekv
from edgekv.server.options import ServeOptions
from edgekv.server.run import listen, make_server


@contextmanager
def serving(model: Path, *, context: int = 256, overflow: str = "error", **options: Any) -> Iterator[str]:
    """Serve a model directory; gives the server's address. `options` are those of ServeOptions."""
    runtime = edgekv.load(model, memory="4GiB", context=context, threads=1, overflow=overflow)
    with serving_runtime(runtime, **options) as address:
        yield address


@contextmanager
def serving_runtime(runtime: edgekv.Runtime, **options: Any) -> Iterator[str]:
    """Serve a loaded model, which is closed at the end; gives the server's address."""
    chosen = ServeOptions(port=0, **options)
    bound = listen(chosen)
    server = make_server(edgekv.AsyncRuntime(runtime, max_waiting=chosen.max_waiting), chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive()
