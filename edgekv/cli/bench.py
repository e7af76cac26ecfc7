"""`edgekv bench`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from edgekv.bench import BenchOptions, BenchReport, cpu_name
from edgekv.cli import render
from edgekv.cli.options import given, options_of
from edgekv.cli.ready import ready_model, ready_runtime
from edgekv.kv.spec import MIN_CAPACITY, KVSpec
from edgekv.model import catalog
from edgekv.options import LoadOptions
from edgekv.units import format_bytes

DISTURBED = 0.2
"""Cores busy with other processes from which on the figures say so."""


@click.command
@click.argument("model", default=catalog.DEFAULT_MODEL)
@options_of(BenchOptions, unset=True)
@options_of(LoadOptions, leave_out=("overflow",), unset=True)
@click.option("--attention", is_flag=True, help="Attention alone, both operators beside a plain read of the cache.")
def command(model: str, attention: bool, **values: Any) -> None:
    """Speed of MODEL at several lengths of the cache, beside what memory allows here. The last line is JSON."""
    from edgekv.api import threads_of
    from edgekv.bench import bench

    options = BenchOptions(**given(BenchOptions, values))
    load = LoadOptions(**given(LoadOptions, values))
    if attention:
        _attention(model, options, load)
        return
    with ready_runtime(model, load) as runtime, render.progress_bar() as progress:
        engine = runtime.chat_state.timeline.engine
        report = bench(runtime.model, engine, threads_of(load), options, progress)
    _print(report)


def _attention(model: str, options: BenchOptions, load: LoadOptions) -> None:
    """Time attention alone and print it. Needs no scales and, beside the cache, no memory."""
    from edgekv.api import threads_of
    from edgekv.bench import bench_attention

    spec = ready_model(model, load).spec
    threads = threads_of(load)
    kv = KVSpec(MIN_CAPACITY, load.kv_dtype, load.granularity)
    with render.progress_bar() as progress:
        speeds = bench_attention(spec, kv, threads, options, progress)
    rows = [
        [
            str(speed.length),
            format_bytes(speed.cache_bytes),
            f"{speed.read_ms:.2f}",
            _ratio(speed.native_ms),
            _ratio(speed.gqa_ms),
            _ratio(speed.native_ms, speed.read_ms),
            _ratio(speed.gqa_ms, speed.native_ms),
        ]
        for speed in speeds
    ]
    columns = ["tokens", "cache", "read ms", "native ms", "GQA ms", "native / read", "GQA / native"]
    render.say(f"attention of one token, all layers, {load.kv_dtype} cache, {threads} threads, {cpu_name()}")
    render.table("", columns, rows, right=range(len(columns)))
    busy = max(speed.others for speed in speeds)
    if busy > DISTURBED:
        render.note(f"Other processes kept {busy:.1f} cores busy meanwhile: these figures are too high.")
    render.print_json({"attention": [asdict(speed) for speed in speeds], "threads": threads})


def _ratio(x: float | None, y: float | None = 1.0) -> str:
    return "-" if x is None or y is None else f"{x / y:.2f}"


def _print(report: BenchReport) -> None:
    card, about = report.card, report.provenance
    render.say(
        f"{about.model}, {about.scheme}, {about.kv_dtype} cache of {about.capacity} tokens, "
        f"{about.threads} threads, {about.cpu}"
    )
    render.say(
        f"reads {format_bytes(card.weight_bytes)} of weights a token; memory is read at "
        f"{card.bandwidth_bytes_per_s / 1e9:.1f} GB/s\n"
    )
    rows = [
        [
            str(speed.length),
            format_bytes(ceiling.token_bytes),
            f"{ceiling.tokens_per_s:.0f}",
            f"{speed.decode_tokens_per_s:.1f}",
            f"{speed.ceiling_share:.0%}",
            f"{speed.prefill_tokens_per_s:.0f}",
        ]
        for ceiling, speed in zip(card.ceilings, report.speeds, strict=True)
    ]
    columns = ["tokens", "bytes a token", "ceiling/s", "decode/s", "of ceiling", "prefill/s"]
    render.table("", columns, rows, right=range(6))
    if card.left_out:
        render.note(f"left out, larger than the cache: {', '.join(map(str, card.left_out))}")
    busy = max((speed.others for speed in report.speeds), default=0.0)
    if busy > DISTURBED:
        render.note(f"Other processes kept {busy:.1f} cores busy meanwhile: these figures are too low.")
    render.print_json(report.to_json())
