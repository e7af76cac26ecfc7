"""All printing. Answers and tables go to stdout, so that a pipe gets just them; what is about them goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from edgekv.cli.wrap import WordWrap
from edgekv.generate import Event, Evicted, Finished, NotedDown, PrefillProgress, TextDelta
from edgekv.kv.plan import Plan
from edgekv.kv.spec import KVDtype
from edgekv.sampling import SamplingOptions
from edgekv.text.precheck import LengthReport, Overflow
from edgekv.units import format_bytes

if TYPE_CHECKING:
    from edgekv.calibrate.run import CalibrationReport
    from edgekv.evaluate.compare import Score
    from edgekv.evaluate.rows import LayerCheck
    from edgekv.evaluate.run import EvalReport

Report = Callable[[str, int, int | None], None]

_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), " ")
"""What moves the cursor, colours or renames the terminal: a conversation may have it in its words."""

console = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def note(text: str) -> None:
    """A line about what is going on, to stderr."""
    _line(console, text, style="dim")


def refusal(text: str) -> None:
    """Why something was not done, to stderr."""
    _line(console, f"error: {text}")


def say(text: str) -> None:
    """A line of a command's own result, to stdout."""
    _line(out, text)


def _line(target: Console, text: str, *, style: str | None = None) -> None:
    """On a terminal a line is broken between words; a word that is longer (a path) stays whole, to be copied."""
    if target.is_terminal:
        wrapper = TextWrapper(target.width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(wrapper.fill(line.translate(_CONTROLS)) for line in text.split("\n"))
    target.print(text, style=style, markup=False, emoji=False, soft_wrap=True)


def spoken(text: str) -> str:
    """The words of a conversation as they are or, on a terminal, without what would command it."""
    return text.translate(_CONTROLS | {9: "\t", 10: "\n", 13: "\r"}) if sys.stdout.isatty() else text


def shortened(text: str, most: int = 50) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= most else f'"{line[: most - 3]}..."'


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> None:
    """A table on stdout, each row on a line of its own: what is too long for a terminal goes on in its next line, so
    that names can be copied.

    Args:
        right: the columns that hold numbers.
        spare: columns that a terminal too narrow for all goes without, the first of them first, until there is some
            room for the last column; that is then cut to the room there is. Which ones these are is told.
    """
    if title:
        say(title)
    head = [list(columns)] if any(columns) else []
    lines = [[cell.translate(_CONTROLS) for cell in row] for row in (*head, *rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    kept = _kept(widths, spare, out.width) if spare and out.is_terminal else list(range(len(widths)))
    for index, row in enumerate(lines):
        text = "  ".join(_padded(row[at], widths[at], at in right) for at in kept).rstrip()
        style = "bold" if index < len(head) else None
        out.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
    if missing := [name for at, name in enumerate(columns) if at not in kept]:
        note(f"[no room here for: {', '.join(missing)}; a wider terminal or a pipe has them]")


_LEAST = 20  # columns of the terminal that the last one of a table is given before others are left out


def _kept(widths: list[int], spare: Sequence[int], room: int) -> list[int]:
    """The columns that a terminal has room for; the last one's width is made what is left for it."""
    kept, wanted = list(range(len(widths))), min(widths[-1], _LEAST)
    for at in spare:
        if sum(widths[index] + 2 for index in kept[:-1]) + wanted <= room:
            break
        kept.remove(at)
    widths[-1] = min(widths[-1], max(room - sum(widths[index] + 2 for index in kept[:-1]), 1))
    return kept


def _padded(text: str, width: int, to_right: bool) -> str:
    """A cell of so many columns of the terminal; what is longer is cut, and shows it."""
    if cell_len(text) > width:
        whole = Text(text)
        whole.truncate(width, overflow="ellipsis")
        text = whole.plain
    blank = " " * (width - cell_len(text))
    return blank + text if to_right else text + blank


def print_json(data: Any) -> None:
    """One JSON value on one line of stdout; in ASCII, where that does not take everything."""
    whole = "utf" in (sys.stdout.encoding or "utf").lower()
    click.echo(json.dumps(data, ensure_ascii=not whole))


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar a stage on a terminal; without one, a line a stage. Gives a callback (stage, done, total)."""
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield _bars(bar)


def _bars(bar: Progress) -> Report:
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        title = _stage(stage)
        if title not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            tasks[title] = bar.add_task(title, total=total)
        bar.update(tasks[title], completed=done, total=total)

    return report


def _lines() -> Report:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int | None) -> None:
        if _stage(stage) not in seen:
            seen.add(_stage(stage))
            note(_stage(stage))

    return report


def _stage(stage: str) -> str:
    """Conversion reports every layer; they are one stage to look at."""
    return "converting" if stage.startswith(("layer", "embedding", "head", "graph")) else stage


def print_plan(plan: Plan, alternatives: Mapping[KVDtype, int]) -> None:
    """The itemised plan, and what else would fit."""
    rows = [[line.name, format_bytes(line.size_bytes), line.formula] for line in plan.lines]
    rows.append(["total", format_bytes(plan.total_bytes), "predicted peak"])
    if plan.budget_bytes is not None:
        rows.append(["budget", format_bytes(plan.budget_bytes), "fits" if plan.fits else "DOES NOT FIT"])
    table("", ["item", "size", "how"], rows, right=[1])
    kv = plan.kv
    say(
        f"\ncache: {kv.capacity} tokens of {plan.spec.max_context}, {plan.numbers}, "
        f"at least {kv.sinks} sinks, {kv.stride} tokens leave at once"
    )
    if alternatives:
        limit = plan.spec.max_context // 64 * 64
        told = [
            f"{dtype} {count}{' (all)' if count >= limit else ''}" if count else f"{dtype} none"
            for dtype, count in alternatives.items()
        ]
        say("tokens that would fit the budget: " + ", ".join(told))


def plan_json(plan: Plan, alternatives: Mapping[KVDtype, int]) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "capacity": plan.kv.capacity,
        "kv_dtype": plan.kv.dtype,
        "cache_bytes": plan.cache_bytes,
        "total_bytes": plan.total_bytes,
        "budget_bytes": plan.budget_bytes,
        "fits": plan.fits,
        "lines": [asdict(line) for line in plan.lines],
        "tokens_that_fit": dict(alternatives),
    }


def print_forecast(report: LengthReport) -> None:
    """Before an answer: what will leave, if anything will."""
    if report.evicts:
        note(
            f"[the cache is full: the {report.evicts} oldest tokens{named_turns(report.turns_leaving)} leave; "
            f"the first {report.pinned} and the newest {report.capacity - report.pinned - 1} at most stay]"
        )


def named_turns(turns: Sequence[int]) -> str:
    """Which messages, counted from 1, in brackets; '' for none."""
    if not turns:
        return ""
    return f" (message {turns[0] + 1})" if len(turns) == 1 else f" (messages {turns[0] + 1} to {turns[-1] + 1})"


class AnswerPrinter:
    """Writes an answer's events as they come."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._wrote = self._reading = False
        self._wrap = WordWrap(lambda: out.width) if out.is_terminal else None
        self._left, self._turns = 0, set[int]()  # tokens that left while the answer was written, and their messages

    def show(self, event: Event) -> None:
        """Write one event."""
        if self._json:
            print_json({"event": type(event).__name__} | asdict(event))
        elif isinstance(event, TextDelta):
            self._clear()
            self._write(spoken(event.text))
            self._wrote = True
        elif isinstance(event, PrefillProgress) and console.is_terminal:
            click.echo(f"\r\x1b[2mreading {event.done} of {event.total} tokens\x1b[0m", nl=False, err=True)
            self._reading = True
        elif isinstance(event, NotedDown):
            self._clear()
            note(f"[{event.messages} messages have left; noted down: {event.note}]")
        elif isinstance(event, Evicted) and self._wrote:
            self._left, self._turns = self._left + event.tokens, self._turns | set(event.turns)
        sys.stdout.flush()

    def end(self) -> None:
        """Finish the line, and say what left meanwhile."""
        self._clear()
        if self._wrote and not self._json:
            click.echo("" if self._wrap is None else self._wrap.close())
        if self._left:
            note(f"[meanwhile {self._left} tokens{named_turns(sorted(self._turns))} left the cache]")

    def _write(self, text: str) -> None:
        click.echo(text if self._wrap is None else self._wrap.put(text), nl=False)

    def _clear(self) -> None:
        """Take back the line that says how far reading is."""
        if self._reading:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._reading = False


def print_limit(finished: Finished, sampling: SamplingOptions, overflow: Overflow, *, whole: bool) -> None:
    """What ended an answer that the model would have gone on with. whole: the cache holds the model's own context."""
    tokens = finished.usage.output_tokens
    if finished.finish_reason == "time":
        note(f"[cut: the answer may take {sampling.max_seconds:g} s (--max-seconds)]")
    elif finished.finish_reason == "length":
        room = "the cache has no room for more" + (
            ", which --overflow window makes" if whole else ": a larger --context has"
        )
        if overflow == "window":
            room = "as many as the cache holds: --max-new-tokens may ask for more"
        why = "--max-new-tokens" if tokens == sampling.max_new_tokens else room
        note(f"[cut: the answer may have {tokens} tokens ({why})]")


_BAR = 20  # characters


def status_line(used: int, capacity: int, evicted: int, finished: Finished | None) -> str:
    """Tokens used and left, and how fast it went."""
    filled = round(_BAR * used / capacity)
    parts = [f"{'=' * filled}{'.' * (_BAR - filled)} {used} of {capacity} tokens in the cache"]
    if evicted:
        parts.append(f"{evicted} evicted so far")
    if finished is not None:
        parts += _speed(finished)
    return "[" + ", ".join(parts) + "]"


def _speed(finished: Finished) -> list[str]:
    speed = finished.usage.tokens_per_s
    return [*([f"{speed:.0f} tokens/s"] if speed else []), first_token(finished)]


def first_token(finished: Finished) -> str:
    """How long an answer's first token took, or how long there was none."""
    usage = finished.usage
    none = finished.finish_reason == "time" and not usage.output_tokens
    return f"no token within {usage.prefill_s:.2f} s" if none else f"first token after {usage.prefill_s:.2f} s"


def print_layers(report: CalibrationReport) -> None:
    """The errors of fresh scales, a layer a row."""
    rows = [[str(check.layer), *_check_cells(check)] for check in report.layers]
    table("", ["layer", "K error", "V error", "K saturated", "V saturated"], rows, right=range(5))


def _check_cells(check: LayerCheck) -> list[str]:
    return [
        *(f"{x:.2%}" for x in (check.k_error, check.v_error)),
        *(f"{x:.1e}" for x in (check.k_saturated, check.v_saturated)),
    ]


def print_eval(report: EvalReport) -> None:
    """Scores of all caches, then perplexity along the text, errors by layer and needles."""
    columns = ["cache", "perplexity", "ratio", "KL / 1000", "top-1", "evicted"]
    rows = [[found.name, f"{found.perplexity:.3f}", *_against(found), str(found.evicted)] for found in report.scores]
    table("", columns, rows, right=range(1, 6))
    names = [found.name for found in report.scores]
    blocks = [[str(index), *(f"{x:.3f}" for x in values)] for index, values in enumerate(zip(*report.curves))]  # noqa: B905
    if len(blocks) > 1:
        table("\nperplexity by block", ["block", *names], blocks, right=range(len(names) + 1))
    checks = [
        [name, str(check.layer), *_check_cells(check)]
        for name, layers in zip(names, report.layers, strict=True)
        for check in layers
    ]
    if checks:
        columns = ["cache", "layer", "K error", "V error", "K saturated", "V saturated"]
        table("\nrounding", columns, checks, right=range(1, 6))
    needles = [
        [name, f"{depth.depth:.2f}", depth.expected, f"{depth.found} of {depth.asked}"]
        for name, depths in zip(names, report.needles, strict=True)
        for depth in depths
    ]
    if needles:
        table("\nneedles (evicted: cannot be known)", ["cache", "depth", "in the cache", "found"], needles, right=[1])


def _against(found: Score) -> list[str]:
    """Ratio of perplexities, divergence and agreement; dashes for the reference itself."""
    if found.ratio is None or found.kl is None or found.top1 is None:
        return ["-"] * 3
    return [f"{found.ratio:.4f} ±{found.ratio_error or 0:.4f}", f"{1000 * found.kl:.3f}", f"{found.top1:.2%}"]


def print_verdict(report: CalibrationReport) -> None:
    """What fresh scales do to perplexity."""
    if report.ratio is None:
        note("The perplexity ratio is unknown: no engine here runs such a cache.")
    else:
        note(
            f"On {report.held_out_tokens} tokens held out, the {report.scales.dtype} cache has {report.ratio:.4f} "
            f"times the perplexity of a float cache (standard error {report.ratio_error or 0:.4f})."
        )
