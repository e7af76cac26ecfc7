"""The sampling that a model's makers recommend beside its weights, as fields of `SamplingOptions`.

transformers keeps it in generation_config.json, GGUF in `general.sampling.*` (the keys of gguf-py). A chat takes it
unless told otherwise. What edgekv has no option for, or would refuse, is left out: weights are no worse for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import InvalidOption
from edgekv.sampling import SamplingOptions

Sampling = dict[str, float]

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def from_generation_config(config: Mapping[str, Any]) -> Sampling:
    """Of a generation_config.json; one that says `do_sample: false` recommends the most likely token."""
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    return _usable({name: config.get(name) for name in FIELDS})


def from_gguf(read: Callable[[str], float | None]) -> Sampling:
    """Of a GGUF file's metadata, whose numbers `read` gives; they are float32, so 0.7 would not be 0.7."""
    found = {name: read(key) for name, key in GGUF_KEYS.items()}
    return _usable({name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in found.items()})


def _usable(found: Mapping[str, Any]) -> Sampling:
    """What is a number, and one that `SamplingOptions` takes."""
    return {name: value for name, value in found.items() if _is_usable(name, value)}


def _is_usable(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        SamplingOptions(**{name: value})  # type: ignore[arg-type]
    except InvalidOption:
        return False
    return True
