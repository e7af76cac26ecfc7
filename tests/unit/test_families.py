"""config.json -> ModelSpec: what is understood, what is refused by name, and that nothing else can happen."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from edgekv.errors import BadCheckpoint, EdgeKVError, UnsupportedModel
from edgekv.model.families import FAMILIES, spec_from_config
from edgekv.model.spec import ModelSpec, RopeSpec

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """Llama 3.2 1B, as published; a change to `...` takes the field away."""
    fields = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": dict(LLAMA3),
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 128256,
    }  # fmt: skip
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def test_a_published_config() -> None:
    """Every field arrives."""
    assert spec_from_config(config()) == ModelSpec(
        family="llama", num_layers=16, hidden_size=2048, ffn_size=8192, num_heads=32, num_kv_heads=8, head_dim=64,
        vocab_size=128256, max_context=131072, rms_eps=1e-5, rope=RopeSpec(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        tied_embeddings=True, qkv_bias=False, bos_id=128000, eos_ids=(128001, 128008, 128009),
    )  # fmt: skip


def test_biases() -> None:
    """Qwen2 has biases on Q, K and V; Mistral has none."""
    assert spec_from_config(config(model_type="qwen2", use_sliding_window=False)).qkv_bias
    assert not spec_from_config(config(model_type="mistral", sliding_window=None)).qkv_bias


# ---- geometry --------------------------------------------------------------------------------------------------------


def test_head_size_is_not_hidden_over_heads() -> None:
    """case C27: head_dim where it is given; hidden / heads only where it is not."""
    assert spec_from_config(config(head_dim=128)).head_dim == 128
    assert spec_from_config(config(head_dim=128)).qkv_rows == (32 + 2 * 8) * 128
    assert spec_from_config(config(head_dim=...)).head_dim == 64
    assert spec_from_config(config(head_dim=None)).head_dim == 64


def test_fields_that_may_be_missing() -> None:
    """Old configs have no KV heads (as many as query heads), no theta, no eps, and untied embeddings."""
    spec = spec_from_config(
        config(num_key_value_heads=..., rope_theta=..., rms_norm_eps=..., tie_word_embeddings=..., rope_scaling=...)
    )
    assert (spec.num_kv_heads, spec.rope, spec.rms_eps, spec.tied_embeddings) == (32, RopeSpec(10_000.0), 1e-6, False)


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
     "max_position_embeddings"],
)  # fmt: skip
@pytest.mark.parametrize("value", [..., None, 0, -1, True, False, "32", 32.0, [32], {}, 1 << 40])
def test_numbers_that_are_none(field: str, value: Any) -> None:
    """Missing, not positive, or of another type: refused. A number no model has is refused too."""
    with pytest.raises(BadCheckpoint) as caught:
        spec_from_config(config(**{field: value}))
    assert field in str(caught.value) or value == 1 << 40


@pytest.mark.parametrize("value", [0, -8, True, "8", 8.0, 5, 64])
def test_kv_heads_must_divide_the_heads(value: Any) -> None:
    """Refused with both numbers."""
    with pytest.raises(BadCheckpoint, match=r"num_key_value_heads|cannot share"):
        spec_from_config(config(num_key_value_heads=value))


def test_an_odd_head_size() -> None:
    """Rotary embeddings rotate pairs."""
    with pytest.raises(BadCheckpoint, match="head size is 63"):
        spec_from_config(config(head_dim=63))


@pytest.mark.parametrize("value", [0, -1e-5, "1e-5", True, float("nan"), float("inf"), [1e-5], 10**400])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_floats_that_are_none(field: str, value: Any) -> None:
    """JSON as Python reads it may hold NaN, Infinity and numbers beyond a float."""
    with pytest.raises(BadCheckpoint, match=field):
        spec_from_config(config(**{field: value}))


@pytest.mark.parametrize(("size", "runs"), [(4096, True), (None, True), (2048, False)])
def test_a_window_that_is_named_twice(size: int | None, runs: bool) -> None:
    """The config.json of google/gemma-2-9b has sliding_window and sliding_window_size."""
    gemma = config(model_type="gemma2", hidden_act=..., sliding_window=4096, sliding_window_size=size, rope_scaling=...)
    if runs:
        assert spec_from_config(gemma).windows[0] == 4096
    else:
        with pytest.raises(UnsupportedModel, match="sliding_window_size is 2048"):
            spec_from_config(gemma)


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_the_rope_type(key: str) -> None:
    """case C28: `rope_scaling.type` and `rope_type` mean the same; where both stand, the newer one counts."""
    scaling = {key: "linear", "factor": 4.0}
    assert spec_from_config(config(rope_scaling=scaling)).rope == RopeSpec(500000.0, "linear", 4.0)
    llama3 = {name: value for name, value in LLAMA3.items() if name != "rope_type"} | {key: "llama3"}
    assert spec_from_config(config(rope_scaling=llama3)).rope.kind == "llama3"
    both = {"type": "linear", "rope_type": "llama3"} | llama3
    assert spec_from_config(config(rope_scaling=both | {"rope_type": "llama3"})).rope.kind == "llama3"


def test_rope_parameters_of_newer_configs() -> None:
    """case C28: transformers 5 writes `rope_parameters`, with theta inside; that one counts."""
    spec = spec_from_config(
        config(rope_scaling=..., rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 2e6})
    )
    assert spec.rope == RopeSpec(2e6)
    assert spec_from_config(config(rope_parameters={"rope_theta": 3e6} | LLAMA3)).rope.theta == 3e6
    assert spec_from_config(config(rope_scaling=None)).rope == RopeSpec(500000.0)


@pytest.mark.parametrize("kind", ["mrope", "proportional", "", None, 3, ["linear"]])
def test_rope_types_that_do_not_run(kind: Any) -> None:
    """case C28: refused by name, under either key."""
    for key in ("type", "rope_type"):
        with pytest.raises(UnsupportedModel, match="rope type"):
            spec_from_config(config(rope_scaling={key: kind, "factor": 2.0}))


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "linear"}, {"rope_type": "linear", "factor": 0}, {"rope_type": "linear", "factor": "x"},
     {"rope_type": "llama3"}, LLAMA3 | {"factor": None}, LLAMA3 | {"low_freq_factor": 4.0},
     LLAMA3 | {"original_max_position_embeddings": 0}, LLAMA3 | {"original_max_position_embeddings": 81.5},
     "linear", ["linear"], 2],
    ids=str,
)  # fmt: skip
def test_rope_parameters_that_are_none(scaling: Any) -> None:
    """A missing or impossible factor is a damaged config, not a traceback or a division by zero later."""
    with pytest.raises(BadCheckpoint):
        spec_from_config(config(rope_scaling=scaling))


def test_rope_that_differs_between_layers() -> None:
    """One table for each kind of layer: not understood, so refused."""
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        spec_from_config(config(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}}))


# ---- refused by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma3", "gemma", "phi", "Llama", "", None, 3, ["llama"], {}])
def test_an_unknown_model_type(kind: Any) -> None:
    """Refused with what it is and what runs."""
    with pytest.raises(UnsupportedModel, match="llama, mistral, qwen2"):
        spec_from_config(config(model_type=kind))
    with pytest.raises(UnsupportedModel, match="None"):
        spec_from_config(config(model_type=...))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("mistral", "attention_bias", True),
        ("qwen2", "mlp_bias", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "sliding_window", 4096),
        ("llama", "rope_interleaved", True),
        ("mistral", "layer_types", ["full_attention"] * 16),
        ("qwen2", "hidden_act", "gelu_new"),
        ("qwen2", "rope_parameters", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
        ("qwen3", "mlp_bias", True),
        ("phi3", "attention_bias", True),
        ("phi3", "partial_rotary_factor", 0.3),
        ("phi3", "full_attn_mod", 2),
        ("phi3", "rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "hidden_activation", "silu"),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        ("granite", "num_local_experts", 8),
        ("granite", "mup_width", 2.0),
    ],
)
def test_fields_that_change_the_arithmetic(family: str, field: str, value: Any) -> None:
    """What would be silently wrong is refused by the field's name."""
    changes = {"rope_scaling": ..., "model_type": family, field: value}
    with pytest.raises(EdgeKVError, match=NAMES.get(field, field)):
        spec_from_config(config(**changes))


NAMES = {"partial_rotary_factor": "partial_rotary_factor|channels of a head", "rope_scaling": "rope type"}


@pytest.mark.parametrize("name", [*FAMILIES])
def test_fields_of_transformers_config_classes(name: str) -> None:
    """Each field that transformers writes for a family is read, checked or known to be inert: an unknown one would be
    refused. (A Gemma 3 has its rotary embeddings by kind of layer.)"""
    from transformers import AutoConfig

    written = AutoConfig.for_model(name).to_dict()
    spec = spec_from_config(json.loads(json.dumps(written)))
    assert spec.family == name
    assert spec.num_layers == written["num_hidden_layers"]


@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_number_of_a_config_class_is_read(name: str) -> None:
    """A number that a family's config class has and edgekv passes over would be silently wrong: changing any of them
    changes the spec, or is refused. Those that are only for training or for padding do not count."""
    from transformers import AutoConfig

    written = json.loads(json.dumps(AutoConfig.for_model(name).to_dict()))
    written |= {"use_sliding_window": True} if "use_sliding_window" in written else {}
    written |= {"no_rope_layers": None} if "no_rope_layers" in written else {}
    if "layer_types" in written:
        written |= {"layer_types": None, "sliding_window": written["sliding_window"] or 4096}
    plain = spec_from_config(written)
    silent = set()
    for field, value in written.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                silent |= {field} if spec_from_config(written | {field: value * 2 + 2}) == plain else set()
            except EdgeKVError:
                continue
    allowed = {"initializer_range", "pad_token_id", "pretraining_tp", "chunk_size_feed_forward"}
    allowed |= {"original_max_position_embeddings"} if name == "phi3" else set()  # longrope alone has a use for it
    assert {field for field in silent if not field.endswith(("dropout", "pdrop"))} <= allowed


def test_windows_of_layers() -> None:
    """Which layers slide, from each family's own way of saying it; a window that nothing exceeds is none."""
    layers = 16

    def windows(family: str, **changes: Any) -> tuple[int, ...]:
        return spec_from_config(config(model_type=family, rope_scaling=..., **changes)).windows

    assert windows("mistral") == (4096,) * layers, "transformers' default, where the config says nothing"
    assert windows("mistral", sliding_window=None) == (0,) * layers
    assert windows("mistral", sliding_window=131072) == (0,) * layers
    assert windows("qwen2", use_sliding_window=False, sliding_window=4096) == (0,) * layers
    upper = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 12}
    assert windows("qwen2", **upper) == (0,) * 12 + (4096,) * 4
    assert windows("qwen3", **upper | {"layer_types": ["full_attention", "sliding_attention"] * 8}) == (0, 4096) * 8
    assert windows("smollm3", use_sliding_window=True, sliding_window=512) == (0, 0, 0, 512) * 4
    assert windows("phi3", sliding_window=2047) == (2047,) * layers
    assert windows("gemma2") == (4096, 0) * 8
    assert windows("gemma3_text", sliding_window=512) == (512,) * 5 + (0,) + (512,) * 5 + (0,) + (512,) * 4
    assert windows("gemma3_text", sliding_window=512, sliding_window_pattern=4) == (512, 512, 512, 0) * 4


def test_layers_and_their_rotary_embeddings() -> None:
    """SmolLM3 leaves out every fourth; Gemma 3's layers with a window have another base."""
    smol = spec_from_config(config(model_type="smollm3", rope_scaling=...))
    assert smol.rope_layers == (0, 0, 0, -1) * 4
    gemma = spec_from_config(config(model_type="gemma3_text", rope_theta=..., rope_scaling=...))
    assert [rope.theta for rope in gemma.ropes] == [1e6, 1e4]
    assert gemma.rope_layers[:6] == (1, 1, 1, 1, 1, 0)
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = spec_from_config(config(model_type="gemma3_text", **old))
    assert gemma.ropes == (RopeSpec(2e6, "linear", 8.0), RopeSpec(2e4))


def test_a_gemma_that_also_sees() -> None:
    """Its language model's config lies deeper and names only what differs from the class."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    inner |= {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    spec = spec_from_config({"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152},
                             "eos_token_id": [1, 106], "mm_tokens_per_image": 256})  # fmt: skip
    assert (spec.hidden_size, spec.num_heads, spec.head_dim, spec.vocab_size) == (2560, 8, 256, 262208)
    assert spec.eos_ids == (1, 106)
    assert spec.tied_embeddings


def test_stretched_contexts() -> None:
    """Dynamic and YaRN scaling say how long a text may become."""

    def context(scaling: dict[str, Any]) -> int:
        return spec_from_config(config(max_position_embeddings=4096, rope_scaling=scaling)).max_context

    assert context({"type": "dynamic", "factor": 2.0}) == 8192
    assert context({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}) == 8192
    assert context({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}) == 4096
    assert context({"type": "linear", "factor": 2.0}) == 4096


# ---- ends of text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "generation", "union"),
    [
        (2, {}, (2,)), ([2, 7], {}, (2, 7)), (2, {"eos_token_id": [2, 32000]}, (2, 32000)), (None, {}, ()),
        (..., {"eos_token_id": 5}, (5,)), ([9, 3], {"eos_token_id": 5}, (3, 5, 9)), (0, {"eos_token_id": None}, (0,)),
    ],
)  # fmt: skip
def test_all_ends_of_text_count(own: Any, generation: dict[str, Any], union: tuple[int, ...]) -> None:
    """case C21: the union of config and generation config, sorted, each once."""
    assert spec_from_config(config(eos_token_id=own), generation).eos_ids == union


@pytest.mark.parametrize("value", ["2", -1, True, 2.0, {"id": 2}, [2, "x"], [[2]], [None]])
@pytest.mark.parametrize("field", ["eos_token_id", "bos_token_id"])
def test_token_ids_that_are_none(field: str, value: Any) -> None:
    """Refused, in either config."""
    with pytest.raises(BadCheckpoint, match=field):
        spec_from_config(config(**{field: value}))
    with pytest.raises(BadCheckpoint, match="eos_token_id"):
        spec_from_config(config(), {"eos_token_id": value})


def test_bos() -> None:
    """One id, the first of a list, or none."""
    assert spec_from_config(config(bos_token_id=None)).bos_id is None
    assert spec_from_config(config(bos_token_id=0)).bos_id == 0
    assert spec_from_config(config(bos_token_id=[5, 6])).bos_id == 5
    assert spec_from_config(config(bos_token_id=[])).bos_id is None


# ---- fuzz ------------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7.5, -0.0, 1e400, float("nan"), "", "abc", "64", [], [1], ["x"], {}, {"a": 1},
    10**30, 10**400, 1 << 31, "linear", "silu", [None], {"rope_type": "linear"}, [[]], b"x", (1,),
]  # fmt: skip


def mutated(random_: random.Random) -> dict[str, Any]:
    """The config with one to three fields, or fields of its rope table, gone or replaced."""
    made = copy.deepcopy(config())
    made |= {"model_type": random_.choice([*FAMILIES, "llama", "llama"])}
    if random_.random() < 0.5:
        made["rope_parameters"] = made.pop("rope_scaling")
    for _ in range(random_.randint(1, 3)):
        scaling = made.get("rope_parameters", made.get("rope_scaling"))
        table = scaling if isinstance(scaling, dict) and scaling and random_.random() < 0.3 else made
        name = random_.choice([*table, "partial_rotary_factor", "sliding_window", "quantization_config", "type"])
        if random_.random() < 0.2:
            table.pop(name, None)
        else:
            table[name] = random_.choice(JUNK)
    return made


@pytest.mark.parametrize("seed", range(10))
def test_damaged_configs(seed: int) -> None:
    """Three hundred seeded mutations: an error of edgekv's own, or a spec that can be written and read back."""
    random_, fine = random.Random(seed), 0
    for _ in range(30):
        damaged = mutated(random_)
        generation = {"eos_token_id": random_.choice(JUNK)} if random_.random() < 0.3 else None
        try:
            spec = spec_from_config(damaged, generation)
        except EdgeKVError:
            continue
        fine += 1
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
        assert spec.rms_eps > 0
        assert spec.rope.theta > 0
        assert spec.rope.factor > 0
    assert fine < 30
