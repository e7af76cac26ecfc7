"""An engine without a model: the whole Engine protocol over plain lists, deterministic, with faults on demand.

A cache row is the token and the position it stands at, so a test sees what was stored where. The logits after a token
depend on every token in the cache and on its distance (as attention with RoPE does), so two caches of the same content
give the same logits and any other content gives others. `answer_ids` makes it say a given text instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgekv.engines.base import EngineState, Logits
from edgekv.errors import CacheFull, InvalidOption
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.spec import ModelSpec

EOS = 2


def fake_spec(vocab_size: int = 64, max_context: int = 1 << 20, eos_ids: tuple[int, ...] = (EOS,)) -> ModelSpec:
    """A geometry for the fake."""
    return ModelSpec("llama", 1, 16, 16, 2, 1, 8, vocab_size, max_context, bos_id=1, eos_ids=eos_ids)


class FakeEngine:
    """See the module.

    Attributes:
        answer_ids: if given, the logits after a prompt prefer the first of them, after that one the second, and so on,
            and EOS after the last. May be set anew for another answer.
        log: (method, tokens or count) of every call.
        fault: called before a backend run with its number (0, 1, ...); may raise. It runs where ONNX Runtime would:
            inside `forward` and inside `evict`, after rows have moved.
    """

    def __init__(self, kv: KVSpec, spec: ModelSpec | None = None, answer_ids: Sequence[int] | None = None) -> None:
        self._spec, self._kv = spec or fake_spec(), kv
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._evicted = 0
        self._runs = 0
        self.answer_ids, self._said = list(answer_ids) if answer_ids is not None else None, 0
        self.log: list[tuple[str, int]] = []
        self.fault: Callable[[int], None] = lambda run: None

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def kv(self) -> KVSpec:
        return self._kv

    @property
    def scales(self) -> None:
        return None

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def evicted(self) -> int:
        return self._evicted

    @property
    def distances(self) -> list[int]:
        """How far each slot stands from the one that comes next."""
        return [self.length + self._evicted - position for position in self._positions]

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits:
        assert len(tokens) > 0
        if len(tokens) > self._kv.capacity - self.length:
            raise CacheFull(length=self.length, tokens=len(tokens), capacity=self._kv.capacity)
        if min(tokens) < 0 or max(tokens) >= self._spec.vocab_size:
            raise InvalidOption(f"{tokens} are not all in the vocabulary.")
        self._run()
        repeats = self.answer_ids is not None and list(tokens) == self.answer_ids[self._said : self._said + 1]
        self._said = self._said + 1 if repeats else 0
        rows = []
        for token in tokens:
            self._positions.append(self.length + self._evicted)
            self._tokens.append(int(token))
            rows.append(self._logits())
        self.log.append(("forward", len(tokens)))
        return np.stack(rows) if all_logits else rows[-1]

    def evict(self, move: Move) -> None:
        assert move.length == self.length
        assert 0 < move.count <= move.length - move.start
        try:
            del self._tokens[move.start : move.start + move.count]
            del self._positions[move.start : move.start + move.count]
            self._evicted += move.count
            self._run()
            self._positions[: move.start] = range(self._evicted, self._evicted + move.start)
        except BaseException:
            self.reset()
            raise
        self.log.append(("evict", move.count))

    def keeps(self, length: int) -> bool:
        return 0 <= length <= self.length

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        if length == 0:
            self.reset()
        else:
            del self._tokens[length:], self._positions[length:]
        self.log.append(("truncate", length))

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        shape = (1, stop - start, self._spec.head_dim)
        k = np.broadcast_to(np.array(self._tokens[start:stop], np.float32)[None, :, None], shape)
        return k.copy(), k.copy()

    def save(self, *, copy: bool = True) -> EngineState:
        rows = np.array([[[position] for position in self._positions]], np.int64)
        return EngineState((rows,), (rows,), tuple(self._tokens), self._evicted)

    def load(self, state: EngineState) -> None:
        self._tokens, self._evicted = list(state.tokens), state.evicted
        self._positions = [int(position) for position in state.keys[0][0, :, 0]]

    def reset(self) -> None:
        self._tokens, self._positions, self._evicted = [], [], 0

    def close(self) -> None:
        self.reset()

    def _run(self) -> None:
        self._runs += 1
        self.fault(self._runs - 1)

    def _logits(self) -> Logits:
        if self.answer_ids is not None:
            wanted = [*self.answer_ids, self._spec.eos_ids[0]][self._said]
            return np.where(np.arange(self._spec.vocab_size) == wanted, 9, 0).astype(np.float32)
        number = 0
        for token, distance in zip(self._tokens, self.distances, strict=True):
            number = (number * 1_000_003 + token * 7919 + distance) % (1 << 61)
        return np.random.default_rng(number).normal(size=self._spec.vocab_size).astype(np.float32)
