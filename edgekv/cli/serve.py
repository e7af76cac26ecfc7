"""`edgekv serve`."""

from __future__ import annotations

import os
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_runtime
from edgekv.errors import DependencyMissing
from edgekv.model import catalog
from edgekv.options import LoadOptions
from edgekv.server.options import ServeOptions

KEY_VARIABLE = "EDGEKV_API_KEY"


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@options_of(ServeOptions)
@options_of(LoadOptions, unset=True)
def command(model: str, **values: Any) -> None:
    """Serve MODEL on this machine: a chat page at /, and OpenAI's interface below /v1 for clients that exist already.

    One answer is made at a time; requests wait in line.
    """
    key = {"api_key": os.environ.get(KEY_VARIABLE) or None}
    options = ServeOptions(**(key | given(ServeOptions, values)))
    _check_installed()
    from edgekv.aio import AsyncRuntime
    from edgekv.server.run import END_S, TOLD_S, listen, serve

    bound = listen(options)
    load = LoadOptions(**given(LoadOptions, values))
    with ready_runtime(model, load, server=True) as runtime:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{bound.getsockname()[1]}"
        render.say(f"{runtime.model.description.name} at {address} (Ctrl-C ends it)")
        render.note(f"[answers that are being made then have {END_S - TOLD_S:g} s; a second Ctrl-C ends them at once]")
        serve(AsyncRuntime(runtime, max_waiting=options.max_waiting), options, bound)


def _check_installed() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DependencyMissing(
            f"The server needs {error.name}, which is not installed: pip install 'edgekv[serve]'."
        ) from None
