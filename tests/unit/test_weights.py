"""Readers of published weights against the libraries of their formats, and what they refuse."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from conftest import TinyModels
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from edgekv.convert import convert
from edgekv.engines.rope import inverse_frequencies
from edgekv.errors import BadCheckpoint, EdgeKVError, ModelNotFound, UnsupportedModel
from edgekv.model.converted import open_converted
from edgekv.model.spec import RopeSpec
from edgekv.text.tokenizer import Tokenizer
from edgekv.weights import BlockWeight, open_source
from edgekv.weights.base import stack_rows
from edgekv.weights.gguf import GGUFSource
from edgekv.weights.quantize import affine, quantize_blocks, without_shift

EXACT, AFFINE = ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS"), ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
ROUNDED = ("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4")
HALVES = {"Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,),
          "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # fmt: skip
"""Where a block has its fp16 numbers: the scale, and for affine types the minimum."""

COLUMNS, ROWS = 512, 6
HUB_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
LINEAR = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
          "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip


# ---- GGUF files, written by the format's own library -----------------------------------------------------------------


def vocabulary(size: int) -> list[str]:
    """Tokens of a byte-level BPE: all bytes as GPT-2 spells them, two specials, one merge, and padding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab"]
    return tokens + [f"[PAD{number}]" for number in range(len(tokens), size)]


def permuted(weight: Any, heads: int) -> Any:
    """The rows of Q or K in llama.cpp's order: what convert_hf_to_gguf.py does to the llama architecture."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path, path: Path, kind: str = "F32", edit: Callable[[Any, dict[str, Any]], None] | None = None
) -> Path:
    """A llama GGUF of a folder of float safetensors; matrices of layers in `kind`, embedding and head in Q8_0.

    Args:
        edit: is given the writer's metadata and the tensors (name -> (array, kind)) before they are written.
    """
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokens = vocabulary(config["vocab_size"])
    metadata: dict[str, Any] = {
        "llama.context_length": config["max_position_embeddings"], "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"], "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1 if n > 2 else 3 for n in range(len(tokens))],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    }  # fmt: skip
    tensors: dict[str, tuple[Any, str]] = {
        "token_embd.weight": (state["model.embed_tokens.weight"].numpy(), "Q8_0"),
        "output_norm.weight": (state["model.norm.weight"].numpy(), "F32"),
    }
    if "lm_head.weight" in state:
        tensors["output.weight"] = (state["lm_head.weight"].numpy(), "Q8_0")
    for layer in range(config["num_hidden_layers"]):
        for name, hub in HUB_NAMES.items():
            weight = state[f"model.layers.{layer}.{hub}.weight"].numpy()
            if name in ("attn_q", "attn_k"):
                weight = permuted(weight, heads if name == "attn_q" else kv_heads)
            tensors[f"blk.{layer}.{name}.weight"] = (weight, "F32" if "norm" in name else kind)
    if edit is not None:
        edit(metadata, tensors)
    return _write(path, metadata, tensors)


def _write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[Any, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for name, (array, kind) in tensors.items():
        if plain := {"F16": np.float16, "F32": np.float32, "F64": np.float64}.get(kind):
            writer.add_tensor(name, array.astype(plain))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, Kind[kind]), raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A tiny llama in float32."""
    return write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf")


def written(
    tiny_models: TinyModels, tmp_path: Path, edit: Callable[[Any, dict[str, Any]], None], kind: str = "F32"
) -> Path:
    return write_gguf(tiny_models.source("llama"), tmp_path / "edited.gguf", kind, edit)


# ---- block types -----------------------------------------------------------------------------------------------------


def raw_blocks(kind: str, seed: int, scale: Callable[[Any], Any], minimum: Callable[[Any], Any]) -> Any:
    """[ROWS, bytes] random valid blocks with given fp16 numbers."""
    rng = np.random.default_rng(seed)
    columns, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // columns, size), dtype=np.uint8)
    for place, values in zip(HALVES[kind], (scale, minimum), strict=False):
        numbers = np.asarray(values(rng.standard_normal(blocks.shape[:2])), np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


def read_raw(kind: str, data: Any, tmp_path: Path) -> tuple[BlockWeight, Any]:
    """What edgekv and the gguf package read of the same tensor in a file."""
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x.weight", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from edgekv.weights.gguf import _read_matrix

    (tensor,) = gguf.GGUFReader(tmp_path / "one.gguf").tensors
    weight = _read_matrix(tensor, tensor.data, int(tensor.shape[0]))
    assert isinstance(weight, BlockWeight)
    assert weight.shape == (ROWS, COLUMNS)
    return weight, gguf.quants.dequantize(data, Kind[kind])


SCALES: dict[str, Callable[[Any], Any]] = {
    "positive": lambda x: abs(x) * 0.02 + 1e-4,
    "negative": lambda x: -abs(x) * 0.02 - 1e-4,
    "zero": lambda x: x * 0,
    "tiny": lambda x: x * 0 + 6e-8,  # the smallest fp16
    "large": lambda x: x * 0 + 1000,
}
MINIMA: dict[str, Callable[[Any], Any]] = {
    "below zero": lambda x: -abs(x) * 0.1,
    "zero": lambda x: x * 0,
    "just above zero": lambda x: abs(x) * 0.005,
    "far above": lambda x: abs(x) + 3,
    "far below": lambda x: -abs(x) - 3,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", EXACT)
def test_integer_types_are_exact(kind: str, scale: str, tmp_path: Path) -> None:
    """Random blocks with every kind of scale: the very numbers that the gguf package reads, bit for bit."""
    weight, reference = read_raw(kind, raw_blocks(kind, 1, SCALES[scale], SCALES["zero"]), tmp_path)
    np.testing.assert_array_equal(weight.dequantize(), reference)
    assert weight.bits == {"Q4_0": 4, "Q3_K": 4, "Q5_0": 5, "Q6_K": 6}.get(kind, 8)
    assert weight.zeros is None
    np.testing.assert_array_equal(weight.to_bits(8).dequantize(), reference)


@pytest.mark.parametrize("minimum", MINIMA)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", AFFINE)
def test_affine_types_are_exact_or_never_worse_than_8_bits(kind: str, scale: str, minimum: str, tmp_path: Path) -> None:
    """Random blocks with every kind of scale and minimum: what the gguf package reads, up to float32 rounding of what
    is added. Without a shift, in 8 bits, within half a step of plain rounding of that block."""
    signed = MINIMA[minimum] if kind in ("Q4_1", "Q5_1") else lambda x: -MINIMA[minimum](x)  # K-quants subtract it
    weight, reference = read_raw(kind, raw_blocks(kind, 2, SCALES[scale], signed), tmp_path)
    blocks = reference.reshape(ROWS, -1, 32)
    terms = np.abs(weight.scales) * (1 << weight.bits) + np.abs(weight.shifts())
    assert weight.bits == (4 if kind in ("Q4_1", "Q4_K") else 5)
    assert np.all(np.abs(weight.dequantize().reshape(blocks.shape) - blocks).max(-1) <= 2e-7 * terms)
    spread = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    error = np.abs(without_shift(weight).dequantize().reshape(blocks.shape) - blocks).max(-1)
    # 1.5: random codes need not reach both ends of the format's range, which is what the step is chosen by
    assert np.all(error <= 1.5 * spread / 510 + 1e-6 * np.abs(blocks).max(-1) + 1e-12)


@pytest.mark.parametrize("kind", AFFINE)
def test_affine_types_are_close_without_a_shift(kind: str, tmp_path: Path) -> None:
    """Weights as they are, around zero, in 8 bits: measured 0.24 % of their size, half of what plain rounding costs."""
    weights = (np.random.default_rng(3).standard_normal((ROWS, COLUMNS)) * 0.05).astype(np.float32)
    limit = 0.7
    try:
        data = gguf.quants.quantize(weights, Kind[kind])
    except NotImplementedError:  # the library only reads K-quants; in these random ones not every range holds zero
        limit = 1.0
        data = raw_blocks(kind, 3, SCALES["positive"], lambda x: abs(x) * 0.15 + 1e-3)
    weight, reference = read_raw(kind, data, tmp_path)
    assert np.linalg.norm(weight.dequantize() - reference) <= 2e-7 * np.linalg.norm(reference)
    error = np.linalg.norm(without_shift(weight).dequantize() - reference)
    assert error <= 3e-3 * np.linalg.norm(reference)
    assert error <= limit * np.linalg.norm(quantize_blocks(reference, bits=8, group=32).dequantize() - reference)


@pytest.mark.parametrize("kind", EXACT + AFFINE)
def test_blocks_of_zeros(kind: str, tmp_path: Path) -> None:
    """All bytes zero: all weights zero, without a warning."""
    weight, reference = read_raw(kind, np.zeros_like(raw_blocks(kind, 0, SCALES["zero"], SCALES["zero"])), tmp_path)
    np.testing.assert_array_equal(weight.dequantize(), reference)
    assert not weight.dequantize().any()


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
@pytest.mark.parametrize("value", [0.3, -0.3, 1000.0, 6e-8])
def test_constant_blocks(kind: str, value: float, tmp_path: Path) -> None:
    """A scale of zero and a minimum: one number everywhere, kept; to float32 rounding without a shift."""
    data = raw_blocks(kind, 4, SCALES["zero"], lambda x: x * 0 + value)
    weight, reference = read_raw(kind, data, tmp_path)
    np.testing.assert_array_equal(weight.dequantize(), reference)
    np.testing.assert_allclose(without_shift(weight).dequantize(), reference, rtol=1e-6)


@pytest.mark.parametrize("kind", ROUNDED)
def test_other_types_are_rounded_to_8_bits(kind: str, tmp_path: Path) -> None:
    """Types without a reader of their own go through the gguf package and half a step of 8 bits at most."""
    columns, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = np.random.default_rng(5).integers(0, 64, (ROWS, COLUMNS // columns, size), dtype=np.uint8).reshape(ROWS, -1)
    weight, reference = read_raw(kind, data, tmp_path)
    blocks = reference.reshape(ROWS, -1, 32)
    spread = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    error = np.abs(weight.dequantize().reshape(blocks.shape) - blocks).max(-1)
    assert np.all(error <= spread / 510 * 1.001 + 1e-12)


# ---- BlockWeight -----------------------------------------------------------------------------------------------------


def block_weight(
    seed: int, bits: int, group: int, zeros: bool, rows: int = 8, columns: int = 128, shift: bool = False
) -> BlockWeight:
    rng = np.random.default_rng(seed)
    shape = (rows, columns // group)
    points = rng.integers(0, 1 << bits, shape, dtype=np.uint8) if zeros else None
    codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    scales, added = rng.uniform(0.001, 0.1, shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    return BlockWeight(codes, scales, points, bits, group, shift=added if shift else None)


def test_dequantize_by_hand() -> None:
    """(code - zero) * scale, block by block, written out."""
    weight = block_weight(0, 4, 32, zeros=True, rows=3)
    found = weight.dequantize()
    for row in range(3):
        for column in range(128):
            zero, scale = int(weight.zeros[row, column // 32]), weight.scales[row, column // 32]  # type: ignore[index]
            assert found[row, column] == np.float32(int(weight.codes[row, column]) - zero) * scale
    plain = block_weight(0, 4, 32, zeros=False, rows=3)
    assert plain.dequantize()[0, 0] == np.float32(int(plain.codes[0, 0]) - 8) * plain.scales[0, 0]
    shifted = block_weight(0, 4, 32, zeros=True, rows=3, shift=True)
    assert shifted.dequantize()[2, 40] == found[2, 40] + shifted.shifts()[2, 1]


@given(
    bits=st.sampled_from([4, 5, 6, 8]), group=st.sampled_from([32, 64, 128]), zeros=st.booleans(),
    shift=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_reshaping_is_exact(bits: int, group: int, zeros: bool, shift: bool, seed: int) -> None:
    """Property: other rows, wider codes, smaller blocks: the very same numbers."""
    weight = block_weight(seed, bits, group, zeros, shift=shift)
    whole = weight.dequantize()
    order = np.random.default_rng(seed).permutation(8)
    np.testing.assert_array_equal(weight.take_rows(order).dequantize(), whole[order])
    np.testing.assert_array_equal(weight.take_rows(order[:3]).dequantize(), whole[order[:3]])
    np.testing.assert_array_equal(weight.to_bits(8).dequantize(), whole)
    assert weight.to_bits(8).bits == 8
    for smaller in (size for size in (16, 32, 64, 128) if size <= group):
        np.testing.assert_array_equal(weight.to_group(smaller).dequantize(), whole)
        assert weight.to_group(smaller).scales.shape == (8, 128 // smaller)


@given(
    st.lists(
        st.tuples(st.sampled_from([4, 5, 6, 8]), st.sampled_from([16, 32, 128]), st.booleans(), st.booleans()),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_stacking_is_exact(kinds: list[tuple[int, int, bool, bool]]) -> None:
    """Property: matrices of any mixture of widths, blocks, zero points and shifts, one above the other."""
    parts = [
        block_weight(seed, bits, group, zeros, shift=shift) for seed, (bits, group, zeros, shift) in enumerate(kinds)
    ]
    stacked = stack_rows(parts)
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([part.dequantize() for part in parts]))
    assert stacked.bits == max(kind[0] for kind in kinds)
    assert stacked.codes.max() < 1 << stacked.bits


# ---- rounding --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 999),
    offset=st.floats(-2, 2), size=st.sampled_from([1e-30, 1e-4, 1.0, 1e4]),
)  # fmt: skip
def test_rounding_error(bits: int, group: int, seed: int, offset: float, size: float) -> None:
    """Property: at most half a step of the block's range (zero included) anywhere, a zero point that is a code, and
    zero itself is exact."""
    weights = ((np.random.default_rng(seed).standard_normal((5, 256)) + offset) * size).astype(np.float32)
    weights[0, :group] = 0
    weights[1, 3] = 0
    held = quantize_blocks(weights, bits=bits, group=group)
    blocks = weights.reshape(5, -1, group)
    spread = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    step = np.where(spread > 0, spread / ((1 << bits) - 1), 1)
    error = np.abs(held.dequantize().reshape(blocks.shape) - blocks).max(-1)
    # half a step for the code; another half where both ends are clipped after the zero point was rounded
    assert np.all(error <= step * 0.5 * 1.01 + step * 0.5 * (spread > 0))
    assert np.sqrt(((held.dequantize().reshape(blocks.shape) - blocks) ** 2).mean()) <= 0.5 * step.max()
    assert held.dequantize()[1, 3] == 0
    assert not held.dequantize()[0, :group].any()


def test_rounding_in_parts_is_rounding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices are rounded some rows at a time, to the same codes."""
    from edgekv.weights import base

    weights = np.random.default_rng(0).standard_normal((37, 64)).astype(np.float32)
    whole = quantize_blocks(weights, bits=4, group=32)
    monkeypatch.setattr(base, "_BLOCK_BYTES", 5 * 64 * 4)
    parts = quantize_blocks(weights, bits=4, group=32)
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.dequantize(), whole.dequantize())


@settings(deadline=None)
@given(
    seed=st.integers(0, 9999), bits=st.sampled_from([4, 5]),
    offset=st.floats(0, 1) | st.floats(-0.6, 0.1) | st.floats(0, 40) | st.floats(-300, 300),
    step=st.sampled_from([1e-6, 0.01, 3.0]),
)  # fmt: skip
def test_affine_blocks_are_held_no_worse_than_rounded(seed: int, bits: int, offset: float, step: float) -> None:
    """Property: whatever the minimum, no block that uses its whole range is further off than half a step of plain
    8-bit rounding, which `quantize_blocks` is measured against too."""
    rng, top = np.random.default_rng(seed), (1 << bits) - 1
    codes = rng.integers(0, top + 1, (4, 64), dtype=np.uint8)
    codes[:, 0::32], codes[:, 1::32] = 0, top
    steps = (step * rng.uniform(0.5, 2, (4, 2))).astype(np.float32)
    minimum = (-offset * steps).astype(np.float32)
    exact = codes.reshape(4, 2, 32) * steps[..., None].astype(np.float64) + minimum[..., None]
    held = without_shift(affine(codes, steps, minimum, bits=bits, group=32)).dequantize().reshape(exact.shape)
    spread = np.maximum(exact.max(-1), 0) - np.minimum(exact.min(-1), 0)
    bound = spread / 510 * 1.001 + 2e-7 * np.abs(exact).max(-1)
    assert np.all(np.abs(held - exact).max(-1) <= bound)


def test_affine_blocks_with_integer_zero_points_are_exact() -> None:
    """m = -z d: the codes themselves are kept, without a shift, too."""
    codes = np.arange(16, dtype=np.uint8).repeat(2)[None]
    for zero in (0, 3, 15, 200):
        step, minimum = np.full((1, 1), 0.5, np.float32), np.full((1, 1), -0.5 * zero, np.float32)
        held = affine(codes, step, minimum, bits=4, group=32)
        for weight in (held, without_shift(held)):
            np.testing.assert_array_equal(weight.dequantize(), (codes.astype(np.float32) - zero) * 0.5)


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def test_a_gguf_file_holds_its_twin(tiny_models: TinyModels, gguf_file: Path) -> None:
    """Every tensor equals the safetensors model the file was made from: the permutation of Q and K is undone."""
    source, twin = GGUFSource(gguf_file), open_source(tiny_models.source("llama"))
    for layer in range(2):
        for part in LINEAR:
            np.testing.assert_array_equal(source.matrix(f"{layer}.{part}"), twin.matrix(f"{layer}.{part}"))
        for norm in ("attn_norm", "ffn_norm"):
            np.testing.assert_array_equal(source.vector(f"{layer}.{norm}"), twin.vector(f"{layer}.{norm}"))
    np.testing.assert_array_equal(source.vector("norm"), twin.vector("norm"))
    for name in ("embed", "head"):
        held, exact = source.matrix(name), twin.matrix(name)
        assert isinstance(held, BlockWeight)
        assert np.abs(held.dequantize() - exact).max() < np.abs(exact).max() / 127  # Q8_0
    assert source.spec.qkv_rows == twin.spec.qkv_rows
    assert source.scheme == "GGUF F32, Q8_0"
    assert source.files == [str(gguf_file)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_transformers_reads_the_same(tiny_models: TinyModels, tmp_path: Path, kind: str) -> None:
    """A library we did not write, reading the same quantised file."""
    path = write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf", kind)
    state = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    source = GGUFSource(path)
    for layer in range(2):
        for part, hub in LINEAR.items():
            held, wanted = source.matrix(f"{layer}.{part}"), state[f"model.layers.{layer}.{hub}.weight"].numpy()
            assert isinstance(held, BlockWeight)
            assert held.bits == (8 if kind == "Q8_0" else 4)
            tolerance = 2e-7 * np.linalg.norm(wanted) if kind == "Q4_1" else 0
            assert np.linalg.norm(held.dequantize() - wanted) <= tolerance, (layer, part)


def test_the_metadata_of_a_gguf_file(gguf_file: Path) -> None:
    """case C21: EOS and EOT both end an answer; geometry, RoPE and tokenizer are read."""
    source = GGUFSource(gguf_file)
    spec = source.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 64, 4, 2, 16)
    assert (spec.bos_id, spec.eos_ids, spec.tied_embeddings, spec.qkv_bias) == (1, (2, 7), False, False)
    texts = source.tokenizer()
    assert (texts.bos_token, texts.eos_token, texts.add_bos) == ("<s>", "</s>", True)
    assert texts.chat_template is not None
    assert json.loads(texts.tokenizer_json)["model"]["vocab"]["ab"] == 259


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def named_tokens(metadata: dict[str, Any], names: dict[int, tuple[str, int]], template: str | None = None) -> None:
    """Give tokens of a GGUF's vocabulary another text and type; a template, or none."""
    for number, (text, kind) in names.items():
        metadata["tokenizer.ggml.tokens"][number] = text
        metadata["tokenizer.ggml.token_type"][number] = kind
    metadata["tokenizer.ggml.unknown_token_id"] = 0
    metadata.pop("tokenizer.ggml.eot_token_id")
    metadata.pop("tokenizer.chat_template")
    if template is not None:
        metadata["tokenizer.chat_template"] = template


@pytest.mark.parametrize(
    ("names", "template", "ends"),
    [
        ({300: ("<end_of_turn>", CONTROL)}, None, (2, 300)),
        ({300: ("<|end|>", CONTROL), 301: ("<|eom_id|>", CONTROL), 302: ("<|user|>", CONTROL)}, None, (2, 300, 301)),
        ({300: ("<|end|>", USER_DEFINED)}, "{{ messages[0].content }}<|end|>", (2, 300)),
        ({300: ("<|im_end|>", NORMAL)}, "{{ messages[0].content }}<|im_end|>", (2, 300)),
        ({300: ("<|im_end|>", NORMAL)}, "{{ messages[0].content }}", (2,)),
        ({300: ("<|end|>", USER_DEFINED)}, None, (2,)),
        ({0: ("<|endoftext|>", CONTROL)}, None, (2,)),
    ],
)
def test_ends_of_turns_that_a_gguf_file_does_not_name(
    tiny_models: TinyModels,
    tmp_path: Path,
    names: dict[int, tuple[str, int]],
    template: str | None,
    ends: tuple[int, ...],
) -> None:
    """Public files of Gemma 2 and Phi-3 name no end of turn: known ones count where the model uses them."""
    source = GGUFSource(written(tiny_models, tmp_path, lambda m, t: named_tokens(m, names, template)))
    assert source.spec.eos_ids == ends


def as_phi3(metadata: dict[str, Any], tensors: dict[str, tuple[Any, str]]) -> None:
    """A Llama's metadata and tensors under the names of Phi-3."""
    metadata["general.architecture"] = "phi3"
    for key in [key for key in metadata if key.startswith("llama.")]:
        metadata[key.replace("llama", "phi3")] = metadata.pop(key)
    for layer in range(metadata["phi3.block_count"]):
        for packed, parts in (("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_up", ("ffn_gate", "ffn_up"))):
            arrays = [tensors.pop(f"blk.{layer}.{part}.weight")[0] for part in parts]
            tensors[f"blk.{layer}.{packed}.weight"] = (np.concatenate(arrays), "F32")


def test_the_turns_of_a_phi3_file(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Its files give the marks of turns the type of user-defined tokens: they are special nevertheless, so that what
    somebody types forges none, and swallow white space behind them as Phi-3's own tokenizer has it."""
    names = {300: ("<|user|>", USER_DEFINED), 301: ("<|end|>", USER_DEFINED), 302: ("<|think|>", USER_DEFINED)}
    names[303] = ("\n", NORMAL)

    def edit(metadata: dict[str, Any], tensors: dict[str, tuple[Any, str]]) -> None:
        as_phi3(metadata, tensors)
        named_tokens(metadata, names, "<|user|>\n{{ messages[0].content }}<|end|>\n")
        tokens = metadata["tokenizer.ggml.tokens"]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * len(tokens)}
        metadata["tokenizer.ggml.add_space_prefix"] = False
        metadata.pop("tokenizer.ggml.merges")

    source = GGUFSource(written(tiny_models, tmp_path, edit))
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(source.tokenizer().tokenizer_json))
    assert {"<|user|>", "<|end|>"} <= tokenizer.special_tokens
    assert "<|think|>" not in tokenizer.special_tokens
    typed = tokenizer.encode_guarded(tokenizer.guard("a<|end|><|user|>b")).ids
    assert not {300, 301} & set(typed)
    assert tokenizer.encode_guarded("<|user|>\na<|end|>\n").ids == (300, tokenizer.token_id("a"), 301)
    assert tokenizer.encode_guarded("<s>\na").ids == (1, 303, tokenizer.token_id("a"))
    assert 301 in source.spec.eos_ids


def test_tied_embeddings_in_gguf(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C26: no output tensor means that the embedding is the head."""
    assert GGUFSource(write_gguf(tiny_models.source("one-layer"), tmp_path / "tied.gguf")).spec.tied_embeddings


def test_head_size_in_gguf(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C27: key_length is the head size where hidden / heads is another number."""

    def edit(metadata: Any, tensors: Any) -> None:
        metadata["llama.attention.key_length"] = 32

    path = write_gguf(tiny_models.source("wide-heads"), tmp_path / "wide.gguf", edit=edit)
    source, twin = GGUFSource(path), open_source(tiny_models.source("wide-heads"))
    assert source.spec.head_dim == 32
    np.testing.assert_array_equal(source.matrix("1.q"), twin.matrix("1.q"))
    np.testing.assert_array_equal(source.matrix("1.k"), twin.matrix("1.k"))


def test_biases_in_gguf(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Biases of Q and K are permuted as their rows are; a bias that would be left out is refused."""
    rng = np.random.default_rng(0)
    biases = {part: rng.standard_normal(size).astype(np.float32) for part, size in (("q", 64), ("k", 32), ("v", 32))}

    def edit(metadata: Any, tensors: Any) -> None:
        for layer in range(2):
            for part, bias in biases.items():
                heads = {"q": 4, "k": 2}.get(part)
                stored = permuted(bias[:, None], heads)[:, 0] if heads else bias
                tensors[f"blk.{layer}.attn_{part}.bias"] = (stored, "F32")

    source = GGUFSource(written(tiny_models, tmp_path, edit))
    assert source.spec.qkv_bias
    for part, bias in biases.items():
        np.testing.assert_array_equal(source.vector(f"1.{part}.bias"), bias)

    def other(metadata: Any, tensors: Any) -> None:
        tensors["blk.0.ffn_up.bias"] = (np.ones(128, np.float32), "F32")

    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.bias"):
        GGUFSource(written(tiny_models, tmp_path, other))


Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (lambda m, t: m.update({"general.architecture": "bloom"}), UnsupportedModel, "bloom.*llama, qwen2"),
        (lambda m, t: m.pop("llama.block_count"), BadCheckpoint, "llama.block_count"),
        (lambda m, t: m.pop("tokenizer.ggml.tokens"), BadCheckpoint, "tokenizer.ggml.tokens"),
        (lambda m, t: m.update({"llama.block_count": "two"}), BadCheckpoint, "llama.block_count is 'two', not a int"),
        (lambda m, t: m.update({"llama.block_count": 3}), BadCheckpoint, r"blk\.2"),
        (lambda m, t: m.update({"llama.block_count": 2_000_000_000}), BadCheckpoint, "2000000000 layers"),
        (lambda m, t: m.update({"llama.attention.head_count": 0}), BadCheckpoint, "num_heads is 0"),
        (lambda m, t: m.update({"llama.attention.head_count": [4, 4]}), BadCheckpoint, "head_count"),
        (lambda m, t: m.update({"llama.attention.head_count": 3}), BadCheckpoint, "3 query heads|attn_q"),
        (lambda m, t: m.update({"llama.attention.layer_norm_rms_epsilon": 0.0}), BadCheckpoint, "epsilon"),
        (lambda m, t: m.update({"llama.attention.layer_norm_rms_epsilon": float("nan")}), BadCheckpoint, "epsilon"),
        (lambda m, t: m.update({"llama.rope.freq_base": -1.0}), BadCheckpoint, "freq_base"),
        (lambda m, t: m.update({"llama.rope.scaling.type": "longrope"}), UnsupportedModel, "longrope"),
        (
            lambda m, t: m.update({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}),
            UnsupportedModel,
            "yarn_log_multiplier",
        ),
        (lambda m, t: m.update({"llama.rope.dimension_count": 8}), UnsupportedModel, "8 of 16"),
        (lambda m, t: m.update({"llama.expert_count": 8}), UnsupportedModel, "a mixture of 8 experts"),
        (
            lambda m, t: m.update({"split.count": 3, "split.no": 1}),
            UnsupportedModel,
            r"part 2 of 3 .*llama-gguf-split --merge \S*edited\.gguf OUT\.gguf",
        ),
        (lambda m, t: m.update({"tokenizer.ggml.tokens": [1, 2, 3]}), BadCheckpoint, "tokens holds"),
        (lambda m, t: m.update({"tokenizer.ggml.eos_token_id": "2"}), BadCheckpoint, "eos_token_id"),
        (lambda m, t: t.update({"rope_freqs.weight": (np.ones(9), "F32")}), BadCheckpoint, "9 RoPE factors"),
        (lambda m, t: t.update({"rope_freqs.weight": (np.zeros(8), "F32")}), BadCheckpoint, "RoPE factors"),
        (lambda m, t: t.update({"rope_factors_long.weight": (np.ones(8), "F32")}), UnsupportedModel, "rotary angles"),
        (lambda m, t: t.update({"blk.0.attn_q_norm.weight": (np.ones(16), "F32")}), UnsupportedModel, "attn_q_norm"),
        (lambda m, t: t.update({"blk.1.ffn_up.weight": (np.ones((128, 64)), "F64")}), UnsupportedModel, "ffn_up.*F64"),
        (lambda m, t: t.pop("blk.1.ffn_up.weight"), BadCheckpoint, r"blk\.1\.ffn_up\.weight"),
        (lambda m, t: t.update({"blk.1.ffn_up.weight": (np.ones((64, 128)), "F32")}), BadCheckpoint, r"\[64, 128\]"),
        (lambda m, t: t.update({"output.weight": (np.ones((64, 512)), "F32")}), BadCheckpoint, r"output\.weight"),
        (lambda m, t: t.update({"output_norm.weight": (np.ones(32), "F32")}), BadCheckpoint, "output_norm"),
    ],
)  # fmt: skip
def test_gguf_files_that_are_refused(
    tiny_models: TinyModels, tmp_path: Path, edit: Edit, error: type[EdgeKVError], match: str
) -> None:
    """By the name of the field or tensor, when the file is opened."""
    with pytest.raises(error, match=match):
        GGUFSource(written(tiny_models, tmp_path, edit))


def test_stored_rope_factors(tiny_models: TinyModels, tmp_path: Path) -> None:
    """llama.cpp stores Llama 3.1's scaling as one divisor a pair of channels: the frequencies are the same."""
    llama3 = RopeSpec(10_000.0, "llama3", 8.0, 1.0, 4.0, 64)
    plain, scaled = (inverse_frequencies(rope, 16) for rope in (RopeSpec(10_000.0), llama3))
    assert (plain / scaled).max() == pytest.approx(8)
    stored = ((plain / scaled).astype(np.float32), "F32")
    source = GGUFSource(written(tiny_models, tmp_path, lambda m, t: t.update({"rope_freqs.weight": stored})))
    np.testing.assert_allclose(inverse_frequencies(source.spec.rope, 16), scaled, rtol=1e-6)


def test_linear_rope_in_gguf(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C28: the one scaling that is read from GGUF."""
    source = GGUFSource(
        written(
            tiny_models, tmp_path,
            lambda m, t: m.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        )
    )  # fmt: skip
    assert (source.spec.rope.kind, source.spec.rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("fields", "kind", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scale_linear": 2.0}, "linear", 2.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, "linear", 4.0),
        ({"rope.scaling.factor": 1.0}, "default", 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default", 1.0),
    ],
)
def test_rope_that_is_scaled_without_saying_how(
    tiny_models: TinyModels, tmp_path: Path, fields: dict[str, Any], kind: str, factor: float
) -> None:
    """As llama.cpp reads it: linearly, the factor also under its older name."""
    named = {f"llama.{name}": value for name, value in fields.items()}
    rope = GGUFSource(written(tiny_models, tmp_path, lambda m, t: m.update(named))).spec.rope
    assert (rope.kind, rope.factor) == (kind, factor)


def test_a_part_of_a_model_names_the_first(gguf_file: Path, tiny_models: TinyModels, tmp_path: Path) -> None:
    """That is what llama.cpp's tool is given."""
    path = tmp_path / "big-00002-of-00003.gguf"
    edit = {"split.count": 3, "split.no": 1}
    write_gguf(tiny_models.source("llama"), path, edit=lambda m, t: m.update(edit))
    with pytest.raises(UnsupportedModel, match=r"--merge \S*big-00001-of-00003\.gguf OUT"):
        open_source(path)


def test_bytes_in_another_order(tmp_path: Path) -> None:
    """Refused: its numbers would be read wrongly."""
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("x.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"big\.gguf has its bytes in the order of another kind of machine"):
        GGUFSource(path)


def test_a_type_of_tensors_that_nobody_knows(gguf_file: Path) -> None:
    """llama.cpp adds types: the file is whole."""
    name = b"blk.1.ffn_up.weight"
    data = bytearray(gguf_file.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the count of dimensions and the dimensions
    data[at : at + 4] = struct.pack("<I", 199)
    gguf_file.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf: blk\.1\.ffn_up\.weight is stored as type 199"):
        GGUFSource(gguf_file)


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-4f2a", "model.bin"])
def test_a_gguf_file_of_any_name(gguf_file: Path, name: str) -> None:
    """Known by its first bytes; Ollama's files have no suffix."""
    path = gguf_file.rename(gguf_file.parent / name)
    assert open_source(path).scheme == "GGUF F32, Q8_0"


def test_a_folder_with_one_gguf_file_in_capitals(gguf_file: Path) -> None:
    gguf_file.rename(gguf_file.parent / "MODEL.GGUF")
    assert open_source(gguf_file.parent).scheme == "GGUF F32, Q8_0"


@pytest.mark.parametrize("count", [1 << 22, 1 << 40, (1 << 22) + 1, (1 << 64) - 1])
@pytest.mark.parametrize("item", [0, 4, 8])  # uint8, uint32, string
def test_a_list_that_claims_to_be_endless(tmp_path: Path, item: int, count: int) -> None:
    """The gguf package would read nothing past the end, a million times a million times: refused at once."""
    key = b"general.tags"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "x.gguf"
    path.write_bytes(header + struct.pack("<IIQ", 9, item, count) + bytes(64))
    started = time.process_time()
    with pytest.raises(BadCheckpoint, match="not a whole GGUF file"):
        GGUFSource(path)
    assert time.process_time() - started < 1


# ---- safetensors folders ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A float32 checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_models.source("llama"), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32")]
)
def test_float_types(folder: Path, dtype: torch.dtype, name: str) -> None:
    """Every number as torch reads it."""
    change_tensors(folder, lambda state: state.update({key: value.to(dtype) for key, value in state.items()}))
    state, source = load_file(folder / "model.safetensors"), open_source(folder)
    assert source.scheme == name
    for part, hub in LINEAR.items():
        wanted = state[f"model.layers.1.{hub}.weight"].float().numpy()
        found = source.matrix(f"1.{part}")
        assert found.dtype == np.float32  # type: ignore[union-attr]
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(source.vector("norm"), state["model.norm.weight"].float().numpy())
    np.testing.assert_array_equal(source.matrix("embed"), state["model.embed_tokens.weight"].float().numpy())


def test_bfloat16_by_hand(folder: Path) -> None:
    """The bits are the upper half of a float32's: written here without any library, with every special value."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] = 0x3F80  # no infinities
    change_config(folder, vocab_size=1024, tie_word_embeddings=True)
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1024, 64], "data_offsets": [0, 2 << 16]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bits.tobytes())
    found = np.asarray(open_source(folder).matrix("embed"))
    wanted = [struct.unpack("<f", struct.pack("<HH", 0, int(half)))[0] for half in bits]
    np.testing.assert_array_equal(found.reshape(-1), np.array(wanted, np.float32))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_ends_of_turns_that_a_config_does_not_name(folder: Path, place: str) -> None:
    """Without generation_config.json a Phi-3 or Gemma 2 has the end of a text alone: what its template ends turns with
    counts as well, and no other token of a known text."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = {"400": "<|end|>", "401": "<|im_end|>", "402": "<|user|>"}
    template = "{{ '<|user|>' + messages[0].content + '<|end|>' }}"
    fields: dict[str, Any] = {"chat_template": template}
    if place == "tokenizer_config.json":
        fields["added_tokens_decoder"] = {number: {"content": text} for number, text in tokens.items()}
    else:
        added = [{"id": int(number), "content": text} for number, text in tokens.items()]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    change_config(folder, eos_token_id=2)
    assert open_source(folder).spec.eos_ids == (2, 400)


def shard(folder: Path) -> list[str]:
    """Split the checkpoint into two files and an index."""
    state = load_file(folder / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: names[index % 2] for index, name in enumerate(state)}
    for file in names:
        save_file({name: state[name] for name in state if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def test_shards(tiny_models: TinyModels, folder: Path) -> None:
    """Two files and an index: the same tensors; other safetensors in the folder do not count."""
    names = shard(folder)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "adapter.safetensors")
    whole, parts = open_source(tiny_models.source("llama")), open_source(folder)
    for name in ("embed", "head", "0.q", "1.down"):
        np.testing.assert_array_equal(parts.matrix(name), whole.matrix(name))
    np.testing.assert_array_equal(parts.vector("norm"), whole.vector("norm"))
    assert [Path(file).name for file in parts.files] == names


def test_a_missing_shard(folder: Path) -> None:
    """Named, with how many there should be."""
    (folder / shard(folder)[1]).unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks model-00002-of-00002\.safetensors, one of 2"):
        open_source(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", ""])
def test_an_index_that_names_a_file_elsewhere(folder: Path, name: str) -> None:
    """Refused before anything is opened."""
    shard(folder)
    (folder.parent / "secret.safetensors").write_bytes(b"secret")
    (folder / "sub").mkdir()
    (folder / "sub" / "x.safetensors").write_bytes(b"secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(BadCheckpoint, match="outside its folder"):
        open_source(folder)


@pytest.mark.parametrize(
    "content", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": []}}']
)
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    """One sentence that names the file."""
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"index\.json"):
        open_source(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    """Both shapes are named."""
    change_tensors(folder, lambda state: state.update({"model.layers.0.mlp.up_proj.weight": torch.ones(64, 128)}))
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.mlp\.up_proj\.weight is \[64, 128\].*128, 64"):
        open_source(folder).matrix("0.up")
    change_tensors(folder, lambda state: state.update({"model.norm.weight": torch.ones(64, 1)}))
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight"):
        open_source(folder).vector("norm")


def test_a_missing_tensor(folder: Path) -> None:
    """Named."""
    change_tensors(folder, lambda state: state.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(BadCheckpoint, match=r"no tensor model\.layers\.1\.self_attn\.k_proj\.weight"):
        open_source(folder).matrix("1.k")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_other_number_types(folder: Path, dtype: torch.dtype) -> None:
    """Refused with what is read."""
    change_tensors(folder, lambda s: s.update({"model.norm.weight": s["model.norm.weight"].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight.*stored as.*F32, F16 and BF16"):
        open_source(folder).vector("norm")


def test_tied_embeddings(folder: Path) -> None:
    """case C26: without an lm_head the config decides; a head that it says is there must be there."""
    change_tensors(folder, lambda state: state.pop("lm_head.weight"))
    assert not open_source(folder).spec.tied_embeddings
    with pytest.raises(BadCheckpoint, match=r"no tensor lm_head\.weight"):
        open_source(folder).matrix("head")
    change_config(folder, tie_word_embeddings=True)
    assert open_source(folder).spec.tied_embeddings


def test_head_size_of_safetensors(tiny_models: TinyModels) -> None:
    """case C27: the shapes follow head_dim."""
    source = open_source(tiny_models.source("wide-heads"))
    assert source.spec.head_dim == 32
    assert source.matrix("0.q").shape == (128, 64)
    assert source.matrix("0.o").shape == (64, 128)


def test_eos_union_of_a_folder(folder: Path) -> None:
    """case C21: generation_config.json counts too."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert open_source(folder).spec.eos_ids == (2, 9)


def test_recommended_sampling_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """What generation_config.json recommends becomes the model's own; what is no option or out of range does not."""
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    unusable = {"min_p": 7, "typical_p": 0.5, "penalty_window": 3, "seed": 1}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **recommended, **unusable}))
    assert open_source(folder).sampling == recommended
    convert(folder, tmp_path / "made")
    assert open_converted(tmp_path / "made").description.sampling == recommended
    convert(folder, tmp_path / "other", sampling={"temperature": 0.2})
    assert open_converted(tmp_path / "other").description.sampling == recommended | {"temperature": 0.2}


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": "hot", "top_p": None, "top_k": True, "min_p": float("nan")}, {}),
        ({}, {}),
    ],
)
def test_sampling_that_nobody_recommends(folder: Path, said: dict[str, Any], sampling: dict[str, float]) -> None:
    """Greedy decoding is a recommendation; a value that is no number is none."""
    (folder / "generation_config.json").write_text(json.dumps(said))
    assert open_source(folder).sampling == sampling


def test_recommended_sampling_of_gguf(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The keys that llama.cpp's converter writes, float32 numbers as they were meant."""

    def edit(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata.update({"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.top_p": 1.5})

    source = GGUFSource(write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf", edit=edit))
    assert source.sampling == {"temperature": 0.7, "top_k": 40}


def test_every_truncation_of_safetensors(folder: Path) -> None:
    """Forty lengths: refused when opened, never read as zeros."""
    raw = (folder / "model.safetensors").read_bytes()
    random_ = random.Random(0)
    for size in [0, 1, 7, 8, 9, len(raw) - 1, *(random_.randrange(len(raw)) for _ in range(34))]:
        (folder / "model.safetensors").write_bytes(raw[:size])
        with pytest.raises(BadCheckpoint, match="not a whole safetensors file"):
            open_source(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b"null"])
def test_damaged_json(folder: Path, name: str, content: bytes) -> None:
    """Each file of a checkpoint may be damaged: one sentence that names it."""
    (folder / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=name.replace(".", r"\.")):
        open_source(folder).tokenizer()


def test_special_tokens_and_templates(folder: Path) -> None:
    """Text or object, one template or a named list, a file beside; junk is no token and no template."""
    config = folder / "tokenizer_config.json"
    for bos in ("<s>", {"content": "<s>", "lstrip": False}):
        config.write_text(json.dumps({"bos_token": bos, "eos_token": None, "chat_template": "x"}))
        texts = open_source(folder).tokenizer()
        assert (texts.bos_token, texts.eos_token, texts.chat_template) == ("<s>", "", "x")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for template, wanted in ((named, "d"), (named[:1], None), ([3], None), (None, None), ({}, None)):
        config.write_text(json.dumps({"chat_template": template, "bos_token": 3, "eos_token": ["x"]}))
        texts = open_source(folder).tokenizer()
        assert (texts.chat_template, texts.bos_token, texts.eos_token) == (wanted, "", "")
    (folder / "chat_template.jinja").write_text("file")
    assert open_source(folder).tokenizer().chat_template == "file"


def test_no_tokenizer(folder: Path) -> None:
    """Named, with what to do."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"no tokenizer\.json.*copy"):
        open_source(folder).tokenizer()


# ---- what is no checkpoint -------------------------------------------------------------------------------------------


def test_pickles_are_never_loaded(folder: Path) -> None:
    """Refused by kind, unread."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickled weights.*safetensors"):
        open_source(folder)


def test_what_is_no_checkpoint(tmp_path: Path, gguf_file: Path) -> None:
    """Nothing there, an empty folder, another file, several GGUF files; a folder with one GGUF is that file."""
    with pytest.raises(ModelNotFound, match="does not exist"):
        open_source(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="holds neither"):
        open_source(tmp_path / "empty")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelNotFound):
        open_source(tmp_path / "x.txt")
    assert open_source(gguf_file.parent).files == [str(gguf_file)]
    shutil.copyfile(gguf_file, gguf_file.parent / "second.gguf")
    with pytest.raises(ModelNotFound, match=r"2 GGUF files: name one of them, e\.g\."):
        open_source(gguf_file.parent)
