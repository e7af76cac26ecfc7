"""A published checkpoint -> transformers' model of its family, its linear layers made from the publisher's integers.

transformers builds the model on the meta device, which costs nothing; then every parameter is made from what the
readers of edgekv/weights hand out, one matrix at a time, and put where it belongs. Rows of Q and K come in the order
that edgekv rotates them in, which is why transformers' own loading would not do even for floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgekv.engines.torch.attention import INTERFACE, register
from edgekv.engines.torch.linear import dense, linear
from edgekv.errors import UnsupportedModel
from edgekv.weights.base import Held, WeightSource

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PARTS = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_TOP = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}


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
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            if name != "lm_head" or not published.source.spec.tied_embeddings:
                bias = _bias(published, name) if module.bias is not None else None
                model.set_submodule(name, linear(published.matrix(source_name(name)), bias, dtype, device))
        elif isinstance(module, nn.Embedding):
            module.weight = _parameter(dense(published.matrix(source_name(name)), dtype), device)
        elif hasattr(module, "weight") and isinstance(module.weight, nn.Parameter):
            module.weight = _parameter(_vector(published, source_name(name)).to(dtype), device)
    if published.source.spec.tied_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def source_name(module: str) -> str:
    """transformers' name of a module -> the name under which WeightSource knows its weight.

    Raises:
        UnsupportedModel: edgekv does not know such a part.
    """
    found = _LAYER.fullmatch(module)
    name = _TOP.get(module) if found is None else _PARTS.get(found[2])
    if name is None:
        raise UnsupportedModel(f"The model has a part {module}, which edgekv's torch engine does not know.")
    return name if found is None else f"{found[1]}.{name}"


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


def _parameter(values: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(values.to(device), requires_grad=False)


def _vector(published: Published, name: str) -> Tensor:
    return torch.tensor(published.source.vector(name))


def _bias(published: Published, module: str) -> Tensor:
    return _vector(published, f"{source_name(module)}.bias")
