"""Every family and rotary kind against transformers, before and after evictions, and that each feature is seen.

Errors are |difference| / |logits| of each position, accuracy level 1, float cache. The tiny checkpoints convert exactly
(helpers/families.py), so the oracle is transformers on the checkpoint; after an eviction it is transformers' layers
with in-cache positions (helpers/in_cache.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ATTENTION
from helpers.engines import measured_scales
from helpers.families import VARIANTS, WINDOW, write_variant
from helpers.gguf_files import write_gguf
from helpers.in_cache import InCacheModel, load
from helpers.published import AWQ, GPTQ, Bnb
from helpers.reference import relative_errors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from edgekv.convert import convert
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.rope import length_mark
from edgekv.errors import UnsupportedModel
from edgekv.generate import Timeline
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.model.families import spec_from_config
from edgekv.model.spec import ModelSpec
from edgekv.weights import open_source

TOLERANCE = 1e-4
SEEN = 100 * TOLERANCE
"""How far the logits are, on average, from those of a model without a feature, at least."""
CAPACITY, STRIDE, PINNED = 64, 8, 4
OpenEngine = Callable[..., OnnxEngine]
DROPPED = [(name, feature) for name, variant in VARIANTS.items() for feature in variant.dropped]


@pytest.fixture(params=ATTENTION)
def attention(request: Any) -> str:
    """Every test here runs with each attention operator."""
    return str(request.param)


class Variants:
    """Checkpoints and conversions by name, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source = cache(self._source)
        self.converted = cache(self._converted)

    def _source(self, name: str) -> Path:
        return write_variant(VARIANTS[name], self._folder / "source" / name)

    def _converted(self, name: str) -> ConvertedModel:
        return convert(self.source(name), self._folder / "converted" / name).model


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(tmp_path_factory.mktemp("families"))


def random_ids(count: int) -> list[int]:
    return np.random.default_rng(5).integers(3, 500, count).tolist()


def wanted_logits(folder: Path, ids: list[int], **changes: Any) -> torch.Tensor:
    with torch.no_grad():
        return load(folder, **changes)(torch.tensor([ids])).logits[0]


def found_logits(variants: Variants, open_onnx: OpenEngine, name: str, ids: list[int]) -> Any:
    engine = open_onnx(variants.converted(name), KVSpec(max(len(ids), 64), "float"))
    return engine.forward(ids, all_logits=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(variants: Variants, open_onnx: OpenEngine, name: str) -> None:
    """Before an eviction: a text that fills the cache."""
    ids = random_ids(96)
    found = found_logits(variants, open_onnx, name, ids)
    assert relative_errors(found, wanted_logits(variants.source(name), ids)).max() < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_rows_equal_in_cache_positions(variants: Variants, open_onnx: OpenEngine, name: str) -> None:
    """After evictions, at every token, and what is stored."""
    ids = random_ids(150)
    engine = open_onnx(variants.converted(name), KVSpec(CAPACITY, "float", sinks=PINNED, stride=STRIDE))
    timeline = Timeline(engine)
    timeline.rewind(ids, PINNED)
    found = timeline.append(ids, all_logits=True)[0]
    wanted = InCacheModel(load(variants.source(name)), CAPACITY, STRIDE, PINNED)
    errors = relative_errors(found, wanted.run(ids))
    assert engine.evicted > CAPACITY
    assert list(engine.tokens) == [ids[number] for number in wanted.held]
    assert errors.max() < TOLERANCE
    order = engine.spec.rope.half_split_order(engine.spec.head_dim)
    for layer in range(engine.spec.num_layers):
        keys, values = engine.rows(layer, 0, engine.length)
        wanted_keys, wanted_values = wanted.rotated(layer, engine.evicted)
        assert relative_errors(keys, wanted_keys[..., order]).max() < TOLERANCE
        assert relative_errors(values, wanted_values).max() < TOLERANCE


@pytest.mark.parametrize(("name", "feature"), DROPPED)
def test_a_dropped_feature_would_be_seen(variants: Variants, open_onnx: OpenEngine, name: str, feature: str) -> None:
    """The tests above can fail: transformers without the feature is far from what edgekv computes with it."""
    ids = random_ids(96)
    found = found_logits(variants, open_onnx, name, ids)
    without = wanted_logits(variants.source(name), ids, **VARIANTS[name].dropped[feature])
    assert relative_errors(found, without).mean() > SEEN


@pytest.mark.parametrize("name", ["mistral", "qwen2", "phi3", "gemma2", "gemma3"])
def test_windows_to_the_token(variants: Variants, open_onnx: OpenEngine, name: str) -> None:
    """W-1, W, W+1 and 2W tokens: a window hides nothing up to W, and one token too many or too few would be seen."""
    ids = random_ids(2 * WINDOW)
    source = variants.source(name)
    full = wanted_logits(source, ids, **VARIANTS[name].dropped["window"])
    for count in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW):
        found = found_logits(variants, open_onnx, name, ids[:count])
        assert relative_errors(found, wanted_logits(source, ids[:count])).max() < TOLERANCE
        errors = relative_errors(found, full[:count])
        assert errors[:WINDOW].max() < TOLERANCE
        assert (errors[WINDOW:] > TOLERANCE).all()
    for other in (WINDOW - 1, WINDOW + 1):
        errors = relative_errors(found, wanted_logits(source, ids, sliding_window=other))
        assert errors[WINDOW:].mean() > SEEN


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_with_an_int8_cache(variants: Variants, open_onnx: OpenEngine, name: str) -> None:
    """Case C14: at W-1, W, W+1 and 2W tokens the 8-bit rows of a layer with a window are no worse than before it fills.
    Errors of the last token measured 2026-11-29: at most 0.018."""
    ids, source, model = random_ids(2 * WINDOW), variants.source(name), variants.converted(name)
    engine = open_onnx(model, KVSpec(64, "int8"), measured_scales(model, "int8", "channel", random_ids(200)))
    for count in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW):
        engine.reset()
        found = engine.forward(ids[:count], all_logits=True)
        assert relative_errors(found, wanted_logits(source, ids[:count]))[-1] < 0.03


@pytest.mark.parametrize("capacity", [64, 80, 81, 96])
def test_longrope_goes_by_the_capacity(variants: Variants, open_onnx: OpenEngine, capacity: int) -> None:
    """Up to the original context of 80 the short factors, beyond it the long ones, whatever the text's length."""
    ids = random_ids(40)
    source = variants.source("longrope-80")
    found = open_onnx(variants.converted("longrope-80"), KVSpec(capacity, "float")).forward(ids, all_logits=True)
    wanted = InCacheModel(load(source), capacity).run(ids)
    assert relative_errors(found, wanted).max() < TOLERANCE
    assert (relative_errors(found, wanted_logits(source, ids)).max() < TOLERANCE) == (capacity <= 80)


def test_dynamic_goes_by_the_capacity(variants: Variants, open_onnx: OpenEngine) -> None:
    """theta is that of a text that fills the cache: transformers' for 96 tokens, not for the 40 that there are."""
    ids = random_ids(96)
    source, model = variants.source("dynamic"), variants.converted("dynamic")
    found = open_onnx(model, KVSpec(96, "float")).forward(ids[:40], all_logits=True)
    assert relative_errors(found, wanted_logits(source, ids)[:40]).max() < TOLERANCE
    assert relative_errors(found, wanted_logits(source, ids[:40])).mean() > SEEN


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "phi3-partial", "gemma2", "gemma3", "yarn"])
def test_an_int8_cache_costs_as_little_as_in_llama(variants: Variants, open_onnx: OpenEngine, name: str) -> None:
    """Mean error measured 2026-11-29, evictions included: 0.008 to 0.016; bound 0.03."""
    ids = random_ids(150)
    model = variants.converted(name)
    scales = measured_scales(model, "int8", "channel", random_ids(200))
    engine = open_onnx(model, KVSpec(CAPACITY, "int8", sinks=PINNED, stride=STRIDE), scales)
    timeline = Timeline(engine)
    timeline.rewind(ids, PINNED)
    found = timeline.append(ids, all_logits=True)[0]
    wanted = InCacheModel(load(variants.source(name)), CAPACITY, STRIDE, PINNED).run(ids)
    errors = relative_errors(found, wanted)
    assert errors.mean() < 0.03


@pytest.mark.parametrize("method", [AWQ(32), GPTQ(32, g_idx="act-order"), Bnb("nf4")], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", ["phi3", "phi3-partial"])
def test_packed_projections_in_4_bits(
    variants: Variants, open_onnx: OpenEngine, tmp_path: Path, name: str, method: Any
) -> None:
    """The rows of Q, K, V, gate and up are taken out of the publisher's packed integers."""
    source = variants.source(name)
    state = load_file(source / "model.safetensors")
    stored, meant = dict(state), dict(state)
    for module in [key.removesuffix(".weight") for key in state if key.endswith("_proj.weight")]:
        tensors, weights = method.layer(module, stored.pop(f"{module}.weight").numpy())
        stored |= {f"{module}.{key}": torch.from_numpy(np.array(values)) for key, values in tensors.items()}
        meant[f"{module}.weight"] = torch.from_numpy(weights).float()
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": method.config()}
    for folder, tensors, fields in (("stored", stored, config), ("meant", meant, None)):
        shutil.copytree(source, tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        if fields:
            (tmp_path / folder / "config.json").write_text(json.dumps(fields))
    ids = random_ids(64)
    model = convert(tmp_path / "stored", tmp_path / "converted").model
    found = open_onnx(model, KVSpec(64, "float")).forward(ids, all_logits=True)
    assert relative_errors(found, wanted_logits(tmp_path / "meant", ids)).max() < 2e-4  # embedding in 8 + 8 bits: 2e-5


def test_a_norm_that_a_family_does_not_have(variants: Variants, tmp_path: Path) -> None:
    """Norms on Q and K under a config that knows of none: refused by the tensor's name."""
    source = shutil.copytree(variants.source("qwen3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    of_qwen = ("layer_types", "max_window_layers", "sliding_window")
    llama = {name: value for name, value in config.items() if name not in of_qwen} | {"model_type": "llama"}
    (source / "config.json").write_text(json.dumps(llama))
    with pytest.raises(UnsupportedModel, match=r"self_attn\.[qk]_norm"):
        open_source(source)


def test_contents_of_caches_with_other_angles_do_not_mix(variants: Variants) -> None:
    """What the capacity decided about the angles is told apart, and nothing else is."""
    longrope, dynamic, plain = (variants.converted(name).spec for name in ("longrope-80", "dynamic", "yarn"))
    assert length_mark(longrope, 64) == length_mark(longrope, 80) != length_mark(longrope, 81)
    assert length_mark(longrope, 81) == length_mark(longrope, 640)
    assert length_mark(dynamic, 32) == length_mark(dynamic, 16) != length_mark(dynamic, 64)
    assert length_mark(plain, 64) == ""


GGUF = {
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "granite": (
        "granite",
        {"attention.scale": 0.0625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    ),
    "phi3": ("phi3", {"attention.sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3", {"attention.sliding_window": WINDOW, "rope.freq_base": 1e6}),
    "biases": ("llama", {}),
    "yarn": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
}  # fmt: skip
"""Variant -> its architecture in a GGUF file, and what the file says beyond the geometry."""

AS_IN_GGUF: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"num_hidden_layers": 6, "query_pre_attn_scalar": 16, "layer_types": None, "rope_parameters": None},
}
"""What llama.cpp does not store but knows: every fourth layer without RoPE, the scale, five windows of six layers."""


@pytest.mark.parametrize("name", GGUF)
def test_gguf_equals_its_checkpoint(open_onnx: OpenEngine, tmp_path: Path, name: str) -> None:
    """The same weights through llama.cpp's names, orders and metadata give transformers' logits on the checkpoint."""
    variant = VARIANTS[name]
    changes = {key: value for key, value in (variant.changes | AS_IN_GGUF.get(name, {})).items() if value is not None}
    folder = write_variant(replace(variant, changes=changes), tmp_path / "source")
    config = AutoConfig.from_pretrained(folder).to_dict() | {"head_dim": changes.get("head_dim", 16)}
    path = write_gguf(folder, tmp_path / "model.gguf", GGUF[name][0], config, GGUF[name][1])
    model = convert(path, tmp_path / "converted").model
    ids = random_ids(96)
    found = open_onnx(model, KVSpec(96, "float")).forward(ids, all_logits=True)
    assert relative_errors(found, wanted_logits(folder, ids)).max() < TOLERANCE
    expected = spec_from_config(json.loads((folder / "config.json").read_text()))
    assert in_float32(model.spec) == in_float32(expected)


def in_float32(spec: ModelSpec) -> Any:
    """As JSON, its numbers rounded to what a float of a GGUF file holds."""
    return json.loads(json.dumps(spec.to_json()), parse_float=lambda text: float(np.float32(text)))
