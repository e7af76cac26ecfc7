"""What all engines do alike: CachedEngine over a CacheLayout.

`CachedEngine` keeps the record of tokens, checks, cuts a prompt into chunks and empties the cache after a failure that
may have left it half changed. A backend adds one run of its model. `CacheLayout` is the backend's cache: where rows lie
and at which angles their keys stand, so that an engine may have one or the other. There are two ways:

    moved   rows lie in the order of tokens; an eviction moves them down, and the pinned tokens run again
    ring    rows stay where they are, `RingLayout`; an eviction only counts

Parts of a cache are called "k" and "v".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from edgekv.engines.base import (
    EngineState,
    Logits,
    PinnedAngles,
    Rows,
    check_ids,
    check_move,
    check_moves,
    check_room,
    check_state,
)
from edgekv.engines.memory import joined
from edgekv.errors import InvalidOption, ScalesError
from edgekv.kv.quant import LIMIT
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec, RowFactors, scales_dtype
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec


class CacheLayout(ABC):
    """Where an engine's rows lie. They are asked for by the order of tokens, 0 .. length-1, pinned prefix first.

    Attributes:
        evicted: how many tokens have left.
        pinned: how many of those at the beginning the last eviction left there; it means nothing before the first.
        row_factors: whether rows have factors of their own beside the scales.
    """

    pinned_angles: ClassVar[PinnedAngles]
    row_factors: RowFactors = "none"

    def __init__(self) -> None:
        self.evicted = self.pinned = 0

    @abstractmethod
    def read(self, part: str, layer: int, start: int, stop: int) -> Rows:
        """A copy of the rows of tokens start .. stop-1 as they are stored, [K, stop-start, row]."""

    @abstractmethod
    def put_back(self, part: str, layer: int, rows: Rows, length: int) -> None:
        """Write a layer's rows as `read` gave them, of a content of `length` tokens.

        Raises:
            InvalidOption: they are of another shape or dtype.
        """

    @abstractmethod
    def forget(self, move: Move) -> None:
        """Drop the rows that `move` names. Moved pinned keys are then stale until their tokens have run again."""

    def reset(self, pinned: int = 0, evicted: int = 0) -> None:
        """Start afresh, with so many tokens pinned and gone."""
        self.pinned, self.evicted = pinned, evicted

    def keeps(self, length: int) -> bool:
        """Whether every layer has what the token after the first `length` would see: yes, where each has its row."""
        return True

    def check(self, move: Move) -> None:
        """Refuse an eviction after which a layer would lack rows.

        Raises:
            InvalidOption: says why.
        """
        return

    def rerunning(self) -> AbstractContextManager[object]:
        """A context in which the pinned tokens run again."""
        return nullcontext()


class RingLayout(CacheLayout):
    """A ring:

        slots     0 .. S-1         S .. C-1
                  pinned prefix    ring: token n >= S (counted from the very first) in slot S + (n - S) mod (C - S)

    Where the pinned prefix ends is only known at the first eviction (its Move says so). Until then no token has wrapped
    round, token n is in slot n, and S does not matter. Pinned keys keep the angle of their own slot.
    """

    pinned_angles: ClassVar[PinnedAngles] = "own"

    def forget(self, move: Move) -> None:
        """Count: the slots of the tokens that leave are the next to be overwritten."""
        self.pinned, self.evicted = move.start, self.evicted + move.count


class LayerRows(Sequence[Rows]):
    """The rows of a cache's first tokens, a layer at a time, read when they are asked for."""

    def __init__(self, cache: CacheLayout, part: str, layers: int, length: int) -> None:
        self._cache, self._part, self._layers, self._length = cache, part, range(layers), length

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: Any) -> Any:
        return self._cache.read(self._part, self._layers[layer], 0, self._length)


def fitting_scales(
    scales: KVScales | None, kv: KVSpec, spec: ModelSpec, fingerprint: str, name: str
) -> KVScales | None:
    """The scales for a cache of this kind, None for one that needs none.

    Args:
        fingerprint, name: of the model.

    Raises:
        ScalesError: they are missing, or for something else.
    """
    if scales_dtype(kv.dtype) not in LIMIT:
        return None
    if scales is None:
        raise ScalesError(f"A {kv.dtype} cache needs KV scales for {name}: make them with `edgekv calibrate`.")
    scales.check(spec, fingerprint, kv.dtype, kv.granularity)
    return scales


class CachedEngine(ABC):
    """The part of `edgekv.engines.base.Engine` that no backend does differently.

    Args:
        scales: what the codes in the cache stand for; None where it holds floats.
        chunk: the most tokens of one run.
    """

    _cache: CacheLayout

    def __init__(self, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, chunk: int) -> None:
        self._spec, self._kv, self._scales, self._chunk = spec, kv, scales, chunk
        self._tokens: list[int] = []

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        return self._spec

    @property
    def kv(self) -> KVSpec:
        """How the cache is stored."""
        return self._kv

    @property
    def scales(self) -> KVScales | None:
        """What the codes in the cache stand for; None where it holds floats."""
        return self._scales

    @property
    def row_factors(self) -> RowFactors:
        """Whether rows are stored with factors of their own beside the scales."""
        return self._cache.row_factors

    @property
    def tokens(self) -> Sequence[int]:
        """The ids in the cache's slots."""
        return self._tokens

    @property
    def length(self) -> int:
        """Filled slots."""
        return len(self._tokens)

    @property
    def evicted(self) -> int:
        """Tokens that have left since the cache was last empty."""
        return self._cache.evicted

    @abstractmethod
    def _run(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        """One run of the model: at most `chunk` tokens into the cache behind `past` others; their logits [R, V] at
        `rows`, as an array of its own.

        Raises:
            EngineError: the backend failed, or gave numbers that are not finite.
        """

    @abstractmethod
    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys (at the angles of slot + evicted) and values of slots start .. stop-1, each [K, n, D]; of a
        layer that holds only its last tokens those that are there."""

    @abstractmethod
    def close(self) -> None:
        """Free the model and the cache; the engine cannot be used afterwards. Closing twice is fine."""

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits:
        """Append tokens; logits [V] after the last one, or [T, V] after each."""
        check_room(tokens, self.length, self._kv.capacity)
        check_ids(tokens, self._spec.vocab_size)
        before, parts = self.length, []
        try:
            for start in range(0, len(tokens), self._chunk):
                part = tokens[start : start + self._chunk]
                is_last = start + len(part) == len(tokens)
                first = 0 if all_logits else len(part) - is_last
                parts.append(self._run(part, self.length, range(first, len(part))))
                self._tokens.extend(part)
        except BaseException:
            del self._tokens[before:]
            if before and not self.keeps(before):  # a layer's own ring has been written over
                self.reset()
            raise
        return joined(parts) if all_logits else parts[-1][0]

    def append(self, tokens: Sequence[int], moves: Sequence[Move], *, all_logits: bool = False) -> Logits:
        """Append tokens, making each of `moves` when the cache is full; logits as `forward` gives them."""
        check_moves(moves, len(tokens), self.length, self._kv.capacity)
        check_ids(tokens, self._spec.vocab_size)
        parts: list[Logits] = []
        for move in (*moves, None):
            step = self._kv.capacity - self.length
            if tokens[:step]:
                parts.append(self.forward(tokens[:step], all_logits=all_logits))
            tokens = tokens[step:]
            if move is not None:
                self.evict(move)
        return joined(parts) if all_logits else parts[-1]

    def evict(self, move: Move) -> None:
        """Drop the rows that `move` names; where rows move, the pinned tokens run again."""
        check_move(move, self.length)
        self._check_pinned(move)
        self._cache.check(move)
        with self._emptied_on_failure():
            self._cache.forget(move)
            del self._tokens[move.start : move.start + move.count]
            if self._cache.pinned_angles == "moved":
                self._run_pinned(move.start)

    def keeps(self, length: int) -> bool:
        """Whether the cache is still whole when cut back to `length` tokens."""
        return 0 <= length <= self.length and (length == 0 or self._cache.keeps(length))

    def truncate(self, length: int) -> None:
        """Forget the tokens from slot `length` on; all of them, if the others are not kept."""
        if not 0 <= length <= self.length:
            raise InvalidOption(f"Cannot truncate to {length}: the cache holds {self.length} tokens.")
        if length and self._cache.keeps(length):
            del self._tokens[length:]
        else:
            self.reset()

    def save(self, *, copy: bool = True) -> EngineState:
        """The cache's content, as a copy or read layer by layer."""
        cache = self._cache
        keys, values = (LayerRows(cache, part, self._spec.num_layers, self.length) for part in "kv")
        pinned = min(cache.pinned, self.length)
        state = EngineState(keys, values, tuple(self._tokens), cache.evicted, pinned, cache.pinned_angles)
        return replace(state, keys=tuple(keys), values=tuple(values)) if copy else state

    def load(self, state: EngineState) -> None:
        """Put a saved content back; it must come from the same model, scales and dtype."""
        check_state(state, self._spec, self._kv.capacity)
        self.reset()
        with self._emptied_on_failure():
            self._cache.reset(state.pinned, state.evicted)
            for part, layers in (("k", state.keys), ("v", state.values)):
                for layer, rows in enumerate(layers):
                    self._cache.put_back(part, layer, rows, len(state.tokens))
            self._tokens = list(state.tokens)
            if state.evicted and state.pinned_angles != self._cache.pinned_angles:
                self._run_pinned(state.pinned)

    def reset(self) -> None:
        """Forget everything."""
        self._tokens = []
        self._cache.reset()

    def _check_pinned(self, move: Move) -> None:
        """Refuse to pin more or fewer tokens than the last eviction did: in a ring every row would have to move."""
        if self._cache.evicted and move.start != self._cache.pinned:
            raise InvalidOption(
                f"{move} pins {move.start} tokens, but {self._cache.pinned} were pinned at the last eviction: "
                "empty the cache first."
            )

    def _run_pinned(self, count: int) -> None:
        """Run the first tokens again, which rewrites their rows and no others."""
        with self._cache.rerunning():
            for start in range(0, count, self._chunk):
                part = self._tokens[start : min(start + self._chunk, count)]
                self._run(part, start, range(0))

    @contextmanager
    def _emptied_on_failure(self) -> Iterator[None]:
        """Whatever goes wrong in here leaves an empty cache."""
        try:
            yield
        except BaseException:
            self.reset()
            raise
