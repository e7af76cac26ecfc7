"""Hugging Face config.json -> ModelSpec: the border where foreign metadata is translated, once.

A family is one entry in FAMILIES: the fields it reads beyond everybody's, what its config class says where they are
missing, and what it adds to the plain Llama block. A config that asks for something not known here is refused by the
name of the field before any weight is read, because running it would be silently wrong. So is a field that nobody here
has heard of, unless it is off or empty, or among those that never change the arithmetic (_INERT).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.fields import Config, choices, expect, flag, integer, number, token_ids
from edgekv.model.rope_config import rope_from_config, rope_from_table, stretched_context
from edgekv.model.spec import MAX_LAYERS, AttentionSpec, BlockSpec, ModelSpec, Multipliers, RopeSpec

_PLAIN = frozenset(
    {
        "model_type", "architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "hidden_act",
        "tie_word_embeddings", "bos_token_id", "eos_token_id", "attention_bias", "mlp_bias", "quantization_config",
    }
)  # fmt: skip
"""Fields that every family reads, or checks; quantization_config is the weights' (weights/scheme.py)."""

_INERT = frozenset(
    {
        # what training, saving and loading need
        "attn_implementation", "auto_map", "cache_implementation", "compression_config", "custom_pipelines", "dtype",
        "initializer_range", "is_llama_config", "max_sequence_length", "model_max_length", "pad_token_id",
        "pretraining_tp", "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
        "unsloth_fixed", "unsloth_version", "use_cache",
        # how transformers returns things and samples
        "chunk_size_feed_forward", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "id2label", "is_decoder", "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
        "output_hidden_states", "problem_type", "repetition_penalty", "return_dict", "sep_token_id",
        "task_specific_params", "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript", "typical_p",
    }
)  # fmt: skip
"""Fields that never change the arithmetic; so do names that begin with an underscore or end in `dropout`."""

BIASES = frozenset({"attention_bias", "mlp_bias"})
"""Families whose config class knows of them name them among their fields: of q, k, v and o; of gate, up and down."""

Extra = Callable[[Config, int, int], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """What a family adds. `extra` makes ModelSpec fields of the config, the number of layers and the head size."""

    extra: Extra
    fields: frozenset[str] = frozenset()  # read by `extra` or checked
    defaults: Config = field(default_factory=dict)  # of its config class, where the config says nothing


def spec_from_config(config: Config, generation: Config | None = None) -> ModelSpec:
    """Translate a config.json (and generation_config.json, for its end-of-text ids).

    Raises:
        UnsupportedModel: a family or field that edgekv does not run.
        BadCheckpoint: a field is missing or impossible.
    """
    config = _text_part(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModel(f"The config's model_type is {name!r}; edgekv runs {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    _refuse_unknown(config, family)
    config = {**family.defaults, **config}
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    layers, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim", max(hidden // heads, 1))
    if layers >= MAX_LAYERS:
        raise BadCheckpoint(f"The config's num_hidden_layers is {layers}, which no model has.")
    max_position = integer(config, "max_position_embeddings")
    own: dict[str, Any] = {"attention": AttentionSpec()} | family.extra(config, layers, head_dim)
    rope = own.pop("rope", None) or rope_from_config(config, head_dim)
    max_context = stretched_context(rope, max_position)
    if "local_rope" not in own:
        own["attention"] = _without_idle_windows(own["attention"], max_context)
    own |= _biases(config, own.get("block", BlockSpec())) if family.fields & BIASES else {}
    return ModelSpec(
        family=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size"),
        max_context=max_context,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=flag(config, "tie_word_embeddings"),
        bos_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_ids=eos_ids(config, generation or {}),
        **own,
    )


def _text_part(config: Config) -> Config:
    """A Gemma 3 that also sees holds the config of its language model apart; only that part is run."""
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return config
    outer = {name: config[name] for name in ("bos_token_id", "eos_token_id", "quantization_config") if name in config}
    return {**outer, **text, "model_type": "gemma3_text"}


def _refuse_unknown(config: Config, family: Family) -> None:
    """Nothing that could change the arithmetic is passed over."""
    for name, value in config.items():
        known = name in _PLAIN or name in family.fields or name in _INERT
        if value and not known and not name.startswith("_") and not name.endswith(("dropout", "_pdrop")):
            raise UnsupportedModel(
                f"The config has a field {name}, {str(value)[:40]!r}, which edgekv does not know for this family: "
                "if it does not change what the model computes, take it out of config.json."
            )
    for name in BIASES - family.fields:
        expect(config, name, False)


def _biases(config: Config, block: BlockSpec) -> dict[str, Any]:
    """What `attention_bias` and `mlp_bias` say."""
    attention = flag(config, "attention_bias")
    return {
        "qkv_bias": attention,
        "block": replace(block, output_bias=attention, ffn_bias=flag(config, "mlp_bias")),
    }


def _llama(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    return {}


def _mistral(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    """All layers slide, where a window is given at all."""
    _expect_silu(config)
    return {"attention": AttentionSpec(windows=_windows(config, (True,) * layers))}


def _qwen2(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    return {"qkv_bias": True, "attention": AttentionSpec(windows=_upper_windows(config, layers))}


def _qwen3(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    return {"attention": AttentionSpec(qk_norm=True, windows=_upper_windows(config, layers))}


def _smollm3(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    if config.get("no_rope_layers") is not None:
        turning = choices(config, "no_rope_layers", {1: True, 0: False}, layers)  # 1 is a layer *with* RoPE
    else:
        interval = integer(config, "no_rope_layer_interval")
        turning = tuple((layer + 1) % interval != 0 for layer in range(layers))
    windows: tuple[int, ...] = ()
    if flag(config, "use_sliding_window"):
        windows = _windows(config, _sliding(config, layers, lambda layer: not turning[layer]))
    nope = tuple(layer for layer in range(layers) if not turning[layer])
    return {"nope_layers": nope, "attention": AttentionSpec(windows=windows)}


def _phi3(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    for name in ("interpolate_factor", "full_attn_mod"):
        expect(config, name, 1)
    rope = rope_from_config(config, head_dim, partial=True)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedModel(f"The config's rope type is {rope.kind!r}; this family has default and longrope.")
    return {"rope": rope, "attention": AttentionSpec(windows=_windows(config, (True,) * layers))}


def _granite(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    _expect_silu(config)
    multipliers = Multipliers(
        embedding=number(config, "embedding_multiplier"),
        residual=number(config, "residual_multiplier"),
        logits=1 / number(config, "logits_scaling"),
    )
    scale = _scale(number(config, "attention_multiplier"), head_dim)
    return {"attention": AttentionSpec(scale=scale), "multipliers": multipliers}


def _gemma2(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    if config.get("sliding_window_size") is not None:  # some configs name the window twice
        expect(config, "sliding_window_size", config["sliding_window"])
    slides = _sliding(config, layers, lambda layer: layer % 2 == 0)
    attention = AttentionSpec(
        scale=_scale(number(config, "query_pre_attn_scalar") ** -0.5, head_dim),
        softcap=_softcap(config, "attn_logit_softcapping"),
        windows=_windows(config, slides),
    )
    return {"attention": attention} | _gemma(config)


def _gemma3(config: Config, layers: int, head_dim: int) -> dict[str, Any]:
    """Its layers with a window turn at another base; the others alone are stretched to long contexts."""
    expect(config, "attn_logit_softcapping", None)  # in the config class, but never applied
    pattern = integer(config, "sliding_window_pattern", integer(config, "_sliding_window_pattern", 6))
    slides = _sliding(config, layers, lambda layer: bool((layer + 1) % pattern))
    window = integer(config, "sliding_window")
    attention = AttentionSpec(
        scale=_scale(number(config, "query_pre_attn_scalar") ** -0.5, head_dim),
        qk_norm=True,
        windows=tuple(window if slide else 0 for slide in slides),
    )
    rope, local = _gemma3_ropes(config)
    return {"attention": attention, "rope": rope, "local_rope": local} | _gemma(config)


def _gemma3_ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of layers without and with a window."""
    tables: Any = config.get("rope_parameters") or {"full_attention": config.get("rope_scaling")}
    if not isinstance(tables, Mapping) or not set(tables) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"The config's rope_parameters are {str(tables)[:40]!r}, not a table each for full_attention and "
            "sliding_attention."
        )
    ropes = []
    for layers, old in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        table = tables.get(layers) or {}
        if not isinstance(table, Mapping):
            raise BadCheckpoint(f"The config's rope_parameters for {layers} are {table!r}, not a table of fields.")
        expect(table, "partial_rotary_factor", 1.0)
        ropes.append(rope_from_table(table, config, number(table, "rope_theta", number(config, old))))
    return ropes[0], ropes[1]


def _gemma(config: Config) -> dict[str, Any]:
    """What all Gemmas have: norms on both sides, tanh GELU, an embedding scaled by sqrt(E), softcapped logits."""
    expect(config, "hidden_activation", "gelu_pytorch_tanh")
    if flag(config, "use_bidirectional_attention"):
        raise UnsupportedModel("The config's use_bidirectional_attention is true; edgekv runs causal attention only.")
    multipliers = Multipliers(
        embedding=integer(config, "hidden_size") ** 0.5,
        logit_softcap=_softcap(config, "final_logit_softcapping"),
    )
    return {"block": BlockSpec(activation="gelu_tanh", post_norms=True), "multipliers": multipliers}


def _expect_silu(config: Config) -> None:
    expect(config, "hidden_act", "silu")


def _scale(scale: float, head_dim: int) -> float:
    """A scale of the scores as AttentionSpec has it: 0 where it is the plain one."""
    return 0.0 if scale == head_dim**-0.5 else scale


def _softcap(config: Config, name: str) -> float:
    return 0.0 if config.get(name) is None else number(config, name)


def _windows(config: Config, slides: tuple[bool, ...]) -> tuple[int, ...]:
    """One window a layer, 0 for those that do not slide; () without a window."""
    if config.get("sliding_window") is None or not any(slides):
        return ()
    window = integer(config, "sliding_window")
    return tuple(window if slide else 0 for slide in slides)


def _without_idle_windows(attention: AttentionSpec, max_context: int) -> AttentionSpec:
    """Windows that no context exceeds are none."""
    return (
        attention if any(0 < window < max_context for window in attention.windows) else replace(attention, windows=())
    )


def _upper_windows(config: Config, layers: int) -> tuple[int, ...]:
    """Qwen: layers from max_window_layers on slide, if use_sliding_window is set."""
    if not flag(config, "use_sliding_window"):
        return ()
    if config.get("layer_types") is not None:
        return _windows(config, _sliding(config, layers, bool))
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise BadCheckpoint(f"The config's max_window_layers is {first!r}; it must be a whole number.")
    return _windows(config, tuple(layer >= first for layer in range(layers)))


def _sliding(config: Config, layers: int, rule: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers slide: `layer_types` where the config has it, else the family's rule."""
    if config.get("layer_types") is not None:
        return choices(config, "layer_types", {"sliding_attention": True, "full_attention": False}, layers)
    return tuple(rule(layer) for layer in range(layers))


def eos_ids(*configs: Config) -> tuple[int, ...]:
    """The union of every place that names end-of-text ids."""
    return tuple(sorted({token for config in configs for token in token_ids(config, "eos_token_id")}))


_WINDOW_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_GEMMA_FIELDS = frozenset(
    {
        "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "sliding_window", "layer_types", "use_bidirectional_attention", "attention_bias",
    }
)  # fmt: skip
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "bos_token_id": 2,
    "eos_token_id": 1, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
"""The whole geometry, because the text_config of a Gemma that also sees names only what differs."""

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, BIASES),
    "mistral": Family(_mistral, frozenset({"sliding_window"}), {"sliding_window": 4096}),
    "qwen2": Family(_qwen2, _WINDOW_FIELDS, _QWEN_DEFAULTS),
    "qwen3": Family(_qwen3, _WINDOW_FIELDS | {"attention_bias"}, _QWEN_DEFAULTS | {"head_dim": 128}),
    "smollm3": Family(
        _smollm3,
        _WINDOW_FIELDS | BIASES | {"no_rope_layers", "no_rope_layer_interval"},
        {"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "phi3": Family(
        _phi3,
        frozenset({"sliding_window", "interpolate_factor", "full_attn_mod"}),
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "granite": Family(
        _granite,
        BIASES | {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"},
        dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
    ),
    "gemma2": Family(
        _gemma2,
        _GEMMA_FIELDS | {"sliding_window_size"},
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        _gemma3,
        _GEMMA_FIELDS | {"sliding_window_pattern", "rope_local_base_freq"},
        _GEMMA3_DEFAULTS,
    ),
}
"""By model_type."""
