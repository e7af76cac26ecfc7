"""A linear layer from a published matrix: dense, in torch's own int4 kernels, or unpacked at every step.

    DenseLinear    the numbers in the compute type (torch's own class)
    Int4Linear     codes in 4 bits, multiplied by torch's weight-only int4 kernel with bfloat16 activations
    BlockLinear    codes as they are, dequantised at every call: what the kernel does not take (8 bits, blocks of 16)
    Bnb4Linear     bitsandbytes' codes, by that library where it is installed

torch's kernel computes w = (code - 8) * scale + offset, so a zero point z becomes offset = (8 - z) * scale, to which a
block's shift is added. Scale and
offset are held in bfloat16, which is where its error of a few thousandths comes from. It takes groups of 32, 64, 128
and 256 columns: larger ones are split, which is exact; smaller ones are merged where two neighbours have the same scale
and zero point. In act-order the input's columns are put in the weight's order first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgekv.weights.base import BlockWeight, Bnb4Weight, Held, SplitWeight

KERNEL_GROUPS = (256, 128, 64, 32)
"""Columns that share a scale in torch's int4 kernels, the cheapest first."""

_KERNEL_ROWS = 16  # torch's CPU kernel takes rows in blocks of so many, the CUDA one of 8
_INNER_TILES = (8, 4, 2)  # of the CUDA layout: 16 columns each


def dense(held: Held, dtype: torch.dtype) -> Tensor:
    """A matrix [N, K] as numbers, on the host."""
    if isinstance(held, SplitWeight):
        values = held.high.dequantize() + held.low.dequantize()
    else:
        values = held if isinstance(held, np.ndarray) else held.dequantize()
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def linear(held: Held, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The layer that multiplies by `held`: packed where the compute type is bfloat16, else dense."""
    if dtype == torch.bfloat16:
        if isinstance(held, BlockWeight):
            fitting = kernel_layout(held) if has_int4_kernel(device) else None
            return BlockLinear(held, bias, device) if fitting is None else Int4Linear(fitting, bias, device)
        if isinstance(held, Bnb4Weight) and device.type == "cuda":
            return Bnb4Linear(held, bias, device)
    layer = nn.Linear(1, 1, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(dense(held, dtype).to(device), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)
    return layer


def has_int4_kernel(device: torch.device) -> bool:
    """CUDA's kernel wants bfloat16 tensor cores (sm80, Ampere)."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def kernel_layout(weight: BlockWeight) -> BlockWeight | None:
    """The same numbers in groups that torch's int4 kernel takes; None if there are none."""
    rows, columns = weight.shape
    if weight.bits != 4 or rows % _KERNEL_ROWS:
        return None
    common = math.gcd(columns, weight.group)
    group = next((group for group in KERNEL_GROUPS if common % group == 0), None)
    if group is not None:
        return weight.to_group(group)
    merged = _merged(weight)
    return None if merged is None else kernel_layout(merged)


def _merged(weight: BlockWeight) -> BlockWeight | None:
    """Pairs of groups made one where every pair has the same scale, zero point and shift."""
    parts = {"scales": weight.scales, "zeros": weight.zeros, "shift": weight.shift}
    there = {name: part for name, part in parts.items() if part is not None}
    if weight.shape[1] % (2 * weight.group) or any((part[:, ::2] != part[:, 1::2]).any() for part in there.values()):
        return None
    kept: dict[str, Any] = {name: part[:, ::2] for name, part in there.items()}
    return replace(weight, group=2 * weight.group, **kept)


class Int4Linear(nn.Module):
    """torch's weight-only int4 kernel, from a weight that `kernel_layout` gave."""

    def __init__(self, weight: BlockWeight, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        self._group = weight.group
        self._on_cpu = device.type == "cpu"
        self._order = None if weight.order is None else torch.from_numpy(weight.order.astype(np.int64)).to(device)
        self._codes = _pack_cpu(weight) if self._on_cpu else _pack_cuda(weight, device)
        scales = torch.from_numpy(weight.scales)
        zeros = torch.from_numpy(weight.zero_points().astype(np.float32))
        offsets = scales * (8 - zeros) + torch.from_numpy(weight.shifts())
        pairs = torch.stack([scales, offsets], dim=-1).transpose(0, 1)  # [K/group, N, 2]
        self._scales = pairs.contiguous().to(device, torch.bfloat16)
        self._bias = None if bias is None else bias.to(device, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 -> [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        if self._order is not None:
            flat = flat[:, self._order]
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if self._on_cpu else torch.ops.aten._weight_int4pack_mm
        y = multiply(flat.contiguous(), self._codes, self._group, self._scales)
        y = y if self._bias is None else y + self._bias
        shaped: Tensor = y.view(*x.shape[:-1], -1)
        return shaped


def _pack_cpu(weight: BlockWeight) -> Tensor:
    codes = torch.from_numpy(weight.codes.astype(np.int32))
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


def _pack_cuda(weight: BlockWeight, device: torch.device) -> Tensor:
    tiles = next(tiles for tiles in _INNER_TILES if weight.shape[1] % (16 * tiles) == 0)
    pairs = (weight.codes[:, ::2] << np.uint8(4)) | weight.codes[:, 1::2]  # high nibble first
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(torch.from_numpy(pairs).to(device), tiles)
    return packed


class BlockLinear(nn.Module):
    """Codes with scales, zero points and shifts, dequantised at every call."""

    def __init__(self, weight: BlockWeight, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        if weight.shape[1] % weight.group:
            weight = weight.to_group(math.gcd(*weight.shape[1:], weight.group))
        self._group, self._midpoint = weight.group, weight.midpoint
        self._order = None if weight.order is None else torch.from_numpy(weight.order.astype(np.int64)).to(device)
        self._packed = weight.bits == 4
        codes = weight.codes[:, ::2] | (weight.codes[:, 1::2] << np.uint8(4)) if self._packed else weight.codes
        self._codes = torch.from_numpy(np.ascontiguousarray(codes)).to(device)  # [N, K] or [N, K/2], low nibble first
        self._scales = torch.from_numpy(weight.scales).to(device)  # [N, K/group]
        self._zeros = None if weight.zeros is None else torch.from_numpy(weight.zeros).to(device)
        self._shift = None if weight.shift is None else torch.from_numpy(weight.shift).to(device)
        self._bias = None if bias is None else bias.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the type of x."""
        if self._order is not None:
            x = x[..., self._order]
        bias = None if self._bias is None else self._bias.to(x.dtype)
        return nn.functional.linear(x, self._weight(x.dtype), bias)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        codes = self._codes
        if self._packed:
            codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1)
        blocks = codes.view(len(codes), -1, self._group).float()
        zeros: Any = self._midpoint if self._zeros is None else self._zeros[..., None].float()
        weight: Tensor = (blocks - zeros) * self._scales[..., None]
        if self._shift is not None:
            weight = weight + self._shift[..., None]
        return weight.to(dtype).view(codes.shape)


class Bnb4Linear(nn.Module):
    """A bitsandbytes matrix, multiplied by that library.

    Raises:
        ImportError: it is not installed; the loader then unpacks the matrix instead.
    """

    def __init__(self, weight: Bnb4Weight, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        from bitsandbytes import functional

        code = functional.get_4bit_type(weight.kind, device=device, blocksize=weight.block)
        self._state = functional.QuantState(
            absmax=torch.from_numpy(weight.absmax).to(device),
            shape=torch.Size(weight.shape),
            code=code,
            blocksize=weight.block,
            quant_type=weight.kind,
            dtype=torch.bfloat16,
        )
        self._codes = torch.from_numpy(np.array(weight.packed)).to(device)[:, None]
        self._bias = None if bias is None else bias.to(device, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 -> [..., N]."""
        from bitsandbytes import matmul_4bit

        y: Tensor = matmul_4bit(x, self._codes.t(), bias=self._bias, quant_state=self._state)
        return y
