"""Checkpoints of llm-compressor in the "pack-quantized" format of the compressed-tensors library, 4-bit weights only.

    weight_packed      int32 [N, K/8]    eight input columns a word, lowest nibble first, each code + 8
    weight_scale       float [N, K/g]    or [N, 1] with strategy "channel"
    weight_zero_point  int32 [N/8, K/g]  packed along the rows, each + 8; int8 [N, K/g] and not packed in old files
    weight_shape       int64 [2]         N, K
    weight_g_idx       int32 [K]         the group of each input column, with actorder "group"

Codes and zero points are signed in the library and shifted by 8 in the file, so w = (code - zero) * scale holds for
what is stored; a symmetric layer has no zero point, which is 8 here. The last dimension is padded to whole words.
Of `transform_config` only what is in the weights already is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.weights.base import BlockWeight, Codes, Form
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


@dataclass(frozen=True)
class PackedGroup:
    """One entry of config_groups: how the layers it targets are stored."""

    targets: tuple[str, ...]
    group: int  # -1: channel
    symmetric: bool

    @classmethod
    def from_config(cls, entry: Any, layout: Any) -> PackedGroup:
        """Read an entry; `layout` is the format of the whole checkpoint, unless the entry has its own."""
        weights = entry.get("weights") if isinstance(entry, Mapping) else None
        targets = entry.get("targets") if isinstance(entry, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(targets, list):
            raise BadCheckpoint("The config's quantization_config.config_groups lacks targets or weights in an entry.")
        choice({"format": layout} | dict(entry), "format", layout, "pack-quantized")
        for field in ("input_activations", "output_activations"):
            choice(entry, field, None, None)
        choice(weights, "num_bits", None, 4)
        choice(weights, "type", "int", "int")
        strategy = choice(weights, "strategy", "group", "group", "channel")
        group = group_size(weights, "group_size") if strategy == "group" else -1
        return cls(tuple(str(target) for target in targets), group, flag(weights, "symmetric", True))

    def targets_module(self, module: str) -> bool:
        """Whether a target names this layer: its path, a pattern "re:...", or its class."""
        return any(
            target == "Linear"
            or (re.match(target[3:], module) is not None if target.startswith("re:") else module.endswith(target))
            for target in self.targets
        )


@dataclass(frozen=True)
class CompressedTensors:
    """The format, with one checkpoint's parameters."""

    groups: tuple[PackedGroup, ...]

    @classmethod
    def from_config(cls, config: QuantConfig) -> CompressedTensors:
        """Read quantization_config."""
        entries = config.get("config_groups")
        if not isinstance(entries, Mapping) or not entries:
            raise BadCheckpoint("The config's quantization_config has no config_groups.")
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity:
            choice(sparsity, "format", "dense", "dense")
        _refuse_online_transforms(config.get("transform_config"))
        layout = config.get("format")
        return cls(tuple(PackedGroup.from_config(entry, layout) for entry in entries.values()))

    @property
    def title(self) -> str:
        """See LinearScheme."""
        kinds = [f"int4/{group_name(g.group)}{'' if g.symmetric else ' asymmetric'}" for g in self.groups]
        return f"{', '.join(dict.fromkeys(kinds))} (compressed-tensors)"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See LinearScheme."""
        return [fact for entry in self.groups for fact in grid_facts(entry.group, symmetric=entry.symmetric)]

    def form(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Form:
        """See LinearScheme."""
        return Blocks.of(shape, self._group_of(tensors, module).group).form()

    def holds(self, tensors: TensorFiles, module: str) -> bool:
        """See LinearScheme."""
        return f"{module}.weight_packed" in tensors

    def read(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> BlockWeight:
        """See LinearScheme."""
        rows, columns = shape
        how = self._group_of(tensors, module)
        blocks = Blocks.of(shape, how.group)
        _check_shape(tensors, f"{module}.weight_shape", shape)
        codes = unpack(tensors.raw(f"{module}.weight_packed", ("I32",), (rows, -(-columns // 8))))[:, :columns]
        scales = tensors.finite(f"{module}.weight_scale", (rows, blocks.count))
        zeros = None if how.symmetric else _zeros(tensors, f"{module}.weight_zero_point", rows, blocks.count)
        name = f"{module}.weight_g_idx"
        order = group_order(tensors, name, blocks) if name in tensors else None
        ordered = np.ascontiguousarray(codes if order is None else codes[:, order])
        return BlockWeight(ordered, scales, zeros, bits=4, group=blocks.size, order=order)

    def _group_of(self, tensors: TensorFiles, module: str) -> PackedGroup:
        for group in sorted(self.groups, key=lambda group: "Linear" in group.targets):  # the particular before all
            if group.targets_module(module):
                return group
        place = tensors.place(f"{module}.weight_packed")
        raise UnsupportedModel(f"{place} is quantised, but no entry of the config's config_groups targets it.")


def _refuse_online_transforms(transforms: Any) -> None:
    """Rotations (SpinQuant's, QuIP's) that are part of the weights change nothing here; one of a layer's input or
    output, or of the attention's, would have to be run beside it."""
    schemes = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for scheme in schemes.values() if isinstance(schemes, Mapping) else ():
        for args in scheme.get("apply") or () if isinstance(scheme, Mapping) else ():
            location = args.get("location") if isinstance(args, Mapping) else args
            if location not in ("weight_input", "weight_output"):
                raise UnsupportedModel(
                    f"The config's quantization_config.transform_config rotates at {location!r} while the model runs; "
                    "edgekv reads only what is rotated in the weights."
                )


def _check_shape(tensors: TensorFiles, name: str, shape: tuple[int, int]) -> None:
    if name in tensors and tuple(tensors.raw(name, ("I64", "I32"), (2,)).tolist()) != shape:
        found = tensors.raw(name, ("I64", "I32")).tolist()
        raise BadCheckpoint(f"{tensors.place(name)} says {found}, but the config says {list(shape)}.")


def _zeros(tensors: TensorFiles, name: str, rows: int, blocks: int) -> Codes | None:
    if name in tensors and tensors.dtype(name) == "I8":
        plain = tensors.raw(name, ("I8",), (rows, blocks))
        return without_midpoints(((plain.astype(np.int16) + 8) & 0xF).astype(np.uint8))
    words = tensors.raw(name, ("I32",), (-(-rows // 8), blocks))
    return without_midpoints(np.ascontiguousarray(unpack(words.T)[:, :rows].T))
