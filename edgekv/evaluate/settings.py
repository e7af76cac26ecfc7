"""What can be tried: a cache, written as `DTYPE[,name=value...]`, such as `int8,granularity=head,sinks=0`.

What a setting does not name is taken from the command's own options, so the settings of one run differ in just what is
written. Scales are the model's own for that dtype and granularity, those of a file (`scales=FILE`), or made afresh by a
method (`method=mse,headroom=1.0`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from edgekv.errors import InvalidOption
from edgekv.kv.spec import Granularity, KVDtype, KVSpec

Attention = Literal["auto", "native", "gqa"]


@dataclass(frozen=True)
class Setting:
    """One cache to try. None: as the command's options say."""

    dtype: KVDtype
    granularity: Granularity | None = None
    context: int | None = None  # capacity in tokens
    sinks: int | None = None
    stride: int | None = None
    attention: Attention = "auto"  # which operator computes it
    method: str | None = None  # of calibration: scales are made for this run
    headroom: float | None = None
    scales: Path | None = None  # a scales file

    @property
    def name(self) -> str:
        """The setting as it is written."""
        told = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:] if self._is_set(field)]
        return ",".join([self.dtype, *told])

    @property
    def quantised(self) -> bool:
        """Whether its cache has scales."""
        return self.dtype not in ("float", "fp16")

    def kv(self, base: KVSpec) -> KVSpec:
        """The cache, where `base` is what the command's options ask for.

        Raises:
            InvalidOption: the values contradict each other.
        """
        capacity = base.capacity if self.context is None else self.context
        stride = base.stride if self.context is None else 0  # 0: an eighth of the capacity
        return replace(
            base,
            capacity=capacity,
            dtype=self.dtype,
            granularity=self.granularity or base.granularity,
            sinks=base.sinks if self.sinks is None else self.sinks,
            stride=stride if self.stride is None else self.stride,
        )

    def _is_set(self, field: Any) -> bool:
        return bool(getattr(self, field.name) != field.default)


REFERENCE = Setting("float")
"""What the others are compared with."""


def has_reference(settings: Sequence[Setting], *, against_float: bool) -> bool:
    """Whether a float cache runs beside these; there is nothing to compare it with itself."""
    return against_float and list(settings) != [REFERENCE]


def parse_setting(text: str) -> Setting:
    """Read `DTYPE[,name=value...]`.

    Raises:
        InvalidOption: a name or value is unknown; says which there are.
    """
    dtype, *pairs = text.split(",")
    values: dict[str, Any] = {"dtype": _choice("dtype", dtype, get_args(KVDtype))}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in _READERS or not equals:
            raise InvalidOption(
                f"{pair!r} in the setting {text!r} is not understood: write DTYPE[,name=value...] with the names "
                f"{', '.join(_READERS)}."
            )
        values[name] = _READERS[name](name, value)
    return Setting(**values)


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidOption(f"There is no {name} {value!r}: choose one of {', '.join(allowed)}.")
    return value


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidOption(f"{name} is {value!r}; it must be a whole number.") from None


def _factor(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidOption(f"{name} is {value!r}; it must be a number.") from None


_READERS: dict[str, Any] = {
    "granularity": lambda name, value: _choice(name, value, get_args(Granularity)),
    "context": _integer,
    "sinks": _integer,
    "stride": _integer,
    "attention": lambda name, value: _choice(name, value, get_args(Attention)),
    "method": lambda name, value: value,  # calibration says which there are
    "headroom": _factor,
    "scales": lambda name, value: Path(value),
}
