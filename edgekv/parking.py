"""Where a cache's content waits while another dialogue has the engine: host memory up to a limit, then the disk.

    pinned rows   the same for every dialogue with the same system prompt: held once, by all that need them
    other rows    each dialogue's own
    in memory     one array a layer
    on the disk   a file without a name, which the system removes even if this process is killed. Where that would be
                  more than the disk's limit, the rows of whoever has waited longest are given up: they are read again
                  when they are needed

What a seat then has is an `EngineState` like any other, whose rows are read when they are asked for. Dropping it frees
them. A disk that cannot be read then is an OSError.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
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
        memory_bytes: the most host memory for rows. folder: where files go beyond that. disk_bytes: the most that those
            files may have; None: no limit.
    """

    def __init__(self, memory_bytes: int = 0, folder: Path | None = None, disk_bytes: int | None = None) -> None:
        self._limit, self._folder, self._disk_limit = memory_bytes, folder, disk_bytes
        self._in_memory: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._in_files: weakref.WeakSet[_Filed] = weakref.WeakSet()
        self._heads: weakref.WeakValueDictionary[_HeadKey, _Kept | _Filed] = weakref.WeakValueDictionary()
        self._filed: list[weakref.ref[Seat]] = []  # who has rows in files; who has waited longest is first

    @property
    def memory_bytes(self) -> int:
        """Host memory in use."""
        return sum(rows.size_bytes for rows in self._in_memory)

    @property
    def disk_bytes(self) -> int:
        """Disk in use."""
        return sum(rows.size_bytes for rows in self._in_files)

    def park(self, seat: Seat, state: ChatState) -> None:
        """Give a seat a copy of the cache's content, good until it is dropped; nothing, if there is no room.

        Args:
            state: whose rows are as `Engine.save(copy=False)` gives them.
        """
        seat.parked = None
        self._filed = [other for other in self._filed if other() not in (None, seat)]
        engine, pinned = state.timeline.engine, state.timeline.pinned
        try:
            keys = self._park("k", engine.keys, engine, pinned)
            values = self._park("v", engine.values, engine, pinned)
        except OSError:  # the disk is full, or its limit is reached: then it is read again when it is needed
            return
        seat.parked = state.with_rows_of(replace(engine, keys=keys, values=values))
        if keys.in_file or values.in_file:
            self._filed.append(weakref.ref(seat))

    def _park(self, part: str, layers: Sequence[Array], state: EngineState, pinned: int) -> _Joined:
        cuts = tuple(_cut(rows, len(state.tokens), pinned) for rows in layers)
        at = state.evicted if state.pinned_angles == "moved" else 0
        key = _HeadKey(part, state.tokens[:pinned], at, cuts)
        head = self._heads.get(key)
        if head is None:
            self._heads[key] = head = self._hold(_Sliced(layers, [slice(cut) for cut in cuts]))
        return _Joined(head, self._hold(_Sliced(layers, [slice(cut, None) for cut in cuts])))

    def _hold(self, rows: _Sliced) -> _Kept | _Filed:
        """A copy of rows, in memory or, where they do not fit, in a file. Either way one layer is read at a time.

        Raises:
            OSError: the disk has no room for them.
        """
        size_bytes = sum(part.nbytes for part in rows)
        if self.memory_bytes + size_bytes <= self._limit:
            kept = _Kept([part.copy() for part in rows])
            self._in_memory.add(kept)
            return kept
        self._make_room(size_bytes)
        filed = _Filed(rows, self._folder)
        self._in_files.add(filed)
        return filed

    def _make_room(self, size_bytes: int) -> None:
        """Give up the rows of who has waited longest until `size_bytes` more are within the disk's limit.

        Raises:
            OSError: there are no more to give up.
        """
        while self._disk_limit is not None and self.disk_bytes + size_bytes > self._disk_limit:
            if not self._filed:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            if (seat := self._filed.pop(0)()) is not None:
                seat.parked = None


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


class _Sliced(Sequence[Array]):
    """Some of the rows of each layer, read when they are asked for."""

    def __init__(self, layers: Sequence[Array], parts: Sequence[slice]) -> None:
        self._layers, self._parts = layers, parts

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: Any) -> Any:
        return self._layers[layer][:, self._parts[layer]]


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
    """Arrays in a file that has no name.

    Raises:
        OSError: they do not fit on the disk; later, they cannot be read.
    """

    def __init__(self, layers: Sequence[Array], folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._places: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []
        try:
            for rows in layers:
                self._places.append((self._file.tell(), rows.shape, rows.dtype))
                self._file.write(np.ascontiguousarray(rows).data)
            self._file.flush()
        except OSError:
            with suppress(OSError):  # it tries to write what is left
                self._file.close()
            raise
        self.size_bytes = self._file.tell()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, layer: Any) -> Any:
        start, shape, dtype = self._places[layer]
        rows = np.empty(shape, dtype)
        self._file.seek(start)
        if self._file.readinto(rows.data) != rows.nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rows


class _Joined(Sequence[Array]):
    """Pinned rows and the others, together again."""

    def __init__(self, head: _Kept | _Filed, tail: _Kept | _Filed) -> None:
        self._head, self._tail = head, tail

    @property
    def in_file(self) -> bool:
        """Whether any of them take room on the disk."""
        return isinstance(self._head, _Filed) or isinstance(self._tail, _Filed)

    def __len__(self) -> int:
        return len(self._head)

    def __getitem__(self, layer: Any) -> Any:
        return np.concatenate([self._head[layer], self._tail[layer]], axis=1)
