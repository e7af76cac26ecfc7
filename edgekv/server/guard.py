"""Who may ask. Every path but the page and /health wants the key, if one is set.

Without a key the server is for this machine's user alone, and the threat is a web page in their browser: it may send
requests to any address, and a name that it owns may point to 127.0.0.1. So the Host must be a loopback name then, an
Origin must be the server's own, and bodies must say that they are JSON, which no page can send without asking first.
"""

from __future__ import annotations

import hmac
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.server.options import ServeOptions, is_loopback
from edgekv.server.problems import Problem

OPEN_PATHS = ("/", "/health")
PAGE_PREFIX = "/page/"


class Guard:
    """ASGI middleware that lets a request through or answers it itself."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._key = app, options.api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self.check(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}
            await JSONResponse(problem.body(), problem.status, headers)(scope, receive, send)

    def check(self, path: str, headers: Headers) -> Problem | None:
        """Why the request is not let through, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._key is None and not is_loopback(_split(f"//{host}").hostname or ""):
            return Problem(403, f"The Host {host!r} is not a name of this machine's own.", "wrong_host")
        if origin is not None and _split(origin).netloc != host:
            return Problem(403, f"Pages of {origin} may not use this server.", "wrong_origin")
        if self._key is None or path in OPEN_PATHS or path.startswith(PAGE_PREFIX):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        what = "is wrong" if given else "is missing: send it as 'Authorization: Bearer KEY'"
        return Problem(401, f"The API key {what}.", "invalid_api_key")


def _split(url: str) -> SplitResult:
    """The parts of an address; of what is none, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
