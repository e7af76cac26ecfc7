"""ModelSpec: everything edgekv knows about a model's architecture, as one frozen value.

A foreign config is translated into it once, at the border (`families.py`, `weights/gguf.py`); nothing further in reads
a config dictionary. Letters used for shapes all over the project: B batch (1), T new tokens, C slots, H query heads,
K key/value heads, D head size, L layers, V vocabulary, E hidden size, F feed-forward size.

The plain block is Llama's: RMS norm, attention, residual, RMS norm, SiLU-gated feed-forward, residual. What a family
adds to it stands in three groups, each of which at its defaults changes nothing: AttentionSpec, BlockSpec, Multipliers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from edgekv.errors import BadCheckpoint

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh"]


MAX_LAYERS = 1 << 12
"""More than any model has: a damaged number must not become a long list."""

_LATER = {"later": True}
"""Marks a field that descriptions did not have from the beginning: it is written only where it says something, so that
the fingerprints of models without it stay as they were."""


def _written(value: Any) -> dict[str, Any]:
    """A dataclass as JSON values, without later fields at their defaults."""
    data = asdict(value)
    for each in fields(value):
        own = getattr(value, each.name)
        if each.metadata.get("later") and own == each.default:
            del data[each.name]
        elif hasattr(own, "__dataclass_fields__"):
            data[each.name] = _written(own)
    return data


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer), half-split layout: channel d turns with channel d + D/2.

    `dynamic` and `longrope` depend on how long a text can become; engines/rope.py fixes them for a cache.

    `channels` of a head turn (0: all), with the frequencies that a head of that size would have. edgekv keeps the pairs
    (d, d + D/2) all the same: a source hands out the rows of Q and K so that the turning channels come first in each
    half of the head (`half_split_order`), and the other pairs have frequency 0.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, dynamic, yarn, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn, longrope, dynamic: the context before it was stretched
    attention_factor: float = field(default=1.0, metadata=_LATER)  # on cosine and sine, so squared on the scores
    beta_fast: float = field(default=32.0, metadata=_LATER)  # yarn
    beta_slow: float = field(default=1.0, metadata=_LATER)  # yarn
    truncate: bool = field(default=True, metadata=_LATER)  # yarn: round the range of interpolated pairs outwards
    factors: tuple[float, ...] = field(default=(), metadata=_LATER)  # what each pair's frequency is divided by
    long_factors: tuple[float, ...] = field(default=(), metadata=_LATER)  # longrope: beyond original_max_position
    channels: int = field(default=0, metadata=_LATER)

    def half_split_order(self, head_dim: int) -> list[int]:
        """Which row of a head, as transformers orders them, stands at each place here."""
        turning = self.channels or head_dim
        first, rest = range(turning // 2), range(turning, head_dim)
        half = len(rest) // 2
        second = range(turning // 2, turning)
        return [*first, *rest[:half], *second, *rest[half:]]


@dataclass(frozen=True)
class AttentionSpec:
    """How attention departs from softmax(q k / sqrt(D)) over everything cached."""

    scale: float = 0.0  # of the scores; 0: 1 / sqrt(D)
    softcap: float = 0.0  # scores become cap tanh(score / cap); 0: they stay (Gemma 2)
    qk_norm: bool = False  # RMS norm of every query and key head before the rotation (Qwen3, Gemma 3)
    windows: tuple[int, ...] = ()  # how many newest tokens, itself included, a layer's query sees; 0: all. () is all 0


@dataclass(frozen=True)
class BlockSpec:
    """How a block departs from Llama's beside its attention."""

    activation: Activation = "silu"
    post_norms: bool = False  # RMS norms also on the results of attention and feed-forward (Gemma)
    output_bias: bool = field(default=False, metadata=_LATER)  # of attention's output projection
    ffn_bias: bool = field(default=False, metadata=_LATER)  # of the three matrices of the feed-forward


@dataclass(frozen=True)
class Multipliers:
    """Constant factors (Granite; Gemma scales its embedding) and Gemma 2's bound on the logits."""

    embedding: float = 1.0
    residual: float = 1.0  # on what attention and feed-forward add to the residual stream
    logits: float = 1.0
    logit_softcap: float = 0.0  # logits become cap tanh(logit / cap), after `logits`; 0: they stay


@dataclass(frozen=True)
class ModelSpec:
    """Geometry and constants of a decoder-only transformer with grouped-query attention."""

    family: str
    num_layers: int  # L
    hidden_size: int  # E
    ffn_size: int  # F
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    vocab_size: int  # V
    max_context: int
    rms_eps: float = 1e-5
    rope: RopeSpec = field(default_factory=RopeSpec)
    tied_embeddings: bool = False
    qkv_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    attention: AttentionSpec = field(default=AttentionSpec(), metadata=_LATER)
    local_rope: RopeSpec | None = field(default=None, metadata=_LATER)  # of layers with a window, if another (Gemma 3)
    nope_layers: tuple[int, ...] = field(default=(), metadata=_LATER)  # those without rotary embedding (SmolLM3)
    block: BlockSpec = field(default=BlockSpec(), metadata=_LATER)
    multipliers: Multipliers = field(default=Multipliers(), metadata=_LATER)

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "ffn_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_context",
        )
        for name in sizes:
            if not 0 < getattr(self, name) < (MAX_LAYERS if name == "num_layers" else 1 << 31):
                raise BadCheckpoint(f"The model's {name} is {getattr(self, name)}, which no model has.")
        if self.num_heads % self.num_kv_heads:
            raise BadCheckpoint(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )
        if self.head_dim % 2:
            raise BadCheckpoint(f"The head size is {self.head_dim}; rotary embeddings need an even one.")
        self._check_layers()

    def _check_layers(self) -> None:
        windows = self.attention.windows
        if windows and len(windows) != self.num_layers:
            raise BadCheckpoint(f"{len(windows)} attention windows are given for {self.num_layers} layers.")
        for rope in self.ropes:
            channels = rope.channels or self.head_dim
            if channels % 2 or not 0 < channels <= self.head_dim:
                raise BadCheckpoint(f"{channels} of {self.head_dim} channels of a head turn, which cannot be.")
            for factors in (rope.factors, rope.long_factors):
                if factors and len(factors) != channels // 2:
                    raise BadCheckpoint(f"{len(factors)} RoPE factors are given for {channels // 2} pairs of channels.")

    @property
    def qkv_rows(self) -> int:
        """Output rows of the packed query, key and value projection: (H + 2 K) D."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def biased(self) -> tuple[str, ...]:
        """The matrices of a layer that have a bias, by the names of WeightSource."""
        block = self.block
        return ("q", "k", "v") * self.qkv_bias + ("o",) * block.output_bias + ("gate", "up", "down") * block.ffn_bias

    @property
    def windows(self) -> tuple[int, ...]:
        """One number a layer: how many newest tokens its queries see; 0: all that is cached."""
        return self.attention.windows or (0,) * self.num_layers

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings there are; `rope_layers` says whose is which."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def rope_layers(self) -> tuple[int, ...]:
        """One number a layer: which of `ropes` it uses; -1: none."""
        local = 0 if self.local_rope is None else 1
        return tuple(
            -1 if layer in self.nope_layers else local if window else 0 for layer, window in enumerate(self.windows)
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values that `from_json` reads back."""
        return _written(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """The inverse of `to_json`.

        Raises:
            BadCheckpoint: a field is missing, unknown or impossible.
        """
        groups: dict[str, type] = {"rope": RopeSpec, "attention": AttentionSpec, "local_rope": RopeSpec}
        groups |= {"block": BlockSpec, "multipliers": Multipliers}
        try:
            values = {name: _tuple(value) for name, value in data.items()}
            for name in groups.keys() & values.keys():
                values[name] = groups[name](**{key: _tuple(value) for key, value in values[name].items()})
            values["rope"], values["eos_ids"]
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise BadCheckpoint(f"The model description does not have the fields edgekv writes: {error}.") from None

    def digest(self) -> str:
        """A short hash of the geometry, part of the fingerprint of scales and sessions."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def _tuple(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
