"""Published 4-bit layers become exactly the publisher's integers; whatever does not add up is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.published import AWQ, GPTQ, Bnb, Grid, Packed, Published, State, groups_in_turn, round_to_grid
from safetensors.torch import load_file, save_file

from edgekv.convert import ConvertOptions, convert
from edgekv.engines.onnx import native
from edgekv.errors import BadCheckpoint, ModelError, UnsupportedModel
from edgekv.weights import BlockWeight, Bnb4Weight, open_source
from edgekv.weights.base import operator_group, stack_bnb4, stack_rows
from edgekv.weights.quantize import split_blocks

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]
DOWN = "model.layers.1.mlp.down_proj"


def random_weights(rows: int, columns: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rows + columns).normal(size=(rows, columns)).astype(np.float32)


def write(folder: Path, method: AWQ | GPTQ | Packed | Bnb, edit: Change | None = None, **options: Any) -> State:
    return Published("unit", method, edit=edit, **options).write(folder)


@pytest.mark.parametrize(
    "method",
    [
        *(AWQ(32), AWQ(-1), AWQ(64, symmetric=True)),
        *(GPTQ(32), GPTQ(32, version=2), GPTQ(-1), GPTQ(128), GPTQ(64, symmetric=True)),
        *(Packed(32, symmetric=False), Packed(-1)),
    ],
    ids=str,
)
def test_integers_are_the_publishers(method: AWQ | GPTQ | Packed, tmp_path: Path) -> None:
    """Cases C23, C25: codes, zero points, scales and group are those that were packed."""
    write(tmp_path, method)
    weight = load_file(write_float_twin(tmp_path / "float"))[f"{DOWN}.weight"].half().float().numpy()
    grid = round_to_grid(weight, groups_in_turn(192, method.group), symmetric=method.symmetric)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    assert found.group == (192 if method.group == -1 else method.group)
    assert found.order is None
    np.testing.assert_array_equal(found.codes, grid.codes)
    np.testing.assert_array_equal(found.zero_points(), grid.zeros)
    np.testing.assert_array_equal(found.scales, grid.scales)
    assert (found.zeros is None) == method.symmetric


def write_float_twin(folder: Path) -> Path:
    """The float checkpoint that `write` starts from."""
    Published("unit", AWQ(), floats=("",)).write(folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("method", [GPTQ(32, g_idx="act-order"), Packed(32, act_order=True)], ids=str)
def test_act_order_keeps_groups_side_by_side(method: GPTQ | Packed, tmp_path: Path) -> None:
    """Case C24: the columns are permuted, and the order says which input column each is."""
    state = write(tmp_path, method)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    assert found.order is not None
    assert sorted(found.order) == list(range(192))
    assert (np.diff(found.order.reshape(-1, 32)) > 0).all()
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-6)


@pytest.mark.parametrize(
    ("location", "runs"), [("weight_input", True), ("weight_output", True), ("input", False), ("q_attn", False)]
)
def test_rotations_that_are_not_in_the_weights(location: str, runs: bool, tmp_path: Path) -> None:
    """SpinQuant's R3 and R4 and QuIP's are run beside the weights; without them every number would be wrong."""
    scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["transform_config"] = {"config_groups": {"R4": scheme}}

    write(tmp_path, Packed(32), edit)
    if runs:
        assert open_source(tmp_path).quantised
    else:
        with pytest.raises(UnsupportedModel, match=rf"transform_config rotates at '{location}'"):
            open_source(tmp_path)


def test_the_older_name_of_compressed_tensors(tmp_path: Path) -> None:
    """compression_config: the same fields."""

    def rename(tensors: Tensors, config: dict[str, Any]) -> None:
        config["compression_config"] = config.pop("quantization_config")
        config["compression_config"].pop("quant_method")

    state = write(tmp_path, Packed(32), rename)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_autorounds_packing_as_gptq(symmetric: bool, tmp_path: Path) -> None:
    """The layout of GPTQ v1 under another method's name; its other layouts are refused."""

    def rename(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        config["quantization_config"] |= {"data_type": "int", "extra_config": {"lm_head": {"bits": 16}}}

    state = write(tmp_path, GPTQ(32, symmetric=symmetric), rename)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-6)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("auto_round:auto_gptq", "auto_round:gptqmodel"))
    with pytest.raises(UnsupportedModel, match="packing_format is 'auto_round:gptqmodel'"):
        open_source(tmp_path)


def test_a_g_idx_of_zeros_is_empty(tmp_path: Path) -> None:
    """Case C24: with six groups it cannot mean that all columns are in the first."""
    state = write(tmp_path, GPTQ(32, g_idx="zeros"))
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-6)


def test_zero_points_of_v1_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """Case C23: GPTQModel makes v1 by subtracting 0x11111111 from whole words; a zero point of 0 then borrows."""

    def subtract(tensors: Tensors, config: dict[str, Any]) -> None:
        words = np.array([[0x83050F07] * 16] * 6, np.uint32)  # nibbles 7 0 15 0 5 0 3 8
        tensors[f"{DOWN}.qzeros"] = torch.from_numpy((words - np.uint32(0x11111111)).view(np.int32))

    write(tmp_path, GPTQ(32), subtract)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_array_equal(found.zero_points()[:, 0], np.tile([7, 0, 15, 0, 5, 0, 3, 8], 16))


@pytest.mark.parametrize("words", [0, 0x88888888 - (1 << 32)])
def test_awq_without_zero_points_means_eight(words: int, tmp_path: Path) -> None:
    """An empty qzeros of a symmetric checkpoint says nothing; one of eights says the same."""

    def fill(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{DOWN}.qzeros"].fill_(words)

    state = write(tmp_path, AWQ(32, symmetric=True), fill)
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-6)


@pytest.mark.parametrize("method", [Bnb(), Bnb("fp4", flat=True), Bnb(double=True), Bnb(storage=np.float32)], ids=str)
def test_bitsandbytes_codes_are_the_publishers(method: Bnb, tmp_path: Path) -> None:
    """Packed bytes as they lie in the file, absmax with double quantisation undone."""
    state = write(tmp_path, method)
    packed = load_file(tmp_path / "model.safetensors")[f"{DOWN}.weight"]
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, Bnb4Weight)
    assert found.packed.tobytes() == packed.numpy().tobytes()
    assert (found.kind, found.block, found.shape) == (method.kind, 64, (128, 192))
    np.testing.assert_allclose(found.dequantize(), state[f"{DOWN}.weight"], rtol=1e-5, atol=1e-7)


def test_configs_beside_config_json(tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ first wrote a file of their own, without a method."""
    for name, method, older in (
        ("quantize_config.json", GPTQ(32), {}),
        ("quant_config.json", AWQ(32), {"w_bit": 4, "q_group_size": 32}),
    ):
        folder = tmp_path / name
        write(folder, method)
        config = json.loads((folder / "config.json").read_text())
        fields = {k: v for k, v in config.pop("quantization_config").items() if k != "quant_method"}
        if older:
            fields = older | {"zero_point": True, "version": "GEMM"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps(fields))
        assert isinstance(open_source(folder).matrix("0.q"), BlockWeight)


def test_the_hash_covers_how_the_weights_are_read(tmp_path: Path) -> None:
    """The same shards read as v1 and as v2 are two models: scales of the one must not be taken for the other."""
    prints = set()
    for layout in ("gptq", "gptq_v2"):

        def set_layout(tensors: Tensors, config: dict[str, Any], layout: str = layout) -> None:
            config["quantization_config"]["checkpoint_format"] = layout

        write(tmp_path / layout, GPTQ(32), set_layout)
        prints.add(convert(tmp_path / layout, tmp_path / f"{layout}-out").model.fingerprint)
    assert len(prints) == 2


def test_held_as_published(tmp_path: Path) -> None:
    """What edgekv.json says of it; a group of all 192 columns runs in blocks of 64."""
    for name, method, scheme in (
        ("gptq", GPTQ(32, g_idx="act-order"), "int4/32, int8+8/32"),
        ("one group", AWQ(-1), "int4/128, int4/64, int8+8/32"),
        ("floats", Bnb("fp4"), "float32, fp4/64, int8+8/32"),
    ):
        folder = tmp_path / name
        write(folder, method, floats=("k_proj",) if name == "floats" else ())
        assert convert(folder, tmp_path / f"{name}-out").model.description.scheme == scheme


def test_lossy_keeps_what_has_4_bits_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ integers stay; bitsandbytes' tables are rounded to the grid, in 4 bits or in 8."""
    write(tmp_path / "gptq", GPTQ(64))
    write(tmp_path / "bnb", Bnb())
    gptq, bnb = (convert(tmp_path / n, tmp_path / f"{n}-out", ConvertOptions(lossy="int4")) for n in ("gptq", "bnb"))
    assert gptq.model.description.scheme == "int4/64, int8/32 requantised"
    assert gptq.max_weight_error < 0.01
    assert bnb.model.description.scheme == "int4/32, int8/32 requantised"
    assert 0.02 < bnb.max_weight_error < 0.2
    wide, plain = (
        convert(tmp_path / "bnb", tmp_path / f"bnb-{lossy}", ConvertOptions(lossy=lossy)) for lossy in ("int8", "")
    )
    assert wide.model.description.scheme == "int8+8/32, int8/32 requantised"
    assert 0.001 < wide.max_weight_error < 0.008
    monkeypatch.setattr(native, "unavailable", lambda: "it was not built")
    assert not wide.advice
    assert "it was not built. `edgekv convert FOLDER OUT --lossy int8`" in plain.advice


def test_a_quantised_head_is_its_own(tmp_path: Path) -> None:
    """Case C26: whatever the config says about tying; a float copy of the embedding is still the embedding."""
    write(tmp_path / "own", GPTQ(32), also=("lm_head",))
    edit_config(tmp_path / "own", tie_word_embeddings=True)
    assert not open_source(tmp_path / "own").spec.tied_embeddings
    write(tmp_path / "none", GPTQ(32), tiny={"tie_word_embeddings": True})
    assert open_source(tmp_path / "none").spec.tied_embeddings


def test_a_head_that_should_be_there_is_missed(tmp_path: Path) -> None:
    """Case C26: tying it silently would run a model that lost a shard."""
    write(tmp_path, GPTQ(32), tiny={"tie_word_embeddings": True})
    edit_config(tmp_path, tie_word_embeddings=False)
    assert not open_source(tmp_path).spec.tied_embeddings
    with pytest.raises(BadCheckpoint, match=r"no tensor lm_head\.weight"):
        open_source(tmp_path).matrix("head")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def remove(name: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors[f"{DOWN}.{name}"]

    return change


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{DOWN}.{name}"] = make(tensors[f"{DOWN}.{name}"])

    return change


def say(**fields: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] |= fields

    return change


def say_of_weights(**fields: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= fields

    return change


def nan(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[7] = float("nan")
    return damaged


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].clone()


def add_bias(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{DOWN}.bias"] = torch.ones(128)


def state_of(shape: list[int]) -> torch.Tensor:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": shape})
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
REFUSALS: tuple[tuple[AWQ | GPTQ | Packed | Bnb, Change, str], ...] = (
    (AWQ(), remove("qzeros"), rf"no tensor {DOWN}\.qzeros"),
    (AWQ(), remove("scales"), rf"no tensor {DOWN}\.scales"),
    (AWQ(), put("scales", nan), rf"model\.safetensors: {DOWN}\.scales .* not finite"),
    (AWQ(), put("qweight", shorter), rf"{DOWN}\.qweight is \[191, 16\], but the config says \[192, 16\]"),
    (AWQ(), put("qzeros", shorter), rf"{DOWN}\.qzeros is \[5, 16\]"),
    (AWQ(), put("qweight", lambda t: t.long()), rf"{DOWN}\.qweight in model\.safetensors is stored as I64"),
    (AWQ(), put("qweight", lambda t: t.float()), rf"{DOWN}\.qweight in model\.safetensors is stored as F32"),
    (AWQ(), say(bits=8), r"quantization_config\.bits is 8; edgekv reads 4"),
    (AWQ(), say(bits=3), r"bits is 3"),
    (AWQ(), say(version="gemv"), r"version is 'gemv'"),
    (AWQ(), say(group_size=64), r"layers\.0\.self_attn\.q_proj\.scales is \[4, 128\], but the config says \[2, 128\]"),
    (AWQ(), say(group_size=0), r"group_size is 0"),
    (AWQ(), say(group_size="128"), r"group_size is '128'"),
    (AWQ(), say(zero_point="yes"), r"zero_point is 'yes'"),
    (AWQ(), say(quant_method="quip"), r"quant_method is 'quip'; edgekv reads awq, gptq"),
    (AWQ(), say(quant_method=None), r"quant_method is None"),
    (AWQ(), say(quant_method=["awq"]), r"quant_method is \['awq'\]"),
    (AWQ(), add_bias, rf"{DOWN}\.bias is not zero"),
    (GPTQ(), remove("qzeros"), rf"no tensor {DOWN}\.qzeros"),
    (GPTQ(), put("qzeros", lambda t: t.to(torch.int16)), rf"{DOWN}\.qzeros in model\.safetensors is stored as I16"),
    (GPTQ(), put("scales", lambda t: t * float("inf")), rf"{DOWN}\.scales .* not finite"),
    (GPTQ(), put("g_idx", shorter), rf"{DOWN}\.g_idx is \[191\]"),
    (GPTQ(), put("g_idx", lambda t: t + 1), rf"{DOWN}\.g_idx does not divide 192 columns into groups of 32"),
    (GPTQ(g_idx="act-order"), remove("g_idx"), rf"no tensor {DOWN}\.g_idx, without which act-order"),
    (GPTQ(), say(bits=2), r"bits is 2"),
    (GPTQ(), say(bits=True), r"bits is True"),
    (GPTQ(), say(bits=None), r"bits is None"),
    (GPTQ(), say(bits=8), r"quantization_config\.bits is 8; edgekv reads 4"),
    (GPTQ(), say(dynamic=[4]), r"dynamic is \[4\], not a table"),
    (GPTQ(), say(dynamic={"+:.*(": {}}), r"dynamic has '\+:\.\*\('"),
    (GPTQ(), say(dynamic={".*down_proj": {"bits": 3}}), r"bits is 3; edgekv reads 4, 8"),
    (
        GPTQ(),
        say(dynamic={".*1.mlp.down_proj": {"bits": 8}}),
        rf"{DOWN}\.qweight is \[24, 128\], but the config says \[48, 128\]",
    ),
    (GPTQ(), say(checkpoint_format="marlin"), r"checkpoint_format is 'marlin'"),
    (Packed(symmetric=False), remove("weight_zero_point"), rf"no tensor {DOWN}\.weight_zero_point"),
    (Packed(), put("weight_shape", lambda t: t + 8), rf"{DOWN}\.weight_shape says \[136, 200\], but the config"),
    (Packed(), put("weight_scale", nan), rf"{DOWN}\.weight_scale .* not finite"),
    (Packed(), put("weight_packed", lambda t: t.to(torch.uint8)), rf"{DOWN}\.weight_packed .* stored as U8"),
    (Packed(), say_of_weights(num_bits=8), r"num_bits is 8"),
    (Packed(), say_of_weights(type="float"), r"type is 'float'"),
    (Packed(), say_of_weights(strategy="tensor"), r"strategy is 'tensor'"),
    (Packed(), say(format="float-quantized"), r"format is 'float-quantized'"),
    (Packed(), say(config_groups={}), r"no config_groups"),
    (Packed(), say(config_groups={"a": 1}), r"lacks targets or weights"),
    (Bnb(), put("weight.absmax", nan), rf"{DOWN}\.weight\.absmax .* not finite"),
    (Bnb(), put("weight.absmax", shorter), rf"{DOWN}\.weight\.absmax is \[383\], but the config says \[384\]"),
    (Bnb(), remove("weight.absmax"), rf"no tensor {DOWN}\.weight\.absmax"),
    (Bnb(double=True), remove("weight.nested_quant_map"), rf"no tensor {DOWN}\.weight\.nested_quant_map"),
    (Bnb(), put("weight", shorter), rf"{DOWN}\.weight holds 24574 codes"),
    (Bnb(), put("weight", lambda t: t.to(torch.int32)), rf"{DOWN}\.weight in model\.safetensors is stored as I32"),
    (Bnb(), put("weight.quant_map", lambda t: t * 0.5), rf"{DOWN}\.weight\.quant_map is not the table of nf4"),
    (Bnb(), put(NF4_STATE, lambda t: t[:-2].clone()), rf"{DOWN}\.{NF4_STATE} cannot be read"),
    (Bnb(), put(NF4_STATE, lambda t: state_of([192, 128])), rf"{DOWN}\.{NF4_STATE} says \[192, 128\]"),
    (Bnb(), say(load_in_4bit=False, load_in_8bit=True), r"load_in_4bit is not true"),
    (Bnb(), say(bnb_4bit_quant_type="int4"), r"bnb_4bit_quant_type is 'int4'"),
)


@pytest.mark.parametrize(("method", "change", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_refusals(method: AWQ | GPTQ | Packed | Bnb, change: Change, message: str, tmp_path: Path) -> None:
    """One sentence naming the file or field and the tensor; nothing is left where the model would have gone."""
    write(tmp_path / "source", method, change)
    with pytest.raises(ModelError, match=message) as caught:
        convert(tmp_path / "source", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_config_that_is_no_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path, AWQ())
    edit_config(tmp_path, quantization_config=[4])
    with pytest.raises(BadCheckpoint, match=r"quantization_config is \[4\]"):
        open_source(tmp_path)


def test_groups_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    """24 columns a group: the largest power of two in it is 8, and MatMulNBits starts at 16."""
    write(tmp_path / "source", GPTQ(24), tiny={"intermediate_size": 192})
    with pytest.raises(UnsupportedModel, match=r"in groups of 24, which no block of 16 to 256 divides"):
        convert(tmp_path / "source", tmp_path / "out")


def test_layers_of_several_config_groups(tmp_path: Path) -> None:
    """compressed-tensors names the layers of each entry: by pattern, by path, by class."""
    write(tmp_path, Packed(32))
    tensors = load_file(tmp_path / "model.safetensors")
    layer, weights = Packed(64, symmetric=False).layer("", random_weights(128, 192))
    tensors |= {f"{DOWN}.{name}": torch.from_numpy(np.array(tensor)) for name, tensor in layer.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = Packed(32).config()["config_groups"] | {
        "group_1": Packed(64, symmetric=False).config()["config_groups"]["group_0"]
        | {"targets": [r"re:.*layers\.1\.mlp\.down_proj$"]}
    }
    edit_config(tmp_path, quantization_config=Packed(32).config() | {"config_groups": entries})
    found = open_source(tmp_path).matrix("1.down")
    assert isinstance(found, BlockWeight)
    np.testing.assert_allclose(found.dequantize(), weights, rtol=1e-6)
    assert open_source(tmp_path).scheme == "int4/32, int4/64 asymmetric (compressed-tensors), float16"


def grid_weight(group: int, columns: int = 192, order: bool = False) -> tuple[BlockWeight, Grid]:
    weight = random_weights(24, columns)
    grid = round_to_grid(weight, groups_in_turn(columns, group), symmetric=False)
    found = BlockWeight(
        grid.codes.astype(np.uint8), grid.scales.astype(np.float32), grid.zeros.astype(np.uint8), 4, group
    )
    return found, grid


@pytest.mark.parametrize(("group", "block"), [(192, 64), (128, 64), (32, 32), (96, 32), (48, 16), (24, None)])
def test_smaller_blocks_are_exact(group: int, block: int | None) -> None:
    """Also where the last group is short: 192 columns in groups of 128."""
    weight, grid = grid_weight(group)
    assert operator_group(columns=192, group=group) == block
    np.testing.assert_allclose(weight.dequantize(), grid.weights(), rtol=1e-6)
    if block:
        np.testing.assert_array_equal(weight.to_group(block).dequantize(), weight.dequantize())
        np.testing.assert_array_equal(weight.to_group(block).to_bits(8).dequantize(), weight.dequantize())


def test_stacking_is_exact() -> None:
    """Different blocks and bits; rows of bitsandbytes only where no block spans two matrices."""
    parts = [grid_weight(64)[0], grid_weight(32)[0], split_blocks(random_weights(24, 192), group=32).high]
    whole = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_array_equal(stack_rows(parts).dequantize(), whole)
    packed = np.random.default_rng(0).integers(0, 256, 24 * 192 // 2).astype(np.uint8)
    weight = Bnb4Weight(packed, np.linspace(0.1, 1, 72, dtype=np.float32), (24, 192), "nf4", 64)
    stacked = stack_bnb4([weight, weight])
    assert stacked is not None
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([weight.dequantize()] * 2))
    odd = Bnb4Weight(packed[: 3 * 48], weight.absmax[:5], (3, 96), "nf4", 64)
    assert stack_bnb4([odd, odd]) is None
    assert stack_bnb4([weight, odd]) is None


def test_two_8_bit_digits_hold_16_bits() -> None:
    """The error is at most 1 / (2 * 255 * 255) of a block's range, and rounding of the sums; 8 bits alone have 255
    times as much."""
    values = random_weights(300, 64) * np.float32(3)
    split = split_blocks(values, group=32)
    found = split.high.dequantize() + split.low.dequantize()
    blocks = values.reshape(300, 2, 32)
    reach = (np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0))[..., None]
    assert (np.abs(found.reshape(blocks.shape) - blocks) / reach).max() < 1.2 / (2 * 255 * 255)
    both = split.side_by_side().dequantize()
    np.testing.assert_array_equal(both[:, :64] + both[:, 64:], found)
