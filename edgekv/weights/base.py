"""BlockWeight: a quantised matrix as integers, and the interface of everything that reads published weights.

A weight is w = (code - zero) * scale, with one scale and zero a block of `group` input columns. These are the terms of
ONNX Runtime's MatMulNBits. What a publisher stored with integer zero points is held with the very same integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgekv.model.spec import ModelSpec

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockWeight:
    """A matrix [N, K] of unsigned integer codes with a scale and a zero point a block of `group` columns."""

    codes: Codes  # [N, K], each 0 .. 2**bits - 1
    scales: Float32  # [N, K / group]
    zeros: Codes | None  # [N, K / group]; None is the midpoint, 2**(bits - 1)
    bits: int  # 4 or 8
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Float32:
        """The matrix in float32, [N, K]."""
        blocks = self.codes.reshape(len(self.codes), -1, self.group).astype(np.float32)  # [N, K/group, group]
        zeros = np.float32(self.midpoint) if self.zeros is None else self.zeros[..., None].astype(np.float32)
        return ((blocks - zeros) * self.scales[..., None]).reshape(self.codes.shape)

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric matrix."""
        return 1 << (self.bits - 1)

    def take_rows(self, order: npt.NDArray[np.intp]) -> BlockWeight:
        """The matrix with its rows in another order; exact."""
        zeros = None if self.zeros is None else self.zeros[order]
        return BlockWeight(self.codes[order], self.scales[order], zeros, self.bits, self.group)

    def to_bits(self, bits: int) -> BlockWeight:
        """The same numbers in wider codes, with every zero point at the midpoint; exact."""
        if bits == self.bits:
            return self
        midpoint = 1 << (bits - 1)
        zeros = self.midpoint if self.zeros is None else np.repeat(self.zeros, self.group, axis=1).astype(np.int16)
        codes = (self.codes.astype(np.int16) - zeros + midpoint).astype(np.uint8)
        return BlockWeight(codes, self.scales, None, bits, self.group)

    def to_group(self, group: int) -> BlockWeight:
        """The same numbers in smaller blocks; exact. `group` must divide the present one."""
        times = self.group // group
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=1)
        return BlockWeight(self.codes, np.repeat(self.scales, times, axis=1), zeros, self.bits, group)


def stack_rows(parts: list[BlockWeight]) -> BlockWeight:
    """One matrix from several with the same input, e.g. Q, K and V packed; exact, in the widest codes of them."""
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    parts = [part.to_bits(bits).to_group(group) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = np.concatenate(
            [np.full_like(p.scales, p.midpoint, dtype=np.uint8) if p.zeros is None else p.zeros for p in parts]
        )
    codes, scales = np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts])
    return BlockWeight(codes, scales, zeros, bits, group)


Matrix = BlockWeight | Float32


@dataclass(frozen=True)
class TokenizerFiles:
    """What is written beside the weights: tokenizer.json as text, the chat template, and the special tokens' text."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool = False  # whether the tokenizer itself puts BOS before plain text


class WeightSource(Protocol):
    """A published checkpoint, read one tensor at a time.

    Tensor names: embed, norm, head, and for layer i `i.attn_norm i.q i.k i.v i.o i.ffn_norm i.gate i.up i.down`; biases
    are `i.q.bias` and so on. Rows of q and k are in the half-split RoPE order that transformers uses.
    """

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def scheme(self) -> str:
        """What the publisher stored, for people: "GGUF Q4_1, Q8_0" or "float16"."""

    @property
    def files(self) -> list[str]:
        """The files that hold the weights; their content is what the source hash covers."""

    def matrix(self, name: str) -> Matrix:
        """A linear layer's weight [out, in]: integers if the publisher stored integers, else float32."""

    def vector(self, name: str) -> Float32:
        """A norm's weight or a bias."""

    def tokenizer(self) -> TokenizerFiles: ...
