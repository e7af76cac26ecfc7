"""Where a cache's content waits while another dialogue has the engine: host memory up to a limit, then the disk.

    pinned rows   the same for every dialogue with the same system prompt: held once, by all that need them
    other rows    one array a layer in memory; or, beyond the limit, a file without a name, which the system removes
                  even if this process is killed

What comes out is an `EngineState` like any other, whose rows are read when they are asked for. Dropping it frees them.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import EngineState

Array = npt.NDArray[Any]


class ParkingLot:
    """Holds contents of caches.

    Args:
        memory_bytes: the most host memory for rows that no dialogue shares. folder: where files go beyond that.
    """

    def __init__(self, memory_bytes: int = 0, folder: Path | None = None) -> None:
        self._limit, self._folder = memory_bytes, folder
        self._in_memory: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._heads: weakref.WeakValueDictionary[_HeadKey, _Kept] = weakref.WeakValueDictionary()

    @property
    def memory_bytes(self) -> int:
        """Host memory in use for rows that no dialogue shares."""
        return sum(rows.size_bytes for rows in self._in_memory)

    def park(self, state: EngineState, pinned: int) -> EngineState:
        """A copy of a content, good until it is dropped.

        Args:
            state: as `Engine.save(copy=False)` gives it. pinned: how many of its first tokens are pinned.

        Raises:
            OSError: the disk is full.
        """
        keys = self._park("k", state.keys, state, pinned)
        values = self._park("v", state.values, state, pinned)
        return replace(state, keys=keys, values=values)

    def _park(self, part: str, layers: Sequence[Array], state: EngineState, pinned: int) -> Sequence[Array]:
        cuts = tuple(_cut(rows, len(state.tokens), pinned) for rows in layers)
        at = state.evicted if state.pinned_angles == "moved" else 0
        key = _HeadKey(part, state.tokens[:pinned], at, cuts)
        head = self._heads.get(key)
        if head is None:
            self._heads[key] = head = _Kept([rows[:, :cut].copy() for rows, cut in zip(layers, cuts, strict=True)])
        tails = (rows[:, cut:] for rows, cut in zip(layers, cuts, strict=True))
        if self.memory_bytes + state.size_bytes // 2 > self._limit:
            return _Joined(head, _Filed(tails, self._folder))
        tail = _Kept([rows.copy() for rows in tails])
        self._in_memory.add(tail)
        return _Joined(head, tail)


def _cut(rows: Array, tokens: int, pinned: int) -> int:
    """How many rows of a layer are pinned ones; a layer that holds only its last tokens has none to share."""
    return pinned if rows.shape[1] == tokens else 0


@dataclass(frozen=True)
class _HeadKey:
    """What pinned rows depend on: the tokens, and the position of the first; and which layers have them."""

    part: str
    tokens: tuple[int, ...]
    position: int
    cuts: tuple[int, ...]


class _Kept(Sequence[Array]):
    """Arrays in memory; unlike a list, it can be told when they are no longer needed."""

    def __init__(self, layers: list[Array]) -> None:
        self._layers = layers
        self.size_bytes = sum(rows.nbytes for rows in layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: Any) -> Any:
        return self._layers[layer]


class _Filed(Sequence[Array]):
    """Arrays in a file that has no name."""

    def __init__(self, layers: Iterator[Array], folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._places: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []
        for rows in layers:
            self._places.append((self._file.tell(), rows.shape, rows.dtype))
            self._file.write(np.ascontiguousarray(rows).data)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, layer: Any) -> Any:
        start, shape, dtype = self._places[layer]
        rows = np.empty(shape, dtype)
        self._file.seek(start)
        self._file.readinto(rows.data)
        return rows


class _Joined(Sequence[Array]):
    """Pinned rows and the others, together again."""

    def __init__(self, head: Sequence[Array], tail: Sequence[Array]) -> None:
        self._head, self._tail = head, tail

    def __len__(self) -> int:
        return len(self._head)

    def __getitem__(self, layer: Any) -> Any:
        return np.concatenate([self._head[layer], self._tail[layer]], axis=1)
