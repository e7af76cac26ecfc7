"""A session as a file: the words, and the cache that they have become, so that going on needs no reading.

One safetensors file, which any reader of that format opens:

    k.0, v.0, k.1, ...  [K, length, row]   the cache's rows as they are stored, in the order of tokens
    tokens, gone        int32              the ids in the slots; those that have left, in order
    text.ids, text.starts                  the ids that the text below stands for, and where each begins
    dialogue            uint8              JSON: messages, sampling, overflow, random stream, what is pinned, that text
                                           and what departed before it (encoded.py; in older files nothing has)
    metadata                               which model and cache it fits, a title, counts, and the SHA-256

The SHA-256 is that of the whole file with the digits of the hash itself as zeros. The file is written row by row of
layers (the memory of one layer, not of a second cache), flushed, and renamed into place, so that whatever moment a
process is killed at, the file before it or the file after it is there, whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import numpy.typing as npt

from edgekv.encoded import Departed, EncodedText, ids_array, offsets_array
from edgekv.engines.base import EngineState, PinnedAngles
from edgekv.errors import SessionError
from edgekv.files import atomic_file
from edgekv.generate import TimelineState
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec, RowFactors
from edgekv.session_state import ChatState, SessionState

FORMAT, FORMAT_VERSION = "edgekv-session", "1"
SUFFIX = ".safetensors"

_ZEROS = "0" * 64
_CHUNK = 1 << 22
_BESIDE_SCALES: dict[RowFactors, str] = {"none": "", "plain": " and row, not mixed", "mixed": " and row"}
_DTYPES = {"I8": np.int8, "U8": np.uint8, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CacheIdentity:
    """What the numbers in a cache mean. A content goes only into a cache of the same identity; its size is free."""

    model: str  # the model's fingerprint
    name: str  # of the model, for people
    dtype: str
    granularity: str  # of the scales, and what rows have beside them
    scales: str  # the beginning of the scales' SHA-256; empty: a cache without scales

    @classmethod
    def of(
        cls, fingerprint: str, name: str, kv: KVSpec, scales: KVScales | None, *, row_factors: RowFactors
    ) -> CacheIdentity:
        """Of a model and the kind of its cache; scales, row_factors: those of its engine."""
        if scales is None:
            return cls(fingerprint, name, kv.dtype, kv.granularity, "")
        return cls(fingerprint, name, kv.dtype, kv.granularity + _BESIDE_SCALES[row_factors], _digest(scales))

    def check(self, path: Path, saved: CacheIdentity) -> None:
        """Refuse a saved cache of another identity, with the reason.

        Raises:
            SessionError: says what differs.
        """
        for what, found, wanted, show in (
            ("model", saved.model, self.model, f"{saved.name} ({saved.model}), not {self.name} ({self.model})"),
            ("KV dtype", saved.dtype, self.dtype, f"{saved.dtype}, not {self.dtype}"),
            ("granularity", saved.granularity, self.granularity, f"{saved.granularity}, not {self.granularity}"),
            ("KV scales", saved.scales, self.scales, f"{saved.scales or 'none'}, not {self.scales or 'none'}"),
        ):
            if found != wanted:
                raise SessionError(
                    f"The session {path} was saved with another {what}: {show}. Load that one, or take just the words "
                    "and have them read again (--reread)."
                )


def _digest(scales: KVScales) -> str:
    """The beginning of the SHA-256 of everything that codes take their meaning from."""
    whole = hashlib.sha256(scales.k.tobytes() + scales.v.tobytes())
    for name, centre in (("", scales.k_centre), ("v_centre", scales.v_centre)):
        if centre is not None:
            whole.update(name.encode() + centre.tobytes())
    return whole.hexdigest()[:16]


@dataclass(frozen=True)
class SessionInfo:
    """What a session file says of itself, without its cache."""

    path: Path
    identity: CacheIdentity
    title: str  # how it began
    messages: int
    capacity: int  # of the cache that it was saved from
    length: int  # tokens in the cache
    evicted: int
    sha256: str
    size_bytes: int
    saved_at: float  # seconds since 1970


def write_session(path: Path, state: SessionState, identity: CacheIdentity, capacity: int) -> str:
    """Write a session, atomically; returns the file's SHA-256.

    Raises:
        StorageError: the file cannot be written; what was there is untouched.
    """
    timeline = state.chat.timeline
    dialogue = json.dumps(state.dialogue(), ensure_ascii=False).encode("utf-8", "surrogatepass")
    small: dict[str, Array] = {
        "tokens": np.asarray(timeline.engine.tokens, np.int32),
        "gone": np.asarray(timeline.gone, np.int32),
        "text.ids": np.asarray(state.chat.known.ids, np.int32),
        "text.starts": np.asarray(state.chat.known.starts, np.int64),
        "dialogue": np.frombuffer(dialogue, np.uint8),
    }
    metadata = {
        "sha256": _ZEROS,  # the first, so that no other field's zeros are taken for it
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **asdict(identity),
        "title": _title(state),
        "messages": str(len(state.messages)),
        "capacity": str(capacity),
        "length": str(len(timeline.engine.tokens)),
        "evicted": str(timeline.engine.evicted),
        "pinned_rows": str(timeline.engine.pinned),
        "pinned_angles": timeline.engine.pinned_angles,
    }
    with atomic_file(path, private=True) as part, part.open("r+b") as file:
        return _write(file, metadata, small, timeline.engine)


def read_session(path: Path, identity: CacheIdentity | None, kv: KVSpec | None = None) -> SessionState:
    """Read a session; the cache's rows are read when they are asked for.

    Args:
        identity, kv: of the cache that it is for; without them only the words are read (the state's cache is then
            empty).

    Raises:
        SessionError: there is no such file, it is damaged, or it is for another cache; the message has the reason.
    """
    info = read_info(path)
    _check_whole(path, info.sha256)
    if identity is not None:
        identity.check(path, info.identity)
    try:
        state = _read(path, with_cache=identity is not None)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SessionError(f"{path} is not a session that edgekv wrote ({error!r}).") from None
    if kv is not None:
        _check_room(path, state.chat.timeline, kv)
    return state


def read_info(path: Path) -> SessionInfo:
    """What a session file is about; its content is not checked.

    Raises:
        SessionError: there is no such file, or it is no session.
    """
    try:
        with path.open("rb") as file:
            metadata = _header(file)[1]["__metadata__"]
        found = path.stat()
        if metadata["format"] != FORMAT or metadata["format_version"] != FORMAT_VERSION:
            raise ValueError(f"{metadata['format']} of version {metadata['format_version']}")
        identity = CacheIdentity(**{field.name: metadata[field.name] for field in fields(CacheIdentity)})
        return SessionInfo(
            path=path,
            identity=identity,
            title=metadata["title"],
            messages=int(metadata["messages"]),
            capacity=int(metadata["capacity"]),
            length=int(metadata["length"]),
            evicted=int(metadata["evicted"]),
            sha256=metadata["sha256"],
            size_bytes=found.st_size,
            saved_at=found.st_mtime,
        )
    except OSError as error:
        raise SessionError(f"The session {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise SessionError(f"{path} is not a session of format version {FORMAT_VERSION} ({reason}).") from None


def _write(file: BinaryIO, metadata: dict[str, str], small: Mapping[str, Array], engine: EngineState) -> str:
    """The safetensors layout: the header's size, the header, the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {key: _encodable(value) for key, value in metadata.items()}}
    end = 0
    for name, shape, dtype in _layout(small, engine):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        code = next(code for code, kind in _DTYPES.items() if dtype == kind)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        digest.update(data)
        file.write(data)

    put(struct.pack("<Q", len(text)))
    put(text)
    for _, array in chain(small.items(), _rows(engine)):
        put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.seek(8 + text.index(_ZEROS.encode()))
    file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def _layout(small: Mapping[str, Array], engine: EngineState) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of every tensor in the file; layers with a window may hold fewer rows than others."""
    for name, array in chain(small.items(), _rows(engine)):
        yield name, array.shape, array.dtype


def _rows(engine: EngineState) -> Iterator[tuple[str, Array]]:
    for layer in range(len(engine.keys)):
        yield f"k.{layer}", engine.keys[layer]
        yield f"v.{layer}", engine.values[layer]


def _header(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The header of a safetensors file, as bytes and as JSON; the file is then at the first tensor."""
    (size,) = struct.unpack("<Q", file.read(8))
    if size > 100_000_000:
        raise ValueError(f"a header of {size} bytes")
    text = file.read(size)
    return text, json.loads(text)


def _check_whole(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        text, _ = _header(file)
        digest = hashlib.sha256(struct.pack("<Q", len(text)))
        digest.update(text.replace(sha256.encode(), _ZEROS.encode(), 1))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise SessionError(f"The session {path} is damaged: its SHA-256 does not fit. Delete it, or restore a copy.")


def _check_room(path: Path, timeline: TimelineState, kv: KVSpec) -> None:
    """Refuse a content that is longer than the cache, or that pins more than it may."""
    length, capacity = len(timeline.engine.tokens), kv.capacity
    if length > capacity:
        raise SessionError(
            f"The session {path} holds {length} tokens, but the cache has room for {capacity}: "
            f"use a --context of {length} or more, or have its words read again (--reread)."
        )
    if timeline.pinned > kv.max_pinned:
        raise SessionError(
            f"The session {path} pins {timeline.pinned} tokens, but a cache of {capacity} keeps at most "
            f"{kv.max_pinned} for good: use a --context of {4 * timeline.pinned} or more."
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as safetensors' own reader has it.

    Raises:
        SessionError: that refuses it, or a tensor is asked for that it does not have.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except SafetensorError as error:
        raise SessionError(f"{path} is not a session that edgekv wrote ({error}).") from None


def _read(path: Path, *, with_cache: bool) -> SessionState:
    with _opened(path) as file:
        metadata = file.metadata()
        dialogue = json.loads(file.get_tensor("dialogue").tobytes().decode("utf-8", "surrogatepass"))
        tokens = tuple(file.get_tensor("tokens").tolist())
        gone, ids = (ids_array(file.get_tensor(name).tolist()) for name in ("gone", "text.ids"))
        starts = offsets_array(file.get_tensor("text.starts").tolist())
        layers = _layers(set(file.keys())) if with_cache else 0
    angles = metadata["pinned_angles"]
    if angles not in get_args(PinnedAngles):
        raise ValueError(f"pinned angles {angles}")
    engine = EngineState(
        _FileRows(path, "k", layers),
        _FileRows(path, "v", layers),
        tokens,
        len(gone),
        int(metadata["pinned_rows"]),
        angles,
    )
    known = EncodedText(dialogue["text"], ids, starts, Departed.from_json(dialogue.get("departed")))
    chat = ChatState(TimelineState(engine, gone, int(dialogue["pinned"])), known)
    return SessionState.from_dialogue(dialogue, chat if with_cache else ChatState.empty())


def _layers(names: set[str]) -> int:
    """How many layers there are rows of, each with its keys and its values."""
    found = {name for name in names if name.startswith(("k.", "v."))}
    count = (len(found) + 1) // 2
    if missing := sorted({f"{part}.{layer}" for part in "kv" for layer in range(count)} - found):
        raise ValueError(f"it has no {missing[0]}")
    return count


class _FileRows(Sequence[Array]):
    """The rows of each layer, read from the file when they are asked for."""

    def __init__(self, path: Path, part: str, layers: int) -> None:
        self._path, self._part, self._layers = path, part, range(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: Any) -> Any:
        with _opened(self._path) as file:
            return file.get_tensor(f"{self._part}.{self._layers[layer]}")


def _title(state: SessionState) -> str:
    first = next((message["content"] for message in state.messages if message["role"] == "user"), "")
    return " ".join(first.split())[:80]


def _encodable(text: str) -> str:
    """A text as safetensors' reader takes it: half of a surrogate pair is written out."""
    return text.encode("utf-8", "backslashreplace").decode()
