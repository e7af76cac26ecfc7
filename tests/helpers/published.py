"""Checkpoints in the published 4-bit formats, written and read in the plainest way: the oracle of weights/.

Writers take random weights, round them, pack them as the format's own library documents it, and keep the numbers that
the integers stand for. The readers of `dequantised_checkpoint` follow the same documents in float64, for checkpoints
that real tools wrote. Nothing here calls edgekv.

    AWQ                 github.com/casper-hansen/AutoAWQ, WQLinear_GEMM
    GPTQ                github.com/AutoGPTQ/AutoGPTQ and github.com/ModelCloud/GPTQModel, QuantLinear
    compressed-tensors  github.com/vllm-project/compressed-tensors, pack_to_int32
    bitsandbytes        github.com/bitsandbytes-foundation/bitsandbytes, QuantState
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import DATA, Tiny, write_checkpoint

Array = np.ndarray[Any, Any]
State = dict[str, torch.Tensor]
Layer = tuple[dict[str, Array], Array]  # tensors by their names below the module, and the weights they stand for

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column AWQ_ORDER[i]
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(value / 12 for value in (*_FP4, *(-value for value in _FP4)))


@dataclass(frozen=True)
class Grid:
    """Rounded weights: w[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] with g = group_of[k]."""

    codes: Array  # [N, K]
    zeros: Array  # [N, G]
    scales: Array  # [N, G], float16
    group_of: Array  # [K]

    def weights(self) -> Array:
        centred = self.codes.astype(np.float64) - self.zeros[:, self.group_of]
        return centred * self.scales.astype(np.float64)[:, self.group_of]


def round_to_grid(weight: Array, group_of: Array, *, symmetric: bool, bits: int = 4) -> Grid:
    rows, groups, top = len(weight), int(group_of.max()) + 1, (1 << bits) - 1
    zeros, scales = np.full((rows, groups), 1 << (bits - 1)), np.empty((rows, groups), np.float16)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        spread = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = np.maximum(spread / top, 1e-4)
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 1, top)
    codes = np.rint(weight / scales[:, group_of]) + zeros[:, group_of]
    return Grid(np.clip(codes, 0, top).astype(np.int64), zeros, scales, group_of)


def pack_words(codes: Array, bits: int = 4) -> Array:
    """[R, C] -> int32 [R, ceil(C bits / 32)], lowest bits first, padded with zeros."""
    count = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % count)))
    words = sum(padded[:, i::count] << np.uint32(bits * i) for i in range(count))
    return np.ascontiguousarray(words).astype(np.uint32).view(np.int32)


def unpack_words(words: Array, bits: int = 4) -> Array:
    """The inverse, without the padding's removal."""
    count = 32 // bits
    codes = np.empty((len(words), count * words.shape[1]), np.int64)
    for i in range(count):
        codes[:, i::count] = (words >> (bits * i)) & ((1 << bits) - 1)
    return codes


def interleave(codes: Array) -> Array:
    """Columns in AWQ's order of nibbles."""
    return np.stack([codes[:, column::8] for column in AWQ_ORDER], axis=-1).reshape(len(codes), -1)


@dataclass(frozen=True)
class AWQ:
    """Writes one AWQ layer."""

    group: int = 32
    symmetric: bool = False
    zeros: bool = True  # whether qzeros is written at all

    def config(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm",
                "zero_point": not self.symmetric}  # fmt: skip

    def layer(self, module: str, weight: Array) -> Layer:
        grid = round_to_grid(weight, groups_in_turn(weight.shape[1], self.group), symmetric=self.symmetric)
        tensors = {
            "qweight": pack_words(interleave(grid.codes.T)),
            "qzeros": pack_words(interleave(grid.zeros.T)),
            "scales": np.ascontiguousarray(grid.scales.T),
        }
        if not self.zeros:
            del tensors["qzeros"]
        return tensors, grid.weights()


@dataclass(frozen=True)
class GPTQ:
    """Writes one GPTQ layer. `g_idx`: "in turn", "zeros", "act-order", "apart" (an order for each layer) or "".

    Layers whose names contain one of `wide` have 8 bits and groups of 64.
    """

    group: int = 32
    symmetric: bool = False
    version: int = 1
    g_idx: str = "in turn"
    wide: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        layout: dict[str, Any] = {} if self.version == 1 else {"checkpoint_format": "gptq_v2"}
        if self.wide:
            layout["dynamic"] = {f"+:.*{name}": {"bits": 8, "group_size": 64} for name in self.wide} | {"-:.*norm": {}}
        return {"quant_method": "gptq", "bits": 4, "group_size": self.group, "sym": self.symmetric,
                "desc_act": self.g_idx in ("act-order", "apart")} | layout  # fmt: skip

    def layer(self, module: str, weight: Array) -> Layer:
        wide = any(name in module for name in self.wide)
        bits, group_of = 8 if wide else 4, groups_in_turn(weight.shape[1], 64 if wide else self.group)
        if self.g_idx in ("act-order", "apart"):
            seed = len(group_of) if self.g_idx == "act-order" else sum(module.encode())
            group_of = np.random.default_rng(seed).permutation(group_of)
        grid = round_to_grid(weight, group_of, symmetric=self.symmetric, bits=bits)
        stored = grid.zeros.T - (self.version == 1)
        tensors = {
            "qweight": np.ascontiguousarray(pack_words(grid.codes, bits).T),
            "qzeros": pack_words(stored, bits),
            "scales": np.ascontiguousarray(grid.scales.T),
            "g_idx": (np.zeros_like(group_of) if self.g_idx == "zeros" else group_of).astype(np.int32),
        }
        if not self.g_idx:
            del tensors["g_idx"]
        return tensors, grid.weights()


@dataclass(frozen=True)
class Packed:
    """Writes one layer of compressed-tensors."""

    group: int = 32  # -1: strategy channel
    symmetric: bool = True
    act_order: bool = False
    packed_zeros: bool = True  # False: int8 and one a zero point, as older versions wrote

    def config(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": self.symmetric, "actorder": None, "dynamic": False}
        weights |= {"strategy": "channel"} if self.group == -1 else {"strategy": "group", "group_size": self.group}
        entry = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": entry},
                "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None}  # fmt: skip

    def layer(self, module: str, weight: Array) -> Layer:
        group_of = groups_in_turn(weight.shape[1], self.group)
        if self.act_order:
            group_of = np.random.default_rng(len(group_of)).permutation(group_of)
        grid = round_to_grid(weight, group_of, symmetric=self.symmetric)
        tensors = {
            "weight_packed": pack_words(grid.codes),
            "weight_scale": grid.scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not self.symmetric:
            packed = np.ascontiguousarray(pack_words(grid.zeros.T).T)
            tensors["weight_zero_point"] = packed if self.packed_zeros else (grid.zeros - 8).astype(np.int8)
        if self.act_order:
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        return tensors, grid.weights()


@dataclass(frozen=True)
class Bnb:
    """Writes one layer of bitsandbytes."""

    kind: str = "nf4"
    double: bool = False
    flat: bool = False
    storage: Any = np.uint8
    block: int = 64
    ran: bool = False  # saved after the model ran on a processor with AVX-512

    def config(self) -> dict[str, Any]:
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                "bnb_4bit_quant_type": self.kind, "bnb_4bit_use_double_quant": self.double}  # fmt: skip

    def layer(self, module: str, weight: Array) -> Layer:
        table = np.array(NF4 if self.kind == "nf4" else FP4, np.float32)
        blocks = weight.reshape(-1, self.block)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": self.kind, "blocksize": self.block, "dtype": "float32",
                                 "shape": list(weight.shape)}  # fmt: skip
        turned = np.ascontiguousarray(absmax.reshape(len(weight), -1).T) if self.ran else absmax
        tensors: dict[str, Array] = {"weight.quant_map": table, "weight.absmax": turned}
        if self.double:
            nested, extra, absmax = _round_absmax(absmax)
            tensors, state = tensors | nested, state | extra
        codes = np.abs(blocks[..., None] / absmax[:, None, None] - table).argmin(-1).reshape(-1)
        packed = ((codes[0::2] << 4) | codes[1::2]).astype(np.uint8).view(self.storage)
        tensors["weight"] = packed if self.flat else packed[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{self.kind}"] = np.frombuffer(text, np.uint8)
        values = table.astype(np.float64)[codes].reshape(blocks.shape) * absmax[:, None].astype(np.float64)
        return tensors, values.reshape(weight.shape)


def _round_absmax(absmax: Array) -> tuple[dict[str, Array], dict[str, Any], Array]:
    """Double quantisation: its tensors, what the state says of it, and the absmax they stand for."""
    quant_map = np.sign(np.linspace(-1, 1, 256)) * np.linspace(-1, 1, 256) ** 2
    offset = float(np.float32(absmax.mean()))
    rest = absmax - np.float32(offset)
    scales = np.array([np.abs(rest[i : i + 256]).max() for i in range(0, len(rest), 256)], np.float32)
    spread = np.repeat(scales, 256)[: len(rest)]
    codes = np.abs(rest[:, None] / spread[:, None] - quant_map).argmin(-1).astype(np.uint8)
    tensors = {"weight.absmax": codes, "weight.nested_absmax": scales,
               "weight.nested_quant_map": quant_map.astype(np.float32)}  # fmt: skip
    state = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return tensors, state, (quant_map[codes] * spread + offset).astype(np.float32)


Method = AWQ | GPTQ | Packed | Bnb


@dataclass(frozen=True)
class Published:
    """A tiny checkpoint: its model, how its linear layers are stored, and which modules are too or are not."""

    name: str
    method: Method
    tiny: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    also: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()  # parts of names of layers left in 16 bits
    edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None  # tensors and config, as written

    def write(self, folder: Path) -> State:
        """Write it; returns the state dict that its integers stand for, in float32."""
        sizes = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
        tiny = Tiny(self.name, sizes | self.tiny, self.family, k_bias=4.0 if self.family == "qwen2" else 0.0)
        write_checkpoint(tiny, folder)
        state = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
        stored, meant = dict(state), {name: tensor.float() for name, tensor in state.items()}
        for module in [name.removesuffix(".weight") for name in state if name.endswith(".weight")]:
            if self._quantises(module):
                source = f"{module}.weight"
                tensors, weights = self.method.layer(module, stored.pop(source).float().numpy())
                stored |= {f"{module}.{name}": torch.from_numpy(np.array(t)) for name, t in tensors.items()}
                meant[source] = torch.from_numpy(weights).float()
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": self.method.config()}
        if self.edit:
            self.edit(stored, config)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(stored, folder / "model.safetensors")
        return meant

    def _quantises(self, module: str) -> bool:
        if any(part in module for part in self.floats):
            return False
        return LINEAR.fullmatch(module) is not None or module in self.also


def copy_fixture(name: str, folder: Path) -> Path:
    """A folder of tests/data, with a tokenizer: those that bitsandbytes wrote have none."""
    shutil.copytree(DATA / name, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / file).exists():
            shutil.copyfile(DATA / "llama-fp16" / file, folder / file)
    return folder


def groups_in_turn(columns: int, group: int) -> Array:
    return np.arange(columns) // (columns if group == -1 else group)


def dequantised_checkpoint(folder: Path) -> State:
    """The state dict that a quantised checkpoint stands for, computed in float64, in float32."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    state = {name: tensor.float() for name, tensor in tensors.items() if _is_plain(name, tensors)}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last == "qweight":
            read = _read_awq if config["quant_method"] == "awq" else _read_gptq
            state[f"{module}.weight"] = torch.from_numpy(read(_below(tensors, module), config)).float()
        elif "quant_state" in name:
            module = name.split(".weight.")[0]
            state[f"{module}.weight"] = torch.from_numpy(_read_bnb(_below(tensors, module))).float()
    return state


def _is_plain(name: str, tensors: State) -> bool:
    return name.endswith((".weight", ".bias")) and tensors[name].is_floating_point()


def _below(tensors: State, module: str) -> dict[str, Array]:
    found = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in found.items()}


def _read_awq(layer: dict[str, Array], config: dict[str, Any]) -> Array:
    def columns(words: Array) -> Array:
        plain = unpack_words(words)
        codes = np.empty_like(plain)
        for nibble, column in enumerate(AWQ_ORDER):
            codes[:, column::8] = plain[:, nibble::8]
        return codes

    codes, zeros = columns(layer["qweight"]), columns(layer["qzeros"])  # [K, N], [G, N]
    group_of = groups_in_turn(len(codes), config["group_size"])
    return ((codes - zeros[group_of]) * layer["scales"].astype(np.float64)[group_of]).T


def _read_gptq(layer: dict[str, Array], config: dict[str, Any]) -> Array:
    group_of = layer["g_idx"]
    bits = 32 * len(layer["qweight"]) // len(group_of)
    codes = unpack_words(np.ascontiguousarray(layer["qweight"].T), bits).T  # [K, N]
    zeros = unpack_words(layer["qzeros"], bits) + (config["checkpoint_format"] == "gptq")
    return ((codes - zeros[group_of]) * layer["scales"].astype(np.float64)[group_of]).T


def _read_bnb(layer: dict[str, Array]) -> Array:
    name = next(name for name in layer if "quant_state" in name)
    state = json.loads(bytes(layer[name].tolist()))
    absmax = layer["weight.absmax"].astype(np.float64).T.reshape(-1)
    if "nested_blocksize" in state:
        scales = np.repeat(layer["weight.nested_absmax"].astype(np.float64), state["nested_blocksize"])
        absmax = layer["weight.nested_quant_map"].astype(np.float64)[layer["weight.absmax"]] * scales[: len(absmax)]
        absmax += state["nested_offset"]
    packed = layer["weight"].reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)
    values = layer["weight.quant_map"].astype(np.float64)[codes]
    return (values * np.repeat(absmax, state["blocksize"])[: len(values)]).reshape(state["shape"])
