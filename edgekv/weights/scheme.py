"""How a publisher stores a quantised linear layer: the interface of the published 4-bit formats, and what they share.

`config.json` names the format in `quantization_config.quant_method`; AutoGPTQ and AutoAWQ before 2023-09 put the same
fields into quantize_config.json and quant_config.json, without a method. Which layers are quantised is read from the
tensors that are there, never from lists of modules in the config: the two disagree in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.weights.base import BlockWeight, Bnb4Weight, Codes, Order
from edgekv.weights.tensors import TensorFiles

QuantConfig = Mapping[str, Any]


class LinearScheme(Protocol):
    """One published format, with the parameters of one checkpoint."""

    @property
    def title(self) -> str:
        """For people: "int4/128 (GPTQ, act-order)"."""

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


def unpack(words: npt.NDArray[Any]) -> Codes:
    """[..., W] 32-bit words -> [..., 8 W] codes, the lowest four bits of each word first."""
    raw = np.ascontiguousarray(words).view(np.uint8)  # [..., 4 W], little-endian
    codes = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = raw & 0xF, raw >> 4
    return codes


def group_order(tensors: TensorFiles, name: str, columns: int, group: int) -> Order | None:
    """The order of input columns that puts each group of an act-order layer side by side; None if they lie so.

    `name` is the tensor that gives the group of each column. All columns in one group, where there should be several,
    means that nobody filled the tensor in (case C24): the groups then lie side by side.
    """
    groups = tensors.raw(name, ("I32", "I64"), (columns,))
    in_turn = np.arange(columns) // group
    if (groups == in_turn).all() or (groups == groups[0]).all():
        return None
    order = np.argsort(groups, kind="stable")
    if not (groups[order] == in_turn).all():
        raise BadCheckpoint(
            f"{tensors.place(name)} does not divide {columns} columns into groups of {group}: download it again."
        )
    return order


def without_midpoints(zeros: Codes) -> Codes | None:
    """Zero points, or None where all are 8: the graph then carries none."""
    return None if (zeros == 8).all() else zeros
