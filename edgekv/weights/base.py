"""A quantised matrix as the publisher's integers, and the interface of everything that reads published weights.

BlockWeight is w = (code - zero) * scale, with one scale and zero a block of `group` input columns: the terms of ONNX
Runtime's MatMulNBits. What a publisher stored with integer zero points is held with the very same integers. Blocks with
a float minimum (GGUF), for which no integer is a zero point, have a shift: w = (code - zero) * scale + shift. With
act-order the columns of a group are scattered; BlockWeight holds them side by side, with the `order` of its columns.

Bnb4Weight is w = table[code] * absmax, the terms of MatMulBnb4. SplitWeight holds floats as the sum of two 8-bit
matrices, 16 bits a weight like the float16 it came from, and as exact as that (largest error 2e-5 of a block's range).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.model.spec import ModelSpec

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.intp]

_BLOCK_BYTES = 8 << 20  # of a block of rows in float32; rounding takes five times that

OPERATOR_GROUPS = (16, 32, 64, 128, 256)
"""Block sizes that MatMulNBits takes."""

MATRIX_PARTS = ("q", "k", "v", "o", "gate", "up", "down")
"""The matrices of a layer."""

Bnb4Kind = Literal["nf4", "fp4"]
BNB_TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0,
    ),
    "fp4": (
        0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4,
        0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -1 / 2, -1 / 6, -1 / 4,
    ),
}  # fmt: skip
"""Code -> number between -1 and 1: the quantiles of a normal distribution, and a float of two exponent bits."""


FormKind = Literal["int", "int sum", "nf4", "fp4", "float"]


@dataclass(frozen=True)
class Form:
    """What the numbers of a matrix are, known from metadata alone."""

    kind: FormKind
    bits: int = 32
    group: int = 0  # columns that share a scale; of nf4 and fp4: weights
    shifted: bool = False  # of int: each block has a float that is added

    def __str__(self) -> str:
        """ "int4/32", "int4+shift/32", "int8+8/32", "nf4/64", "float32"."""
        shift = "+shift" * self.shifted
        names = {"int": f"int{self.bits}{shift}/{self.group}", "int sum": f"int8+8/{self.group}", "float": "float32"}
        return names.get(self.kind, f"{self.kind}/{self.group}")

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """What a matrix takes in the model's file, zero points included; the file has no codes of 5 or 6 bits."""
        rows, columns = shape
        if self.kind == "float":
            return 4 * rows * columns
        blocks = rows * columns // self.group
        if self.kind == "int":
            bits = file_bits(self.bits)
            return rows * columns * bits // 8 + blocks * 4 + blocks * (4 if self.shifted else bits // 8)
        return 2 * (rows * columns + 5 * blocks) if self.kind == "int sum" else rows * columns // 2 + 4 * blocks


@dataclass(frozen=True)
class Stored:
    """How a matrix lies in the checkpoint."""

    label: str  # for people: "Q4_K", "int4/128", "bfloat16"
    shape: tuple[int, int]
    form: Form  # in which it is read
    exact: bool = True  # whether the form holds the very numbers

    @property
    def is_float(self) -> bool:
        """Whether it was not quantised."""
        return self.form.kind == "float"


def file_bits(bits: int) -> int:
    """In which MatMulNBits takes codes of so many bits."""
    return 4 if bits <= 4 else 8


def operator_group(columns: int, group: int) -> int | None:
    """The largest block size of MatMulNBits that divides both; None if there is none."""
    common = math.gcd(columns, group)
    return max((size for size in OPERATOR_GROUPS if common % size == 0), default=None)


@dataclass(frozen=True)
class BlockWeight:
    """A matrix [N, K] of unsigned integer codes with a scale and a zero point a block of `group` columns."""

    codes: Codes  # [N, K], each 0 .. 2**bits - 1
    scales: Float32  # [N, K / group]
    zeros: Codes | None  # [N, K / group]; None is the midpoint, 2**(bits - 1)
    bits: int  # 4, 5, 6 or 8
    group: int  # may exceed K, or leave a smaller group at the end
    order: Order | None = None  # [K]: codes[:, j] belongs to input column order[j]; None: to column j
    shift: Float32 | None = None  # [N, K / group], added to each weight of a block; None: nothing is

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Float32:
        """The matrix in float32, [N, K], its columns in the order of the input."""
        if self.order is not None:
            return replace(self, order=None).dequantize()[:, np.argsort(self.order)]
        if self.codes.shape[1] % self.group:
            return self.to_group(math.gcd(self.codes.shape[1], self.group)).dequantize()
        blocks = self.codes.reshape(len(self.codes), -1, self.group).astype(np.float32)  # [N, K/group, group]
        zeros = np.float32(self.midpoint) if self.zeros is None else self.zeros[..., None].astype(np.float32)
        values = (blocks - zeros) * self.scales[..., None]
        return (values if self.shift is None else values + self.shift[..., None]).reshape(self.codes.shape)

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric matrix."""
        return 1 << (self.bits - 1)

    def zero_points(self) -> Codes:
        """[N, K / group], also where all are the midpoint."""
        return np.full(self.scales.shape, self.midpoint, np.uint8) if self.zeros is None else self.zeros

    def shifts(self) -> Float32:
        """[N, K / group], also where nothing is added."""
        return np.zeros_like(self.scales) if self.shift is None else self.shift

    def take_rows(self, rows: Order) -> BlockWeight:
        """The matrix with these of its rows, in this order; exact."""
        zeros = None if self.zeros is None else self.zeros[rows]
        shift = None if self.shift is None else self.shift[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros, shift=shift)

    def to_bits(self, bits: int) -> BlockWeight:
        """The same numbers in wider codes, with every zero point at the midpoint; exact."""
        if bits == self.bits:
            return self
        midpoint = 1 << (bits - 1)
        columns = np.arange(self.codes.shape[1]) // self.group
        zeros = self.midpoint if self.zeros is None else self.zeros[:, columns].astype(np.int16)
        codes = (self.codes.astype(np.int16) - zeros + midpoint).astype(np.uint8)
        return replace(self, codes=codes, zeros=None, bits=bits)

    def to_group(self, group: int) -> BlockWeight:
        """The same numbers in smaller blocks; exact. `group` must divide the present one and K."""
        if group == self.group:
            return self
        parents = np.arange(0, self.codes.shape[1], group) // self.group  # of each new block
        zeros = None if self.zeros is None else self.zeros[:, parents]
        shift = None if self.shift is None else self.shift[:, parents]
        return replace(self, scales=self.scales[:, parents], zeros=zeros, shift=shift, group=group)


@dataclass(frozen=True)
class Bnb4Weight:
    """A matrix of bitsandbytes: 4-bit codes into a table, with the largest magnitude of each block.

    Blocks follow each other through the matrix row after row, so that one may end in the middle of a row.
    """

    packed: Codes  # [N K / 2], two codes a byte, high nibble first
    absmax: Float32  # [ceil(N K / block)]
    shape: tuple[int, int]  # (N, K)
    kind: Bnb4Kind
    block: int

    def dequantize(self) -> Float32:
        """The matrix in float32, [N, K]."""
        codes = np.stack([self.packed >> 4, self.packed & 0xF], axis=-1).reshape(-1)
        values = np.array(BNB_TABLES[self.kind], np.float32)[codes]
        return (values * np.repeat(self.absmax, self.block)[: len(values)]).reshape(self.shape)

    def take_rows(self, rows: Order) -> Bnb4Weight | Float32:
        """The matrix with these of its rows, in this order; in floats where a block crosses two rows."""
        count, columns = self.shape
        if columns % self.block:
            return self.dequantize()[rows]
        packed, absmax = self.packed.reshape(count, -1)[rows], self.absmax.reshape(count, -1)[rows]
        return replace(self, packed=packed.reshape(-1), absmax=absmax.reshape(-1), shape=(len(rows), columns))


@dataclass(frozen=True)
class SplitWeight:
    """Floats as `high` + `low`, both 8-bit, in the same blocks; `low` holds what rounding to `high` left."""

    high: BlockWeight
    low: BlockWeight

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.high.shape

    def side_by_side(self) -> BlockWeight:
        """[high, low], [N, 2 K]: it multiplies an input that is repeated."""
        parts = [self.high, self.low]
        codes, scales = np.hstack([p.codes for p in parts]), np.hstack([p.scales for p in parts])
        zeros = np.hstack([p.zero_points() for p in parts])
        return BlockWeight(codes, scales, zeros, self.high.bits, self.high.group)


Matrix = BlockWeight | Bnb4Weight | Float32
Held = Matrix | SplitWeight
"""How a matrix may be held in the graph."""


def row_blocks(shape: tuple[int, int]) -> Iterator[slice]:
    """The rows of a matrix, top to bottom, in blocks that are worked on one at a time."""
    rows, columns = shape
    step = max(1, _BLOCK_BYTES // (4 * columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def join_rows(blocks: Iterable[Held]) -> Held:
    """The matrix whose blocks of rows these are; all have one form."""
    first, *rest = blocks
    if not rest:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate([first, *(block for block in rest if isinstance(block, np.ndarray))])
    assert isinstance(first, BlockWeight)  # no other form comes in blocks, but for embedding and head
    return stack_rows([first, *(block for block in rest if isinstance(block, BlockWeight))])


def form_of(weight: Held) -> Form:
    """The form of a matrix that is there."""
    if isinstance(weight, BlockWeight):
        return Form("int", weight.bits, weight.group, weight.shift is not None)
    if isinstance(weight, SplitWeight):
        return Form("int sum", 16, weight.high.group)
    return Form(weight.kind, 4, weight.block) if isinstance(weight, Bnb4Weight) else Form("float")


def fits_half(values: Float32) -> bool:
    """Whether all of these are float16 numbers."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def packed_bytes(weight: Held) -> int:
    """What a matrix takes in edgekv's own matmul (native/matmul.h), padding apart: in the bits that it has."""
    if not isinstance(weight, BlockWeight):
        return form_of(weight).bytes_of((weight.shape[0], weight.shape[1]))
    factors = [part for part in (weight.scales, weight.shift) if part is not None]
    width = 2 if all(map(fits_half, factors)) else 4
    zeros = 0 if weight.zeros is None else weight.zeros.size
    return weight.codes.size * weight.bits // 8 + width * sum(part.size for part in factors) + zeros


def matrix_names(spec: ModelSpec) -> Iterator[str]:
    """The names of all matrices of a model, the embedding first; one by one, as a damaged config may claim billions."""
    yield "embed"
    for layer in range(spec.num_layers):
        yield from (f"{layer}.{part}" for part in MATRIX_PARTS)
    if not spec.tied_embeddings:
        yield "head"


def take_rows(weight: Matrix, rows: Order) -> Matrix:
    """A matrix with these of its rows (outputs), in this order; exact."""
    return weight[rows] if isinstance(weight, np.ndarray) else weight.take_rows(rows)


def stack_rows(parts: list[BlockWeight]) -> BlockWeight:
    """One matrix from several with the same input, e.g. Q, K and V packed; exact, in the widest codes of them.

    All must have the same order of columns (`same_order`).
    """
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    parts = [part.to_bits(bits).to_group(group) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = np.concatenate([part.zero_points() for part in parts])
    shift = None
    if any(part.shift is not None for part in parts):
        shift = np.concatenate([part.shifts() for part in parts])
    codes, scales = np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts])
    return BlockWeight(codes, scales, zeros, bits, group, parts[0].order, shift)


def stack_bnb4(parts: list[Bnb4Weight]) -> Bnb4Weight | None:
    """One matrix from several with the same input; None where a block would belong to two of them."""
    first = parts[0]
    alike = all((part.kind, part.block, part.shape[1]) == (first.kind, first.block, first.shape[1]) for part in parts)
    if not alike or any(math.prod(part.shape) % part.block for part in parts):
        return None
    packed, absmax = np.concatenate([p.packed for p in parts]), np.concatenate([p.absmax for p in parts])
    return Bnb4Weight(packed, absmax, (sum(p.shape[0] for p in parts), first.shape[1]), first.kind, first.block)


def same_order(parts: list[BlockWeight]) -> bool:
    """Whether the columns of all matrices are in the same order."""
    orders = [np.arange(part.shape[1]) if part.order is None else part.order for part in parts]
    return all(np.array_equal(orders[0], order) for order in orders)


@dataclass(frozen=True)
class TokenizerFiles:
    """What is written beside the weights: tokenizer.json as text, the chat template, and the special tokens' text."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool = False  # whether the tokenizer itself puts BOS before plain text


NO_TOKENIZER = TokenizerFiles("", None, "", "")
"""Of a folder without one: the model runs on token ids only."""


class WeightSource(Protocol):
    """A published checkpoint, read one tensor at a time. All numbers that it gives are finite: one that is not is
    refused with the names of its file and tensor.

    Tensor names: embed, norm, head, and for layer i `i.attn_norm i.q i.k i.v i.o i.ffn_norm i.gate i.up i.down`; biases
    are `i.q.bias` and so on. Where the spec has them: `i.q_norm i.k_norm`, and the norms on what a sublayer adds,
    `i.post_attn_norm i.post_ffn_norm`. A norm is handed out as what it multiplies with (Gemma stores that less one).
    Rows of q and k are in the half-split RoPE order that transformers uses; of a head that turns in part, see RopeSpec.
    """

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def scheme(self) -> str:
        """What the publisher stored, for people: "GGUF Q4_1, Q8_0" or "float16"."""

    @property
    def files(self) -> list[str]:
        """The files that hold the weights; their content is what the source hash covers."""

    @property
    def quantised(self) -> bool:
        """Whether the publisher quantised the model; a layer that is float nevertheless is then meant to be."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What else was recognised of the format, for people: ("zero points", "symmetric: all 8")."""

    @property
    def sampling(self) -> dict[str, float]:
        """What the makers recommend, as fields of SamplingOptions."""

    def stored(self, name: str) -> Stored:
        """How the matrix `name` lies in the files, from metadata alone."""

    def matrix(self, name: str) -> Matrix:
        """A linear layer's weight [out, in]: integers if the publisher stored integers, else float32."""

    def blocks(self, name: str) -> Iterator[Matrix]:
        """The same, in blocks of rows from top to bottom, where it would take much memory; else whole."""

    def vector(self, name: str) -> Float32:
        """A norm's factors or a bias."""

    def tokenizer(self) -> TokenizerFiles: ...
    @property
    def missing_tokenizer(self) -> str:
        """Why `tokenizer` would refuse, and what to do about it; empty if there is one. The weights can do without."""

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template; `tokenizer` reads it."""
