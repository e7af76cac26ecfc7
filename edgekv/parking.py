"""Where a cache's content waits while another dialogue has the engine: host memory up to a limit, then the disk.

    pinned rows   the same for every dialogue with the same system prompt: held once, by all that need them
    other rows    one array a layer in memory; or, beyond the limit, a file without a name, which the system removes
                  even if this process is killed. Where that would be more than the disk's limit, the rows of whoever
                  has waited longest are given up: they are read again when they are needed

What a seat then has is an `EngineState` like any other, whose rows are read when they are asked for. Dropping it frees
them.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import EngineState
from edgekv.session_state import ChatState, Seat

Array = npt.NDArray[Any]


class ParkingLot:
    """Holds contents of caches.

    Args:
        memory_bytes: the most host memory for rows that no dialogue shares. folder: where files go beyond that.
        disk_bytes: the most that those files may have; None: no limit.
    """

    def __init__(self, memory_bytes: int = 0, folder: Path | None = None, disk_bytes: int | None = None) -> None:
        self._limit, self._folder, self._disk_limit = memory_bytes, folder, disk_bytes
        self._in_memory: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._heads: weakref.WeakValueDictionary[_HeadKey, _Kept] = weakref.WeakValueDictionary()
        self._filed: list[_Spot] = []  # who waited longest first

    @property
    def memory_bytes(self) -> int:
        """Host memory in use for rows that no dialogue shares."""
        return sum(rows.size_bytes for rows in self._in_memory)

    @property
    def disk_bytes(self) -> int:
        """Disk in use."""
        return sum(spot.size_bytes for spot in self._filed)

    def park(self, seat: Seat, state: ChatState) -> None:
        """Give a seat a copy of the cache's content, good until it is dropped; nothing, if there is no room.

        Args:
            state: whose rows are as `Engine.save(copy=False)` gives them.
        """
        engine, pinned = state.timeline.engine, state.timeline.pinned
        try:
            keys = self._park("k", engine.keys, engine, pinned, seat)
            values = self._park("v", engine.values, engine, pinned, seat)
        except OSError:  # the disk is full, or its limit is reached: then it is read again when it is needed
            seat.parked = None
        else:
            seat.parked = state.with_rows_of(replace(engine, keys=keys, values=values))

    def _park(self, part: str, layers: Sequence[Array], state: EngineState, pinned: int, seat: Seat) -> Sequence[Array]:
        cuts = tuple(_cut(rows, len(state.tokens), pinned) for rows in layers)
        at = state.evicted if state.pinned_angles == "moved" else 0
        key = _HeadKey(part, state.tokens[:pinned], at, cuts)
        head = self._heads.get(key)
        if head is None:
            self._heads[key] = head = _Kept([rows[:, :cut].copy() for rows, cut in zip(layers, cuts, strict=True)])
        tails = (rows[:, cut:] for rows, cut in zip(layers, cuts, strict=True))  # one layer in memory at a time
        if self.memory_bytes + state.size_bytes // 2 > self._limit:
            size_bytes = sum(rows[:, cut:].nbytes for rows, cut in zip(layers, cuts, strict=True))
            return _Joined(head, self._file(seat, tails, size_bytes))
        tail = _Kept([rows.copy() for rows in tails])
        self._in_memory.add(tail)
        return _Joined(head, tail)

    def _file(self, seat: Seat, layers: Iterator[Array], size_bytes: int) -> _Filed:
        """Rows in a file, once there is room for them."""
        self._make_room(size_bytes)
        filed = _Filed(layers, self._folder)
        self._filed.append(_Spot(weakref.ref(seat), weakref.ref(filed)))
        return filed

    def _make_room(self, size_bytes: int) -> None:
        """Give up the oldest rows until `size_bytes` more are within the limit.

        Raises:
            OSError: there are no more to give up.
        """
        for spot in self._filed:
            if self._disk_limit is None or self.disk_bytes + size_bytes <= self._disk_limit:
                break
            spot.give_up()
        self._filed = [spot for spot in self._filed if spot.size_bytes]
        if self._disk_limit is not None and self.disk_bytes + size_bytes > self._disk_limit:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def _cut(rows: Array, tokens: int, pinned: int) -> int:
    """How many rows of a layer are pinned ones; a layer that holds only its last tokens has none to share."""
    return pinned if rows.shape[1] == tokens else 0


@dataclass(frozen=True)
class _Spot:
    """Who has rows in a file."""

    seat: weakref.ref[Seat]
    rows: weakref.ref[_Filed]

    @property
    def size_bytes(self) -> int:
        """Of the file, as long as anybody needs it."""
        rows = self.rows()
        return 0 if rows is None else rows.size_bytes

    def give_up(self) -> None:
        """Free the rows, if their seat still waits with them."""
        seat = self.seat()
        if seat is not None and seat.parked is not None and self.size_bytes:
            seat.parked = None


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
        self.size_bytes = self._file.tell()

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
