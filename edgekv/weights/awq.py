"""AWQ checkpoints of the "gemm" version (AutoAWQ's WQLinear_GEMM; Lin et al., arXiv 2306.00978).

    qweight  int32 [K, N/8]   eight output columns a word; nibble i of a word is column 0 2 4 6 1 3 5 7 (i)
    qzeros   int32 [K/g, N/8] zero points, packed the same way, stored as they are
    scales   float [K/g, N]   w = (code - zero) * scale

The interleaved nibbles suit one CUDA instruction. `zero_point` false means that every zero point is 8; publishers then
write eights, leave the tensor out, or leave it empty (all zeros, which would make every weight positive).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.weights.base import BlockWeight, Codes, Form
from edgekv.weights.scheme import (
    Blocks,
    QuantConfig,
    choice,
    flag,
    grid_facts,
    group_name,
    group_size,
    unpack,
    without_midpoints,
)
from edgekv.weights.tensors import TensorFiles

_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AWQ:
    """The format, with one checkpoint's parameters."""

    group: int
    zero_point: bool

    @classmethod
    def from_config(cls, config: QuantConfig) -> AWQ:
        """Read quantization_config; `w_bit` and `q_group_size` are the older names."""
        choice(config, "w_bit" if "w_bit" in config else "bits", 4, 4)
        choice(config, "version", "gemm", "gemm")
        return cls(group_size(config, "group_size", "q_group_size"), flag(config, "zero_point", True))

    @property
    def title(self) -> str:
        """See LinearScheme."""
        return f"int4/{group_name(self.group)} (AWQ{'' if self.zero_point else ', symmetric'})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See LinearScheme."""
        return grid_facts(self.group, symmetric=not self.zero_point)

    def form(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Form:
        """See LinearScheme."""
        return Blocks.of(shape, self.group).form()

    def holds(self, tensors: TensorFiles, module: str) -> bool:
        """See LinearScheme."""
        return f"{module}.qweight" in tensors

    def read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> BlockWeight:
        """See LinearScheme."""
        blocks = Blocks.of(shape, self.group)
        codes = _columns(tensors.raw(f"{module}.qweight", ("I32",), (blocks.columns, blocks.rows // 8)))
        scales = blocks.column_scales(tensors, module)
        return BlockWeight(codes, scales, self._zeros(tensors, module, blocks), 4, blocks.size)

    def _zeros(self, tensors: TensorFiles, module: str, blocks: Blocks) -> Codes | None:
        name = f"{module}.qzeros"
        if not self.zero_point and name not in tensors:
            return None
        words = tensors.raw(name, ("I32",), (blocks.count, blocks.rows // 8))
        if not self.zero_point and not words.any():
            return None
        return without_midpoints(_columns(words))


def _columns(words: npt.NDArray[Any]) -> Codes:
    """[R, N/8] words -> [N, R] codes."""
    nibbles = unpack(words).reshape(len(words), -1, 8)[..., _NIBBLE_OF_COLUMN]
    return np.ascontiguousarray(nibbles.reshape(len(words), -1).T)
