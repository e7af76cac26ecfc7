"""The chat page: static files, and headers that let it talk to this server and to nothing else."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path -> file in this folder, and its type."""


def page_routes() -> list[Route]:
    """One route a file; the files are read once."""
    return [_route(path, name, kind) for path, (name, kind) in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = files(__package__).joinpath(name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers=HEADERS | {"Content-Type": kind})

    return Route(path, serve)
