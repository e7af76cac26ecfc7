"""The ONNX graph and its external data file while they are written: nodes, tensors, inputs and outputs.

Operators are those of the standard domain that _STANDARD_DOMAIN names, and else of ONNX Runtime's com.microsoft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.errors import BadCheckpoint
from edgekv.model.spec import ModelSpec

_ALIGNMENT = 4096  # so that ONNX Runtime can map a tensor instead of copying it
_INLINE_BYTES = 4096  # smaller tensors stay inside the graph file

_STANDARD_DOMAIN = (
    "Add",
    "Concat",
    "Gather",
    "MatMul",
    "Mul",
    "ReduceSum",
    "Reshape",
    "SimplifiedLayerNormalization",
    "Split",
    "Tanh",
)  # the norm by ONNX Runtime's own convention


@dataclass
class DataFile:
    """The external data file being written: one tensor after another, aligned, never two in memory."""

    path: Path
    size: int = 0

    def append(self, array: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Write an array; returns its offset and size in bytes."""
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        raw = np.ascontiguousarray(array)
        with self.path.open("ab") as file:
            file.write(b"\0" * (offset - self.size))
            file.write(raw.data)  # not tofile(): that hides why a write failed
        self.size = offset + raw.nbytes
        return offset, raw.nbytes

    def reserve(self, nbytes: int) -> tuple[int, int]:
        """Make room for a tensor that `write` fills; returns its offset and size."""
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = offset + nbytes
        with self.path.open("ab") as file:
            file.truncate(self.size)
        return offset, nbytes

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> int:
        """Fill a part of what was reserved; returns the offset of what follows."""
        raw = np.ascontiguousarray(array)
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(raw.data)
        return offset + raw.nbytes


@dataclass
class RowTensor:
    """A tensor that is written some rows at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: tuple[int, int]
    end: int  # of what was written

    @property
    def kind(self) -> int:
        """ONNX's number of its type."""
        return int(helper.np_dtype_to_tensor_dtype(self.dtype))

    @classmethod
    def reserve(cls, data: DataFile, rows: int, first: np.ndarray[Any, Any]) -> RowTensor:
        """Room for `rows` rows like those of `first`."""
        place = data.reserve(rows * first[0].nbytes)
        return cls((rows, *first.shape[1:]), first.dtype, place, place[0])


@dataclass
class Graph:
    """The graph being written."""

    spec: ModelSpec
    data: DataFile
    accuracy_level: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    ordered: dict[tuple[str, bytes], str] = field(default_factory=dict)  # input and order -> the Gather's output
    summed: dict[tuple[str, int], str] = field(default_factory=dict)  # input and group -> the sums of its blocks

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        domain = "" if kind in _STANDARD_DOMAIN else "com.microsoft"
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """Store a tensor."""
        require_finite(name, array)
        if array.nbytes <= _INLINE_BYTES:
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        else:
            self.external(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype), self.data.append(array))
        return name

    def external(self, name: str, shape: tuple[int, ...], dtype: int, place: tuple[int, int]) -> str:
        tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self.data.path.name), ("offset", place[0]), ("length", place[1])):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def input(self, name: str, dtype: int, shape: list[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: list[Any]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name


def require_finite(name: str, array: np.ndarray[Any, Any]) -> None:
    """What was read is finite, but a scale made of it may overflow; int8 activations would hide that later."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadCheckpoint(f"{name} is not finite: the checkpoint's numbers are too large for float32.")
