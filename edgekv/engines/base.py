"""The seam between the runtime and a backend: the Engine protocol and the values that cross it.

An engine owns the cache and nothing else decides for it: it appends what it is given, moves what `kv/window.py` says,
forgets its tail. It never evicts by itself and never truncates in silence. `tokens` is the one record of what the
cache holds: an engine extends it only after the backend has succeeded, so a failure or a Ctrl-C between two statements
leaves at worst rows that nobody counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec

Logits = npt.NDArray[np.float32]


Rows = npt.NDArray[np.generic]
PinnedAngles = Literal["moved", "own"]


@dataclass(frozen=True)
class EngineState:
    """A cache's content, in host memory, in the order of tokens.

    It says of itself what an engine of another kind must know: window keys are at the angle of their absolute position
    everywhere, but after evictions the pinned keys are either *moved* (at slot + evicted, as where rows move down) or
    at the angle of their *own* slot (as in a ring, whose queries are turned instead). `Engine.load` takes both; what is
    not its own kind it makes so by running the pinned tokens again.
    """

    keys: Sequence[Rows]  # one array a layer, [K, length, row] in the cache's own dtype
    values: Sequence[Rows]
    tokens: tuple[int, ...]  # the ids in the slots
    evicted: int
    pinned: int = 0  # of these tokens, how many were pinned at the last eviction; 0 while nothing has left
    pinned_angles: PinnedAngles = "moved"

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(rows.nbytes for part in (self.keys, self.values) for rows in part)


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

    def keeps(self, length: int) -> bool:
        """Whether the cache is still whole when cut back to `length` tokens. A layer that holds only the last tokens of
        its window cannot be cut back at will: `truncate` then empties the cache, and all is to be read again."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from slot `length` on; all of them, if the cache does not keep the others (`keeps`)."""

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Keys (rotated) and values in slots start .. stop-1, dequantised: two arrays [K, stop-start, D]."""

    def save(self, *, copy: bool = True) -> EngineState:
        """The cache's content. Without `copy` an engine may read each layer's rows only when they are asked for, so
        that writing them to a file takes the memory of one layer; they are then good until the cache changes."""

    def load(self, state: EngineState) -> None:
        """Put a saved content back; it must come from the same model, scales and dtype.

        Raises:
            CacheFull: it is longer than this cache. InvalidOption: its rows are not of this shape or dtype.
        """

    def reset(self) -> None: ...
    def close(self) -> None: ...
