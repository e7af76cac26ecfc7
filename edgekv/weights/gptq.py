"""GPTQ checkpoints, v1 and v2 (AutoGPTQ's and GPTQModel's QuantLinear; Frantar et al., arXiv 2210.17323).

    qweight  int32 [K/8, N]   eight input columns a word, lowest nibble first
    qzeros   int32 [K/g, N/8] zero points, eight outputs a word, lowest nibble first
    scales   float [K/g, N]   w = (code - zero) * scale
    g_idx    int32 [K]        the group of each input column; in act-order (`desc_act`) not in turn

The trap: v1, which `checkpoint_format` "gptq" or its absence means, stores zero points minus one, v2 stores
them as they are. GPTQModel makes the one from the other by adding 0x11111111 to whole words, so that a zero point of 0
borrows from its neighbour; the same addition is its exact inverse and is what is done here.

AutoRound's "auto_round:auto_gptq" is v1. Layers that its `extra_config` leaves in floats show it in their tensors.

A g_idx of zeros is an empty tensor, not one group. `group_size` -1 is one group.

GPTQModel's `dynamic` gives layers whose names match a pattern parameters of their own, the first that matches: another
group size, or 8 bits, which an output head or a few sensitive layers get. "-:" marks layers left in floats, which
their tensors show. Of a checkpoint that is 8-bit throughout nothing would be gained, and it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgekv.errors import BadCheckpoint
from edgekv.weights.base import BlockWeight, Codes, Form, Order
from edgekv.weights.scheme import (
    Blocks,
    QuantConfig,
    choice,
    flag,
    grid_facts,
    group_name,
    group_order,
    group_size,
    unpack,
    without_midpoints,
)
from edgekv.weights.tensors import TensorFiles

_ONE_IN_EACH = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""By bits."""


@dataclass(frozen=True)
class GPTQ:
    """The format, with one checkpoint's parameters."""

    group: int
    symmetric: bool
    act_order: bool
    version: int  # 1: zero points are stored minus one
    bits: int = 4
    apart: tuple[tuple[str, GPTQ], ...] = ()  # patterns of names -> how those layers are stored

    @classmethod
    def from_config(cls, config: QuantConfig) -> GPTQ:
        """Read quantization_config; newer writers call `checkpoint_format` also `format`."""
        choice(config, "bits", None, 4)
        return replace(cls._of(config), apart=tuple(cls._apart(config)))

    @classmethod
    def from_auto_round(cls, config: QuantConfig) -> GPTQ:
        """Read AutoRound's quantization_config, where it packs as GPTQ v1 does."""
        choice(config, "packing_format", None, "auto_round:auto_gptq")
        choice(config, "data_type", "int", "int")
        return cls.from_config({**config, "checkpoint_format": "gptq"})

    @classmethod
    def _of(cls, config: QuantConfig) -> GPTQ:
        field = "checkpoint_format" if "checkpoint_format" in config else "format"
        layout = choice(config, field, "gptq", "gptq", "gptq_v2")
        return cls(
            group=group_size(config, "group_size"),
            symmetric=flag(config, "sym", True),
            act_order=flag(config, "desc_act", False),
            version=2 if layout == "gptq_v2" else 1,
            bits=choice(config, "bits", None, 4, 8),
        )

    @classmethod
    def _apart(cls, config: QuantConfig) -> Iterator[tuple[str, GPTQ]]:
        rules = config.get("dynamic") or {}
        if not isinstance(rules, Mapping):
            raise BadCheckpoint(f"The config's quantization_config.dynamic is {rules!r}, not a table of layers.")
        for name, fields in rules.items():
            if name.startswith("-:"):
                continue
            try:
                re.compile(pattern := name.removeprefix("+:"))
            except re.error as error:
                raise BadCheckpoint(f"The config's quantization_config.dynamic has {name!r}: {error}.") from None
            if not isinstance(fields, Mapping):
                raise BadCheckpoint(f"The config's quantization_config.dynamic has {fields!r} for {name!r}.")
            yield pattern, cls._of({**config, **fields})

    @property
    def title(self) -> str:
        """See LinearScheme."""
        words = ["GPTQ" if self.version == 1 else "GPTQ v2", "symmetric" if self.symmetric else "asymmetric"]
        return f"int4/{group_name(self.group)} ({', '.join(words + ['act-order'] * self.act_order)})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See LinearScheme."""
        facts = grid_facts(self.group, symmetric=self.symmetric, act_order=self.act_order)
        return facts + [("layers apart", f"{name}: int{own.bits}/{group_name(own.group)}") for name, own in self.apart]

    def form(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Form:
        """See LinearScheme."""
        own = self._layer(module)
        return Blocks.of(shape, own.group).form(own.bits)

    def holds(self, tensors: TensorFiles, module: str) -> bool:
        """See LinearScheme."""
        return f"{module}.qweight" in tensors

    def read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> BlockWeight:
        """See LinearScheme."""
        return self._layer(module)._read(tensors, module, shape)

    def _layer(self, module: str) -> GPTQ:
        """How one layer is stored."""
        return next((own for pattern, own in self.apart if re.match(pattern, module)), self)

    def _read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> BlockWeight:
        blocks = Blocks.of(shape, self.group)
        words = tensors.raw(f"{module}.qweight", ("I32",), (blocks.columns * self.bits // 32, blocks.rows))
        order = self._order(tensors, module, blocks)
        codes = unpack(words.T, self.bits)  # [N, K]
        return BlockWeight(
            codes if order is None else np.ascontiguousarray(codes[:, order]),
            blocks.column_scales(tensors, module),
            self._zeros(tensors, module, blocks),
            bits=self.bits,
            group=blocks.size,
            order=order,
        )

    def _zeros(self, tensors: TensorFiles, module: str, blocks: Blocks) -> Codes | None:
        shape = (blocks.count, -(-blocks.rows * self.bits // 32))
        words = tensors.raw(f"{module}.qzeros", ("I32",), shape).view(np.uint32)
        if self.version == 1:
            words = words + _ONE_IN_EACH[self.bits]
        zeros = np.ascontiguousarray(unpack(words, self.bits)[:, : blocks.rows].T)
        return without_midpoints(zeros, self.bits)

    def _order(self, tensors: TensorFiles, module: str, blocks: Blocks) -> Order | None:
        name = f"{module}.g_idx"
        if name in tensors:
            return group_order(tensors, name, blocks)
        if self.act_order:
            raise BadCheckpoint(f"{tensors.folder} has no tensor {name}, without which act-order cannot be undone.")
        return None
