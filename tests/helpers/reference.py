"""The float model that defines the eviction policy: StreamingLLM (arXiv 2309.17453), written out plainly in torch.

Every layer keeps the *unrotated* keys of what is in the cache. At each step each kept key is rotated by the slot it
lies in at that moment and the query by the slot of the newest token: positions are positions in the cache. Nothing of
this is clever, nothing is taken from edgekv: inverse frequencies come from transformers' own rotary embedding, weights
from a state dict, and the schedule is helpers/schedule.py.

Tokens between two evictions may run together: no slot changes in between, so the definition is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from helpers.schedule import leaving

State = dict[str, torch.Tensor]


@dataclass
class SinkModel:
    """A llama or qwen2 decoder over a cache that holds `capacity` tokens; None: as many as come."""

    config: PretrainedConfig
    state: State
    capacity: int | None = None
    stride: int = 0
    pinned: int = 0
    dtype: torch.dtype = torch.float64
    activation_block: int = 0  # round the input of every linear layer to int8, one scale a block of so many channels
    held: list[int] = field(default_factory=list)  # numbers of the tokens in the cache, counted from the first ever
    seen: int = 0

    def __post_init__(self) -> None:
        use_threads(self.config)
        self.state = {name: tensor.to(self.dtype) for name, tensor in self.state.items()}
        config = self.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.frequencies = LlamaRotaryEmbedding(config).inv_freq.double()
        empty = torch.zeros(self.kv_heads, 0, self.size, dtype=self.dtype)
        self.keys = [empty for _ in range(config.num_hidden_layers)]  # unrotated, each [K, n, D]
        self.values = list(self.keys)

    def run(self, tokens: Sequence[int], turn_starts: Sequence[int] = ()) -> torch.Tensor:
        """Logits after each token, [T, V]."""
        parts: list[torch.Tensor] = []
        while tokens:
            self._make_room(turn_starts)
            step = len(tokens) if self.capacity is None else min(len(tokens), self.capacity - len(self.held))
            parts.append(self._run(tokens[:step]))
            tokens = tokens[step:]
        return torch.cat(parts)

    def forget(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        self.held, self.seen = self.held[: len(self.held) - count], self.seen - count
        self.keys = [rows[:, : len(self.held)] for rows in self.keys]
        self.values = [rows[:, : len(self.held)] for rows in self.values]

    def rotated(self, layer: int, first_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the cache, the keys rotated to slot + first_position."""
        slots = torch.arange(len(self.held)) + first_position
        return self._rotate(self.keys[layer], slots), self.values[layer]

    def _make_room(self, turn_starts: Sequence[int]) -> None:
        gone = leaving(self.held, self.capacity, self.stride, self.pinned, turn_starts) if self.capacity else []
        if gone:
            keep = [slot for slot, number in enumerate(self.held) if number not in gone]
            self.held = [self.held[slot] for slot in keep]
            self.keys = [rows[:, keep] for rows in self.keys]
            self.values = [rows[:, keep] for rows in self.values]

    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        past = len(self.held)
        self.held += range(self.seen, self.seen + len(tokens))
        self.seen += len(tokens)
        x = self.state["model.embed_tokens.weight"][list(tokens)]  # [T, E]
        for layer in range(self.config.num_hidden_layers):
            base = f"model.layers.{layer}"
            x = x + self._attention(layer, self._norm(x, f"{base}.input_layernorm"), past)
            y = self._norm(x, f"{base}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(y, f"{base}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(y, f"{base}.mlp.up_proj"), f"{base}.mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _attention(self, layer: int, x: torch.Tensor, past: int) -> torch.Tensor:
        count, base = len(x), f"model.layers.{layer}.self_attn"

        def heads(part: str, number: int) -> torch.Tensor:
            return self._linear(x, f"{base}.{part}_proj").view(count, number, self.size).transpose(0, 1)

        self.keys[layer] = torch.cat([self.keys[layer], heads("k", self.kv_heads)], 1)
        self.values[layer] = torch.cat([self.values[layer], heads("v", self.kv_heads)], 1)
        slots = torch.arange(past + count)
        k = self._rotate(self.keys[layer], slots).repeat_interleave(self.heads // self.kv_heads, 0)
        v = self.values[layer].repeat_interleave(self.heads // self.kv_heads, 0)
        q = self._rotate(heads("q", self.heads), slots[past:])
        scores = q @ k.transpose(1, 2) / self.size**0.5  # [H, T, n]
        scores = scores.masked_fill(slots[None, None, :] > slots[past:][None, :, None], -torch.inf)
        mixed = scores.softmax(-1) @ v  # [H, T, D]
        return self._linear(mixed.transpose(0, 1).reshape(count, -1), f"{base}.o_proj")

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.double()[:, None] * self.frequencies  # [n, D/2]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        first, second = x[..., : self.size // 2], x[..., self.size // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = self._rounded(x) @ self.state[f"{name}.weight"].T
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """What ONNX Runtime's MatMulNBits does to its input at accuracy level 4: symmetric int8 by blocks."""
        if not self.activation_block:
            return x
        blocks = x.reshape(*x.shape[:-1], -1, self.activation_block)
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return (blocks.div(scale).round() * scale).reshape(x.shape)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.state[f"{name}.weight"]


def use_threads(config: PretrainedConfig) -> None:
    """Threads for torch: a tiny model is faster on one, above all where other programs run."""
    torch.set_num_threads(1 if config.hidden_size < 512 else 2)


def transformers_model(config: PretrainedConfig, state: State) -> Any:
    """transformers' own model with these weights, float32."""
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen2ForCausalLM
    config._attn_implementation = "eager"
    use_threads(config)
    model = kind(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return model


def relative_errors(found: Any, wanted: Any) -> torch.Tensor:
    """|found - wanted| / |wanted| of each row, in float64."""
    a, b = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    assert a.shape == b.shape
    return (a - b).norm(dim=-1) / b.norm(dim=-1)
