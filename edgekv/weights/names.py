"""Tensors by edgekv's names (`WeightSource`): their shapes, and where a Hugging Face checkpoint keeps them.

Families differ in three ways: Phi-3 packs Q, K, V and gate, up into one matrix each; Gemma's norm after attention has
the name that elsewhere belongs to the norm before the feed-forward; a Gemma that also sees keeps its language model one
level deeper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgekv.model.spec import ModelSpec
from edgekv.weights.base import Order

ROOTS = {
    "model": "lm_head",
    "language_model.model": "language_model.lm_head",
    "model.language_model": "lm_head",
}
"""What the names of a language model's tensors begin with, and its output head."""

_TOP = {"embed": "embed_tokens", "norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_WITH_POST_NORMS = _LAYER | {
    "post_attn_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PACKED = {"q": "self_attn.qkv_proj", "gate": "mlp.gate_up_proj"}  # by the first of the packed


@dataclass(frozen=True)
class HubPlace:
    """A module of a Hugging Face checkpoint, its shape, and which of its rows are meant; None: all."""

    module: str
    shape: tuple[int, ...]
    rows: range | None = None


def shape(spec: ModelSpec, name: str) -> tuple[int, ...]:
    """The shape of a matrix [out, in], of a norm, or of a bias."""
    if name.endswith(".bias"):
        return shape(spec, name.removesuffix(".bias"))[:1]
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (spec.ffn_size, hidden),
        "up": (spec.ffn_size, hidden),
        "down": (hidden, spec.ffn_size),
        "embed": (spec.vocab_size, hidden),
        "head": (spec.vocab_size, hidden),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
    }
    return sizes.get(name.rpartition(".")[2], (hidden,))


def packed_with(part: str) -> tuple[str, ...]:
    """The matrices that Phi-3 packs into one together with this, in the order of their rows; () if none."""
    return next((group for group in (("q", "k", "v"), ("gate", "up")) if part in group), ())


def packed_rows(spec: ModelSpec, part: str) -> tuple[int, range]:
    """How many rows the packed matrix has, and which of them are this part's."""
    together = packed_with(part)
    counts = [shape(spec, other)[0] for other in together]
    index = together.index(part)
    first = sum(counts[:index])
    return sum(counts), range(first, first + counts[index])


def turning_first(spec: ModelSpec, name: str) -> Order | None:
    """The rows of Q or K in the order in which `RopeSpec` wants a head that turns in part; None: as they are."""
    if not spec.rope.channels or not name.endswith((".q", ".k")):
        return None
    heads = np.arange(0, shape(spec, name)[0], spec.head_dim)
    return np.asarray(heads[:, None] + spec.rope.half_split_order(spec.head_dim), np.intp).reshape(-1)


def layer_parts(spec: ModelSpec) -> tuple[str, ...]:
    """What every layer of this model has, without its biases."""
    parts = ["attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down"]
    parts += ["q_norm", "k_norm"] if spec.attention.qk_norm else []
    parts += ["post_attn_norm", "post_ffn_norm"] if spec.block.post_norms else []
    return tuple(parts)


def hub_place(spec: ModelSpec, name: str, root: str) -> HubPlace:
    """Where a checkpoint whose language model lies under `root` keeps a matrix or norm."""
    layer, _, part = name.rpartition(".")
    if part == "head":
        return HubPlace(ROOTS[root], shape(spec, name))
    if not layer:
        return HubPlace(f"{root}.{_TOP[part]}", shape(spec, name))
    base = f"{root}.layers.{layer}"
    if spec.family == "phi3" and packed_with(part):
        count, rows = packed_rows(spec, part)
        return HubPlace(f"{base}.{_PACKED[packed_with(part)[0]]}", (count, spec.hidden_size), rows)
    names = _WITH_POST_NORMS if spec.block.post_norms else _LAYER
    return HubPlace(f"{base}.{names[part]}", shape(spec, name))
