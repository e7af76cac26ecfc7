"""The process: uvicorn with limits on headers and time, and an orderly end.

uvicorn bounds the size of what it reads before a request is complete (64 KiB, h11's own limit is lowered to 32 KiB
here), but not the time: a client that sends its headers a byte a minute would hold a connection for ever. So the
protocol is h11's with a clock: a connection whose request has not begun in time is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgekv.aio import AsyncRuntime
from edgekv.errors import InvalidOption
from edgekv.server.app import make_app
from edgekv.server.options import ServeOptions
from edgekv.server.problems import Problem

MAX_HEADER_BYTES = 32 * 1024
KEEP_ALIVE_S = 30
MAX_CONNECTIONS = 256
END_S = 10
"""How long answers may go on when the server is told to end. uvicorn cancels then what still runs, and calls that an
exception of the application's, so:"""
TOLD_S, LEFT_S = 1.0, 0.5
"""So long before, clients are told that there is no more; connections that are still open then are closed."""


def listen(options: ServeOptions) -> socket.socket:
    """The listening socket; its name tells the port.

    Raises:
        InvalidOption: the address is taken, or is none.
    """
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host, options.port))
        bound.listen()  # from now on clients wait, and are not refused
        return bound
    except (OSError, UnicodeError) as error:
        reason = "it is no host name" if isinstance(error, UnicodeError) else error.strerror or error
        raise InvalidOption(f"Cannot listen on {options.host} port {options.port}: {reason}; choose others.") from None


def serve(runtime: AsyncRuntime, options: ServeOptions, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; answers under way may end first."""
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        make_server(runtime, options).run(sockets=[bound])


def make_server(runtime: AsyncRuntime, options: ServeOptions) -> uvicorn.Server:
    """The server, not yet running."""
    protocol = type("TimedProtocol", (_TimedProtocol,), {"headers_timeout_s": options.body_timeout_s})
    config = uvicorn.Config(
        make_app(runtime, options),
        http=protocol,
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=END_S,
    )
    return _EndingServer(config, runtime)


class _EndingServer(uvicorn.Server):
    """uvicorn's, which ends in an orderly manner though answers take longer than it waits."""

    def __init__(self, config: uvicorn.Config, runtime: AsyncRuntime) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # once it is ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        last = self._loop.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            last.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the answers now; uvicorn would leave them to the loop's end, with their tracebacks."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self._loop is None:
            self._hurry.set()
        else:
            self._loop.call_soon_threadsafe(self._hurry.set)

    async def _end_answers(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), END_S - TOLD_S)
        self._runtime.end(Problem(503, "The server is ending: ask again when it is back.", "server_ending"))
        await asyncio.sleep(TOLD_S - LEFT_S)
        self._leave()

    def _leave(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


class _TimedProtocol(H11Protocol):
    """h11 with a limit on the time until a request has begun."""

    headers_timeout_s = 15.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._headers_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        if self._headers_clock is None and self.conn.their_state is h11.IDLE:
            self._start_clock()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self._headers_clock = self.loop.call_later(self.headers_timeout_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._headers_clock is not None:
            self._headers_clock.cancel()
            self._headers_clock = None
