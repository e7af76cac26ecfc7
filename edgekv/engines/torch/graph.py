"""One token through the model over fixed buffers, with sampling on the device; with Triton captured and replayed.

Everything a step reads that changes from token to token lies in tensors that are allocated once: the id, the three
integers of `cache.Place`, the angles, the temperature and the random numbers. So one captured graph serves every step,
and many tokens can be decoded without reading any of them back. Uncaptured (on a CPU, or with plain kernels, which take
their places from the host) the same function runs.

Sampling is by Gumbel's trick: the argmax of logit / temperature - log(-log(u)) over uniform u has the softmax's
probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WARM_UP_RUNS = 2  # before a capture: kernels are compiled and workspaces allocated then


class DecodeStep:
    """See the module.

    Attributes:
        token: [1, 1] int64, the id that the next step runs, and after it the one it chose.
        logits: [V] float32 of the last step. check: a sum of all logits so far, not finite if one was not.
        temperature: [1] float32; 0 takes the likeliest. uniform: [V] float32 random numbers of the next step.
    """

    def __init__(self, model: Any, vocab_size: int, device: torch.device, *, captured: bool) -> None:
        self._model, self._captured = model, captured
        self._graph: Any = None
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.logits = torch.zeros(vocab_size, device=device)
        self.check = torch.zeros((), device=device)
        self.temperature = torch.zeros(1, device=device)
        self.uniform = torch.full((vocab_size,), 0.5, device=device)

    def start(self, token: int, temperature: float) -> None:
        """The next step runs this token."""
        self.token.fill_(token)
        self.temperature.fill_(temperature)
        self.check.zero_()

    def run(self) -> None:
        """One step; the cache's place and angles must have been set for it."""
        self.capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()

    def capture(self) -> None:
        """Record the step, once, so that `run` replays it. Writes the row at the place that is set, like a step.

        The warm-up runs go through a stream of their own, as torch.cuda.graph asks for.
        """
        if not self._captured or self._graph is not None:
            return
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        token = self.token.clone()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                self._compute()
                self.token.copy_(token)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        self.token.copy_(token)
        self.check.zero_()
        self._graph = graph

    def _compute(self) -> None:
        self.logits.copy_(self._model(input_ids=self.token, use_cache=False).logits[0, -1])
        self.check.add_(self.logits.sum())
        self.token.copy_(sample(self.logits, self.temperature, self.uniform).view(1, 1))


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """The id [1] chosen from logits [V]; see the module. A temperature of 0 takes the likeliest, whatever `uniform`."""
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
    return (logits + temperature * gumbel).argmax(-1, keepdim=True)
