"""The `gguf` package's reader, made strict and quick.

By itself it reads nothing past the end, as long as a count says, and makes five arrays of each item of a list, which
takes half a minute for a large vocabulary. (Loads the package: import it where a file is opened.)
"""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np

from edgekv.errors import UnsupportedModel
from edgekv.weights.base import Codes

MOST_ITEMS = 1 << 22
"""Of a list in the metadata; the largest vocabularies have a quarter of a million tokens."""

FieldParts = tuple[int, list[Any], list[int], list[Any]]
"""Of a field: its size in bytes, its parts, which of them are items, types."""

_TYPES = frozenset(map(int, gguf.GGMLQuantizationType))

_ITEMS = 12
"""Where the items of a list begin, behind their kind and their count."""


class WholeFileReader(gguf.GGUFReader):  # type: ignore[misc]
    """Reads a file whole.

    Raises:
        ValueError: it ends early, or holds a list that no model has.
        UnsupportedModel: a tensor is of a type that the library does not know.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **options: Any) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it ends {end - len(self.data):,} bytes early")
        return super()._get(offset, dtype, count, *rest, **options)

    def _build_tensors(self, start: int, fields: list[Any]) -> None:
        for field in fields:
            name, number = field.parts[1], int(field.parts[4][0])
            if number not in _TYPES:
                raise UnsupportedModel(
                    f"{bytes(name).decode()} is stored as type {number} of ggml, which edgekv does not read."
                )
        super()._build_tensors(start, fields)

    def _get_field_parts(self, offset: int, kind: int) -> Any:
        return self._list(offset) if kind == gguf.GGUFValueType.ARRAY else super()._get_field_parts(offset, kind)

    def _list(self, offset: int) -> FieldParts:
        """What the library's `_get_field_parts` gives for a list."""
        head = [self._get(offset, np.uint32), self._get(offset + 4, np.uint64)]
        kind, count = gguf.GGUFValueType(int(head[0][0])), int(head[1][0])
        if count > MOST_ITEMS:
            raise ValueError(f"a list of {count:,} items")
        if kind == gguf.GGUFValueType.STRING:
            items = self._strings(offset + _ITEMS, count)
            size = sum(8 + len(item) for item in items)
        elif kind in self.gguf_scalar_to_np:
            items = [self._get(offset + _ITEMS, self.gguf_scalar_to_np[kind], count)]
            size = items[0].nbytes
        else:
            raise ValueError("a list of lists")
        numbers = list(range(len(head), len(head) + len(items)))
        return _ITEMS + size, [*head, *items], numbers, [gguf.GGUFValueType.ARRAY, kind]

    def _strings(self, offset: int, count: int) -> list[Codes]:
        raw, items = self.data.view(np.ndarray), []
        length = struct.Struct(">Q" if self.byte_order == "S" else "<Q")
        for _ in range(count):
            if offset + 8 > len(raw) or (end := offset + 8 + length.unpack_from(raw, offset)[0]) > len(raw):
                raise ValueError("a list of texts ends early")
            items.append(raw[offset + 8 : end])
            offset = end
        return items
