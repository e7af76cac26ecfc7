"""Checkpoints of helpers/families.py as GGUF files, laid out as llama.cpp's converter lays them out.

In float, under llama.cpp's names: norms of Gemma as factors, Q and K of the llama kind interleaved, Phi-3's matrices
packed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_MODULES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_INTERLEAVED = ("llama", "smollm3", "granite")


def write_gguf(folder: Path, path: Path, architecture: str, config: dict[str, Any], more: dict[str, Any]) -> Path:
    """Write the checkpoint in `folder`; `more`: fields of the architecture's own beyond the geometry."""
    writer = gguf.GGUFWriter(path, architecture)
    geometry = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    for key, value in (geometry | more).items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{number}" for number in range(3, config["vocab_size"]))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in load_file(folder / "model.safetensors").items():
        writer.add_tensor(*_tensor(name, values, architecture, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor(name: str, values: torch.Tensor, architecture: str, config: dict[str, Any]) -> tuple[str, Any]:
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("model.layers."):
        _, _, number, module = module.split(".", 3)
        layer = f"blk.{number}."
    post = "post_attention_norm" if "gemma" in architecture else "ffn_norm"
    found = (_MODULES | {"post_attention_layernorm": post})[module]
    array = values.float().numpy()
    if "gemma" in architecture and "norm" in module:
        array = array + np.float32(1)
    if architecture in _INTERLEAVED and found in ("attn_q", "attn_k"):
        size = config["head_dim"]
        array = array.reshape(-1, 2, size // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return f"{layer}{found}.{kind}", np.ascontiguousarray(array)
