"""`edgekv eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_runtime
from edgekv.errors import InvalidOption
from edgekv.model import catalog
from edgekv.options import LoadOptions


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@click.option("--data", type=click.Path(path_type=Path), required=True, help="A UTF-8 text file.")
@click.option("--tokens", type=int, default=4096, show_default=True, help="How many tokens of it.")
@click.option(
    "--block", type=int, default=2000, show_default=True, help="Also the perplexity of each block of so many."
)
@options_of(LoadOptions, leave_out=("overflow",))
def command(model: str, data: Path, tokens: int, block: int, **values: Any) -> None:
    """Perplexity of a text that streams through MODEL's cache, evicting when it is full. The last line is JSON."""
    from edgekv.evaluate import stream_loss

    options = LoadOptions(**given(LoadOptions, values))
    text = _read(data)
    with ready_runtime(model, options) as runtime:
        chat = runtime.chat_state
        ids = chat.tokenizer.encode(text[: 16 * tokens])[: tokens + 1]
        if len(ids) < 2:
            raise InvalidOption(f"{data} gives {len(ids)} tokens; at least 2 are needed.")
        with render.progress_bar() as report:
            loss = stream_loss(chat.timeline, ids, lambda done, total: report("perplexity", done, total))
        blocks = [round(value, 3) for value in loss.blocks(block)]
        rows = [[str(index * block), f"{value:.3f}"] for index, value in enumerate(blocks)]
        render.table("", ["from token", "perplexity"], rows, right=[0, 1])
        kv = runtime.plan.kv
        render.print_json(
            {
                "perplexity": round(loss.perplexity, 4),
                "tokens": len(loss.losses),
                "evicted": loss.evicted,
                "blocks": blocks,
            }
            | {
                "capacity": kv.capacity,
                "kv_dtype": kv.dtype,
                "granularity": kv.granularity,
                "sinks": kv.sinks,
                "stride": kv.stride,
            }
        )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path} is not UTF-8 text (byte {error.start}).") from None
