"""The project's own operators (edgekv/native): where their library lies, and when attention can be one of them.

The library is built with the package where a C++ compiler is there, and by hand for development:

    cmake -S edgekv/native -B build && cmake --build build
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.model.spec import ModelSpec

DTYPES: tuple[KVDtype, ...] = ("int8", "k8v4", "int4", "fp8", "float")
BLOCK = 16
"""Slots in a block of the cache (native/kernels.h)."""
TOGETHER = 4
"""Channels (keys) or slots (values) of codes that lie in one 32-bit word."""
MAX_HEAD_DIM = 256

CACHE_FORMAT = 5
"""The layout of the cache and the inputs that ring.py and a library must agree on (native/kernels.h)."""

PACKED_WEIGHTS = "packed_weights"
"""The graph's input that holds all matrices of edgekv's own matmul (engines/onnx/packed.py)."""

PACKING_FORMAT = 3
"""The structures through which matrices are packed, and the operators that read them, that packed.py and a library must
agree on (native/matmul.h)."""

_EXPORTS = ("edgekv_cache_format", "edgekv_packing_format", "edgekv_table_instruction_set")
"""Functions that a library of this edgekv has, one of each operator; an older one lacks some."""

_SUFFIX = ".dll" if sys.platform == "win32" else ".so"
_FOLDER = Path(__file__).resolve().parents[2] / "native" / "_lib"


def library() -> Path:
    """Where the library is, if it was built."""
    return _FOLDER / f"libedgekv_ops{_SUFFIX}"


def unavailable() -> str | None:
    """Why the operators are not there at all; None if they are."""
    return _load(library())[1]


def instruction_set() -> str:
    """What attention runs with on this processor, such as avx2.

    Raises:
        RuntimeError: the library is not there.
    """
    return _name(functions().edgekv_instruction_set)


def matmul_instruction_set() -> str:
    """What the matmul with packed weights runs with; "plain" is slower than ONNX Runtime's.

    Raises:
        RuntimeError: the library is not there.
    """
    return _name(functions().edgekv_matmul_instruction_set)


def functions() -> ctypes.CDLL:
    """The library's own functions (native/op.cpp, native/matmul_op.cpp).

    Raises:
        RuntimeError: it is not there.
    """
    loaded, reason = _load(library())
    if loaded is None:
        raise RuntimeError(reason)
    return loaded


def refusal(spec: ModelSpec, kv: KVSpec, device: str, *, half: bool = False) -> str | None:
    """Why the operator does not serve this model and cache; None if it does."""
    if device != "cpu" or half:
        return f"it runs on the CPU in float32, not on {device}" if not half else "it does not run in float16"
    if kv.dtype not in DTYPES:
        return f"it has no {kv.dtype} cache (it has {', '.join(DTYPES)})"
    if spec.head_dim % BLOCK or spec.head_dim > MAX_HEAD_DIM:
        return f"the head size {spec.head_dim} is not a multiple of {BLOCK} up to {MAX_HEAD_DIM}"
    return unavailable()


def _name(function: Any) -> str:
    function.restype = ctypes.c_char_p
    return str(function().decode())


def matmul_refusal() -> str | None:
    """Why MatMulNBits is kept on this machine; None if edgekv's own matmul is faster here."""
    return unavailable() or _slower(matmul_instruction_set())


def table_refusal() -> str | None:
    """Why MatMulBnb4 is kept on this machine; None if edgekv's own matmul with a table is faster here."""
    return unavailable() or _slower(_name(functions().edgekv_table_instruction_set))


def _slower(instruction_set: str) -> str | None:
    return "it has none for this processor that is faster" if instruction_set == "plain" else None


def _formats(loaded: ctypes.CDLL) -> tuple[int, int]:
    return loaded.edgekv_cache_format(), loaded.edgekv_packing_format()


@cache
def _load(path: Path) -> tuple[ctypes.CDLL | None, str | None]:
    if not path.exists():
        return (
            None,
            f"it was not built (no {path.name} in {path.parent}): a C++ compiler is needed when edgekv is installed",
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} cannot be loaded ({error})"
    if not all(hasattr(loaded, name) for name in _EXPORTS) or _formats(loaded) != (CACHE_FORMAT, PACKING_FORMAT):
        return None, f"{path} was built from the sources of another edgekv: build it again"
    return loaded, None
