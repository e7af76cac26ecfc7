"""The torch engine against the onnx engine, and both against the float model that defines the eviction policy.

Errors are |difference| / |logits| of each position. Measured 2026-11-29 on x86-64, torch 2.13, float32 weights:

    float cache, against onnx at level 1      at most 4e-6, through three wraps of the ring; bound 1e-3
    float cache, against the float64 model    at most 3e-6; bound 1e-4
    INT8 cache, Triton's kernels and twins    at most 4e-3 (a code that rounds the other way); bound 2e-2
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyModels
from helpers.checkpoints import TINY
from helpers.engines import measured_scales
from helpers.published import AWQ, GPTQ, Bnb, Packed, Published, copy_fixture
from helpers.reference import SinkModel, relative_errors
from helpers.torch_engines import OpenTorch, random_ids, run
from helpers.weights import dequantised_state_dict
from transformers import AutoConfig

from edgekv.convert import ConvertOptions, convert
from edgekv.engines.torch import engine as torch_engine
from edgekv.engines.torch.graph import sample
from edgekv.errors import (
    BadCheckpoint,
    CacheFull,
    EngineError,
    InvalidOption,
    MemoryBudgetError,
    ScalesError,
    UnsupportedModel,
)
from edgekv.kv.quant import fake_quantize
from edgekv.kv.rows import own_rows
from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.kv.window import Move

SAME = 1e-3
FLOAT_TOLERANCE = 1e-4
INT8_TOLERANCE = 2e-2
OpenOnnx = Callable[..., Any]
WRAPPED = KVSpec(64, "float", sinks=4, stride=8)
FIXTURES = (
    "llama-fp16",
    "qwen2-fp16",
    "llama-awq-g128",
    "llama-bnb-nf4-double",
    "llama-gptq-g128-sym",
    "llama-gptq-g32-asym-actorder",
    "llama-gptqv2-g128-asym",
)


@pytest.mark.parametrize("name", FIXTURES)
def test_checkpoints_of_real_tools_equal_the_onnx_engine(
    name: str, tmp_path: Path, open_onnx: OpenOnnx, open_torch: OpenTorch
) -> None:
    """Every published format, through three wraps of the ring."""
    ids = random_ids(260)
    model = convert(copy_fixture(name, tmp_path / "source"), tmp_path / "model").model
    found = open_torch(model, WRAPPED)
    assert relative_errors(run(found, ids), run(open_onnx(model, WRAPPED), ids)).max() < SAME
    assert found.evicted >= 3 * (64 - 4)


@pytest.mark.parametrize(
    "published",
    [
        Published("packed", Packed(symmetric=False), family="qwen2"),
        Published("act-order-apart", GPTQ(32, g_idx="apart"), family="qwen2"),
        Published("one-group-tied", AWQ(-1), tiny={"tie_word_embeddings": True}),
        Published("fp4-with-floats", Bnb("fp4"), floats=("v_proj",)),
    ],
    ids=lambda published: published.name,
)
def test_variants_equal_the_onnx_engine(
    published: Published, tmp_path: Path, open_onnx: OpenOnnx, open_torch: OpenTorch
) -> None:
    """compressed-tensors, an order of columns for each layer, one group, tied embeddings, layers left in floats."""
    published.write(tmp_path / "source")
    model = convert(tmp_path / "source", tmp_path / "model").model
    ids = random_ids(40)
    found, wanted = (run(opened(model, KVSpec(64, "float")), ids) for opened in (open_torch, open_onnx))
    assert relative_errors(found, wanted).max() < SAME


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_equals_the_reference(tiny_models: TinyModels, open_torch: OpenTorch, name: str) -> None:
    """Case C06, C27: the model that defines the policy, at every token, through three wraps of the ring."""
    ids = random_ids(260)
    model = tiny_models.converted(name)
    config = AutoConfig.from_pretrained(tiny_models.source(name))
    engine = open_torch(model, WRAPPED)
    wanted = SinkModel(config, dequantised_state_dict(model.folder), 64, 8, 4)
    assert relative_errors(run(engine, ids), wanted.run(ids)).max() < FLOAT_TOLERANCE
    for layer in range(engine.spec.num_layers):
        keys, values = wanted.rotated(layer, engine.evicted)
        found = engine.rows(layer, 0, engine.length)
        assert relative_errors(found[0], keys).max() < FLOAT_TOLERANCE
        assert relative_errors(found[1], values).max() < FLOAT_TOLERANCE


@pytest.mark.parametrize(("pinned", "chunk"), [(0, 128), (9, 7), (16, 1)])
def test_whole_turns_leave_as_in_the_reference(
    tiny_models: TinyModels, open_torch: OpenTorch, pinned: int, chunk: int
) -> None:
    """Uneven moves, any pinned prefix and any way of cutting the prompt."""
    ids = random_ids(220)
    turns = [9, 23, 24, 61, 77, 90, 101, 130, 139, 163, 190, 211]
    model = tiny_models.converted("llama3-rope")
    engine = open_torch(model, KVSpec(64, "float", sinks=min(4, pinned), stride=8), chunk=chunk)
    config = AutoConfig.from_pretrained(tiny_models.source("llama3-rope"))
    wanted = SinkModel(config, dequantised_state_dict(model.folder), 64, 8, pinned)
    assert relative_errors(run(engine, ids, pinned, turns), wanted.run(ids, turns)).max() < FLOAT_TOLERANCE
    assert engine.evicted % 8, "no turn start fell into the zone, so the test shows nothing"


def test_int8_cache_is_nearer_to_floats_than_one_with_scales_alone(
    tiny_models: TinyModels, open_onnx: OpenOnnx, open_torch: OpenTorch
) -> None:
    """Than GroupQueryAttention's, through several evictions: 0.79 of its error, on the tokens that scales are from."""
    ids = random_ids(260)
    model = tiny_models.converted("qwen2")
    scales = measured_scales(model, "int8", "channel", ids)
    kv = KVSpec(64, "int8", sinks=4, stride=8)
    engines = [open_torch(model, kv, scales), open_onnx(model, kv, scales, attention="gqa")]
    assert [engine.row_factors for engine in engines] == ["plain", "none"]
    exact = run(open_torch(model, replace(kv, dtype="float")), ids)
    ours, theirs = (relative_errors(run(engine, ids), exact) for engine in engines)
    assert ours.max() < theirs.max()
    assert ours.mean() < 0.9 * theirs.mean()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_stored_rows_are_the_reference_codes(tiny_models: TinyModels, open_torch: OpenTorch, dtype: KVDtype) -> None:
    """What `rows` gives is the rounding of what a float cache holds, kv/rows.py's or kv/quant.py's, in the first layer
    exactly; and INT8 rows are saved as there."""
    ids = random_ids(50)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids)
    exact, coded = open_torch(model, KVSpec(64, "float")), open_torch(model, KVSpec(64, dtype), scales)
    for engine in (exact, coded):
        engine.forward(ids)
    parts = zip("kv", exact.rows(0, 0, 50), coded.rows(0, 0, 50), (scales.k[0], scales.v[0]), strict=True)
    for part, floats, found, scale in parts:
        if dtype == "int8":
            quantise, restore = own_rows(dtype, part, coded.row_factors)
            wanted = restore(quantise(floats, scale[:, None]), scale[:, None])
            saved = coded._cache.read(part, 0, 0, 50).view(np.int8)
            assert relative_errors(restore(saved, scale[:, None]), wanted).max() < 1e-6
        else:
            wanted = fake_quantize(floats, scale[:, None], dtype)
        assert relative_errors(found, wanted).max() < 1e-6


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp16", "float"])
def test_a_saved_state_goes_on_as_before(tiny_models: TinyModels, open_torch: OpenTorch, dtype: KVDtype) -> None:
    """Saved after the ring has wrapped, loaded into another engine, bit for bit; and an empty one."""
    ids = random_ids(150)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype in ("int8", "fp8") else None
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    first, second = open_torch(model, kv, scales), open_torch(model, kv, scales)
    first.load(first.save())
    run(first, ids)
    second.load(first.save())
    assert (second.tokens, second.evicted) == (first.tokens, first.evicted)
    assert np.array_equal(first.forward([7]), second.forward([7]))


@pytest.mark.parametrize("attention", ["gqa", "native"])
def test_a_state_of_the_onnx_engine_goes_on_here(
    tiny_models: TinyModels, open_onnx: OpenOnnx, open_torch: OpenTorch, attention: str
) -> None:
    """Both kinds of onnx cache: the ring's pinned rows at their own angles, and the compacted one's at moved angles."""
    ids = random_ids(150)
    model = tiny_models.converted("llama")
    other = open_onnx(model, WRAPPED, attention=attention)
    run(other, ids)
    engine = open_torch(model, WRAPPED)
    engine.load(other.save())
    assert relative_errors(engine.forward([7])[None], other.forward([7])[None]).max() < SAME


def test_refusals_leave_the_cache_as_it_was(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """Too many tokens, unknown ids, a move for another cache."""
    engine = open_torch(tiny_models.converted("llama"), KVSpec(64, "float"))
    engine.forward(random_ids(60))
    with pytest.raises(CacheFull):
        engine.forward(random_ids(5))
    with pytest.raises(InvalidOption, match="vocabulary"):
        engine.forward([10_000])
    with pytest.raises(InvalidOption, match="nothing to run"):
        engine.forward([])
    with pytest.raises(InvalidOption, match="does not fit"):
        engine.evict(Move(4, 8, 10))
    assert engine.length == 60


def test_numbers_that_are_not_finite_are_an_error(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """Case C13: nothing is kept, and the message names the layer."""
    engine = open_torch(tiny_models.converted("llama"), KVSpec(64, "float"))
    engine.forward([5])
    engine._model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(EngineError, match="not finite in layer 1"):
        engine.forward([6, 7])
    assert list(engine.tokens) == [5]


def test_scales_that_do_not_fit_are_refused(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """Case C11."""
    model = tiny_models.converted("llama")
    scales = measured_scales(model, "int8", "channel", random_ids(40))
    with pytest.raises(ScalesError, match="calibrate"):
        open_torch(model, KVSpec(64, "int8"))
    with pytest.raises(ScalesError, match="dtype"):
        open_torch(model, KVSpec(64, "fp8"), scales)
    with pytest.raises(UnsupportedModel, match="INT4"):
        open_torch(model, KVSpec(64, "int4"))


def test_other_weights_in_the_source_are_refused(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """The scales and the fingerprint are those of what was converted."""
    with pytest.raises(BadCheckpoint, match="other weights"):
        open_torch(tiny_models.converted("llama"), KVSpec(64, "float"), source=tiny_models.source("wide-heads"))


def test_float_weights_are_held_as_the_conversion_held_them(
    tiny_models: TinyModels, tmp_path: Path, open_onnx: OpenOnnx, open_torch: OpenTorch
) -> None:
    """Options other than the default ones are remembered."""
    model = convert(tiny_models.source("llama"), tmp_path / "model", ConvertOptions(bits=8, group=64)).model
    ids = random_ids(30)
    found, wanted = (run(opened(model, KVSpec(64, "float")), ids) for opened in (open_torch, open_onnx))
    assert relative_errors(found, wanted).max() < SAME


def test_closing_frees_the_model_and_the_cache(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """At once, without waiting for the garbage collector: on a GPU the memory is wanted by whoever comes next."""
    engine = open_torch(tiny_models.converted("llama"), KVSpec(64, "float"))
    engine.forward([5, 6])
    kept = [weakref.ref(engine._model.model.layers[0].mlp.up_proj.weight), weakref.ref(engine._cache._parts["k"])]
    gc.disable()
    try:
        engine.close()
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_decoding_on_the_device_is_greedy_decoding(tiny_models: TinyModels, open_torch: OpenTorch) -> None:
    """The step that CUDA captures, uncaptured: the same tokens as one call of `forward` after another."""
    model = tiny_models.converted("llama")
    first, second = (open_torch(model, KVSpec(64, "float", stride=8)) for _ in range(2))
    for engine in (first, second):
        run(engine, random_ids(90))
    wanted = [7]
    while len(wanted) <= 6:
        wanted.append(int(np.argmax(first.forward(wanted[-1:]))))
    assert second.decode(7, 6) == wanted[1:]
    assert list(first.tokens) == list(second.tokens)
    with pytest.raises(CacheFull):
        second.decode(7, 65)


def test_sampling_on_the_device_has_the_softmaxs_probabilities() -> None:
    """5,000 draws; the largest deviation of a frequency is within five standard errors."""
    logits = torch.tensor([1.0, 0.0, 2.5, -1.0])
    random = torch.Generator().manual_seed(3)
    draws = 5_000
    uniform = torch.rand((draws, 4), generator=random)
    chosen = torch.cat([sample(logits, torch.tensor([0.7]), one) for one in uniform])
    wanted = (logits / 0.7).softmax(-1)
    found = chosen.bincount(minlength=4) / draws
    assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / draws).sqrt()).all()
    assert sample(logits, torch.tensor([0.0]), uniform[0]).item() == 2


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_triton_kernels_in_the_engine(tiny_models: TinyModels, open_torch: OpenTorch, dtype: KVDtype) -> None:
    """A whole model over the interpreted kernels, wrapped ring included, as over their twins."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    ids = random_ids(70)
    model = tiny_models.converted("one-layer")
    scales = measured_scales(model, dtype, "channel", ids)
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    found, wanted = (run(open_torch(model, kv, scales, kernels=kernels), ids) for kernels in ("triton", "plain"))
    assert relative_errors(found, wanted).max() < INT8_TOLERANCE


@pytest.mark.parametrize("failures", [1, 2])
def test_too_little_memory_halves_the_cache_once(
    tiny_models: TinyModels, open_torch: OpenTorch, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The device refuses the cache: half of it is tried, and the warning says so; then it is an error."""
    capacities: list[int] = []

    class Refusing(torch_engine.RingCache):
        def __init__(self, spec: Any, kv: KVSpec, *rest: Any) -> None:
            capacities.append(kv.capacity)
            if len(capacities) <= failures:
                raise torch.OutOfMemoryError("no room")
            super().__init__(spec, kv, *rest)

    monkeypatch.setattr(torch_engine, "RingCache", Refusing)
    model = tiny_models.converted("llama")
    if failures == 1:
        with pytest.warns(UserWarning, match="256 instead"):
            engine = open_torch(model, KVSpec(512, "float"))
        assert engine.kv == KVSpec(256, "float")
    else:
        with pytest.raises(MemoryBudgetError, match="Neither 512 nor 256"):
            open_torch(model, KVSpec(512, "float"))
    assert capacities == [512, 256]


def test_fp8_needs_ampere() -> None:
    """Refused with the reason; INT8 is not."""
    with pytest.raises(UnsupportedModel, match=r"has 7\.5: use --kv-dtype int8"):
        torch_engine.check_capability(KVSpec(64, "fp8"), (7, 5))
    torch_engine.check_capability(KVSpec(64, "fp8"), (8, 0))
    torch_engine.check_capability(KVSpec(64, "int8"), (7, 5))
