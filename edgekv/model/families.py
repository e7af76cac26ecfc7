"""Hugging Face config.json -> ModelSpec: the border where foreign metadata is translated, once.

A family is one entry in FAMILIES: what it adds to the plain Llama block. A config that asks for something not known
here is refused by the name of the field before any weight is read, because running it would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.spec import ModelSpec, RopeSpec

Config = Mapping[str, Any]


def _llama(config: Config) -> dict[str, Any]:
    _expect(config, "attention_bias", False)
    _expect(config, "mlp_bias", False)
    return {}


def _mistral(config: Config) -> dict[str, Any]:
    _expect(config, "sliding_window", None)
    return {}


def _qwen2(config: Config) -> dict[str, Any]:
    _expect(config, "use_sliding_window", False)
    return {"qkv_bias": True}


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2}


def spec_from_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """Translate a config.json (and generation_config.json, for its end-of-text ids).

    Raises:
        UnsupportedModel: a family or field that edgekv does not run.
        BadCheckpoint: a field is missing or impossible.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(f"The config's model_type is {family!r}; edgekv runs {', '.join(FAMILIES)}.")
    _expect(config, "hidden_act", "silu")
    extra = FAMILIES[family](config)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    return ModelSpec(
        family=family,
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=_integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // heads if heads > 0 else 0),
        vocab_size=_integer(config, "vocab_size"),
        max_context=_integer(config, "max_position_embeddings"),
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=rope_from_config(config),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        bos_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_ids=eos_ids(config, generation or {}),
        **extra,
    )


def rope_from_config(config: Config) -> RopeSpec:
    """`rope_parameters` of newer configs, `rope_scaling` beside `rope_theta` of older ones (case C28)."""
    scaling: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise BadCheckpoint(f"The config's rope_parameters is {scaling!r}, not a table of fields.")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("The config's rope_parameters differ between layers, which edgekv does not run.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10_000.0))
    for table in (config, scaling):
        if _number(table, "partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel("The config's partial_rotary_factor is not 1, which edgekv does not run.")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=_number(scaling, "factor"))
    if kind == "llama3":
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        if low >= high:
            raise BadCheckpoint(f"The config's low_freq_factor is {low}, which is not below high_freq_factor, {high}.")
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=_number(scaling, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=_integer(scaling, "original_max_position_embeddings"),
        )
    raise UnsupportedModel(f"The config's rope type is {kind!r}; edgekv runs default, linear and llama3.")


def _expect(config: Config, field: str, value: Any) -> None:
    found = config.get(field, value)
    if found != value:
        raise UnsupportedModel(f"The config's {field} is {found!r}; edgekv runs this family only with {value!r}.")


def _integer(config: Config, field: str, *default: int) -> int:
    value = config.get(field)
    if value is None and default:
        return default[0]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a positive whole number.")
    return value


def _number(config: Config, field: str, *default: float) -> float:
    value = config.get(field)
    if value is None and default:
        return default[0]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a positive number.")
    return float(value)


def _flag(config: Config, field: str) -> bool:
    value = config.get(field)
    if value not in (None, True, False):
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be true or false.")
    return bool(value)


def token_ids(config: Config, field: str) -> list[int]:
    """A token id, a list of them, or nothing, as a list."""
    value = config.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise BadCheckpoint(f"The config's {field} is {value!r}; it must be a token id or a list of them.")
    return list(ids)


def eos_ids(*configs: Config) -> tuple[int, ...]:
    """The union of every place that names end-of-text ids (case C21)."""
    return tuple(sorted({token for config in configs for token in token_ids(config, "eos_token_id")}))
