"""A published checkpoint -> transformers' model of its family, its linear layers made from the publisher's integers.

transformers builds the model on the meta device, which costs nothing; then every parameter is made from what the
readers of edgekv/weights hand out, one matrix at a time, and put where it belongs. Rows of Q and K come in the order
that edgekv rotates them in, which is why transformers' own loading would not do even for floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgekv.engines.torch.attention import INTERFACE, register
from edgekv.engines.torch.linear import dense, linear
from edgekv.errors import UnsupportedModel
from edgekv.model.spec import ModelSpec
from edgekv.weights.base import BlockWeight, Held, WeightSource, same_order, stack_rows
from edgekv.weights.names import hub_place, layer_parts


@dataclass(frozen=True)
class Published:
    """A checkpoint as the engine reads it.

    Attributes:
        path: the folder or GGUF file; its config is read by transformers.
        source: norms, biases and the spec. matrix: a linear layer by name, as it is to be held.
    """

    path: Path
    source: WeightSource
    matrix: Callable[[str], Held]


def load_model(published: Published, dtype: torch.dtype, device: torch.device) -> Any:
    """The model, ready for `attention.connect`.

    Raises:
        UnsupportedModel: transformers has no such model, or it has a part that edgekv does not know.
    """
    register()
    model = _empty_model(published, dtype)
    filler = _Filler(published, dtype, device)
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _make_buffers(model, module, device)
        if isinstance(module, nn.Linear):
            if name != "lm_head" or not published.source.spec.tied_embeddings:
                model.set_submodule(name, filler.linear(name, has_bias=module.bias is not None))
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            module.weight = filler.parameter(name, module)  # an embedding or a norm
    if published.source.spec.tied_embeddings:
        model.lm_head.weight = model.base_model.embed_tokens.weight
    return model.eval()


def source_names(spec: ModelSpec) -> dict[str, list[str]]:
    """transformers' name of each module -> the matrices or the norm that it holds, in order of its rows."""
    names = ["embed", "norm", "head"]
    names += [f"{layer}.{part}" for layer in range(spec.num_layers) for part in layer_parts(spec)]
    modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        modules[hub_place(spec, name, "model").module].append(name)
    return modules


class _Filler:
    """Makes modules and parameters from what the readers hand out."""

    def __init__(self, published: Published, dtype: torch.dtype, device: torch.device) -> None:
        self._published, self._dtype, self._device = published, dtype, device
        self._names = source_names(published.source.spec)

    def linear(self, module: str, *, has_bias: bool) -> nn.Module:
        names = self._of(module)
        bias = torch.cat([self._vector(f"{name}.bias") for name in names]) if has_bias else None
        return linear(_joined([self._published.matrix(name) for name in names]), bias, self._dtype, self._device)

    def parameter(self, name: str, module: nn.Module) -> nn.Parameter:
        (own,) = self._of(name)
        if isinstance(module, nn.Embedding):
            values = dense(self._published.matrix(own), self._dtype)
        else:
            values = (self._vector(own) - _constant_factor(module)).to(self._dtype)
        return nn.Parameter(values.to(self._device), requires_grad=False)

    def _of(self, module: str) -> list[str]:
        if module not in self._names:
            raise UnsupportedModel(f"The model has a part {module}, which edgekv's torch engine does not know.")
        return self._names[module]

    def _vector(self, name: str) -> Tensor:
        return torch.tensor(self._published.source.vector(name))


def _constant_factor(norm: nn.Module) -> float:
    """What a norm adds to its weight: 1 in Gemma, 0 elsewhere. The readers hand out the sum."""
    return 1.0 if type(norm).__name__.startswith("Gemma") else 0.0


def _joined(parts: list[Held]) -> Held:
    """One matrix from several with the same input."""
    if len(parts) == 1:
        return parts[0]
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(blocks) == len(parts) and same_order(blocks):
        return stack_rows(blocks)
    return np.concatenate([np.asarray(dense(part, torch.float32)) for part in parts])


def _make_buffers(model: Any, module: nn.Module, device: torch.device) -> None:
    """Buffers that are not stored in checkpoints get the values that the model's own code gives them."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty_like(buffer, device=device))
    model._init_weights(module)


def _empty_model(published: Published, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = published.path
    try:
        if path.is_file():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot read the config of {path}: {error}") from None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.tie_word_embeddings = published.source.spec.tied_embeddings
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(config, attn_implementation=INTERFACE, dtype=dtype)
