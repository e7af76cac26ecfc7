"""The memory plan: known figures, the largest cache that fits, and refusals whose advice works."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from edgekv.engines.onnx.centre import CentreTable
from edgekv.engines.onnx.ring import RingCache as OnnxRingCache
from edgekv.engines.onnx.ring import RingInputs
from edgekv.engines.torch.cache import RingCache
from edgekv.errors import InvalidOption, MemoryBudgetError, UnsupportedModel
from edgekv.kv.plan import Footprint, Plan, PlanRequest, cache_bytes, largest_capacity, make_plan
from edgekv.kv.scales import KVScales, Provenance, write_scales
from edgekv.kv.spec import BITS, FLOATS, KV_DTYPES, MIN_CAPACITY, KVDtype, KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import AttentionSpec, ModelSpec
from edgekv.options import LoadOptions, plan_request
from edgekv.units import GIB, KIB, MIB, parse_bytes


def model(**changes: Any) -> ModelSpec:
    """A 7B-like model."""
    fields = {
        "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "vocab_size": 32000, "max_context": 131072,
    }  # fmt: skip
    return ModelSpec(**(fields | changes))


SMALL = model(num_layers=2, hidden_size=64, ffn_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512)
QWEN3 = model(num_layers=28, hidden_size=1024, ffn_size=3072, num_heads=16, vocab_size=151936, max_context=40960)


def plan_of(spec: ModelSpec, budget: int | None = None, **request: Any) -> Plan:
    return make_plan(spec, Footprint.estimate(spec), PlanRequest(**request), budget)


def refusal_of(spec: ModelSpec, budget: int, **request: Any) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        plan_of(spec, budget, **request)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "size"),
    [(32, "fp16", 2 * GIB), (8, "fp16", 512 * MIB), (8, "int8", 256 * MIB), (8, "fp8", 256 * MIB),
     (8, "int4", 128 * MIB), (8, "k8v4", 32 * 8 * 4096 * (130 + 66)), (8, "float", 1 * GIB)],
)  # fmt: skip
def test_known_cache_sizes(kv_heads: int, dtype: Any, size: int) -> None:
    """case C15: 32 layers, D 128, 4096 tokens; heads and the KV type count."""
    plan = plan_of(model(num_kv_heads=kv_heads), dtype=dtype, context=4096)
    assert plan.cache_bytes == size
    assert next(line.size_bytes for line in plan.lines if line.name.startswith("cache (")) == size


def test_qwen3_geometry() -> None:
    """28 layers, 8 KV heads, D 128 in fp16: 112 KiB a token, 448 MiB at 4096. D is not hidden / heads (case C27)."""
    assert cache_bytes(QWEN3, "fp16", 1) == 112 * KIB
    assert plan_of(QWEN3, dtype="fp16", context=4096).cache_bytes == 448 * MIB


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_total_follows_the_dtype(dtype: Any) -> None:
    """case C15: between two types nothing but the cache's own line differs, and scales, which floats have none of."""
    plan, reference = plan_of(QWEN3, dtype=dtype, context=2048), plan_of(QWEN3, dtype="float", context=2048)
    factors = 4 if dtype == "k8v4" else 0  # bytes of two rows; without edgekv's own operator the others have none
    scales = 0 if dtype in FLOATS else 8 * 28 * 8 * 128
    expected = 28 * 8 * 2048 * (128 * (64 - sum(BITS[dtype])) // 8 - factors) - scales
    assert reference.total_bytes - plan.total_bytes == expected


def test_int4_in_the_own_operator() -> None:
    """Rows of half the bytes with a factor each, and two bytes for a pair and slot of what keys are held without."""
    sizes = {
        dtype: {line.name: line.size_bytes for line in plan_of(QWEN3, dtype=dtype, context=4096, native=True,
                                                               centre_pairs=64).lines}
        for dtype in ("int4", "fp8")
    }  # fmt: skip
    assert sizes["int4"]["cache (int4)"] == 28 * 8 * 4096 * 2 * (64 + 2)
    assert sizes["int4"]["key centres"] == 4 * 28 * 8 * 128 + 2 * 64 * 4096
    assert sizes["fp8"]["key centres"] == 4 * 28 * 8 * 128 + 8 * 64 * 4096


@pytest.mark.parametrize("engine", ["native", "torch", "gqa"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_caches_formula_is_its_size(dtype: KVDtype, engine: str) -> None:
    """The numbers that are shown, multiplied."""
    line = next(
        line
        for line in plan_of(QWEN3, dtype=dtype, context=4096, native=engine == "native", torch=engine == "torch").lines
        if line.name == f"cache ({dtype})"
    )
    numbers, bits = line.formula.split(" = ")[1].removesuffix(" bits").split(" of ")
    assert math.prod(map(int, numbers.split(" x "))) * int(bits) == 8 * line.size_bytes


def test_float_caches_have_no_scales() -> None:
    """Nothing is counted that is not there."""
    assert "cache scales" not in {line.name for line in plan_of(QWEN3, dtype="float", context=4096).lines}


def test_lines_add_up() -> None:
    """Every byte is a line with a formula, and the lines scale as they say."""
    plan = plan_of(QWEN3, context=4096)
    assert plan.total_bytes == sum(line.size_bytes for line in plan.lines)
    assert all(line.formula and line.size_bytes > 0 for line in plan.lines)
    sizes = {line.name: line.size_bytes for line in plan.lines}
    assert sizes["logits"] == 4 * 151936
    assert sizes["cache scales"] == 2 * 28 * 8 * 128 * 4
    assert sizes["RoPE tables"] == 4096 * 64 * (2 * 4 + 3 * 8)
    ring = {line.name: line.size_bytes for line in plan_of(QWEN3, context=4096, native=True).lines}
    assert "RoPE tables" not in ring
    assert ring["RoPE angles"] == 128 * 64 * 4 * 4
    assert sizes["prefill workspace"] == 4 * 128 * (8 * 1024 + 3 * 3072 + QWEN3.qkv_rows)
    assert "tied embedding" not in sizes


def test_the_server_is_counted_where_it_is_planned() -> None:
    """Measured: `edgekv serve` on the default model at 2,048 slots peaks at 424 MiB once a schema was followed, and the
    plan without these lines says 350."""
    smollm2 = model(vocab_size=49152)
    without, served = (plan_of(smollm2, context=4096, server=server) for server in (False, True))
    more = {line.name: line.size_bytes for line in served.lines if line not in without.lines}
    assert more.keys() == {"server", "schemas"}
    assert sum(more.values()) == pytest.approx(74 * MIB, rel=0.1)
    small = plan_of(QWEN3, 3 * GIB, server=True)
    assert small.kv.capacity < plan_of(QWEN3, 3 * GIB).kv.capacity


def test_what_the_torch_engine_has_no_cache_for_does_not_run() -> None:
    """It holds no 4 bits."""
    dtypes = ("int4", "k8v4", "int8", "fp8", "float")
    assert [PlanRequest(dtype, torch=True).runs for dtype in dtypes] == [False, False, True, True, True]
    assert all(PlanRequest(dtype, native=True).runs for dtype in dtypes)


def test_weights_are_exact_or_marked_as_estimated() -> None:
    """A converted model's file size is taken as it is; ONNX Runtime holds a tied embedding twice, edgekv's own matmul
    once."""
    tied = replace(QWEN3, tied_embeddings=True)
    exact = make_plan(tied, Footprint.of(tied, 123 * MIB), PlanRequest(context=512), None)
    sizes = {line.name: line for line in exact.lines}
    assert sizes["weights"].size_bytes == 123 * MIB
    assert "estimated" not in sizes["weights"].formula
    assert sizes["tied embedding"].size_bytes == 151936 * 1024
    assert "estimated" in plan_of(QWEN3, context=512).lines[0].formula
    packed = make_plan(tied, Footprint.of(tied, 123 * MIB), PlanRequest(context=512, packed=True), None)
    assert packed.total_bytes == exact.total_bytes - 151936 * 1024


def test_the_estimate_counts_four_bits() -> None:
    """4-bit layers with a float32 scale and a 4-bit zero a block of 32, embedding and head in 8 bits."""
    per_layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    table = 151936 * 1024 * (1 + 4 / 32)
    expected = 28 * per_layer * (0.5 + 4 / 32 + 0.5 / 32) + 2 * table
    assert Footprint.estimate(QWEN3).weight_bytes == pytest.approx(expected, rel=1e-6)
    assert Footprint.estimate(replace(QWEN3, tied_embeddings=True)).weight_bytes == pytest.approx(expected - table)
    wider = 28 * per_layer * (0.5 + 0.5 / 32)
    assert Footprint.estimate(QWEN3, bits=8).weight_bytes == pytest.approx(expected + wider, rel=1e-6)


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_the_budget_decides_not_the_models_context() -> None:
    """case C16: a model with a context of 128k on a small device gets what fits there."""
    plan = plan_of(model(), 6 * GIB)
    assert plan.fits
    assert MIN_CAPACITY < plan.kv.capacity < 131072
    assert plan.total_bytes <= 6 * GIB


def test_the_models_context_is_the_most() -> None:
    """With room for more, the capacity is the model's own context, in steps of 64."""
    assert plan_of(SMALL, 64 * GIB).kv.capacity == 131072
    assert plan_of(replace(SMALL, max_context=1000), 64 * GIB).kv.capacity == 960
    assert plan_of(replace(SMALL, max_context=64), None).kv.capacity == 64
    assert plan_of(replace(SMALL, max_context=127), 64 * GIB).kv.capacity == 64


@given(
    budget=st.integers(100 * MIB, 3 * GIB), dtype=st.sampled_from(KV_DTYPES), layers=st.integers(1, 8),
    heads=st.sampled_from([1, 2, 4]), context=st.integers(64, 200_000), tied=st.booleans(),
)  # fmt: skip
def test_the_capacity_is_the_largest_that_fits(
    budget: int, dtype: Any, layers: int, heads: int, context: int, tied: bool
) -> None:
    """Property: it fits, and 64 more would not or are beyond the model; asking for exactly it is accepted."""
    spec = replace(SMALL, num_layers=layers, num_kv_heads=heads, max_context=context, tied_embeddings=tied)
    footprint, request = Footprint.estimate(spec), PlanRequest(dtype)
    assume(make_plan(spec, footprint, replace(request, context=64), None).total_bytes <= budget)
    plan = make_plan(spec, footprint, request, budget)
    capacity = plan.kv.capacity
    assert plan.fits
    assert plan.total_bytes <= budget
    assert capacity % 64 == 0
    assert 64 <= capacity <= context
    assert make_plan(spec, footprint, replace(request, context=capacity), budget).total_bytes == plan.total_bytes
    if capacity + 64 <= context:
        larger = make_plan(spec, footprint, replace(request, context=capacity + 64), None)
        assert larger.total_bytes > budget


@given(st.lists(st.integers(1, 4 * GIB), min_size=2, max_size=6))
def test_more_memory_never_means_less_cache(budgets: list[int]) -> None:
    """Property: monotone in the budget, also below what fits at all, where the least useful capacity is named."""
    footprint = Footprint.estimate(QWEN3)
    found = [largest_capacity(QWEN3, footprint, PlanRequest(), budget) for budget in sorted(budgets)]
    assert found == sorted(found)
    assert found[0] >= MIN_CAPACITY


def test_a_denser_cache_holds_more() -> None:
    """case C15: the fitted capacity answers to the KV type."""
    capacities = [
        plan_of(QWEN3, 2 * GIB, dtype=dtype).kv.capacity for dtype in ("float", "fp16", "int8", "k8v4", "int4")
    ]
    assert capacities == sorted(set(capacities))
    assert capacities[2] > 1.7 * capacities[1]


# ---- refusals --------------------------------------------------------------------------------------------------------


def remedies(message: str) -> list[dict[str, Any]]:
    """What the message proposes, as arguments of `plan_of`."""
    found: list[dict[str, Any]] = [{"context": int(n)} for n in re.findall(r"--context (\d+)", message)]
    found += [{"budget": parse_bytes(size)} for size in re.findall(r"--memory (\w+)", message)]
    return found + [{"dtype": dtype} for dtype in re.findall(r"--kv-dtype (\w+)", message)]


@pytest.mark.parametrize(
    ("budget", "request_"),
    [
        (GIB, {"context": 32768}),
        (GIB, {"context": 32768, "dtype": "fp16"}),
        (900 * MIB, {"context": 1024, "dtype": "float"}),
        (50 * MIB, {}),
        (50 * MIB, {"dtype": "float"}),
        (50 * MIB, {"context": 4096}),
        (1, {}),
        (GIB, {"context": 32768, "sinks": 3000}),
        (GIB, {"context": 32768, "stride": 20_000}),
        (700 * MIB, {"context": 8192, "sinks": 128, "stride": 1024}),
    ],
)
def test_every_remedy_in_a_refusal_works(budget: int, request_: dict[str, Any]) -> None:
    """The message has the table and both totals; each thing it proposes, done alone, leads to a plan that fits."""
    message = refusal_of(QWEN3, budget, **request_)
    for name in ("weights", "cache (", "runtime", "budget"):
        assert name in message
    proposals = remedies(message)
    assert any("budget" in proposal for proposal in proposals)
    for proposal in proposals:
        arguments = {"budget": budget} | request_ | proposal
        assert plan_of(QWEN3, **arguments).fits, proposal
    least = next(proposal["budget"] for proposal in proposals if "budget" in proposal)
    with pytest.raises(MemoryBudgetError):
        plan_of(QWEN3, **({"budget": least - MIB} | request_))


def test_the_largest_context_is_proposed() -> None:
    """The proposed context is the one that the budget would have got by itself, and a wide cache may be made denser."""
    (proposal,) = [p for p in remedies(refusal_of(QWEN3, GIB, context=32768)) if "context" in p]
    assert proposal["context"] == plan_of(QWEN3, GIB).kv.capacity
    assert {"dtype": "int8"} in remedies(refusal_of(QWEN3, 900 * MIB, context=2048, dtype="float"))
    assert {"dtype": "int8"} not in remedies(refusal_of(QWEN3, 50 * MIB, dtype="float"))


def test_no_context_is_proposed_where_none_fits() -> None:
    """With less than the weights there is nothing to gain from a smaller cache."""
    assert "--context" not in refusal_of(QWEN3, 50 * MIB, context=4096)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_more_context_than_the_model_has() -> None:
    """Refused with the model's own."""
    with pytest.raises(InvalidOption, match=r"1001 tokens.*at most 1000"):
        plan_of(replace(SMALL, max_context=1000), context=1001)
    assert plan_of(replace(SMALL, max_context=1000), context=1000).kv.capacity == 1000


@pytest.mark.parametrize("context", [63, 1, 0, -5])
def test_less_context_than_is_useful(context: int) -> None:
    """Refused with the least."""
    with pytest.raises(InvalidOption, match="64 is the least"):
        plan_of(SMALL, GIB, context=context)


@pytest.mark.parametrize("request_", [{}, {"context": 32}, {"context": 64}])
def test_a_model_whose_context_is_too_short(request_: dict[str, Any]) -> None:
    """A model of 32 tokens cannot chat, whatever is asked for; no advice goes in a circle."""
    with pytest.raises(UnsupportedModel, match="32 tokens; at least 64"):
        plan_of(replace(SMALL, max_context=32), GIB, **request_)


def test_sinks_and_stride_are_measured_by_the_fitted_capacity() -> None:
    """More sinks or a longer stride than the smallest cache could take are fine in a large one."""
    plan = plan_of(SMALL, GIB, sinks=500, stride=1000)
    assert (plan.kv.sinks, plan.kv.stride) == (500, 1000)
    assert plan.kv.capacity == plan_of(SMALL, GIB).kv.capacity


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"sinks": 65}, r"65 sinks do not fit a cache of 256 tokens.*\(64\)"),
        ({"sinks": -1}, "-1 sinks"),
        ({"stride": 193}, r"193 does not fit.*1 to 192"),
        ({"stride": -1}, "stride of -1"),
        ({"dtype": "int3"}, "Unknown KV dtype 'int3'.*int8"),
        ({"granularity": "layer"}, "Unknown granularity 'layer'.*channel"),
    ],
)
def test_impossible_options(request_: dict[str, Any], match: str) -> None:
    """Refused with the number, the bound, and never as a matter of memory."""
    with pytest.raises(InvalidOption, match=match):
        plan_of(SMALL, GIB, context=256, **request_)


@given(capacity=st.integers(64, 5000), sinks=st.integers(0, 1300), stride=st.integers(1, 5000))
def test_sinks_and_stride_bounds(capacity: int, sinks: int, stride: int) -> None:
    """Property: a quarter of the cache may be pinned, and what leaves at once must fit the window that is left."""
    allowed = sinks <= capacity // 4 and stride <= capacity - capacity // 4
    try:
        spec = KVSpec(capacity, sinks=sinks, stride=stride)
    except InvalidOption:
        assert not allowed
    else:
        assert allowed
        assert spec.max_pinned == capacity // 4


def test_defaults() -> None:
    """Four sinks, an eighth of the capacity at once, one number for each."""
    spec = KVSpec(1024)
    assert (spec.sinks, spec.stride, spec.dtype, spec.granularity) == (4, 128, "int8", "channel")
    assert plan_of(SMALL, context=64).kv == KVSpec(64)
    assert plan_of(SMALL, context=64).kv.stride == 8


GEMMA = ModelSpec(
    "gemma3", 18, 640, 2048, 4, 1, 256, 262144, 32768, attention=AttentionSpec(windows=(512, 512, 512, 512, 512, 0) * 3)
)


def test_layers_with_a_window_keep_rings_of_their_own() -> None:
    """Gemma 3 270M at 32k: three layers of 18 hold everything, the others 512 tokens, a run, and some to take back."""
    rings, whole = (plan_of(GEMMA, context=32768, native=native) for native in (True, False))
    assert whole.cache_bytes == 2 * 18 * 32768 * 256
    assert rings.cache_bytes == 2 * (256 + 2) * (3 * 32768 + 15 * (512 + 128 + 512))  # a factor of 2 bytes a row
    assert [line.name for line in rings.lines if "cache" in line.name] == [
        "cache (int8)",
        "cache, own rings",
        "cache scales",
    ]
    tables = 32768 * 128 * (2 * 4 + 3 * 8) - 128 * 128 * 4 * 4  # of all positions, and of one run's
    assert whole.total_bytes - rings.total_bytes == whole.cache_bytes - rings.cache_bytes + tables


@pytest.mark.parametrize("budget_mib", [350, 363, 371, 400, 450, 500, 600])
@pytest.mark.parametrize("changes", [{}, {"native": True}, {"native": True, "centre_pairs": 128}])
def test_the_largest_capacity_is_found_though_the_total_falls_in_between(budget_mib: int, changes: Any) -> None:
    """Where a layer's own ring becomes possible more tokens take less memory: every capacity is tried here."""
    request = PlanRequest(**changes)
    footprint, budget = Footprint.estimate(GEMMA), budget_mib * MIB
    fitting = []
    for capacity in range(64, GEMMA.max_context + 1, 64):
        with contextlib.suppress(MemoryBudgetError):
            make_plan(GEMMA, footprint, replace(request, context=capacity), budget)
            fitting.append(capacity)
    assert largest_capacity(GEMMA, footprint, request, budget) == max(fitting, default=64)


def centred_scales(spec: ModelSpec, pairs: Sequence[int]) -> KVScales:
    """Scales of which these pairs of channels have a centre, in every layer."""
    ones = np.ones((spec.num_layers, spec.num_kv_heads, spec.head_dim), np.float32)
    centre = np.zeros_like(ones)
    centre[..., [*pairs, *(pair + spec.head_dim // 2 for pair in pairs)]] = 9
    return KVScales(ones, ones, "int8", "channel", "", Provenance("envelope", 1.1, 0, ""), centre)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_value_centres_take_what_the_plan_says(engine: str) -> None:
    """As key centres do."""
    kv, ones = KVSpec(320, "fp8"), np.ones((SMALL.num_layers, SMALL.num_kv_heads, SMALL.head_dim), np.float32)
    scales = KVScales(ones, ones, "fp8", "channel", "", Provenance("envelope", 1.1, 0, ""), v_centre=ones)
    plan, without = (
        plan_of(SMALL, dtype="fp8", context=kv.capacity, value_centres=centred, **{engine: True})
        for centred in (True, False)
    )
    planned = sum(line.size_bytes for line in plan.lines if line.name == "value centres")
    if engine == "native":
        io = SimpleNamespace(bind_input=lambda *arguments: None)
        inputs = RingInputs(io, OnnxRingCache(SMALL, kv), SMALL, kv, scales, 128)
        assert planned == sum(array.nbytes for array in inputs._centres)
    else:
        held = RingCache(SMALL, kv, scales, torch.device("cpu"))._centres["v"]
        assert planned == sum(tensor.nbytes for tensor in held.values())
    assert plan.total_bytes - without.total_bytes == planned
    whole = plan_of(SMALL, dtype="fp8", context=kv.capacity, value_centres=True)
    assert whole == plan_of(SMALL, dtype="fp8", context=kv.capacity)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_key_centres_take_what_the_plan_says(engine: str) -> None:
    """The arrays that both engines hold for them, byte by byte; on ONNX Runtime's operator keys are held whole."""
    scales, kv = centred_scales(SMALL, [1, 5, 6]), KVSpec(320)
    plan = plan_of(SMALL, context=kv.capacity, centre_pairs=len(scales.centre_pairs), **{engine: True})
    planned = sum(line.size_bytes for line in plan.lines if line.name == "key centres")
    if engine == "native":
        table = CentreTable(SMALL, kv, scales)
        assert planned == sum(array.nbytes for name, array in table.inputs() if name != "pairs")
    else:
        cache = RingCache(SMALL, kv, scales, torch.device("cpu"))
        assert cache._turns is not None
        tensors = [cache._turns.starts, cache._turns.within, *cache._centres["k"].values()]
        assert planned == sum(tensor.nbytes for tensor in tensors)
    assert plan.total_bytes - plan_of(SMALL, context=kv.capacity, **{engine: True}).total_bytes == planned
    whole = plan_of(SMALL, context=kv.capacity, centre_pairs=3)
    assert whole == plan_of(SMALL, context=kv.capacity)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "float"])
def test_the_torch_cache_takes_what_the_plan_says(dtype: Any) -> None:
    """Rows and their factors, byte by byte."""
    kv, ones = KVSpec(320, dtype), np.ones((SMALL.num_layers, SMALL.num_kv_heads, SMALL.head_dim), np.float32)
    scales = KVScales(ones, ones, dtype, "channel", "", Provenance("envelope", 1.1, 0, ""))
    cache = RingCache(SMALL, kv, scales, torch.device("cpu"))
    held = sum(tensor.nbytes for tensor in (*cache._parts.values(), *cache._factors.values()))
    assert plan_of(SMALL, dtype=dtype, context=kv.capacity, torch=True).cache_bytes == held


def test_centres_are_planned_from_the_scales_or_from_what_they_may_become(tmp_path: Path) -> None:
    """A model with K biases and no scales yet is planned with the most pairs that calibrating takes out."""
    biased = model(qkv_bias=True)
    for spec, dtype, pairs in ((biased, "int8", 16), (biased, "float", 0), (model(), "int8", 0), (model(), "fp8", 64)):
        request = plan_request(spec, LoadOptions(kv_dtype=dtype))
        assert (request.centre_pairs, request.value_centres) == (pairs, dtype == "fp8")
    path = tmp_path / "scales.safetensors"
    write_scales(path, centred_scales(SMALL, [2, 3]))
    found = cast(ConvertedModel, SimpleNamespace(folder=tmp_path))
    assert plan_request(biased, LoadOptions(scales=str(path)), found).centre_pairs == 2
    assert plan_request(biased, LoadOptions(), found).centre_pairs == 16, "it has no scales of its own"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"native": True}, "int8 with scales per channel and a factor per row"),
        ({"granularity": "head"}, "int8 with scales per head"),
        ({"torch": True}, "int8 with scales per channel and a factor per row"),
        ({"dtype": "fp8", "torch": True}, "fp8 with scales per channel"),
        ({"dtype": "float", "native": True}, "float"),
    ],
)
def test_the_plan_says_how_numbers_are_held(request_: dict[str, Any], words: str) -> None:
    """INT8 rows of edgekv's own operator and of the torch engine have factors of their own, floats have no scales."""
    assert plan_of(SMALL, context=256, **request_).numbers == words
