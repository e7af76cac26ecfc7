"""The environment that chat templates run in: Jinja's immutable sandbox, with a limit on time and on sizes.

Templates are programs that came with somebody's weights. Jinja's sandbox keeps them from the interpreter's insides and
from ranges past 100,000, but nested loops, a macro that calls itself twice, or `"x" * 10**10` would still hang or fill
the memory. So here every step of a loop and every call looks at the clock, and products, powers, joined strings and
counts given to filters and methods are bounded before they are computed. One built-in operation on data that a
template has prepared can still take long; SECURITY.md says so.

The rest is what transformers gives its templates (its documentation, "Chat templates"): block trimming, `break` and
`continue`, `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, and `{% generation %}`, which only marks
text for training and is passed through.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgekv.units import MIB

TIME_LIMIT_S = 5.0
"""For one rendering. Real templates take milliseconds, a thousand turns tens of them."""

MAX_CHARS = 16 * MIB
"""Of one string that a template makes; also of its whole output."""

MAX_COUNT = 1_000_000
"""The largest number that a filter or method may be given (a width, an indent, a count)."""

_MAX_BITS = 4096  # of an integer
_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{6}|\*)|\{[^{}]*\d{6}|\{[^{}]*:[^{}]*\{")
"""In a format: a large width, or one that is itself given as a value."""
_LOOP = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"))
_STEPS = "edgekv_steps"  # names of filters that only `_generate` writes
_JOINED = "edgekv_joined"


class LimitExceeded(Exception):
    """A template was stopped; the message says at what."""


class _Clock(threading.local):
    """When the rendering that this thread is in must be over."""

    deadline = float("inf")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits. Render inside `with sandbox.time_limit():`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self._clock = _Clock()
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _bounded(_to_json), _STEPS: self._steps, _JOINED: _joined}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Everything rendered inside, by this thread, shares TIME_LIMIT_S."""
        self._clock.deadline = time.monotonic() + TIME_LIMIT_S
        try:
            yield
        finally:
            self._clock.deadline = float("inf")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here."""
        self._check_clock()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            _check_counts(*args, *kwargs.values())
            if getattr(function, "__name__", "") in ("format", "format_map"):
                _check_format(owner)
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`loop.first` and the like are asked at every message: spare them the questions whether they are safe."""
        if type(obj) is LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products, powers, sums and formats, whose results can outgrow the memory."""
        if operator == "+" and type(left) is type(right) is str and len(left) + len(right) <= MAX_CHARS:
            return left + right  # nearly all that templates compute: spare it the rest
        if operator == "%":
            _check_format(left)
        elif _size(operator, left, right) > MAX_CHARS:
            raise LimitExceeded("it computes something larger than 16 MiB")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Put the checks into the template's tree (Jinja's hook before code is made)."""
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, _STEPS)
        for joined in list(source.find_all(nodes.Concat)):
            joined.nodes = [_filtered(nodes.List(joined.nodes, lineno=joined.lineno), _JOINED)]
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def _steps(self, items: Iterable[Any]) -> Iterable[Any]:
        """The items of a loop, with a look at the clock at each. What is not iterable fails in the loop, as before."""
        return items if isinstance(items, jinja2.Undefined) else self._timed(items)

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._check_clock()
            yield item

    def _check_clock(self) -> None:
        if time.monotonic() > self._clock.deadline:
            raise LimitExceeded(f"it has run for more than {TIME_LIMIT_S:g} s")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: the body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its arguments checked; Jinja's marks on the function (pass_context and such) are kept."""
    options = 2 if hasattr(function, "jinja_pass_arg") else 1  # arguments come after the filtered value

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_counts(*args[options:], *kwargs.values())
        if function.__name__ == "do_format":
            _check_format(args[0])
        return function(*args, **kwargs)

    return checked


def _check_counts(*values: Any) -> None:
    """Refuse counts that no template needs. Texts may hold any numbers: they are what people say."""
    if any(isinstance(value, int) and abs(value) > MAX_COUNT for value in values):
        raise LimitExceeded(f"it asks for more than {MAX_COUNT} of something")


def _check_format(text: Any) -> None:
    """Refuse widths that no template needs, and those that are themselves values."""
    if isinstance(text, str) and _WIDTH.search(text):
        raise LimitExceeded(f"it asks for a width of more than {MAX_COUNT}, or of a value")


def _size(operator: str, left: Any, right: Any) -> int:
    """A bound on the size of a sum, product or power: characters or items; for numbers, past the limit or 0."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return MAX_CHARS + 1 if bits > _MAX_BITS else 0
    if operator == "+":
        return _length(left) + _length(right)
    return max((_length(a) * b for a, b in ((left, right), (right, left)) if isinstance(b, int)), default=0)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _joined(parts: list[Any]) -> str:
    """`a ~ b ~ ...`, bounded."""
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_CHARS:
        raise LimitExceeded("it joins a text larger than 16 MiB")
    return "".join(texts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
