"""Tiny random checkpoints, written by transformers with a seed: one for each architectural variant edgekv runs.

Weights are five times as wide as a fresh initialisation's, so that attention is sharp and positions matter: with
transformers' default spread every test about rotary angles passes whatever the angles are.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

DATA = Path(__file__).resolve().parents[1] / "data"
VOCAB = 512

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One variant: what it changes in the common config."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    k_bias: float = 0.0  # spread of the K bias, qwen2 only
    seed: int = 0


TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny("llama"),
        Tiny("one-layer", {"num_hidden_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        Tiny("three-layers-mha", {"num_hidden_layers": 3, "num_key_value_heads": 4, "tie_word_embeddings": True}),
        Tiny("llama3-rope", {"rope_parameters": _LLAMA3}),
        Tiny("linear-rope", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
        Tiny("wide-heads", {"head_dim": 32, "num_key_value_heads": 1}),  # case C27: not hidden / heads
        Tiny("qwen2", {"tie_word_embeddings": True}, family="qwen2", k_bias=4.0),
    )
}
"""By name."""

ROPE_KINDS = ("llama", "linear-rope", "llama3-rope")


def write_checkpoint(tiny: Tiny, folder: Path) -> Path:
    """Write the float32 checkpoint as transformers does, with the tokenizer of tests/data/llama-fp16."""
    torch.manual_seed(tiny.seed)
    if tiny.family == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**(_COMMON | tiny.changes)))
        with torch.no_grad():
            for layer in model.model.layers:
                for part, spread in (("q", 0.5), ("k", tiny.k_bias), ("v", 0.5)):
                    getattr(layer.self_attn, f"{part}_proj").bias.normal_(0, spread)
    else:
        model = LlamaForCausalLM(LlamaConfig(**(_COMMON | tiny.changes)))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:  # a gain of exactly one everywhere would hide a gain that is left out
                values.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DATA / "llama-fp16" / name, folder / name)
    return folder
