"""KVSpec: how the cache is stored and how it evicts, chosen before anything loads.

Words (the same everywhere): *capacity* C slots, fixed at load. The *pinned prefix* is the first S tokens, never
evicted; *sinks* is the least S. The *window* is the other C - S slots. *stride* G is how many tokens leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edgekv.errors import InvalidOption

KVDtype = Literal["int8", "k8v4", "int4", "fp8", "fp16", "float"]
Granularity = Literal["channel", "head", "tensor"]

KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
BITS: dict[KVDtype, tuple[int, int]] = {
    "int8": (8, 8),
    "k8v4": (8, 4),
    "int4": (4, 4),
    "fp8": (8, 8),
    "fp16": (16, 16),
    "float": (32, 32),
}
"""Bits of a stored number, in keys and in values."""

OWN_OPERATOR_ONLY: tuple[KVDtype, ...] = ("k8v4",)
"""Dtypes that nothing but edgekv's own attention operator holds; FP8 is held by it and by the torch engine."""

ROW_FACTORS: tuple[KVDtype, ...] = ("int8", "k8v4", "int4")
"""Dtypes of which edgekv's own operator and the torch engine store a factor with each row (kv/rows.py)."""

RowFactors = Literal["none", "plain", "mixed"]
"""Whether rows have factors of their own: none in ONNX Runtime's operator, plain ones in the torch engine; in edgekv's
own operator keys are mixed, too, and so are values of 4 bits."""

MEAN_FREE: tuple[KVDtype, ...] = ("fp8", "int4")
"""Dtypes whose keys are held less the mean of each pair of channels where the engine can put it back (kv/scales.py)."""

FLOATS: tuple[KVDtype, ...] = ("fp16", "float")
"""Dtypes that need no scales; "float" is float32."""

FACTOR_BYTES = 2
"""Size of a row's factor, a bfloat16."""

MIN_CAPACITY = 64
"""Below this no chat template plus an answer fits, so it is refused rather than tried."""

DEFAULT_SINKS = 4

PREFILL_CHUNK = 128
"""Tokens of one prefill run: larger ones are no faster with an INT8 cache and need more scratch memory. Plans, and
rings of layers with a window, are made for it."""

TURN_STEP, TURN_REACH = 32, 64
"""The torch engine's tables of angles (its cache.py): places from one start to the next, and places behind a start that
a tile of attention reaches."""

UNDO_TOKENS = 512
"""What a layer with a window keeps beyond it, for an answer that is taken back: about a long answer's length."""


def scales_dtype(dtype: KVDtype) -> KVDtype:
    """The dtype that scales are measured for: K8V4 takes those of INT8, as its rows have factors for the rest."""
    return "int8" if dtype == "k8v4" else dtype


@dataclass(frozen=True)
class KVSpec:
    """How the cache is stored and how it evicts.

    Raises:
        InvalidOption: a value is out of range, or two of them contradict each other.
    """

    capacity: int  # C
    dtype: KVDtype = "int8"
    granularity: Granularity = "channel"
    sinks: int = DEFAULT_SINKS
    stride: int = 0  # G; 0 means C / 8

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise InvalidOption(f"Unknown KV dtype {self.dtype!r}: choose one of {', '.join(KV_DTYPES)}.")
        if self.granularity not in GRANULARITIES:
            raise InvalidOption(f"Unknown granularity {self.granularity!r}: choose one of {', '.join(GRANULARITIES)}.")
        if self.capacity < MIN_CAPACITY:
            raise InvalidOption(
                f"A cache of {self.capacity} tokens is too small to chat in: {MIN_CAPACITY} is the least."
            )
        if not 0 <= self.sinks <= self.max_pinned:
            raise InvalidOption(
                f"{self.sinks} sinks do not fit a cache of {self.capacity} tokens: "
                f"at most a quarter of it ({self.max_pinned}) may be pinned."
            )
        if self.stride == 0:
            object.__setattr__(self, "stride", max(1, self.capacity // 8))
        if not 0 < self.stride <= self.capacity - self.max_pinned:
            raise InvalidOption(
                f"A stride of {self.stride} does not fit a cache of {self.capacity} tokens: "
                f"1 to {self.capacity - self.max_pinned} tokens may leave at once."
            )

    def ring_slots(self, window: int, chunk: int) -> int:
        """Slots of a layer whose queries see the last `window` tokens (0: all), where layers may have their own rings.

        Such a ring holds the window, one run of `chunk` tokens, and UNDO_TOKENS to take back. It has no pinned prefix,
        so no query may see that: not even after the largest eviction, of twice the stride, with the longest prefix.
        Where that cannot be promised, or nothing is gained, the layer has all C slots.
        """
        shortest = self.capacity - self.max_pinned - 2 * self.stride
        slots = -(-(window + chunk + UNDO_TOKENS) // 16) * 16  # whole blocks (native/kernels.h)
        return slots if 0 < window <= shortest and slots < self.capacity else self.capacity

    def holds_all_of(self, max_context: int) -> bool:
        """Whether a larger cache is no remedy: a model's own context has no more, or less than the least cache."""
        return max_context - self.capacity < MIN_CAPACITY

    @property
    def max_pinned(self) -> int:
        """The most tokens that may be pinned: C / 4."""
        return self.capacity // 4
