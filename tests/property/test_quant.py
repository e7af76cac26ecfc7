"""kv/quant.py against torch and arithmetic, and ONNX Runtime's stored codes against kv/quant.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ATTENTION, TinyModels
from helpers.checkpoints import VOCAB
from helpers.engines import measured_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.rope import rope_tables
from edgekv.kv.quant import (
    LIMIT,
    coarsen,
    count_saturated,
    fake_quantize,
    pair_norms,
    quantize,
    round_e4m3,
)
from edgekv.kv.spec import GRANULARITIES, KVDtype, KVSpec
from edgekv.model.spec import RopeSpec


@pytest.fixture(params=ATTENTION)
def attention(request: Any) -> str:
    """What is stored is tested with each attention operator."""
    return str(request.param)


INTEGERS: tuple[KVDtype, ...] = ("int8", "int4")
FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = arrays.arrays(np.float32, (2, 5, 8), elements=st.floats(-100, 100, width=32))
SCALES = arrays.arrays(np.float32, (2, 1, 8), elements=st.floats(np.float32(1e-3), 10, width=32))


def torch_e4m3(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """torch's cast after the saturation that hardware does: by itself it gives NaN beyond 464."""
    clipped = np.clip(x, -448, 448)
    return torch.from_numpy(clipped).to(torch.float8_e4m3fn).float().numpy()


def test_e4m3_is_torchs_everywhere() -> None:
    """Every E4M3 number, every midpoint between two of them (ties to even), and the floats beside each midpoint."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    numbers = np.unique(codes[np.isfinite(codes)])
    assert len(numbers) == 253
    middle = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    points = np.concatenate([numbers, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    points = np.concatenate([points, np.float32([449, 464, 480, 1e9, -1e9, 1e-30, -1e-30, 0.0])])
    np.testing.assert_array_equal(round_e4m3(points.astype(np.float32)), torch_e4m3(points.astype(np.float32)))


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(
        np.float32, 64, elements=FLOATS | st.floats(-1, 1, width=32) | st.floats(-0.015625, 0.015625, width=32)
    )
)
def test_e4m3_is_torchs(x: np.ndarray[Any, Any]) -> None:
    """Any float32."""
    np.testing.assert_array_equal(round_e4m3(x), torch_e4m3(x))


@settings(max_examples=300, deadline=None)
@given(ROWS, SCALES, st.sampled_from(INTEGERS))
def test_integer_error_bounds(x: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], dtype: KVDtype) -> None:
    """At most half a step inside the range; beyond it the last code; and never a code that the dtype has not."""
    codes, seen = quantize(x, scales, dtype), fake_quantize(x, scales, dtype)
    limit = LIMIT[dtype]
    assert np.array_equal(codes, np.rint(codes))
    assert np.abs(codes).max() <= limit
    wide = np.broadcast_to(scales.astype(np.float64), x.shape)
    inside = np.abs(x) <= (limit + 0.5) * wide
    error = np.abs(x.astype(np.float64) - seen)
    assert (error[inside] <= wide[inside] / 2 + 1e-6 * np.abs(x[inside]) + 1e-12).all()
    beyond = np.abs(x) > (limit + 0.5) * wide * (1 + 1e-6)
    assert (np.abs(codes)[beyond] == limit).all()
    assert (np.sign(codes)[beyond] == np.sign(x)[beyond]).all()
    wanted = np.count_nonzero(np.abs(x) > (limit + 0.5) * wide)
    assert count_saturated(x, scales, dtype) == pytest.approx(wanted, abs=0.02 * x.size)


def test_codes_in_figures() -> None:
    """The ends of each range and ties to even, as the module's docstring has them."""
    x, one = np.float32([-1e9, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1e9]), np.float32([1])
    assert quantize(x, one, "int8").tolist() == [-127, -2, -2, 0, 0, 2, 2, 127]
    assert quantize(x, one, "int4").tolist() == [-7, -2, -2, 0, 0, 2, 2, 7]
    assert quantize(x, one, "fp8").tolist() == [-448, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 448]


@pytest.mark.parametrize(("dtype", "edge"), [("int8", 127.5), ("int4", 7.5), ("fp8", 464)])
def test_what_rounds_to_the_largest_code_is_not_clipped(dtype: KVDtype, edge: float) -> None:
    """In FP8 the largest code is 448, and 480 would be the next."""
    x = np.float32([edge - 0.25, edge, edge + 0.25, -edge - 1])
    assert count_saturated(x, np.float32([1]), dtype) == 2


@settings(max_examples=300, deadline=None)
@given(ROWS, SCALES)
def test_fp8_error_bound(x: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> None:
    """Three mantissa bits: at most 1/16 of the value, or half the smallest step; further out the largest number."""
    wide = np.broadcast_to(scales.astype(np.float64), x.shape)
    inside = np.abs(x) <= 448 * wide
    error = np.abs(x.astype(np.float64) - fake_quantize(x, scales, "fp8"))
    bound = np.maximum(np.abs(x) / 16, wide * 2.0**-10) * (1 + 1e-5)
    assert (error[inside] <= bound[inside] + 1e-12).all()
    assert (np.abs(quantize(x, scales, "fp8"))[~inside] == 448).all()


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(np.float32, (1, 1, 8), elements=st.floats(-100, 100, width=32)),
    st.integers(0, 1 << 24),
    st.sampled_from(["default", "linear", "llama3"]),
    st.sampled_from(INTEGERS),
)
def test_the_envelope_bounds_a_key_at_every_position(
    key: np.ndarray[Any, Any], position: int, kind: str, dtype: KVDtype
) -> None:
    """A pair's norm is what a rotation leaves alone: scales made from it saturate nowhere, at no position."""
    rope = RopeSpec(kind=kind, factor=8.0, original_max_position=64)
    cos, sin = rope_tables(rope, 8, position, 1)
    first, second = key[..., :4], key[..., 4:]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    norms = pair_norms(key)
    np.testing.assert_allclose(pair_norms(rotated), norms, rtol=1e-5, atol=1e-5)
    limits = np.maximum(np.concatenate([norms, norms], -1), np.float32(1e-3))
    scales = limits / np.float32(LIMIT[dtype])
    assert (np.abs(rotated) <= limits * (1 + 1e-5)).all()
    assert count_saturated(rotated, scales, dtype) == 0
    assert (np.abs(rotated - fake_quantize(rotated, scales, dtype)) <= scales * 0.501 + 1e-6).all()


def test_rope_tables_are_exact_far_out() -> None:
    """Angles at position 10 million: in float32 they would be off by half a radian.

    The oracle reduces the angle with Python's exact fractions of 2 pi."""
    from fractions import Fraction

    two_pi = Fraction(
        62831853071795864769252867665590057683943387987502116419498891846156,
        10**67,
    )
    cos, sin = rope_tables(RopeSpec(theta=10000.0), 64, 10_000_000, 3)
    for row in range(3):
        for pair in range(32):
            frequency = Fraction(float(10000.0 ** (-2 * pair / 64)))
            angle = float((frequency * (10_000_000 + row)) % two_pi)
            assert cos[row, pair] == pytest.approx(np.cos(angle), abs=1e-6)
            assert sin[row, pair] == pytest.approx(np.sin(angle), abs=1e-6)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rope_frequencies_are_transformers(kind: str) -> None:
    """The three rotary kinds against transformers' own tables, at positions where float32 angles still hold."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 50000.0}
    if kind != "default":
        parameters["factor"] = 4.0
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=parameters
    )
    positions = torch.arange(100, 140)[None]
    wanted_cos, wanted_sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), positions)
    rope = RopeSpec(50000.0, kind, parameters.get("factor", 1.0), 1.0, 4.0, 256)
    cos, sin = rope_tables(rope, 64, 100, 40)
    np.testing.assert_allclose(cos, wanted_cos[0, :, :32].numpy(), atol=2e-5)
    np.testing.assert_allclose(sin, wanted_sin[0, :, :32].numpy(), atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float32, (3, 2, 8), elements=st.floats(0, 100, width=32)), st.sampled_from(GRANULARITIES))
def test_coarser_thresholds_cover_finer_ones(thresholds: np.ndarray[Any, Any], granularity: Any) -> None:
    """Equal over what shares a scale, and nothing that a channel needs is cut off."""
    coarse = coarsen(thresholds, granularity)
    assert coarse.shape == thresholds.shape
    assert (coarse >= thresholds).all()
    shared = {"channel": 0, "head": 8, "tensor": 16}[granularity]
    for layer in coarse.reshape(3, -1):
        groups = layer.reshape(-1, shared or 1)
        assert (groups == groups[:, :1]).all()
    assert coarse.max() == thresholds.max()


@pytest.mark.parametrize("attention", ["gqa"])  # the native operator's rows have factors: tests/parity/test_native.py
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("headroom", [1.1, 0.5])
def test_engines_store_what_quantize_says(
    tiny_models: TinyModels, open_onnx: Callable[..., OnnxEngine], dtype: KVDtype, granularity: Any, headroom: float
) -> None:
    """One layer, so that keys and values do not depend on the cache: its codes are those of the float rows.

    Up to one step where a value lies on a border (the two engines' rows differ in the last bit), in at most 1 % of
    places; with headroom 0.5 some saturate, and there the operator's own least code, -128 or -8, is one further."""
    if dtype == "int4" and granularity == "tensor":
        pytest.skip("refused by the engine: too coarse")
    ids = np.random.default_rng(4).integers(3, VOCAB, 60).tolist()
    model = tiny_models.converted("one-layer")
    scales = measured_scales(model, dtype, granularity, ids, headroom)
    exact, stored = open_onnx(model, KVSpec(64, "float")), open_onnx(model, KVSpec(64, dtype, granularity), scales)
    for engine in (exact, stored):
        engine.forward(ids)
    saturated = 0
    for rows, found, scale in zip(
        exact.rows(0, 0, 60), stored.rows(0, 0, 60), (scales.k[0][:, None], scales.v[0][:, None]), strict=True
    ):
        wanted = quantize(rows, scale, dtype)
        difference = np.abs(np.rint(found / scale) - wanted)
        at_the_end = np.abs(wanted) == LIMIT[dtype]
        assert difference.max() <= 1
        assert np.mean(difference[~at_the_end] > 0) < 0.01
        saturated += int(at_the_end.sum())
    assert (saturated > 50) == (headroom < 1)
