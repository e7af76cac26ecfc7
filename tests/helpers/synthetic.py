"""Checkpoints as large as one likes, of seeded noise, written tensor by tensor: for what conversion takes in memory."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from helpers.checkpoints import DATA

Array = np.ndarray[Any, Any]
_TILE = 1 << 20  # weights of noise that are repeated
_GROUP = 128
_NAMES = {"F16": np.float16, "I32": np.int32}


@dataclass(frozen=True)
class Size:
    """The geometry of a llama; every query head has a key head of its own."""

    layers: int
    hidden: int
    ffn: int
    vocab: int

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_attention_heads": self.hidden // 128,
            "num_key_value_heads": self.hidden // 128, "head_dim": 128, "vocab_size": self.vocab,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        }  # fmt: skip

    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers [N, K]."""
        attention = {f"self_attn.{part}_proj": (self.hidden, self.hidden) for part in "qkvo"}
        return attention | {
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }


def write_floats(size: Size, folder: Path) -> int:
    """A float16 checkpoint; returns the bytes of its largest tensor."""
    return _write_folder(size, folder, lambda shape: {"weight": ("F16", shape)}, {})


def write_gptq(size: Size, folder: Path) -> int:
    """A GPTQ checkpoint with embedding and head in float16; returns the bytes of its largest tensor."""

    def layer(shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        rows, columns = shape
        groups = columns // _GROUP
        return {"qweight": ("I32", (columns // 8, rows)), "qzeros": ("I32", (groups, rows // 8)),
                "scales": ("F16", (groups, rows))}  # fmt: skip

    how = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False, "desc_act": False}
    return _write_folder(size, folder, layer, {"quantization_config": how})


def write_gguf(size: Size, folder: Path) -> int:
    """A GGUF file of Q4_0 with embedding and head in Q8_0; returns the bytes of its largest tensor."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for name, value in (
        ("context_length", 2048), ("embedding_length", size.hidden), ("block_count", size.layers),
        ("feed_forward_length", size.ffn), ("attention.head_count", size.hidden // 128),
        ("attention.head_count_kv", size.hidden // 128),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["t", "1", "t1", *(f"x{n}" for n in range(size.vocab - 3))])
    writer.add_array("tokenizer.ggml.merges", ["t 1"])
    largest = 0
    names = dict(
        zip(size.linear(), ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
    )
    tensors: list[tuple[str, tuple[int, ...], str]] = [
        (name, (size.vocab, size.hidden), "Q8_0") for name in ("token_embd.weight", "output.weight")
    ]
    tensors.append(("output_norm.weight", (size.hidden,), "F32"))
    for index in range(size.layers):
        tensors += [(f"blk.{index}.{names[name]}.weight", shape, "Q4_0") for name, shape in size.linear().items()]
        tensors += [(f"blk.{index}.{name}_norm.weight", (size.hidden,), "F32") for name in ("attn", "ffn")]
    for name, shape, kind in tensors:
        data = _blocks(shape, getattr(gguf.GGMLQuantizationType, kind))
        writer.add_tensor_info(name, shape if kind == "F32" else data.shape, data.dtype, data.nbytes,
                               getattr(gguf.GGMLQuantizationType, kind))  # fmt: skip
        largest = max(largest, data.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape, kind in tensors:
        writer.write_tensor_data(_blocks(shape, getattr(gguf.GGMLQuantizationType, kind)))
    writer.close()
    return largest


def _blocks(shape: tuple[int, ...], kind: Any) -> Array:
    """A tensor of a GGUF type: quantised noise, repeated."""
    if kind == gguf.GGMLQuantizationType.F32:
        return np.ones(shape, np.float32)
    columns = shape[1]
    tile = gguf.quants.quantize(_noise()[: columns * (_TILE // columns)].reshape(-1, columns), kind)
    return np.tile(tile, (-(-shape[0] // len(tile)), 1))[: shape[0]]


def _noise() -> Array:
    return np.random.default_rng(0).standard_normal(_TILE, np.float32) * np.float32(0.02)


def _write_folder(
    size: Size, folder: Path, layer: Callable[[tuple[int, int]], dict[str, Any]], extra: dict[str, Any]
) -> int:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(size.config() | extra))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DATA / "llama-fp16" / name, folder / name)
    vocab = (size.vocab, size.hidden)
    tensors = {"model.embed_tokens.weight": ("F16", vocab), "lm_head.weight": ("F16", vocab)}
    tensors["model.norm.weight"] = ("F16", (size.hidden,))
    for index in range(size.layers):
        place = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{name}.weight"] = ("F16", (size.hidden,))
        for module, shape in size.linear().items():
            tensors |= {f"{place}.{module}.{name}": value for name, value in layer(shape).items()}
    return _write_safetensors(folder / "model.safetensors", tensors)


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    header, end, sizes = {}, 0, []
    for name, (kind, shape) in tensors.items():
        sizes.append(math.prod(shape) * np.dtype(_NAMES[kind]).itemsize)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end := end + sizes[-1]]}
    text = json.dumps(header).encode()
    tiles = {"F16": _noise().astype(np.float16).tobytes(),
             "I32": np.random.default_rng(1).integers(0, 256, 2 * _TILE, np.uint8).tobytes()}  # fmt: skip
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (kind, _), nbytes in zip(tensors.values(), sizes, strict=True):
            tile, left = tiles[kind], nbytes
            while left:
                left -= file.write(tile[:left])
    return max(sizes)
