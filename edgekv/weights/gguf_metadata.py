"""The metadata of a GGUF file -> ModelSpec, with what llama.cpp knows of an architecture and the file does not say.

    interleaved Q and K      the llama architecture and those derived from it (smollm3, granite) turn neighbouring
                             channels, so the file has the rows of Q and K in that order
    windows                  gemma2: every other layer, the first with one; gemma3: five of six; phi3: all
    without RoPE             smollm3: every fourth layer
    attention scale          gemma2, gemma3: 1 / sqrt(E / H) in the 27B model, else 1 / sqrt(D)
    local RoPE base          gemma3: 10,000, and no scaling

RoPE that is scaled without saying how is scaled linearly; `rope.scale_linear` is the older name of the factor.
Stored RoPE factors (`rope_freqs`, `rope_factors_long`, `rope_factors_short`) divide the frequencies.

What ends an answer is found by the texts of tokens, too (text/turns.py), because many files name no end of a turn.
Files of Phi-3 give the marks of its turns the type of tokens that a user defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.rope_config import stretched_context
from edgekv.model.spec import MAX_LAYERS, AttentionSpec, BlockSpec, ModelSpec, Multipliers, RopeSpec
from edgekv.text.turns import ENDS, MARKS
from edgekv.weights.base import Float32

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3", "phi3": "phi3", "granite": "granite",
    "gemma2": "gemma2", "gemma3": "gemma3_text",
}  # fmt: skip
"""GGUF architecture -> edgekv family."""

INTERLEAVED_QK = ("llama", "smollm3", "granite")
"""Families whose files have the rows of Q and K interleaved."""

_CONTROL, _USER_DEFINED = 3, 4  # token types

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


class Metadata:
    """The fields of a file, each of the type it has to have."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.name, self._fields = path.name, fields

    @property
    def architecture(self) -> str:
        """The architecture; refused unless edgekv runs it."""
        found = self.field("general.architecture", str)
        if found not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModel(f"{self.name} is of architecture {found!r}; edgekv runs {known} from GGUF.")
        return str(found)

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def field(self, key: str, kind: type, *default: Any) -> Any:
        """A value of the metadata. A number that has to be a float may be whole."""
        field = self._fields.get(key)
        if field is None:
            if default:
                return default[0]
            raise BadCheckpoint(f"{self.name} has no {key} in its metadata, so the model cannot be described.")
        try:
            value = field.contents()
        except UnicodeDecodeError:
            value = None
        self._check(key, kind, value, "is")
        return value

    def items(self, key: str, kind: type, *default: Any) -> list[Any]:
        """A list of the metadata; its items all have one type."""
        values: list[Any] = self.field(key, list, *default)
        if values:
            self._check(key, kind, values[0], "holds")
        return values

    def token_id(self, name: str) -> int | None:
        """The id of a special token, by llama.cpp's name for it."""
        token: int | None = self.field(f"tokenizer.ggml.{name}_token_id", int, None)
        return token

    @cached_property
    def tokens(self) -> list[str]:
        """The text of each id."""
        return self.items("tokenizer.ggml.tokens", str)

    @cached_property
    def token_types(self) -> list[int]:
        """The type of each id; empty: all are normal."""
        return self.items("tokenizer.ggml.token_type", int, [])

    @property
    def chat_template(self) -> str | None:
        """The template of a chat, if the file has one."""
        template: str | None = self.field("tokenizer.chat_template", str, None)
        return template

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends an answer: the ids that the file names, and known ends of turns that this model uses. A token that
        the file names as the unknown one is used for that (SmolLM2's <|endoftext|>)."""
        named = self._named("eos", "eot", "eom")
        return tuple(sorted({*named, *self._marks(ENDS, _CONTROL)} - (self._named("unknown") - named)))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are special whatever their type: those that the file names, and the marks of turns."""
        named = self._named("bos", "eos", "eot", "eom", "padding", "unknown")
        return tuple(sorted({*named, *self._marks(MARKS, _CONTROL, _USER_DEFINED)}))

    def _named(self, *names: str) -> set[int]:
        ids = (self.token_id(name) for name in names)
        return {number for number in ids if number is not None}

    def _marks(self, texts: frozenset[str], *types: int) -> Iterator[int]:
        """The ids with these texts that are of these types, or that the template writes."""
        template = self.chat_template or ""
        for number, text in enumerate(self.tokens):
            if text in texts and (self._type(number) in types or text in template):
                yield number

    def _type(self, number: int) -> int:
        return self.token_types[number] if number < len(self.token_types) else 0

    def own(self, name: str, kind: type, *default: Any) -> Any:
        """A value of the architecture's own."""
        return self.field(f"{self.architecture}.{name}", kind, *default)

    def positive(self, name: str, *default: float) -> float:
        """A positive number of the architecture's own."""
        value = float(self.own(name, float, *default))
        if not 0 < value < math.inf:
            key = f"{self.architecture}.{name}"
            raise BadCheckpoint(f"{self.name}: the metadata's {key} is {value}; it must be a positive number.")
        return value

    def _check(self, key: str, kind: type, value: Any, verb: str) -> None:
        if isinstance(value, bool):
            fits = kind is bool
        else:
            fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits:
            raise BadCheckpoint(f"{self.name}: the metadata's {key} {verb} {str(value)[:40]!r}, not a {kind.__name__}.")


def spec_from_metadata(metadata: Metadata, tensors: Mapping[str, Any], read: Callable[[Any], Float32]) -> ModelSpec:
    """The spec of a file with these tensors; `read` gives the numbers of one.

    Raises:
        UnsupportedModel: an architecture or kind of RoPE that edgekv does not run.
        BadCheckpoint: a field is missing or impossible.
    """
    architecture, own = metadata.architecture, metadata.own
    heads, hidden, layers = own("attention.head_count", int), own("embedding_length", int), own("block_count", int)
    if experts := own("expert_count", int, 0):
        raise UnsupportedModel(f"{metadata.name} is a mixture of {experts} experts, which edgekv does not run.")
    if not 0 < layers < MAX_LAYERS:
        raise BadCheckpoint(f"{metadata.name} says that it has {layers} layers, which no model has.")
    head_dim = own("attention.key_length", int, hidden // max(heads, 1))
    rope = _rope(metadata, head_dim, {name: read(tensors[name]) for name in _ROPE_TENSORS if name in tensors})
    return ModelSpec(
        family=ARCHITECTURES[architecture],
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=own("feed_forward_length", int),
        num_heads=heads,
        num_kv_heads=own("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=len(metadata.tokens),
        max_context=stretched_context(rope, own("context_length", int)),
        rms_eps=metadata.positive("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        bos_id=metadata.token_id("bos"),
        eos_ids=metadata.end_ids,
        attention=_attention(metadata, layers, max(hidden, 1) / max(heads, 1), max(head_dim, 1)),
        local_rope=RopeSpec(metadata.positive("rope.freq_base_swa", 1e4)) if architecture == "gemma3" else None,
        nope_layers=tuple(range(3, layers, 4)) if architecture == "smollm3" else (),
        block=_block(architecture, tensors),
        multipliers=_multipliers(metadata, max(hidden, 1)),
    )


def _block(architecture: str, tensors: Mapping[str, Any]) -> BlockSpec:
    """Biases are there where the first layer has one; a layer that lacks one is found later."""
    gemma = architecture.startswith("gemma")
    return BlockSpec(
        activation="gelu_tanh" if gemma else "silu",
        post_norms=gemma,
        output_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_down.bias" in tensors,
    )


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _rope(metadata: Metadata, head_dim: int, factors: dict[str, Float32]) -> RopeSpec:
    theta = metadata.positive("rope.freq_base", 1e6 if metadata.architecture == "gemma3" else 1e4)
    kind = metadata.own("rope.scaling.type", str, "linear")
    channels = metadata.own("rope.dimension_count", int, head_dim)
    own = tuple(float(factor) for factor in factors.get("rope_freqs.weight", ()))
    if not all(0 < factor < math.inf for values in factors.values() for factor in values):
        raise BadCheckpoint(f"{metadata.name}: RoPE factors are not all positive numbers: download the model again.")
    if len(factors) == 2 and not own:
        return _longrope(metadata, theta, head_dim, factors)
    if channels != head_dim or kind not in ("none", "linear", "yarn") or len(factors) > len(own[:1]):
        raise UnsupportedModel(
            f"{metadata.name} scales its rotary angles by {kind!r}, turning {channels} of {head_dim} channels, which "
            "edgekv does not read from GGUF: convert the model's safetensors instead."
        )
    if kind == "linear":
        factor = metadata.positive("rope.scaling.factor", metadata.positive("rope.scale_linear", 1.0))
        return RopeSpec(theta, factors=own) if factor == 1 else RopeSpec(theta, "linear", factor, factors=own)
    return _yarn(metadata, theta, own) if kind == "yarn" else RopeSpec(theta, factors=own)


def _yarn(metadata: Metadata, theta: float, factors: tuple[float, ...]) -> RopeSpec:
    """llama.cpp's: the attention factor is that of the paper, times those that the file may give."""
    for key, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if metadata.own(f"rope.scaling.{key}", float, usual) != usual:
            raise UnsupportedModel(
                f"{metadata.name} has its own rope.scaling.{key}, which edgekv does not read from GGUF: convert the "
                "model's safetensors instead."
            )
    factor = metadata.positive("rope.scaling.factor", 1.0)
    context = metadata.own("context_length", int)
    own = metadata.positive("rope.scaling.attn_factor", 1.0) * metadata.positive("rope.scaling.yarn_attn_factor", 1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_position=metadata.own("rope.scaling.original_context_length", int, context),
        attention_factor=own * (1 + 0.1 * math.log(max(factor, 1.0))),
        beta_fast=metadata.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.positive("rope.scaling.yarn_beta_slow", 1.0),
        factors=factors,
    )


def _longrope(metadata: Metadata, theta: float, head_dim: int, factors: dict[str, Float32]) -> RopeSpec:
    """Phi-3's: both sets of factors are stored, and the attention factor."""
    short, long = (tuple(float(x) for x in factors[f"rope_factors_{name}.weight"]) for name in ("short", "long"))
    original = metadata.own("rope.scaling.original_context_length", int)
    return RopeSpec(
        theta,
        "longrope",
        original_max_position=original,
        attention_factor=metadata.positive("rope.scaling.attn_factor", 1.0),
        factors=short,
        long_factors=long,
        channels=0 if 2 * len(short) == head_dim else 2 * len(short),
    )


def _attention(metadata: Metadata, layers: int, width: float, head_dim: int) -> AttentionSpec:
    """Scale, softcap, norms and windows; `width` is the hidden size of one query head, E / H."""
    architecture = metadata.architecture
    slides = {
        "gemma2": [layer % 2 == 0 for layer in range(layers)],
        "gemma3": [(layer + 1) % 6 != 0 for layer in range(layers)],
        "phi3": [True] * layers,
    }.get(architecture, [])
    window = metadata.own("attention.sliding_window", int, 0) if slides else 0
    context = metadata.own("context_length", int)
    if window >= context and architecture != "gemma3":
        window = 0
    scale = 0.0
    if layers == _LAYERS_OF_27B.get(architecture):
        scale = width**-0.5
    if architecture == "granite":
        scale = metadata.positive("attention.scale") if "granite.attention.scale" in metadata else 0.0
    return AttentionSpec(
        scale=scale,
        softcap=metadata.positive("attn_logit_softcapping", 50.0) if architecture == "gemma2" else 0.0,
        qk_norm=architecture in ("qwen3", "gemma3"),
        windows=tuple(window if slide else 0 for slide in slides) if window else (),
    )


def _multipliers(metadata: Metadata, hidden: int) -> Multipliers:
    architecture = metadata.architecture
    if architecture == "granite":
        return Multipliers(
            embedding=metadata.positive("embedding_scale", 1.0),
            residual=metadata.positive("residual_scale", 1.0),
            logits=1 / metadata.positive("logit_scale", 1.0),
        )
    if not architecture.startswith("gemma"):
        return Multipliers()
    softcap = metadata.positive("final_logit_softcapping", 30.0) if architecture == "gemma2" else 0.0
    return Multipliers(embedding=math.sqrt(hidden), logit_softcap=softcap)
