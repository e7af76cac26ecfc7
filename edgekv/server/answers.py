"""From a Call to a response: the answer's events, as JSON at once or as server-sent events while they come.

The headers of a stream are sent when the prompt has been accepted, so that a refusal is a status and not an event. A
client that goes away, waiting, reading or being written to, ends its answer: the wait for it is cancelled, and
edgekv/aio.py stops the worker between two events. While a long prompt is read, comments (": reading 512 of 2048") keep
the stream alive; clients pass over them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgekv.aio import AsyncEvents
from edgekv.errors import EdgeKVError
from edgekv.generate import Event, Finished, PrefillProgress, TextDelta, TokenScored, Usage
from edgekv.server.metrics import Metrics
from edgekv.server.problems import Problem, problem_of
from edgekv.server.replies import Piece, Shape
from edgekv.server.requests import Call
from edgekv.text.toolcalls import CallParser, ToolCall

CLIENT_GONE = 499
"""The status in the metrics of a request whose client went away; nobody reads it otherwise."""

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Result = TypeVar("Result")


class Answer:
    """One answer on its way to a client."""

    def __init__(self, events: AsyncEvents, shape: Shape, parser: CallParser | None, metrics: Metrics) -> None:
        self._events, self._shape, self._parser, self._metrics = events, shape, parser, metrics
        self._scores: list[TokenScored] = []
        self._called = False
        self._finished: Finished | None = None

    async def respond(self, request: Request, call: Call, begun: Callable[[], None]) -> Response:
        """The response, whole or as a stream.

        Args:
            begun: called when the prompt has been accepted.

        Raises:
            EdgeKVError, Problem: the prompt is refused, or the answer failed before anything was sent.
        """
        try:
            await _while_connected(request, self._events.begin())
            begun()
            if call.stream:
                lines = self._lines(include_usage=call.include_usage)
                return StreamingResponse(lines, media_type="text/event-stream", headers=STREAM_HEADERS)
            return JSONResponse(await _while_connected(request, self._whole()))
        except ClientGone:
            self._metrics.cancelled += 1
            return Response(status_code=CLIENT_GONE)

    async def _whole(self) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces() if isinstance(piece, Piece)]
        whole = Piece(
            "".join(piece.text for piece in pieces),
            tuple(call for piece in pieces for call in piece.calls),
            tuple(score for piece in pieces for score in piece.scores),
        )
        return self._shape.whole(whole, self._reason(), self._usage())

    async def _lines(self, *, include_usage: bool) -> AsyncIterator[str]:
        """The stream's lines; whatever goes wrong now can only be told in the stream."""
        try:
            async for line in self._chunks(include_usage=include_usage):
                yield line
        except Problem as problem:
            yield _data(problem.body())
        except EdgeKVError as error:
            yield _data(problem_of(error).body())
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled += 1
            raise
        finally:
            self._events.drop()

    async def _chunks(self, *, include_usage: bool) -> AsyncIterator[str]:
        if first := self._shape.first():
            yield _data(first)
        async for piece in self._pieces():
            if isinstance(piece, Piece):
                yield _data(self._shape.chunk(piece))
            else:
                yield f": reading {piece.done} of {piece.total}\n\n"
        yield _data(self._shape.last(self._reason()))
        if include_usage:
            yield _data(self._shape.usage_chunk(self._usage()))
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[Piece | PrefillProgress]:
        async for event in self._events:
            if isinstance(event, PrefillProgress):
                yield event
            elif (piece := self._piece(event)) is not None:
                yield piece

    def _piece(self, event: Event) -> Piece | None:
        """What a client is told of an event, if anything."""
        if isinstance(event, TokenScored):
            self._scores.append(event)
        if isinstance(event, Finished):
            self._finished = event
            self._metrics.answered(event.usage)
            return self._parsed("", last=True)
        return self._parsed(event.text) if isinstance(event, TextDelta) else None

    def _parsed(self, text: str, *, last: bool = False) -> Piece | None:
        """Text and calls in what has come, with the scores since the piece before."""
        parts: list[str | ToolCall] = [text]
        if self._parser is not None:
            parts = [*self._parser.put(text), *(self._parser.close() if last else ())]
        said = "".join(part for part in parts if isinstance(part, str))
        calls = tuple(part for part in parts if isinstance(part, ToolCall))
        if not said and not calls and not (last and self._scores):
            return None
        self._called = self._called or bool(calls)
        scores, self._scores = tuple(self._scores), []
        return Piece(said, calls, scores)

    def _reason(self) -> str:
        """OpenAI's word for why the answer has ended; an answer whose time was up was cut as one that was too long."""
        reason = self._end().finish_reason
        if self._called:
            return "tool_calls"
        return "stop" if reason == "stop" else "length"

    def _usage(self) -> Usage:
        return self._end().usage

    def _end(self) -> Finished:
        """How the answer has ended.

        Raises:
            Problem: it was dropped.
        """
        if self._finished is None:
            raise Problem(503, "The answer was ended before it was complete: ask again.", "answer_ended")
        return self._finished


class ClientGone(Exception):
    """The client has closed its connection."""


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or cancel it when the client goes away."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _data(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
