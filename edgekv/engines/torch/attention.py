"""Where transformers' models meet the cache: an attention function in their interface, and rotary angles of our own.

Every family's own code runs: projections, norms of queries and keys, scaling, window, softcap. Two things are taken
from it. Its rotary embedding is replaced by one of angle 0 (`NoRotation`), so that queries and keys arrive unrotated;
and its attention function is `attend` below, which rotates them, stores the keys and reads the cache.

Sinks + window, exactly (kv/window.py), without moving a row: a window key keeps the angle of its own number, and is met
by queries at theirs. A pinned key keeps the angle of its own slot, and is met by queries turned to their number less
the evicted tokens: it thus sits just before the window, as in StreamingLLM. So each query is rotated twice, and one
softmax goes over both parts. Angles are made in float64 on the host, for as many tokens as one run has.

Where keys are stored less a constant c (kv/scales.py), the score that they lack is q . R(j - t) c, for a key in place j
and a token in place t: pinned or not, they stand j - t apart. So it is the product of the query turned to t, which is
what pinned keys meet, and c turned to j: angles of the places (cache.Turns), which no eviction changes, serve all
layers. What values are stored without is added to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgekv.engines.rope import inverse_frequencies, rope_tables, settled_ropes
from edgekv.engines.torch.cache import LayerRows, Place
from edgekv.engines.torch.kernels import Kernels
from edgekv.model.spec import ModelSpec

INTERFACE = "edgekv"
"""The name under which transformers finds the attention function."""


def register() -> None:
    """Make the attention function known to transformers; doing it twice is fine."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    layer: LayerAttention = module.edgekv  # type: ignore[assignment]
    out = layer(query[0], key[0], value[0], scaling, sliding_window, softcap)
    return out.transpose(0, 1)[None].to(query.dtype), None


class Angles:
    """cos and sin of one run's tokens for each of the model's rotary embeddings, at their own numbers and as pinned
    keys meet them.

    Args:
        capacity: of the cache, which settles embeddings that depend on a length. chunk: the most tokens of a run.
    """

    def __init__(self, spec: ModelSpec, capacity: int, chunk: int, device: torch.device) -> None:
        self._size = spec.head_dim
        self._ropes = settled_ropes(spec, capacity)
        self._buffers = torch.zeros((len(self._ropes), 4, chunk, spec.head_dim // 2), device=device)
        self._count = 0

    def set(self, place: Place, count: int) -> None:
        """For tokens in places past .. past+count-1; those in pinned places stand at the angles of their own slots."""
        self._count = count
        slots = max(0, min(place.pinned - place.past, count)) if place.evicted else count
        for rope, buffer in zip(self._ropes, self._buffers, strict=True):
            pinned = np.stack(rope_tables(rope, self._size, place.past, count))
            window = rope_tables(rope, self._size, place.past + slots + place.evicted, count - slots)
            own = np.concatenate([pinned[:, :slots], np.stack(window)], axis=1)
            buffer[:, :count].copy_(torch.from_numpy(np.concatenate([own, pinned])))

    def rotate(self, rows: Tensor, rope: int, *, pinned: bool = False) -> Tensor:
        """Rows [..., T, D] in float32, turned to their tokens' angles by embedding number `rope`; -1: not at all."""
        if rope < 0:
            return rows.float()
        cos, sin = self._buffers[rope, 2:, : self._count] if pinned else self._buffers[rope, :2, : self._count]
        return rotate(rows.float(), cos, sin)

    def moved_on(self, rows: Tensor, rope: int, places: int) -> Tensor:
        """Rotated rows [..., D] on the host, turned by so many places more."""
        if rope < 0:
            return rows
        turn = torch.from_numpy(places * inverse_frequencies(self._ropes[rope], self._size))
        return rotate(rows, turn.cos().float(), turn.sin().float())


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of rows [..., T, D] by cos and sin [T, D/2]."""
    low, high = rows.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class LayerAttention:
    """What one attention module of the model uses in the place of its own function. rope: see Angles.rotate."""

    def __init__(self, rows: LayerRows, place: Place, angles: Angles, rope: int, kernels: Kernels) -> None:
        self._rows, self._place, self._kernels = rows, place, kernels
        self._angles, self._rope = angles, rope

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Store the new rows and attend: query [H, T, D], key and value [K, T, D] -> [H, T, D]."""
        kept, values = _less(key, self._rows.keys.centre), _less(value, self._rows.values.centre)
        self._kernels.store(self._angles.rotate(kept, self._rope), values, self._rows, self._place)
        queries = self._angles.rotate(query, self._rope)
        pinned = self._angles.rotate(query, self._rope, pinned=True)
        return self._kernels.attend(
            queries, pinned, self._rows, self._place, scaling=scaling, window=window, softcap=softcap
        )


def _less(rows: Tensor, centre: Tensor | None) -> Tensor:
    """What is left of rows [K, T, D] without a centre [K, D]."""
    return rows if centre is None else rows.float() - centre[:, None]


class NoRotation(nn.Module):
    """Stands for a model's rotary embedding: angle 0 everywhere."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self._head_dim = head_dim

    def forward(self, hidden: Tensor, *positions: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """cos = 1 and sin = 0, each [1, T, D]."""
        shape = (1, hidden.shape[1], self._head_dim)
        return hidden.new_ones(shape), hidden.new_zeros(shape)


def connect(model: nn.Module, spec: ModelSpec, attentions: Sequence[LayerAttention]) -> None:
    """Give every attention module its part of the cache, and every rotary embedding its replacement."""
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2].startswith("rotary_emb"):
            model.set_submodule(name, NoRotation(spec.head_dim))
        elif hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups"):
            module.edgekv = attentions[module.layer_idx]
