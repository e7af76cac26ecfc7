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

from edgekv.errors import CacheFull, InvalidOption
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec, RowFactors
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
    def scales(self) -> KVScales | None:
        """What the codes in the cache stand for; None where it holds floats. An engine that keeps keys whole has scales
        `without_centre()`, whatever it was opened with."""

    @property
    def row_factors(self) -> RowFactors:
        """Whether rows are stored with factors of their own beside the scales (kv/rows.py). Rows of different kinds are
        of different widths or types, so that none is taken for another."""

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

    def append(self, tokens: Sequence[int], moves: Sequence[Move], *, all_logits: bool = False) -> Logits:
        """As `forward`, with as many evictions as it takes: each of `moves` is made when the cache is full and a token
        is still to come. The result is that of `forward` and `evict` in turn. If this fails, what was appended before
        an eviction may stay, or the cache may be empty.

        Raises:
            CacheFull: there are too few moves; nothing was appended.
            InvalidOption: a move is for another cache, or is not needed; nothing was appended.
            EngineError: as `forward`.
        """

    def evict(self, move: Move) -> None:
        """Drop the rows that `move` names. If this fails half-way the cache is reset rather than left inconsistent.

        Raises:
            InvalidOption: the move is for another cache, or pins more or fewer tokens than the last eviction did;
                nothing was dropped.
        """

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


def check_room(tokens: Sequence[int], length: int, capacity: int) -> None:
    """Refuse to run nothing, or more than fits behind `length` filled slots.

    Raises:
        InvalidOption, CacheFull: see Engine.forward.
    """
    if not tokens:
        raise InvalidOption("There is nothing to run: forward needs at least one token.")
    if len(tokens) > capacity - length:
        raise CacheFull(length=length, tokens=len(tokens), capacity=capacity)


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside of the vocabulary."""
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidOption(f"Token {bad} is outside the vocabulary of {vocab_size}.")


def check_move(move: Move, length: int) -> None:
    """Refuse an eviction that was planned for another cache, or that drops nothing or more than there is."""
    if move.length != length or not 0 < move.count <= move.length - move.start:
        raise InvalidOption(f"{move} does not fit a cache that holds {length} tokens.")


def check_moves(moves: Sequence[Move], tokens: int, length: int, capacity: int) -> None:
    """Refuse evictions that `tokens` more tokens behind `length` filled slots do not need, or too few of them.

    Raises:
        InvalidOption, CacheFull: see Engine.append.
    """
    left = tokens - (capacity - length)
    for move in moves:
        check_move(move, capacity)
        if left <= 0:
            raise InvalidOption(f"{tokens} tokens after {length} in {capacity} slots do not need {move}.")
        left -= move.count
    if left > 0:
        raise CacheFull(length=length, tokens=tokens, capacity=capacity)


def check_state(state: EngineState, spec: ModelSpec, capacity: int) -> None:
    """Refuse a saved content of more tokens than there are slots, or of another model.

    Raises:
        CacheFull, InvalidOption: see Engine.load.
    """
    if len(state.tokens) > capacity:
        raise CacheFull(length=0, tokens=len(state.tokens), capacity=capacity)
    layers = spec.num_layers
    if not len(state.keys) == len(state.values) == layers or not 0 <= state.pinned <= len(state.tokens):
        raise InvalidOption(
            f"This is no content of a cache of {layers} layers: {len(state.keys)} layers of keys, "
            f"{len(state.values)} of values, {state.pinned} of {len(state.tokens)} tokens pinned."
        )
    if state.tokens:
        check_ids(state.tokens, spec.vocab_size)


def check_rows(rows: Rows, layer: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    """Refuse a layer's saved rows of another shape or dtype."""
    if rows.shape != shape or rows.dtype != dtype:
        raise InvalidOption(
            f"Layer {layer} of this content is {rows.dtype} {list(rows.shape)}; this cache holds {dtype} {list(shape)}."
        )
