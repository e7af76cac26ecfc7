"""What touches the rows of a cache: `store` quantises and writes new ones, `attend` reads them.

twin.py is the plain-torch version: it runs on any device, is what a CPU runs, and is the oracle of the Triton kernels,
which have the same signatures.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from edgekv.engines.torch.cache import LayerRows, Place
from edgekv.model.spec import ModelSpec

KernelChoice = Literal["auto", "plain", "triton"]


class Kernels(Protocol):
    """One implementation.

    Attributes:
        captured: whether a CUDA graph of its launches serves other places, too: it reads them from the device.
    """

    captured: bool

    def store(self, keys: Tensor, values: Tensor, rows: LayerRows, place: Place) -> None:
        """Quantise new rows and write them, and the factors of those that have some, behind the filled ones.

        Args:
            keys (rotated), values: [K, T, D] of any float type, less their centres.
        """

    def attend(
        self,
        queries: Tensor,
        pinned_queries: Tensor,
        rows: LayerRows,
        place: Place,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of the T newest tokens, whose rows are stored already, over everything they may see, centres put
        back.

        Args:
            queries: [H, T, D] float32, at the tokens' own angles.
            pinned_queries: the same at the angles of their places, as pinned keys are to meet them, and the constants
                that keys are stored without.
            scaling: factor on the scores. window: a token sees so many places up to its own; None: all.
            softcap: scores become softcap * tanh(score / softcap).

        Returns:
            [H, T, D] float32.
        """


def open_kernels(choice: KernelChoice, spec: ModelSpec, capacity: int, device: torch.device) -> Kernels:
    """The kernels for a model's cache; "auto" takes Triton's where it is installed and finds matrix units."""
    if choice == "triton" or (choice == "auto" and _suits_triton(device)):
        from edgekv.engines.torch.kernels.fused import TritonKernels

        return TritonKernels(spec.num_heads, spec.num_kv_heads, spec.head_dim, capacity, device)
    from edgekv.engines.torch.kernels import twin

    return twin


def _suits_triton(device: torch.device) -> bool:
    """Below compute capability 8.0 Triton multiplies without matrix units and keeps most of a tile in memory."""
    return (
        device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )
