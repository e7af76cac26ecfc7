"""The seam between the runtime and a backend: the Engine protocol and the values that cross it.

An engine owns the cache and nothing else decides for it: it appends what it is given, moves what `kv/window.py` says,
forgets its tail. It never evicts by itself and never truncates in silence. `tokens` is the one record of what the
cache holds: an engine extends it only after the backend has succeeded, so a failure or a Ctrl-C between two statements
leaves at worst rows that nobody counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class EngineState:
    """A copy of a cache's content, in host memory.

    keys, values: one array a layer, [K, length, row] in the cache's own dtype; tokens: the ids in the slots; pinned:
    how many of them hold keys at the angles of their own slots, which only a ring does (engines/onnx/ring.py).
    """

    keys: tuple[npt.NDArray[np.generic], ...]
    values: tuple[npt.NDArray[np.generic], ...]
    tokens: tuple[int, ...]
    evicted: int
    pinned: int = 0


@runtime_checkable
class Engine(Protocol):
    """One model on one device with one preallocated cache."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def kv(self) -> KVSpec: ...
    @property
    def tokens(self) -> Sequence[int]:
        """The ids in the cache's slots, pinned prefix first."""

    @property
    def length(self) -> int:
        """Filled slots; always len(tokens)."""

    @property
    def evicted(self) -> int:
        """How many tokens have left since the cache was last empty."""

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits:
        """Append tokens and return logits: [V] after the last one, or [T, V] after each with `all_logits`.

        Raises:
            CacheFull: they do not fit; nothing was appended.
            EngineError: the backend failed or gave non-finite logits; nothing was appended.
        """

    def evict(self, move: Move) -> None:
        """Drop the rows that `move` names. If this fails half-way the cache is reset rather than left inconsistent."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from slot `length` on."""

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Keys (rotated) and values in slots start .. stop-1, dequantised: two arrays [K, stop-start, D]."""

    def save(self) -> EngineState: ...
    def load(self, state: EngineState) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
