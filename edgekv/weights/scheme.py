"""How a publisher stores a quantised linear layer: the interface of the published 4-bit formats, and what they share.

`config.json` names the format in `quantization_config.quant_method`; AutoGPTQ and AutoAWQ before 2023-09 put the same
fields into quantize_config.json and quant_config.json, without a method. Which layers are quantised is read from the
tensors that are there, never from lists of modules in the config: the two disagree in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.weights.base import BlockWeight, Bnb4Weight, Codes, Float32, Form, Order
from edgekv.weights.tensors import TensorFiles

QuantConfig = Mapping[str, Any]


class LinearScheme(Protocol):
    """One published format, with the parameters of one checkpoint."""

    @property
    def title(self) -> str:
        """For people: "int4/128 (GPTQ, act-order)"."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The parameters one by one, for people: ("group size", "128")."""

    def form(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Form:
        """What `read` will give, from metadata alone."""

    def holds(self, tensors: TensorFiles, module: str) -> bool:
        """Whether the layer `module` ("model.layers.0.mlp.down_proj") is stored in this format."""

    def read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> BlockWeight | Bnb4Weight:
        """The layer [N, K] with the publisher's integers.

        Raises:
            BadCheckpoint, UnsupportedModel: a tensor is missing, of another type or shape, or not finite.
        """


def choice(config: QuantConfig, field: str, default: Any, *known: Any) -> Any:
    """A field of quantization_config that must have one of the known values; names in either case are the same."""
    value = config.get(field)
    value = default if value is None else value.lower() if isinstance(value, str) else value
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
        raise UnsupportedModel(
            f"The config's quantization_config.{field} is {value!r}; edgekv reads {', '.join(map(repr, known))}."
        )
    return value


def flag(config: QuantConfig, field: str, default: bool) -> bool:
    """A field that is true or false."""
    return bool(choice(config, field, default, True, False))


def group_size(config: QuantConfig, *fields: str) -> int:
    """Columns that share a scale, from the first of these fields that is there; -1 is all of them."""
    value = next((config[field] for field in fields if config.get(field) is not None), -1)
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
        raise BadCheckpoint(
            f"The config's quantization_config.{fields[0]} is {value!r}; it must be -1 or a positive whole number."
        )
    return value


def group_name(group: int) -> str:
    """The group size in a title."""
    return "channel" if group == -1 else str(group)


def grid_facts(group: int, *, symmetric: bool, act_order: bool | None = None) -> list[tuple[str, str]]:
    """What people ask of an integer format; `act_order` None: the format has none."""
    facts = [
        ("group size", "a whole row (channel)" if group == -1 else str(group)),
        ("zero points", "none stored (symmetric: all 8)" if symmetric else "stored (asymmetric)"),
    ]
    return facts if act_order is None else [*facts, ("act-order", "yes" if act_order else "no")]


@dataclass(frozen=True)
class Blocks:
    """How the columns of one layer [N, K] are divided; a group size of -1 is one group."""

    rows: int
    columns: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, int], group: int) -> Blocks:
        """Of a layer and the checkpoint's group size."""
        return cls(*shape, shape[1] if group == -1 else group)

    @property
    def count(self) -> int:
        """Groups of a row; the last may be short."""
        return -(-self.columns // self.size)

    def form(self, bits: int = 4) -> Form:
        """Integers in groups of this size."""
        return Form("int", bits, self.size)

    def column_scales(self, tensors: TensorFiles, module: str) -> Float32:
        """The `scales` [K/g, N] of GPTQ and AWQ as [N, K/g], all finite."""
        return np.ascontiguousarray(tensors.finite(f"{module}.scales", (self.count, self.rows)).T)


def unpack(words: npt.NDArray[Any], bits: int = 4) -> Codes:
    """[..., W] 32-bit words -> [..., 32 W / bits] codes of 4 or 8 bits, the lowest bits of each word first."""
    raw = np.ascontiguousarray(words).view(np.uint8)  # [..., 4 W], little-endian
    if bits == 8:
        return raw
    codes = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = raw & 0xF, raw >> 4
    return codes


def group_order(tensors: TensorFiles, name: str, blocks: Blocks) -> Order | None:
    """The order of input columns that puts each group of an act-order layer side by side; None if they lie so.

    `name` is the tensor that gives the group of each column. All columns in one group, where there should be several,
    means that nobody filled the tensor in: the groups then lie side by side.
    """
    groups = tensors.raw(name, ("I32", "I64"), (blocks.columns,))
    in_turn = np.arange(blocks.columns) // blocks.size
    if (groups == in_turn).all() or (groups == groups[0]).all():
        return None
    order = np.argsort(groups, kind="stable")
    if not (groups[order] == in_turn).all():
        raise BadCheckpoint(
            f"{tensors.place(name)} does not divide {blocks.columns} columns into groups of {blocks.size}: "
            "download it again."
        )
    return order


def without_midpoints(zeros: Codes, bits: int = 4) -> Codes | None:
    """Zero points, or None where all are the midpoint (8 in 4 bits): the graph then carries none."""
    return None if (zeros == 1 << (bits - 1)).all() else zeros
