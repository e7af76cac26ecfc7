"""`edgekv pull`."""

from __future__ import annotations

from pathlib import Path

import click

from edgekv.cli import render
from edgekv.model import catalog


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--home", type=click.Path(path_type=Path), help="Cache folder. Default: EDGEKV_HOME, or the user's.")
def command(model: str, home: Path | None) -> None:
    """Download MODEL: a name from the catalog, or hf:ORG/REPO[/FILE.gguf] from the hub."""
    from edgekv.model.pull import pull

    with render.progress_bar() as report:
        path = pull(model, home=catalog.home(home), progress=report)
    click.echo(path)
