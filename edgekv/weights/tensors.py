"""The tensors of a folder of safetensors by name: raw, memory-mapped, checked for type and shape before they are used.

The `safetensors` library checks each header; the numbers are then read through a memory map, because its numpy side
has no bfloat16 and reading a shard whole would cost its size in memory. bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.weights.base import Float32

FLOATS = ("F32", "F16", "BF16")
FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_DTYPES = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "I8": np.int8,
    "U8": np.uint8,
}  # fmt: skip
"""Safetensors types edgekv reads -> numpy's; bfloat16 as its bits."""

Shape = tuple[int, ...]


class TensorFiles:
    """The tensors of several safetensors files."""

    def __init__(self, folder: Path, files: Iterable[Path]) -> None:
        self.folder = folder
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}  # name -> file, offset of data, header entry
        for file in files:
            self._read_header(file)

    @property
    def files(self) -> list[str]:
        """The files, in order of name."""
        return sorted({str(file) for file, _, _ in self._entries.values()})

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtypes(self) -> list[str]:
        """The types of all tensors, most frequent first."""
        return [kind for kind, _ in Counter(entry["dtype"] for _, _, entry in self._entries.values()).most_common()]

    def dtype(self, name: str) -> str:
        """The type of a tensor, as safetensors names it."""
        return str(self._entry(name)[2]["dtype"])

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return tuple(self._entry(name)[2]["shape"])

    def place(self, name: str) -> str:
        """The file and the tensor, for messages."""
        return f"{self._entry(name)[0].name}: {name}"

    def raw(self, name: str, dtypes: tuple[str, ...], *shapes: Shape, rows: slice = slice(None)) -> npt.NDArray[Any]:
        """A tensor as stored, mapped; bfloat16 as uint16. `rows`: only these of the first dimension are mapped.

        Args:
            dtypes: the types it may have. shapes: the shapes it may have; none given: any.

        Raises:
            BadCheckpoint: it is missing, or of another shape.
            UnsupportedModel: it is of another type.
        """
        file, start, entry = self._entry(name)
        if entry["dtype"] not in dtypes:
            wanted = ", ".join(dtypes[:-1]) + " and " * (len(dtypes) > 1) + dtypes[-1]
            raise UnsupportedModel(f"{name} in {file.name} is stored as {entry['dtype']}; edgekv reads {wanted}.")
        shape = tuple(entry["shape"])
        if shapes and shape not in shapes:
            raise BadCheckpoint(f"{file.name}: {name} is {list(shape)}, but the config says {list(shapes[0])}.")
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        first, last, _ = rows.indices(shape[0] if shape else 1)
        offset = start + entry["data_offsets"][0] + first * dtype.itemsize * math.prod(shape[1:])
        return np.memmap(file, dtype, "r", offset, (last - first, *shape[1:]) if shape else ())

    def floats(self, name: str, *shapes: Shape, rows: slice = slice(None)) -> Float32:
        """A tensor of floating-point numbers, in float32; errors as in `raw`."""
        values = self.raw(name, FLOATS, *shapes, rows=rows)
        if self.dtype(name) == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(values.astype(np.float32))

    def finite(self, name: str, *shapes: Shape, rows: slice = slice(None)) -> Float32:
        """`floats`, refused unless all are finite."""
        values = self.floats(name, *shapes, rows=rows)
        if not np.isfinite(values).all():
            raise BadCheckpoint(f"{self.place(name)} holds numbers that are not finite: download the model again.")
        return values

    def _entry(self, name: str) -> tuple[Path, int, dict[str, Any]]:
        if name not in self._entries:
            raise BadCheckpoint(f"{self.folder} has no tensor {name}: the checkpoint is incomplete.")
        return self._entries[name]

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{file} is not a whole safetensors file ({error}): download it again.") from None
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        self._entries |= {name: (file, 8 + size, entry) for name, entry in header.items()}
