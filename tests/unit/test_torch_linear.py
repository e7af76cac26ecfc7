"""Linear layers of the torch engine against the matrices that they hold, multiplied in float64.

Errors are |difference| / |output| of each row. Measured 2026-11-29 (torch 2.13, CPU): 1.7e-3 to 4.2e-3 with torch's
int4 kernel (bfloat16 activations, scales and zero points), 3.2e-3 with codes dequantised to bfloat16; bound 1e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import measured_scales
from helpers.reference import relative_errors, transformers_model
from helpers.torch_engines import OpenTorch, random_ids, run
from helpers.weights import dequantised_state_dict
from transformers import AutoConfig

from edgekv.engines.torch.linear import BlockLinear, Int4Linear, kernel_layout, linear
from edgekv.kv.spec import KVSpec
from edgekv.weights.base import BlockWeight, Bnb4Weight
from edgekv.weights.quantize import quantize_blocks, split_blocks

ROUNDED = 1e-2
CPU = torch.device("cpu")
ROWS, COLUMNS = 64, 512


def floats(rows: int = ROWS, columns: int = COLUMNS) -> Any:
    return np.random.default_rng(2).normal(size=(rows, columns)).astype(np.float32)


def blocks(group: int = 128, bits: int = 4, rows: int = ROWS) -> BlockWeight:
    return quantize_blocks(floats(rows), bits=bits, group=group)


def error(layer: torch.nn.Module, weight: Any, bias: Any = None) -> float:
    x = torch.from_numpy(floats(5))[None].bfloat16()
    wanted = x[0].double() @ torch.from_numpy(weight).double().T
    wanted = wanted if bias is None else wanted + bias.double()
    found = layer(x)
    assert found.shape == (1, *wanted.shape)
    return float(relative_errors(found[0].double(), wanted).max())


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
def test_the_int4_kernel_in_every_group_size(group: int) -> None:
    """512 columns in one group are split, which is exact."""
    weight = blocks(group)
    layer = linear(weight, None, torch.bfloat16, CPU)
    assert isinstance(layer, Int4Linear)
    assert error(layer, weight.dequantize()) < ROUNDED


def test_act_order_and_bias() -> None:
    """The columns of the input are put in the weight's order first."""
    order = np.random.default_rng(1).permutation(COLUMNS)
    weight, bias = replace(blocks(), order=order), torch.from_numpy(floats(1, ROWS)[0])
    layer = linear(weight, bias, torch.bfloat16, CPU)
    assert isinstance(layer, Int4Linear)
    assert error(layer, weight.dequantize(), bias) < ROUNDED
    plain = BlockLinear(weight, bias, CPU)
    assert error(plain, weight.dequantize(), bias) < ROUNDED


def test_small_groups_are_merged_where_that_is_exact() -> None:
    """Two neighbours of 16 with the same scale and zero point are one of 32; others are dequantised at every call."""
    wide = blocks(32)
    halves = wide.to_group(16)
    merged = kernel_layout(halves)
    assert merged is not None
    assert merged.group == 32
    assert np.array_equal(merged.dequantize(), wide.dequantize())
    other = blocks(16)
    assert kernel_layout(other) is None
    layer = linear(other, None, torch.bfloat16, CPU)
    assert isinstance(layer, BlockLinear)
    assert error(layer, other.dequantize()) < ROUNDED


@pytest.mark.parametrize(
    "weight",
    [blocks(32, bits=8), blocks(rows=24), replace(blocks(), zeros=None)],
    ids=["8 bits", "24 rows", "symmetric"],
)
def test_what_the_kernel_does_not_take(weight: BlockWeight) -> None:
    """8 bits, and rows that its blocks do not divide; a symmetric weight has its zero point at the midpoint."""
    layer = linear(weight, None, torch.bfloat16, CPU)
    assert isinstance(layer, Int4Linear) == (weight.zeros is None)
    assert error(layer, weight.dequantize()) < ROUNDED


@pytest.mark.parametrize(
    "held",
    [
        floats(),
        split_blocks(floats(), group=32),
        Bnb4Weight(np.arange(ROWS * 256, dtype=np.uint8), np.ones(ROWS * 8, np.float32), (ROWS, COLUMNS), "nf4", 64),
    ],
    ids=lambda held: type(held).__name__,
)
def test_other_matrices_are_dense_on_a_cpu(held: Any) -> None:
    """Floats, sums of two, codes of bitsandbytes (without that library)."""
    layer = linear(held, None, torch.bfloat16, CPU)
    assert type(layer) is torch.nn.Linear
    weight = held if isinstance(held, np.ndarray) else None
    if weight is None:
        weight = held.dequantize() if isinstance(held, Bnb4Weight) else held.high.dequantize() + held.low.dequantize()
    assert error(layer, weight) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_in_bfloat16_is_near_its_float_self(tiny_models: Any, open_torch: OpenTorch, name: str) -> None:
    """Packed weights and bfloat16 activations: no further from float32 than transformers' own bfloat16 model with the
    same weights, on average or at the worst position. Measured 2026-11-30, mean and largest, for the two models:

        this engine, float cache     1.14e-2, 2.00e-2    1.13e-2, 1.94e-2
        transformers, bfloat16       1.27e-2, 2.52e-2    1.43e-2, 2.61e-2
        this engine, INT8 cache      1.65e-2, 3.12e-2    1.77e-2, 3.35e-2    (against its float32 self)
    """
    ids = random_ids(60)
    model = tiny_models.converted(name)
    exact = transformers_model(
        AutoConfig.from_pretrained(tiny_models.source(name)), dequantised_state_dict(model.folder)
    )
    with torch.inference_mode():
        wanted = exact(torch.tensor([ids])).logits[0]
        theirs = relative_errors(exact.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float(), wanted)
    ours = relative_errors(run(open_torch(model, KVSpec(64, "float"), precision="bf16"), ids), wanted)
    assert ours.mean() < 2e-2
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < 1.1 * theirs.max()
    scales = measured_scales(model, "int8", "channel", ids)
    open_one: Callable[..., Any] = lambda **options: open_torch(model, KVSpec(64, "int8"), scales, **options)  # noqa: E731
    found, float32 = (run(open_one(precision=precision), ids) for precision in ("bf16", "float"))
    assert relative_errors(found, float32).mean() < 2e-2
