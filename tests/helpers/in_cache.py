"""transformers' own model as the reference of the eviction policy, for every family: positions are those in the cache.

Everything a family computes stays transformers': its norms, projections, multipliers, masks' windows, softcaps. Only
two things are put in between. The rotation is put off: the model is handed its queries and keys back as they were
(`_defer`), and attention, which keeps the unrotated keys of what is in the cache, rotates each by the slot it lies in
at that moment and each query by its own. And attention itself is written out here, over that cache, with the scale,
softcap and window that the model passes.

The cosines and sines are those that transformers makes for a text as long as the cache, which is what edgekv fixes RoPE
kinds to that depend on a length. They are made in float64 from its inverse frequencies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.schedule import leaving

_NAME = "in_cache"


class InCacheModel:
    """A transformers model over a cache that holds `capacity` tokens, with `pinned` of them for ever."""

    def __init__(self, model: Any, capacity: int, stride: int = 0, pinned: int = 0) -> None:
        self.model, self.config = model.double().eval(), model.config
        self.capacity, self.stride, self.pinned = capacity, stride, pinned
        self.held: list[int] = []  # numbers of the tokens in the cache, counted from the first ever
        self.seen = 0
        self.keys: dict[int, torch.Tensor] = {}  # of each layer, unrotated, [K, n, D]
        self.values: dict[int, torch.Tensor] = {}
        self._module = importlib.import_module(type(model).__module__)
        self._apply: Callable[..., Any] = self._module.apply_rotary_pos_emb
        self._turns = False  # whether the layer that is being run rotates
        self.config._attn_implementation = _NAME
        self._tables = {kind: self._table(kind) for kind in self._kinds()}

    def run(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each token, [T, V]."""
        parts: list[torch.Tensor] = []
        while tokens:
            self._make_room()
            step = min(len(tokens), self.capacity - len(self.held))
            parts.append(self._run(tokens[:step]))
            tokens = tokens[step:]
        return torch.cat(parts)

    def rotated(self, layer: int, first_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the cache, the keys rotated to slot + first_position."""
        positions = torch.arange(len(self.held)) + first_position
        attention = self.model.model.layers[layer].self_attn
        keys = self.keys[layer]
        if getattr(attention, "use_rope", True):
            keys = self._rotate(keys, self._angles(self._kind(attention), positions))
        return keys, self.values[layer]

    def _make_room(self) -> None:
        gone = leaving(self.held, self.capacity, self.stride, self.pinned)
        if gone:
            keep = [slot for slot, number in enumerate(self.held) if number not in gone]
            self.held = [self.held[slot] for slot in keep]
            for rows in (self.keys, self.values):
                for layer in rows:
                    rows[layer] = rows[layer][:, keep]

    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        self.held += range(self.seen, self.seen + len(tokens))
        self.seen += len(tokens)
        with torch.no_grad(), self._patched():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    @contextmanager
    def _patched(self) -> Iterator[None]:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)
        with mock.patch.object(self._module, "apply_rotary_pos_emb", self._defer):
            yield

    def _defer(self, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._turns = True
        return q, k

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer over its cache; query [1, H, T, D], key and value [1, K, T, D]."""
        layer, turns, self._turns = module.layer_idx, self._turns, False
        for rows, new in ((self.keys, key[0]), (self.values, value[0])):
            rows[layer] = torch.cat([rows[layer], new], 1) if layer in rows else new
        k, v, q = self.keys[layer], self.values[layer], query[0]
        slots = torch.arange(k.shape[1])
        newest = slots[-q.shape[1] :]
        if turns:
            table = self._tables[self._kind(module)]
            k, q = self._rotate(k, table[:, slots]), self._rotate(q, table[:, newest])
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * given["scaling"]
        if given.get("softcap"):
            scores = (scores / given["softcap"]).tanh() * given["softcap"]
        hidden = slots[None, :] > newest[:, None]
        if given.get("sliding_window"):
            hidden |= slots[None, :] <= newest[:, None] - given["sliding_window"]
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)[None], None

    def _rotate(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """By transformers' own function; x [heads, n, D], table [2, n, channels]."""
        cos, sin = table[:, None]
        return self._apply(x[None], x[None], cos, sin)[0][0]

    def _kinds(self) -> list[str]:
        """The layer types that have a RoPE of their own; [""] where all have the same."""
        nested = self.config.rope_parameters.get("full_attention")
        return sorted(set(self.config.layer_types)) if isinstance(nested, dict) else [""]

    def _kind(self, module: Any) -> str:
        return module.layer_type if "" not in self._tables else ""

    def _table(self, kind: str) -> torch.Tensor:
        return self._angles(kind, torch.arange(self.capacity))

    def _angles(self, kind: str, positions: torch.Tensor) -> torch.Tensor:
        """cos and sin of positions, [2, n, channels], with the frequencies of a text that fills the cache."""
        rotary, prefix = self.model.model.rotary_emb, f"{kind}_" if kind else ""
        rotary(torch.zeros(1), torch.arange(self.capacity)[None], *([kind] if kind else []))
        angles = positions.double()[:, None] * getattr(rotary, f"{prefix}inv_freq").double()
        angles = torch.cat([angles, angles], -1)
        return torch.stack([angles.cos(), angles.sin()]) * getattr(rotary, f"{prefix}attention_scaling")


def load(folder: Path, **changes: Any) -> Any:
    """transformers' model from a checkpoint, in float32, with plain attention; `changes` replace config fields."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **changes
    ).eval()
