"""ModelSpec: everything edgekv knows about a model's architecture, as one frozen value.

A foreign config is translated into it once, at the border (`families.py`, `weights/gguf.py`); nothing further in reads
a config dictionary. Letters used for shapes all over the project: B batch (1), T new tokens, C slots, H query heads,
K key/value heads, D head size, L layers, V vocabulary, E hidden size, F feed-forward size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from edgekv.errors import BadCheckpoint


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer), half-split layout.

    `kind` is "default", "linear" or "llama3"; the remaining fields are the parameters of the latter two under their
    names in the published configs.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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
            if not 0 < getattr(self, name) < 1 << 31:
                raise BadCheckpoint(f"The model's {name} is {getattr(self, name)}, which no model has.")
        if self.num_heads % self.num_kv_heads:
            raise BadCheckpoint(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )
        if self.head_dim % 2:
            raise BadCheckpoint(f"The head size is {self.head_dim}; rotary embeddings need an even one.")

    @property
    def qkv_rows(self) -> int:
        """Output rows of the packed query, key and value projection: (H + 2 K) D."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """The inverse of `to_json`.

        Raises:
            BadCheckpoint: a field is missing, unknown or impossible.
        """
        try:
            values = dict(data)
            values["rope"] = RopeSpec(**values["rope"])
            values["eos_ids"] = tuple(values["eos_ids"])
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise BadCheckpoint(f"The model description does not have the fields edgekv writes: {error}.") from None

    def digest(self) -> str:
        """A short hash of the geometry, part of the fingerprint of scales and sessions."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]
