"""An ONNX file read without its weights: every large tensor stays where it lies and is named by file, offset, length.

Weights in a file of their own are stored so anyway. Those inside the graph file are found by walking the protobuf
encoding (field 7 of the model is the graph, field 5 of a graph an initializer, field 9 of a tensor its bytes) and
become external data whose file is the graph itself. So a graph of 2 GB takes no more memory to edit than one of 20 KB,
ONNX Runtime maps the file that the user has, and nothing of it is copied.

ONNX Runtime refuses data files that links lead out of the graph's folder, as all do in the hub's own cache. So links
are followed here, and files are named from the folder that holds them all.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from edgekv.errors import BadCheckpoint

_INLINE_BYTES = 4096  # smaller tensors are read
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # protobuf field numbers
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types


class _Field(NamedTuple):
    number: int
    wire: int
    start: int  # of the field with its tag
    value: int  # of what it holds
    end: int


@dataclass(frozen=True)
class GraphFile:
    """An ONNX file without its large tensors."""

    model: onnx.ModelProto
    folder: Path  # that the places of external data are relative to
    files: tuple[str, ...]  # the graph and its data files, by their names in the graph's folder


def read_graph(path: Path) -> GraphFile:
    """The model at `path`, large tensors as external data of files in its folder, all of which are there and whole.

    Raises:
        BadCheckpoint: it is no ONNX model, or a data file is missing, too short or outside of the folder.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            slim = b"".join(_slim_model(data, path.name))
        model = onnx.ModelProto.FromString(slim)
        _check_text(model.graph)
    except (OSError, ValueError, IndexError, DecodeError) as error:
        raise BadCheckpoint(f"{path} cannot be read as an ONNX model ({error}): download it again.") from None
    if not model.graph.node:
        raise BadCheckpoint(f"{path} holds no ONNX graph: download it again.")
    tensors = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    for tensor in tensors:
        _check_external(path, tensor)
    names = sorted({external_place(tensor)[0] for tensor in tensors} - {path.name})
    real = {name: (path.parent / name).resolve() for name in (path.name, *names)}
    folder = Path(os.path.commonpath([file.parent for file in real.values()]))
    for entry in (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"):
        entry.value = real[entry.value].relative_to(folder).as_posix()
    return GraphFile(model, folder, (path.name, *names))


def external_place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File name, offset and length in bytes of a tensor's external data."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries.get("location", ""), int(entries.get("offset") or 0), int(entries.get("length") or _size(tensor))


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """What a tensor's numbers take in memory."""
    return external_place(tensor)[2] if tensor.data_location == TensorProto.EXTERNAL else _size(tensor)


def tensor_array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray[Any, Any]:
    """A tensor's numbers; external data is mapped, not read."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    name, offset, _ = external_place(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(folder / name, dtype, "r", offset, tuple(tensor.dims))


def _check_text(graph: onnx.GraphProto) -> None:
    """The parser lets names that are not UTF-8 through, as bytes."""
    names = [name for node in graph.node for name in (node.op_type, node.name, *node.input, *node.output)]
    names += [each.name for each in (*graph.initializer, *graph.input, *graph.output)]
    names += [
        text for tensor in graph.initializer for entry in tensor.external_data for text in (entry.key, entry.value)
    ]
    damaged = next((name for name in names if not isinstance(name, str)), None)
    if damaged is not None:
        raise ValueError(f"the name {damaged!r} is not UTF-8")


def _size(tensor: onnx.TensorProto) -> int:
    width = 0.5 if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4) else 0
    itemsize = width or np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    return int(prod(tensor.dims) * itemsize + 0.5)


def _check_external(path: Path, tensor: onnx.TensorProto) -> None:
    try:
        name, offset, length = external_place(tensor)
        size = _size(tensor)
    except (ValueError, KeyError, TypeError):
        raise BadCheckpoint(f"{path}: tensor {tensor.name} does not say where its numbers lie.") from None
    file = path.parent / name
    if not name or Path(name).name != name:
        raise BadCheckpoint(f"{path}: tensor {tensor.name} lies outside of the folder, in {name!r}.")
    if not file.is_file():
        raise BadCheckpoint(f"{path} needs {name}, which is not in {path.parent}: download it too.")
    if length != size or offset < 0 or offset + length > file.stat().st_size:
        raise BadCheckpoint(
            f"{file} has {file.stat().st_size:,} bytes, but tensor {tensor.name} needs {size:,} at {offset:,} "
            f"({length:,} are said to be there): download it again."
        )


def _slim_model(data: mmap.mmap, name: str) -> Iterator[bytes]:
    for part in _fields(data, 0, len(data)):
        if part.number == _GRAPH and part.wire == _BYTES:
            graph = b"".join(_slim_graph(data, part, name))
            yield _tagged(_GRAPH, graph)
        else:
            yield data[part.start : part.end]


def _slim_graph(data: mmap.mmap, graph: _Field, name: str) -> Iterator[bytes]:
    for part in _fields(data, graph.value, graph.end):
        raw = _large_data(data, part) if part.number == _INITIALIZER and part.wire == _BYTES else None
        if raw is None:
            yield data[part.start : part.end]
            continue
        tensor = TensorProto.FromString(data[part.value : raw.start] + data[raw.end : part.end])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", raw.value), ("length", raw.end - raw.value)):
            tensor.external_data.add(key=key, value=str(value))
        yield _tagged(_INITIALIZER, tensor.SerializeToString())


def _large_data(data: mmap.mmap, tensor: _Field) -> _Field | None:
    """The field with a tensor's bytes, if they are many."""
    for part in _fields(data, tensor.value, tensor.end):
        if part.number == _RAW_DATA and part.end - part.value > _INLINE_BYTES:
            return part
    return None


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """The fields of the message that lies at start .. end-1."""
    while start < end:
        tag, value = _varint(data, start)
        wire = tag & 7
        if wire == _BYTES:
            size, value = _varint(data, value)
            stop = value + size
        elif wire == _VARINT:
            stop = _varint(data, value)[1]
        elif wire in (_FIXED64, _FIXED32):
            stop = value + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"unknown wire type {wire} at byte {start}")
        if stop > end:
            raise ValueError(f"a field at byte {start} goes beyond the end, as in a file cut short")
        yield _Field(tag >> 3, wire, start, value, stop)
        start = stop


def _varint(data: mmap.mmap, start: int) -> tuple[int, int]:
    """A number in protobuf's encoding, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[start]
        start += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, start
    raise ValueError(f"a number at byte {start} does not end")


def _tagged(number: int, content: bytes) -> bytes:
    return bytes(_encode(number << 3 | _BYTES)) + bytes(_encode(len(content))) + content


def _encode(number: int) -> Iterator[int]:
    while number >= 0x80:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number
