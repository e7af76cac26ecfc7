"""Perplexity of a token stream through a cache, evicting as a chat would.

Each token is predicted from what the cache holds at that moment; the loss is the natural logarithm's. Streams may be
any length: memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import Logits
from edgekv.generate import Timeline

STEP = 64
"""Tokens whose logits are held at once: 64 x 49152 float32 is 12 MiB."""


@dataclass(frozen=True)
class StreamLoss:
    """Losses of a stream."""

    losses: npt.NDArray[np.float64]  # one a predicted token, in nats
    evicted: int

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return float(np.exp(self.losses.mean()))

    def blocks(self, size: int = 2000) -> list[float]:
        """Perplexity of each block of `size` tokens along the stream."""
        return [float(np.exp(self.losses[i : i + size].mean())) for i in range(0, len(self.losses), size)]


def stream_loss(
    timeline: Timeline, tokens: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None
) -> StreamLoss:
    """Run a stream from an empty cache and return the loss of every token after the first."""
    timeline.reset()
    losses: list[npt.NDArray[np.float64]] = []
    for start in range(0, len(tokens) - 1, STEP):
        part = tokens[start : min(start + STEP, len(tokens) - 1)]
        logits, _ = timeline.append(part, all_logits=True)  # [T, V]
        losses.append(token_losses(logits, tokens[start + 1 : start + 1 + len(part)]))
        progress(start + len(part), len(tokens) - 1)
    return StreamLoss(np.concatenate(losses), timeline.window.evicted)


def token_losses(logits: Logits, targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """-log p(target) of each row, [T, V] and [T] -> [T]."""
    return np.array([_loss(row, target) for row, target in zip(logits, targets, strict=True)], np.float64)


def _loss(logits: Logits, target: int) -> float:
    shifted = logits - logits.max()
    return float(np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[target])
