"""The rotary embedding in a config.json -> RopeSpec, under the names that configs of all ages use.

`rope_parameters` of newer configs, `rope_scaling` beside `rope_theta` of older ones; the kind stands in `rope_type` or
`type`. What transformers derives when a field is missing is derived here in the same way: the original context, the
attention factor of YaRN (0.1 ln factor + 1) and of LongRoPE (sqrt(1 + ln factor / ln original context)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.fields import Config, flag, integer, number, numbers
from edgekv.model.spec import RopeKind, RopeSpec

_KNOWN = frozenset(
    {
        "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale",
        "mscale_all_dim", "short_factor", "long_factor", "finetuned",
    }
)  # fmt: skip
"""Fields of a rope table; those of another kind than the table's are ignored, as transformers does."""


def rope_from_config(config: Config, head_dim: int, *, partial: bool = False) -> RopeSpec:
    """The rotary embedding of a config that has one for all layers.

    Args:
        partial: whether the family may turn a part of a head only.

    Raises:
        BadCheckpoint: a field is missing or impossible. UnsupportedModel: a kind or field that edgekv does not run.
    """
    table: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise BadCheckpoint(f"The config's rope_parameters is {table!r}, not a table of fields.")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise UnsupportedModel("The config's rope_parameters differ between layers, which edgekv does not run.")
    fraction = number(table, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if fraction != 1.0 and not partial:
        raise UnsupportedModel("The config's partial_rotary_factor is not 1, which edgekv does not run.")
    channels = int(head_dim * fraction)
    theta = number(table, "rope_theta", number(config, "rope_theta", 10_000.0))
    return rope_from_table(table, config, theta, 0 if channels == head_dim else channels)


def rope_from_table(table: Config, config: Config, theta: float, channels: int = 0) -> RopeSpec:
    """One table of fields, of a config that may hold its original context beside it; errors as above."""
    kind: Any = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(f"The config's rope type is {kind!r}; edgekv runs {', '.join(_KINDS)}.")
    unknown = [name for name, value in table.items() if name not in _KNOWN and value]
    if unknown:
        raise UnsupportedModel(f"The config's rope_parameters have a field {unknown[0]}, which edgekv does not know.")
    name: RopeKind = "longrope" if kind == "su" else kind  # type: ignore[assignment]
    return RopeSpec(theta=theta, kind=name, channels=channels, **_KINDS[kind](table, config))


def stretched_context(rope: RopeSpec, max_position: int) -> int:
    """The context that a RoPE is made for, in tokens: dynamic and YaRN say by how much they stretch the original."""
    if rope.kind not in ("dynamic", "yarn"):
        return max_position
    return max(max_position, int(rope.original_max_position * rope.factor))


def _default(table: Config, config: Config) -> dict[str, Any]:
    return {}


def _linear(table: Config, config: Config) -> dict[str, Any]:
    return {"factor": number(table, "factor")}


def _dynamic(table: Config, config: Config) -> dict[str, Any]:
    return {"factor": number(table, "factor"), "original_max_position": integer(config, "max_position_embeddings")}


def _llama3(table: Config, config: Config) -> dict[str, Any]:
    low, high = number(table, "low_freq_factor"), number(table, "high_freq_factor")
    if low >= high:
        raise BadCheckpoint(f"The config's low_freq_factor is {low}, which is not below high_freq_factor, {high}.")
    return {
        "factor": number(table, "factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": integer(table, "original_max_position_embeddings"),
    }


def _yarn(table: Config, config: Config) -> dict[str, Any]:
    original = _original_context(table, config)
    factor = number(table, "factor", integer(config, "max_position_embeddings") / original)
    fast, slow = number(table, "beta_fast", 32.0), number(table, "beta_slow", 1.0)
    if fast < slow:
        raise BadCheckpoint(f"The config's beta_fast is {fast}, which is below beta_slow, {slow}.")
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": number(table, "attention_factor", _yarn_attention_factor(table, factor)),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": flag(table, "truncate", default=True),
    }


def _yarn_attention_factor(table: Config, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if table.get("mscale") and table.get("mscale_all_dim"):
        return scale(number(table, "mscale")) / scale(number(table, "mscale_all_dim"))
    return scale(1.0)


def _longrope(table: Config, config: Config) -> dict[str, Any]:
    original = _original_context(table, config)
    factor = number(table, "factor", integer(config, "max_position_embeddings") / original)
    derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "original_max_position": original,
        "attention_factor": number(table, "attention_factor", derived),
        "factors": numbers(table, "short_factor"),
        "long_factors": numbers(table, "long_factor"),
    }


def _original_context(table: Config, config: Config) -> int:
    """Beside the table (Phi-3), in it, or else the whole context."""
    inside = integer(table, "original_max_position_embeddings", integer(config, "max_position_embeddings"))
    return integer(config, "original_max_position_embeddings", inside)


_KINDS: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3,
    "longrope": _longrope, "su": _longrope,
}  # fmt: skip
"""By rope_type; "su" is the first name of LongRoPE."""
