"""bitsandbytes 4-bit checkpoints: NF4 and FP4, plain or with double quantisation (Dettmers et al., arXiv 2305.14314).

    weight                 uint8 [N K / 2, 1] (or flat)   the matrix row after row, two codes a byte, high nibble first
    weight.absmax          float32 [N K / block]          w = table[code] * absmax; block is 64 unless it says otherwise
                           or [K / block, N]              saved after the model ran on a processor with AVX-512 (0.50)
    weight.quant_map       float32 [16]                   the table
    weight.quant_state.bitsandbytes__nf4 (or __fp4)       JSON as bytes: quant_type, blocksize, shape, nested_*

Double quantisation stores absmax as uint8 codes: absmax = nested_quant_map[code] * nested_absmax + nested_offset, with
one nested_absmax for 256 codes. It is undone here, in float32 as the library does it; the 4-bit codes are unchanged.

`bnb_4bit_quant_storage` lets the packed bytes pass for numbers of another type; their bytes are the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.weights.base import BNB_TABLES, Bnb4Kind, Bnb4Weight, Codes, Float32, Form
from edgekv.weights.scheme import QuantConfig, choice, flag
from edgekv.weights.tensors import TensorFiles

_STORAGE = ("U8", "I8", "BF16", "F16", "F32")


@dataclass(frozen=True)
class BitsAndBytes:
    """The format, with one checkpoint's parameters; what matters is said again beside each tensor."""

    kind: str
    double: bool

    @classmethod
    def from_config(cls, config: QuantConfig) -> BitsAndBytes:
        """Read quantization_config."""
        if config.get("load_in_8bit") or not config.get("load_in_4bit", config.get("_load_in_4bit")):
            raise UnsupportedModel(
                "The config's quantization_config.load_in_4bit is not true: of bitsandbytes edgekv reads 4-bit weights."
            )
        kind = choice(config, "bnb_4bit_quant_type", "fp4", *BNB_TABLES)
        return cls(kind, flag(config, "bnb_4bit_use_double_quant", False))

    @property
    def title(self) -> str:
        """See LinearScheme."""
        return f"{self.kind} (bitsandbytes{', double quantisation' * self.double})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See LinearScheme."""
        return [("table", self.kind), ("double quantisation", "yes" if self.double else "no")]

    def form(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Form:
        """See LinearScheme."""
        state = _State.read(tensors, module, shape)
        return Form(state.kind, 4, state.block)

    def holds(self, tensors: TensorFiles, module: str) -> bool:
        """See LinearScheme."""
        return _state_name(tensors, module) is not None

    def read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Bnb4Weight:
        """See LinearScheme."""
        name = f"{module}.weight"
        state = _State.read(tensors, module, shape)
        table = tensors.floats(f"{name}.quant_map", (16,))
        if not np.allclose(table, BNB_TABLES[state.kind], rtol=0, atol=1e-4):
            raise UnsupportedModel(f"{tensors.place(f'{name}.quant_map')} is not the table of {state.kind}.")
        absmax = _absmax(tensors, name, state, shape)
        return Bnb4Weight(_packed(tensors, name, shape), absmax, shape, state.kind, state.block)


@dataclass(frozen=True)
class _State:
    """What the JSON beside a weight says."""

    kind: Bnb4Kind
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def read(cls, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> _State:
        name = _state_name(tensors, module) or ""
        try:
            data: dict[str, Any] = json.loads(bytes(tensors.raw(name, ("U8",))))
            kind, block, found = str(data["quant_type"]), int(data["blocksize"]), tuple(data["shape"])
            nested = int(data.get("nested_blocksize", 256)), float(data.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadCheckpoint(f"{tensors.place(name)} cannot be read ({error!r}): download it again.") from None
        if found != shape:
            raise BadCheckpoint(f"{tensors.place(name)} says {list(found)}, but the config says {list(shape)}.")
        if kind not in BNB_TABLES or block < 16 or block & (block - 1) or nested[0] < 1 or not np.isfinite(nested[1]):
            raise UnsupportedModel(f"{tensors.place(name)} says {kind}, blocks of {block}: edgekv does not read that.")
        return cls(cast(Bnb4Kind, kind), block, *nested)


def _state_name(tensors: TensorFiles, module: str) -> str | None:
    names = [f"{module}.weight.quant_state.bitsandbytes__{kind}" for kind in BNB_TABLES]
    return next((name for name in names if name in tensors), None)


def _packed(tensors: TensorFiles, name: str, shape: tuple[int, int]) -> Codes:
    stored = tensors.raw(name, _STORAGE)
    packed = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    if 2 * packed.size != shape[0] * shape[1]:
        raise BadCheckpoint(f"{tensors.place(name)} holds {2 * packed.size} codes, but the config says {list(shape)}.")
    return packed


def _absmax(tensors: TensorFiles, name: str, state: _State, shape: tuple[int, int]) -> Float32:
    stored, blocks = f"{name}.absmax", -(-shape[0] * shape[1] // state.block)
    if f"{name}.nested_absmax" not in tensors:
        values = tensors.finite(stored, (blocks,), (shape[1] // state.block, shape[0]))
        return np.ascontiguousarray(values.T).reshape(-1)  # of one dimension: as it is
    codes = tensors.raw(stored, ("U8",), (blocks,))
    scales = tensors.finite(f"{name}.nested_absmax", (-(-blocks // state.nested_block),))
    values = tensors.finite(f"{name}.nested_quant_map", (256,))[codes]
    spread = np.repeat(scales, state.nested_block)[:blocks]
    return np.asarray(values * spread + np.float32(state.nested_offset), np.float32)
