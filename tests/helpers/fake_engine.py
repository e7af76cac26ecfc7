"""An engine without a model: the whole Engine protocol over plain lists, deterministic, with faults on demand.

A cache row is the token and the position it stands at, so a test sees what was stored where. The logits after a token
depend on every token in the cache and on its distance (as attention with RoPE does), so two caches of the same content
give the same logits and any other content gives others. `answer_ids` makes it say a given text instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from edgekv.engines.base import Logits, PinnedAngles, Rows
from edgekv.engines.cached import CachedEngine, CacheLayout
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec

EOS = 2


def fake_spec(vocab_size: int = 64, max_context: int = 1 << 20, eos_ids: tuple[int, ...] = (EOS,)) -> ModelSpec:
    """A geometry for the fake."""
    return ModelSpec("llama", 1, 16, 16, 2, 1, 8, vocab_size, max_context, bos_id=1, eos_ids=eos_ids)


class FakeCache(CacheLayout):
    """Rows that move, as a list: each is the position that its token stands at."""

    pinned_angles: ClassVar[PinnedAngles] = "moved"

    def __init__(self) -> None:
        self.positions: list[int] = []  # stale behind the tokens that are held
        super().__init__()

    def read(self, part: str, layer: int, start: int, stop: int) -> Rows:
        return np.array([[[position] for position in self.positions[start:stop]]], np.int64)

    def put_back(self, part: str, layer: int, rows: Rows, length: int) -> None:
        self.positions = [int(position) for position in rows[0, :, 0]]

    def forget(self, move: Move) -> None:
        del self.positions[move.start : move.start + move.count]
        self.pinned, self.evicted = move.start, self.evicted + move.count


class FakeEngine(CachedEngine):
    """See the module.

    Attributes:
        answer_ids: if given, the logits after a prompt prefer the first of them, after that one the second, and so on,
            and EOS after the last. May be set anew for another answer.
        log: (method, tokens or count) of every call.
        fault: called before a backend run with its number (0, 1, ...); may raise. It runs where ONNX Runtime would:
            inside `forward` and inside `evict`, after rows have moved.
    """

    _cache: FakeCache

    def __init__(self, kv: KVSpec, spec: ModelSpec | None = None, answer_ids: Sequence[int] | None = None) -> None:
        super().__init__(spec or fake_spec(), kv, None, chunk=kv.capacity)
        self._cache = FakeCache()
        self._runs = 0
        self.answer_ids, self._said = list(answer_ids) if answer_ids is not None else None, 0
        self.log: list[tuple[str, int]] = []
        self.fault: Callable[[int], None] = lambda run: None

    @property
    def distances(self) -> list[int]:
        """How far each slot stands from the one that comes next."""
        return [self.length + self.evicted - position for position in self._cache.positions[: self.length]]

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits:
        logits = super().forward(tokens, all_logits=all_logits)
        self.log.append(("forward", len(tokens)))
        return logits

    def evict(self, move: Move) -> None:
        super().evict(move)
        self.log.append(("evict", move.count))

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.log.append(("truncate", length))

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        shape = (1, stop - start, self.spec.head_dim)
        k = np.broadcast_to(np.array(self.tokens[start:stop], np.float32)[None, :, None], shape)
        return k.copy(), k.copy()

    def close(self) -> None:
        self.reset()

    def _run(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        self._runs += 1
        self.fault(self._runs - 1)
        stop = past + len(tokens)
        self._cache.positions[past:stop] = range(past + self.evicted, stop + self.evicted)
        if not rows:  # the pinned tokens once more
            return np.zeros((0, self.spec.vocab_size), np.float32)
        repeats = self.answer_ids is not None and list(tokens) == self.answer_ids[self._said : self._said + 1]
        self._said = self._said + 1 if repeats else 0
        held = [*self.tokens[:past], *tokens]
        return np.stack([self._logits(held[: past + row + 1]) for row in rows])

    def _logits(self, held: Sequence[int]) -> Logits:
        if self.answer_ids is not None:
            wanted = [*self.answer_ids, self.spec.eos_ids[0]][self._said]
            return np.where(np.arange(self.spec.vocab_size) == wanted, 9, 0).astype(np.float32)
        number, end = 0, len(held) + self.evicted
        for token, position in zip(held, self._cache.positions, strict=False):
            number = (number * 1_000_003 + token * 7919 + end - position) % (1 << 61)
        return np.random.default_rng(number).normal(size=self.spec.vocab_size).astype(np.float32)
