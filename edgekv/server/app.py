"""The routes, over one AsyncRuntime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psutil
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgekv.aio import AsyncEvents, AsyncRuntime
from edgekv.errors import EdgeKVError
from edgekv.server.answers import CLIENT_GONE, Answer
from edgekv.server.dialogues import Dialogues
from edgekv.server.guard import Guard
from edgekv.server.metrics import Metrics
from edgekv.server.options import ServeOptions
from edgekv.server.page import page_routes
from edgekv.server.problems import Problem, problem_of
from edgekv.server.replies import ChatShape, Shape, TextShape
from edgekv.server.requests import Call, chat_call, read_json, text_call
from edgekv.server.toolgrammar import forced_call
from edgekv.text.toolcalls import CallParser, call_parser, style_of


class Service:
    """The server's state, and one method a route."""

    def __init__(self, runtime: AsyncRuntime, options: ServeOptions) -> None:
        self.runtime, self.options, self.metrics = runtime, options, Metrics()
        self.model_name = runtime.runtime.model.description.name
        self._dialogues = Dialogues(options.max_sessions)
        self._style = style_of(runtime.runtime.template_source)
        self._began = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        call = await self._call(request, chat_call)
        sampling = self._timed(call.sampling)
        if call.forced:
            token_id = self.runtime.runtime.chat_state.tokenizer.token_id
            sampling |= forced_call(self._style, call.tools, call.forced, token_id)
        dialogue = self._dialogues.of(call.session_id, sampling.get("seed"))
        ask = partial(self.runtime.stream, call.messages, tools=call.tools, dialogue=dialogue, **sampling)
        names = {tool["function"]["name"] for tool in call.tools}
        parser = call_parser(self._style, names) if names else None
        return await self._respond(request, call, ask, ChatShape(call.model, scored="top_logprobs" in sampling), parser)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        call = await self._call(request, text_call)
        ask = partial(self.runtime.stream_text, call.prompt, **self._timed(call.sampling))
        return await self._respond(request, call, ask, TextShape(call.model, scored="top_logprobs" in call.sampling))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return JSONResponse(self._model(self._known(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok", "model": self.model_name, "waiting": self.runtime.waiting})

    async def state(self, request: Request) -> Response:
        """GET /v1/state: the cache and the memory at this moment, for the page and for whoever watches."""
        return JSONResponse({"model": self.model_name, **self._gauges()})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return PlainTextResponse(self.metrics.text(self._gauges()), media_type="text/plain; version=0.0.4")

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.model_name, *self.options.alias)

    def _timed(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling options with the server's limit on an answer's time, unless the client's is lower."""
        limit = self.options.max_answer_s
        return {**sampling, "max_seconds": min(sampling.get("max_seconds", limit), limit)}

    def _model(self, name: str) -> dict[str, Any]:
        capacity = self.runtime.runtime.plan.kv.capacity
        return {"id": name, "object": "model", "created": self._began, "owned_by": "edgekv", "context": capacity}

    def _known(self, name: str) -> str:
        if name not in self._names:
            told = ", ".join(self._names)
            raise Problem(404, f"There is no model {name!r} here: this server has {told}.", "model_not_found", "model")
        return name

    def _gauges(self) -> dict[str, int]:
        plan = self.runtime.runtime.plan
        timeline = self.runtime.runtime.chat_state.timeline
        return {
            "cache_tokens": timeline.engine.length,
            "cache_capacity_tokens": plan.kv.capacity,
            "cache_pinned_tokens": min(timeline.pinned, timeline.engine.length),
            "cache_evicted_tokens": timeline.engine.evicted,
            "cache_bytes": plan.cache_bytes,
            "planned_bytes": plan.total_bytes,
            "resident_bytes": psutil.Process().memory_info().rss,
            "sessions": len(self._dialogues),
            "requests_waiting": self.runtime.waiting,
            "requests_running": self.runtime.running,
        }

    async def _call(self, request: Request, parse: Callable[[Any], Call]) -> Call:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "Send the body with Content-Type: application/json.", "unsupported_media_type")
        call = parse(read_json(await self._body(request)))
        self._known(call.model)
        return call

    async def _body(self, request: Request) -> bytes:
        limit, body = self.options.max_body_bytes, bytearray()
        too_large = Problem(413, f"The body is larger than the {limit} bytes that are read here.", "body_too_large")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.options.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            wait = self.options.body_timeout_s
            raise Problem(408, f"The body did not arrive within {wait:g} s.", "body_timeout") from None
        return bytes(body)

    async def _respond(
        self,
        request: Request,
        call: Call,
        ask: Callable[..., AsyncEvents],
        shape: Shape,
        parser: CallParser | None = None,
    ) -> Response:
        try:
            events = ask(wait_s=self.options.max_wait_s)
            keep = partial(self._dialogues.keep, call.session_id)
            return await Answer(events, shape, parser, self.metrics).respond(request, call, keep)
        except EdgeKVError as error:
            raise problem_of(error, call.prompt_field) from error


def make_app(runtime: AsyncRuntime, options: ServeOptions) -> Starlette:
    """The ASGI application. It closes the runtime when it ends."""
    service = Service(runtime, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await runtime.close()

    routes = [
        Route("/v1/chat/completions", _counted(service, service.chat), methods=["POST"]),
        Route("/v1/completions", _counted(service, service.complete), methods=["POST"]),
        Route("/v1/models", _counted(service, service.models)),
        Route("/v1/models/{name:path}", _counted(service, service.model)),
        Route("/v1/state", service.state),
        Route("/health", service.health),
        Route("/metrics", service.prometheus),
        *page_routes(),
    ]
    handlers: Any = {Problem: _problem, HTTPException: _http_problem, Exception: _bug, ClientDisconnect: _gone}
    middleware = [Middleware(Guard, options=options)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


Endpoint = Callable[[Request], Any]


def _counted(service: Service, endpoint: Endpoint) -> Endpoint:
    """The endpoint, with its requests counted by status."""

    async def counted(request: Request) -> Response:
        status, path = 500, request.scope["route"].path
        try:
            response: Response = await endpoint(request)
            status = response.status_code
            return response
        except Problem as problem:
            status = problem.status
            raise
        except ClientDisconnect:
            status = CLIENT_GONE
            raise
        finally:
            service.metrics.requests[path, status] += 1

    return counted


async def _problem(request: Request, problem: Problem) -> Response:
    return JSONResponse(problem.body(), problem.status, problem.headers)


async def _http_problem(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    told = {
        404: (f"There is nothing at {path}.", "not_found"),
        405: (f"{path} does not take {request.method}.", "method_not_allowed"),
    }
    problem = Problem(error.status_code, *told.get(error.status_code, (error.detail, "invalid_request")))
    return JSONResponse(problem.body(), problem.status, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    return JSONResponse(Problem(500, "The server has a bug; its log says more.", "internal_error").body(), 500)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)
