"""Every published 4-bit format runs with the publisher's numbers: its logits are those of transformers on the weights
that its integers stand for.

Errors are |difference| / |logits| of each position, float cache, accuracy level 1. The checkpoints of tests/data were
written by gptqmodel 7.7.0 and bitsandbytes 0.50.2, with those tools' own logits; the others are made here
(helpers/published.py). Measured 2026-11-29 on x86-64, onnxruntime 1.32.0:

    against the dequantised weights   5e-5 to 1.1e-4 (8e-5 from the two-digit embedding and head); bound 1e-3
    against bitsandbytes' own logits  8e-5; bound 1e-3
    against gptqmodel's own logits    1.8e-2 to 2.1e-2, since it computes in bfloat16; bound 3e-2
    the same at accuracy level 4      2.5e-2 to 2.8e-2 of all logits together (2026-11-30, edgekv's own matmul,
                                      which rounds inputs by 32; MatMulNBits rounds them by group: 3.4e-2 at 128)

With embedding and head in 8 bits the first line is 1.6e-2 to 2.4e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from helpers.checkpoints import DATA
from helpers.published import AWQ, GPTQ, Bnb, Packed, Published, State, dequantised_checkpoint
from helpers.reference import relative_errors, transformers_model
from transformers import AutoConfig

from edgekv.convert import convert
from edgekv.engines.onnx import native
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import TOKENIZER, ConvertedModel

EXACT = 1e-3
SAME_TOOL = 3e-2
IDS = [5, 17, 99, 200, 41, 63, 77, 150, 33, 8, 240, 111, 19, 58, 92, 131]
FIXTURES = {
    "llama-awq-g128": "int4/128 (AWQ), bfloat16",
    "llama-gptq-g128-sym": "int4/128 (GPTQ, symmetric), bfloat16",
    "llama-gptq-g32-asym-actorder": "int4/32 (GPTQ, asymmetric, act-order), bfloat16",
    "llama-gptqv2-g128-asym": "int4/128 (GPTQ v2, asymmetric), bfloat16",
    "llama-bnb-nf4": "nf4 (bitsandbytes), float32",
    "llama-bnb-nf4-double": "nf4 (bitsandbytes, double quantisation), float32",
}
OpenEngine = Callable[..., OnnxEngine]


def head_bias_of_zeros(stored: State, config: dict[str, Any]) -> None:
    """What AutoGPTQ writes beside every layer."""
    stored["model.layers.0.mlp.up_proj.bias"] = torch.zeros(192, dtype=torch.float16)


def without_tie_field(stored: State, config: dict[str, Any]) -> None:
    del config["tie_word_embeddings"]
    stored.pop("lm_head.weight", None)


def copied_head(stored: State, config: dict[str, Any]) -> None:
    """llm-compressor saves the shared tensor twice; the config still says that it is shared."""
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()


def only_head(stored: State, config: dict[str, Any]) -> None:
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")


TIED = {"tie_word_embeddings": True}
VARIANTS = (
    Published("awq-32", AWQ(32)),
    Published("awq-64", AWQ(64)),
    Published("awq-one-group", AWQ(-1)),
    Published("awq-symmetric", AWQ(32, symmetric=True)),
    Published("awq-symmetric-without-zeros", AWQ(32, symmetric=True, zeros=False)),
    Published("awq-bias", AWQ(32), family="qwen2"),
    Published("awq-floats", AWQ(32), floats=("k_proj", "layers.1.mlp.down", "layers.0.self_attn.o"), family="qwen2"),
    Published("gptq-no-g-idx", GPTQ(32, symmetric=True, g_idx="")),
    Published("gptq-one-group", GPTQ(-1)),
    Published("gptq-one-group-symmetric", GPTQ(-1, symmetric=True), edit=head_bias_of_zeros),
    Published("gptq-one-group-act-order", GPTQ(-1, g_idx="act-order")),
    Published("gptq-empty-g-idx", GPTQ(32, g_idx="zeros")),
    Published("gptq-act-order-bias", GPTQ(32, g_idx="act-order"), family="qwen2", tiny=TIED),
    Published("gptq-orders-apart", GPTQ(32, g_idx="apart"), family="qwen2"),
    Published("gptq-v2-act-order", GPTQ(64, version=2, g_idx="act-order")),
    Published("gptq-short-last-group", GPTQ(128)),
    Published("gptq-head", GPTQ(32), also=("lm_head",)),
    Published("gptq-8-bit-head", GPTQ(32, wide=("lm_head",)), also=("lm_head",)),
    Published(
        "gptq-8-bit-layers", GPTQ(32, symmetric=True, g_idx="act-order", version=2, wide=("v_proj", "down_proj"))
    ),
    Published("gptq-head-act-order", GPTQ(32, g_idx="act-order"), also=("lm_head",)),
    Published("tied", GPTQ(32), tiny=TIED),
    Published("tied-unsaid", GPTQ(32), tiny=TIED, edit=without_tie_field),
    Published("tied-and-copied", AWQ(32), tiny=TIED, edit=copied_head),
    Published("tied-under-other-name", AWQ(32), tiny=TIED, edit=only_head),
    Published("packed", Packed()),
    Published("packed-asymmetric", Packed(symmetric=False)),
    Published("packed-channel", Packed(-1)),
    Published("packed-channel-asymmetric", Packed(-1, symmetric=False), family="qwen2"),
    Published("packed-act-order", Packed(symmetric=False, act_order=True)),
    Published("packed-old-zeros", Packed(symmetric=False, packed_zeros=False)),
    Published("nf4-flat", Bnb(flat=True)),
    Published("nf4-that-ran", Bnb(ran=True)),
    Published("nf4-bias", Bnb(double=True), family="qwen2"),
    Published("nf4-stored-as-float", Bnb(storage=np.float32)),
    Published("nf4-floats", Bnb(), floats=("v_proj", "gate_proj")),
    Published("fp4", Bnb("fp4")),
    Published("fp4-double", Bnb("fp4", double=True, flat=True)),
)


def check(
    source: Path, state: State, converted: ConvertedModel, open_onnx: OpenEngine, head_from: str = "lm_head.weight"
) -> np.ndarray[Any, Any]:
    """Logits of the converted model, after they were found equal to transformers' with `state`."""
    config = AutoConfig.from_pretrained(source)
    del config.quantization_config
    state = {"lm_head.weight": state["model.embed_tokens.weight"]} | state
    with torch.no_grad():
        wanted = transformers_model(config, state)(torch.tensor([IDS])).logits[0]
    found = open_onnx(converted, KVSpec(64, "float")).forward(IDS, all_logits=True)
    assert relative_errors(found, wanted).max() < EXACT
    return found


@pytest.mark.parametrize("name", FIXTURES)
def test_checkpoints_of_real_tools(name: str, tmp_path: Path, open_onnx: OpenEngine) -> None:
    """Case C23: zero points of GPTQ v1 and v2; case C24: act-order. The scheme tells people what it was. Those that
    bitsandbytes wrote have no tokenizer: they run on ids."""
    source = DATA / name
    report = convert(source, tmp_path / "model")
    converted = report.model
    assert (tmp_path / "model" / TOKENIZER).exists() == converted.description.tokenizer == ("bnb" not in name)
    assert ("no tokenizer.json" in report.missing_tokenizer) == ("bnb" in name)
    found = check(source, dequantised_checkpoint(source), converted, open_onnx)
    theirs = np.load(source / "ref_logits.npy").reshape(found.shape)
    assert relative_errors(found, theirs).max() < (EXACT if "bnb" in name else SAME_TOOL)
    assert converted.description.source_scheme == FIXTURES[name]
    if native.matmul_refusal() is None:
        as_it_runs = open_onnx(converted, KVSpec(64, "float"), level=4).forward(IDS, all_logits=True)
        assert np.linalg.norm(as_it_runs - theirs) < SAME_TOOL * np.linalg.norm(theirs)


@pytest.mark.parametrize("published", VARIANTS, ids=lambda published: published.name)
def test_variants(published: Published, tmp_path: Path, open_onnx: OpenEngine) -> None:
    """Case C24: a g_idx of zeros; case C25: one group; case C26: tied embeddings in every way they are saved."""
    source = tmp_path / "source"
    state = published.write(source)
    report = convert(source, tmp_path / "model")
    check(source, state, report.model, open_onnx)
    assert report.max_weight_error == 0


def kinds(converted: ConvertedModel) -> list[str]:
    model = onnx.load(converted.folder / "model.onnx", load_external_data=False)
    return [node.op_type for node in model.graph.node]


def test_act_order_costs_gathers_only_where_it_must(tmp_path: Path) -> None:
    """Two layers: one for Q, K and V, one for the attention's output, one for gate and up, none for down; one chooses
    the rows of the head."""
    Published("act-order", GPTQ(32, g_idx="act-order")).write(tmp_path / "source")
    found = kinds(convert(tmp_path / "source", tmp_path / "model").model)
    assert found.count("Gather") == 2 * 3 + 1
    assert found.count("MatMulNBits") == 2 * 5 + 1


def test_orders_apart_run_one_by_one(tmp_path: Path) -> None:
    """Q, K and V in three operators with an order each, and gate and up with one each."""
    Published("apart", GPTQ(32, g_idx="apart")).write(tmp_path / "source")
    found = kinds(convert(tmp_path / "source", tmp_path / "model").model)
    assert found.count("Gather") == 2 * (3 + 1 + 2) + 1
    assert found.count("MatMulNBits") == 2 * 7 + 1


@pytest.mark.parametrize("method", [Bnb(), Bnb("fp4", double=True)])
def test_bitsandbytes_runs_packed(method: Bnb, tmp_path: Path) -> None:
    """Five operators a layer, like any other format."""
    Published("bnb", method).write(tmp_path / "source")
    assert kinds(convert(tmp_path / "source", tmp_path / "model").model).count("MatMulBnb4") == 2 * 5
