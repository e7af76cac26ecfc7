"""Scales to onnxruntime-genai and vLLM and back: nothing is lost that their formats can hold, and what does not fit is
refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgekv.cli import run
from edgekv.convert import convert
from edgekv.errors import InvalidOption, ScalesError
from edgekv.kv.interchange import (
    VLLM_SHARD,
    add_to_checkpoint,
    from_genai,
    from_vllm,
    retarget,
    to_genai,
    to_vllm,
)
from edgekv.kv.quant import LIMIT
from edgekv.kv.scales import KVScales, Provenance, from_thresholds, read_scales, write_scales
from edgekv.kv.spec import Granularity, KVDtype
from edgekv.model.spec import ModelSpec

LAYERS, HEADS, SIZE = 3, 2, 8
SPEC = ModelSpec("llama", LAYERS, 32, 64, 4, HEADS, SIZE, 300, 512)
NOTE = Provenance("envelope", 1.1, 100, "a test")


def made(dtype: KVDtype = "int8", granularity: Granularity = "channel") -> KVScales:
    random = np.random.default_rng(1)
    k, v = (random.uniform(0.1, 50, (LAYERS, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    return from_thresholds(k, v, dtype, granularity, "abc", NOTE)


def same_numbers(a: KVScales, b: KVScales) -> bool:
    return (
        np.array_equal(a.k, b.k) and np.array_equal(a.v, b.v) and (a.dtype, a.granularity) == (b.dtype, b.granularity)
    )


# onnxruntime-genai


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_genai_and_back_to_the_last_bit(dtype: KVDtype, granularity: Granularity) -> None:
    scales = made(dtype, granularity)
    text = json.dumps(to_genai(scales))
    assert same_numbers(from_genai(json.loads(text), SPEC, dtype, "abc", "x"), scales)


def test_a_genai_file_of_another_dtype_is_rescaled_as_its_builder_does() -> None:
    found = from_genai(to_genai(made("int8")), SPEC, "int4", "abc", "x")
    assert found.k == pytest.approx(made("int8").k * 128 / 8, rel=1e-6)


def test_genai_layers_may_be_named_and_the_file_may_have_sections() -> None:
    data = to_genai(made())
    turned = {name: values[::-1] for name, values in data["scales"].items()}
    found = from_genai({"model": {"scales": turned, "layer_ids": [2, 1, 0]}}, SPEC, "int8", "abc", "x")
    assert same_numbers(found, made())


def test_the_builder_of_onnxruntime_genai_reads_the_file(tmp_path: Path) -> None:
    """Its own code, on a stub that holds what that code asks for."""
    base = pytest.importorskip("onnxruntime_genai.models.builders.base")
    scales, path = made(), tmp_path / "scales.json"
    path.write_text(json.dumps(to_genai(scales)))
    initializers: dict[str, Any] = {}
    attributes = {"quant_mode": "PER_CHANNEL", "scales_path": str(path), "quant_scheme": "int8_per_channel"}
    stub = SimpleNamespace(
        kv_cache_attrs=attributes,
        num_kv_heads=HEADS,
        head_size=SIZE,
        num_layers=LAYERS,
        use_paged_attention=False,
        make_initializer=lambda values, name: initializers.update({name: values}),
    )
    for name in ("get_kv_cache_calibration_factor", "get_kv_cache_scale_names"):
        setattr(stub, name, getattr(base.Model, name).__get__(stub))
    base.Model.make_kv_cache_scale_initializers(stub)
    for layer in range(LAYERS):
        assert np.array_equal(initializers[f"model.layers.{layer}.attn.k_scale"], scales.k[layer].reshape(-1))
        assert np.array_equal(initializers[f"model.layers.{layer}.attn.v_scale"], scales.v[layer].reshape(-1))


@pytest.mark.parametrize("data", [{}, [], {"scales": {"k_scales": [1.0], "v_scales": [1.0]}}, {"scales": 3}])
def test_what_is_no_genai_file_is_refused(data: Any) -> None:
    with pytest.raises(ScalesError, match="holds no scales"):
        from_genai(data, SPEC, "int8", "abc", "x")


def test_a_scale_that_is_none_is_refused() -> None:
    data = to_genai(made())
    data["scales"]["v_scales"][1][3] = -1.0
    with pytest.raises(ScalesError, match="v scale of layer 1"):
        from_genai(data, SPEC, "int8", "abc", "x")


# vLLM


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_vllm_and_back(granularity: Granularity) -> None:
    """FP8 thresholds are those of the INT8 scales, the largest of what they cover."""
    scales, tensors = made(), to_vllm(made(), granularity)
    shape = (1,) if granularity == "tensor" else (HEADS, 1, 1)
    assert len(tensors) == 2 * LAYERS
    assert all(values.shape == shape and values.dtype == np.float32 for values in tensors.values())
    back = from_vllm(tensors, SPEC, "abc", "x")
    assert same_numbers(back, retarget(scales, "fp8", granularity))
    assert back.k.max() * LIMIT["fp8"] == pytest.approx(scales.k.max() * LIMIT["int8"], rel=1e-6)
    assert (back.k * LIMIT["fp8"] * (1 + 1e-6) >= scales.k * LIMIT["int8"]).all()


@pytest.mark.parametrize("pattern", ["self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_scale"])
def test_other_names_of_the_same_tensors(pattern: str) -> None:
    names = {f"model.layers.{i}.{pattern.format(part)}": (i, part) for i in range(LAYERS) for part in "kv"}
    tensors = {name: np.float32(1 + i + (part == "v") / 2).reshape(()) for name, (i, part) in names.items()}
    found = from_vllm(tensors, SPEC, "abc", "x")
    assert found.granularity == "tensor"
    assert found.v[2, 1, 5] == 3.5


def test_vllm_tensors_that_do_not_fit_are_refused() -> None:
    tensors = to_vllm(made(), "head")
    with pytest.raises(ScalesError, match="3 numbers"):
        from_vllm(tensors | {"model.layers.1.self_attn.k_scale": np.ones(3, np.float32)}, SPEC, "abc", "x")
    del tensors["model.layers.2.self_attn.v_scale"]
    with pytest.raises(ScalesError, match="no v scale for layer 2"):
        from_vllm(tensors, SPEC, "abc", "x")


def checkpoint(folder: Path, quantization: Any = None) -> Path:
    """A sharded checkpoint, as far as it matters here."""
    save_file({"model.norm.weight": np.ones(4, np.float32)}, folder / "model-00001-of-00001.safetensors")
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_checkpoint_gets_a_shard_index_entries_and_a_scheme(tmp_path: Path) -> None:
    add_to_checkpoint(checkpoint(tmp_path), made(), "head")
    assert load_file(tmp_path / VLLM_SHARD).keys() == to_vllm(made(), "head").keys()
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map["model.norm.weight"] == "model-00001-of-00001.safetensors"
    assert weight_map["model.layers.0.self_attn.k_scale"] == VLLM_SHARD
    stanza = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stanza["quant_method"] == "compressed-tensors"
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    assert stanza["kv_cache_scheme"] == scheme


def test_a_compressed_checkpoint_keeps_what_it_says(tmp_path: Path) -> None:
    theirs = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}
    add_to_checkpoint(checkpoint(tmp_path, theirs), made(), "tensor")
    stanza = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {name: stanza[name] for name in theirs} == theirs
    assert stanza["kv_cache_scheme"]["strategy"] == "tensor"


def test_a_checkpoint_whose_loader_looks_for_no_scales_is_refused_untouched(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"quant_method": "awq"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidOption, match="quantised by awq"):
        add_to_checkpoint(tmp_path, made(), "head")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_with_scales_still_converts(tmp_path: Path) -> None:
    """Its quantization_config is of the KV cache alone; the scales come back out of the folder."""
    folder = tmp_path / "hf"
    shutil.copytree(Path(__file__).parents[1] / "data" / "llama-fp16", folder)
    plain = convert(folder, tmp_path / "plain").model
    shape = (plain.spec.num_layers, plain.spec.num_kv_heads, plain.spec.head_dim)
    limits = np.ones(shape, np.float32)
    add_to_checkpoint(folder, from_thresholds(limits, limits * 2, "int8", "channel", "abc", NOTE), "head")
    again = convert(folder, tmp_path / "again").model
    assert again.spec == plain.spec
    assert run(["scales", "import", str(again.folder), "--from", "vllm", "--file", str(folder)]) == 0
    assert read_scales(again.folder / "kv_scales.int8-head.safetensors").v[0, 0, 0] == pytest.approx(2 / 127)


# Both


def test_others_get_scales_for_whole_rows() -> None:
    """They know of no centres, so what was taken out has to fit their codes, too."""
    centre = np.full((LAYERS, HEADS, SIZE), -100, np.float32)
    scales = replace(made("fp8"), k_centre=centre, v_centre=centre)
    whole = scales.without_centre()
    assert (whole.v * LIMIT["fp8"] > 100).all()
    assert same_numbers(from_genai(to_genai(scales), SPEC, "fp8", "abc", "x"), whole)
    assert same_numbers(from_vllm(to_vllm(scales, "head"), SPEC, "abc", "x"), retarget(whole, "fp8", "head"))


def test_finer_scales_cannot_be_had() -> None:
    with pytest.raises(InvalidOption, match="cannot be made finer"):
        retarget(made(granularity="head"), "fp8", "channel")
    with pytest.raises(InvalidOption, match="per channel or per tensor"):
        to_genai(made(granularity="head"))
    with pytest.raises(InvalidOption, match="per tensor or per head"):
        to_vllm(made(), "channel")


def test_the_commands_take_scales_there_and_back(tiny_models: Any, tmp_path: Path) -> None:
    model = tiny_models.converted("llama-fp16")
    shape = (model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim)
    thresholds = np.random.default_rng(2).uniform(1, 2, shape).astype(np.float32)
    scales = from_thresholds(thresholds, thresholds * 2, "int8", "channel", model.fingerprint, NOTE)
    write_scales(tmp_path / "own.safetensors", scales)

    def edgekv(*arguments: object) -> None:
        assert run(["scales", *map(str, arguments)]) == 0

    common = ("export", model.folder, "--scales", tmp_path / "own.safetensors")
    edgekv(*common, "--to", "genai", "--out", tmp_path / "g.json")
    back = tmp_path / "back.safetensors"
    edgekv("import", model.folder, "--from", "genai", "--file", tmp_path / "g.json", "--out", back)
    assert same_numbers(read_scales(back), scales)
    edgekv(*common, "--to", "vllm", "--out", tmp_path / "v.safetensors")
    edgekv("import", model.folder, "--from", "vllm", "--file", tmp_path / "v.safetensors", "--out", back)
    assert read_scales(back).k == pytest.approx(retarget(scales, "int8", "head").k, rel=1e-6)
    edgekv(*common, "--to", "vllm", "--out", checkpoint(tmp_path))
    edgekv(
        "import", model.folder, "--from", "vllm", "--file", tmp_path / VLLM_SHARD, "--kv-dtype", "fp8", "--out", back
    )
    assert same_numbers(read_scales(back), retarget(scales, "fp8", "head"))
