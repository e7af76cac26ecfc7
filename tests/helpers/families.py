"""Tiny random checkpoints of every family, made by transformers with a seed, and what each is without a feature.

The weights lie on the grids that `edgekv convert` rounds to, so that a conversion is exact and the checkpoint itself is
the oracle: nothing has to be read back. They are five times as wide as a fresh initialisation's, as in checkpoints.py.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgekv.weights.quantize import quantize_blocks
from helpers.checkpoints import DATA, VOCAB

WINDOW = 24
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1,
    "head_dim": 16,
}  # fmt: skip

Changes = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A family with settings of its own; `dropped`: config changes that each take one feature away."""

    name: str
    family: str
    changes: Changes = field(default_factory=dict)
    dropped: dict[str, Changes] = field(default_factory=dict)


def _rope(family: str, name: str, **fields: Any) -> Variant:
    """A rotary kind, dropped by turning it into the plain one, and its attention factor by setting that to 1."""
    table = PLAIN_ROPE | fields
    part = {key: value for key, value in fields.items() if key == "partial_rotary_factor"}
    dropped = {"kind": {"rope_parameters": PLAIN_ROPE | part}}
    if fields["rope_type"] in ("yarn", "longrope"):
        dropped["attention factor"] = {"rope_parameters": table | {"attention_factor": 1.0}}
    context = {"original_max_position_embeddings": fields["original_max_position_embeddings"]}
    return Variant(name, family, {"rope_parameters": table} | (context if family == "phi3" else {}), dropped)


_FACTORS = {
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 20.0, 30.0],
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": PLAIN_ROPE,
}
_GRANITE = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("mistral", "mistral", {"sliding_window": WINDOW}, {"window": {"sliding_window": None}}),
        Variant(
            "qwen2",
            "qwen2",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": None},
            {"window": {"layer_types": ["full_attention"] * 2}},
        ),
        Variant("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        Variant("smollm3", "smollm3", {"no_rope_layers": [1, 0]}, {"NoPE": {"no_rope_layers": [1, 1]}}),
        Variant("phi3", "phi3", {"sliding_window": WINDOW}, {"window": {"sliding_window": None}}),
        Variant(
            "phi3-partial",
            "phi3",
            {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
            {"part": {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}}},
        ),
        Variant(
            "gemma2",
            "gemma2",
            {
                "tie_word_embeddings": True, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 64,
            },
            {
                "window": {"layer_types": ["full_attention"] * 2},
                "order of windows": {"layer_types": ["full_attention", "sliding_attention"]},
                "attention softcap": {"attn_logit_softcapping": None},
                "logit softcap": {"final_logit_softcapping": None},
                "scale": {"query_pre_attn_scalar": 16},
                "activation": {"hidden_activation": "silu"},
            },
        ),
        Variant(
            "gemma3",
            "gemma3_text",
            {
                "tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 64,
                "rope_parameters": _GEMMA3_ROPES, "layer_types": ["sliding_attention", "full_attention"],
            },
            {
                "window": {"sliding_window": 2048},
                "scale": {"query_pre_attn_scalar": 16},
                "local base": {"rope_parameters": dict.fromkeys(_GEMMA3_ROPES, _GEMMA3_ROPES["full_attention"])},
                "global base": {"rope_parameters": dict.fromkeys(_GEMMA3_ROPES, PLAIN_ROPE)},
            },
        ),
        Variant("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
        Variant("granite", "granite", _GRANITE, {name: {name: 1.0} for name in _GRANITE}),
        _rope("llama", "linear", rope_type="linear", factor=4.0, original_max_position_embeddings=None),
        Variant(
            "dynamic",
            "llama",
            {"max_position_embeddings": 32, "rope_parameters": PLAIN_ROPE | {"rope_type": "dynamic", "factor": 4.0}},
            {"kind": {"rope_parameters": PLAIN_ROPE}},
        ),
        _rope("llama", "yarn", **_YARN),
        _rope("qwen3", "yarn-own-factor", **_YARN, attention_factor=1.4, truncate=False, beta_fast=8.0, beta_slow=2.0),
        _rope("llama", "yarn-mscale", **_YARN, mscale=1.0, mscale_all_dim=0.5),
        _rope(
            "llama", "llama3", rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        _rope("phi3", "longrope-48", rope_type="longrope", original_max_position_embeddings=48, **_FACTORS),
        _rope(
            "phi3", "phi4", rope_type="longrope", original_max_position_embeddings=48, partial_rotary_factor=0.5,
            short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.0, 2.0, 8.0, 20.0],
        ),
        _rope("phi3", "longrope-80", rope_type="longrope", original_max_position_embeddings=80, **_FACTORS),
    )
}  # fmt: skip
"""By name."""


def write_variant(variant: Variant, folder: Path) -> Path:
    """Write the float32 checkpoint as transformers does, with the tokenizer of tests/data/llama-fp16."""
    torch.manual_seed(0)
    fields = {name: value for name, value in (_COMMON | variant.changes).items() if value is not None}
    config = AutoConfig.for_model(variant.family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, values in model.named_parameters():
            _set_values(name, values, less_one="gemma" in variant.family)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DATA / "llama-fp16" / file, folder / file)
    return folder


def _set_values(name: str, values: torch.Tensor, *, less_one: bool) -> None:
    """Norms away from one, biases away from zero, matrices on the grid they are held in."""
    if "norm" in name:
        values.uniform_(-0.5, 0.5) if less_one else values.uniform_(0.5, 1.5)
    elif name.endswith(".bias"):
        values.normal_(0, 0.5)
    else:
        bits = 8 if "embed" in name or "lm_head" in name else 4
        values.copy_(torch.from_numpy(quantize_blocks(values.numpy(), bits=bits, group=32).dequantize()))
