"""What a calibration is asked to do; every default lives here, and thresholds.py says what the methods compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from edgekv.about import about
from edgekv.errors import InvalidOption
from edgekv.kv.quant import LIMIT
from edgekv.kv.spec import GRANULARITIES, Granularity, KVDtype, scales_dtype

Method = Literal["envelope", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many tokens of it are done, and how many there are."""

MIN_TOKENS = 64
MAX_TOKENS = 1 << 24
MIN_HELD_OUT = 512


@dataclass(frozen=True)
class CalibrateOptions:
    """How scales are found.

    Raises:
        InvalidOption: a value is unknown or out of range.
    """

    method: Method = about("How thresholds are chosen.", default="envelope")
    tokens: int = about("How many tokens are observed.", default=4096)
    headroom: float = about("Factor on the thresholds, for what the observed tokens did not show.", default=1.1)
    percentile: float = about("Of the percentile method.", default=99.9)
    centre: Literal["auto", "none"] = about("Whether constants are taken out of keys and values.", default="auto")
    dtype: KVDtype = about("How the cache is stored.", default="int8")
    granularity: Granularity = about("What shares one scale.", default="channel")
    seed: int = about("Of the text that the model writes.", default=0)
    data: tuple[Path, ...] = about("UTF-8 text to observe (may be given several times).", default=())

    def __post_init__(self) -> None:
        scaled = scales_dtype(self.dtype)
        if scaled != self.dtype:
            raise InvalidOption(f"A {self.dtype} cache takes the scales of {scaled}: calibrate that instead.")
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("centre", self.centre, ("auto", "none")),
            ("KV dtype", self.dtype, tuple(LIMIT)),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if value not in allowed:
                raise InvalidOption(f"There are no scales of {name} {value!r}: choose one of {', '.join(allowed)}.")
        for name, number, low, high in (
            ("tokens", self.tokens, MIN_TOKENS, MAX_TOKENS),
            ("headroom", self.headroom, 0.5, 4.0),
            ("percentile", self.percentile, 50.0, 100.0),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not (math.isfinite(number) and low <= number <= high):
                raise InvalidOption(f"{name} is {number}; it must be between {low:,} and {high:,}.")

    @property
    def held_out_tokens(self) -> int:
        """How many further tokens the scales are checked on: an eighth as many as observed, at least 512."""
        return max(MIN_HELD_OUT, self.tokens // 8)
