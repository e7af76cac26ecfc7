"""kv/rows.py: rows of codes with a factor of their own, against the definition and the bounds that the scheme promises.

That the operator writes these rows is tested in tests/parity/test_native.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgekv.kv.quant import fake_quantize
from edgekv.kv.rows import (
    dequantize_int4_keys,
    dequantize_int4_values,
    dequantize_keys,
    dequantize_values,
    mixed,
    mixed_channels,
    quantize_int4_keys,
    quantize_int4_values,
    quantize_keys,
    quantize_values,
)

ROWS = arrays.arrays(np.float32, (2, 3, 32), elements=st.floats(-(2.0**20), 2.0**20, width=32))


@pytest.mark.parametrize(("dim", "channels"), [(16, 16), (64, 64), (80, 16), (96, 32), (128, 128), (192, 64)])
def test_mixing_is_its_own_inverse_but_for_n(dim: int, channels: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, dim)).astype(np.float32)
    assert mixed_channels(dim) == channels
    np.testing.assert_allclose(mixed(mixed(x)) / channels, x, atol=1e-5)
    signs = [[(-1) ** (i & j).bit_count() for j in range(channels)] for i in range(channels)]
    np.testing.assert_allclose(mixed(x)[:, :channels], x[:, :channels] @ np.array(signs, np.float32), atol=1e-4)


@given(ROWS)
def test_values_are_off_by_half_a_step_of_their_row(values: Any) -> None:
    """The step is at most a 127th of the row's largest number, and 2^-7 of that for the factor's own 8 bits."""
    scales = np.linspace(0.5, 2, 32, dtype=np.float32)
    found = dequantize_values(quantize_values(values, scales), scales)
    reach = np.abs(values / scales).max(-1, keepdims=True) / 127 * (1 + 2.0**-7)
    assert (np.abs(found - values) <= (0.5 * reach + 2.0**-60) * scales * (1 + 1e-5)).all()


@given(ROWS)
def test_keys_are_off_by_no_more_than_their_length_allows(keys: Any) -> None:
    """Mixed by an orthogonal matrix an error keeps its length: n rounding errors of half a step each at the most."""
    scales = np.full(32, 0.25, np.float32)
    found = dequantize_keys(quantize_keys(keys, scales), scales)
    largest = np.abs(mixed(keys)).max(-1) / np.sqrt(32)
    bound = 0.5 * np.sqrt(32) * largest / 127 * (1 + 2.0**-6)
    assert (np.linalg.norm((found - keys).astype(np.float64), axis=-1) <= bound * (1 + 1e-4) + 1e-12).all()


def test_one_large_channel_leaves_the_others_their_codes() -> None:
    """A channel 30 times the others: with one static scale a head they are lost, mixed they are not."""
    keys = np.random.default_rng(0).normal(size=(1, 200, 64)).astype(np.float32)
    keys[..., 5] *= 30
    scales = np.full((1, 1, 64), np.abs(keys).max() / 127, np.float32)
    others = np.arange(64) != 5
    errors = [
        np.linalg.norm((found - keys)[..., others]) / np.linalg.norm(keys[..., others])
        for found in (dequantize_keys(quantize_keys(keys, scales), scales), fake_quantize(keys, scales, "int8"))
    ]
    assert errors[0] < 0.4 * errors[1]


def test_what_is_no_number_stays_in_its_row() -> None:
    """Codes are integers whatever comes, and other rows are as if nothing had come."""
    values = np.random.default_rng(0).normal(size=(1, 4, 16)).astype(np.float32)
    whole = quantize_values(values, np.ones(16, np.float32))
    values[0, 1, 3], values[0, 2] = np.inf, np.nan
    with np.errstate(invalid="ignore", over="ignore"):
        found = quantize_values(values, np.ones(16, np.float32))
    np.testing.assert_array_equal(found[0, [0, 3]], whole[0, [0, 3]])
    assert np.isfinite(dequantize_values(found, np.ones(16, np.float32))).all()
    assert not quantize_values(np.zeros((1, 1, 16), np.float32), np.ones(16, np.float32))[..., :16].any()


@given(ROWS)
def test_values_of_4_bits_are_off_by_half_a_cell(values: Any) -> None:
    """Mixed, each is within half of one of 16 cells as wide as an eighth of the largest."""
    scales = np.linspace(0.5, 2, 32, dtype=np.float32)
    rows = quantize_int4_values(values, scales)
    assert rows.shape == (2, 3, 18)
    mixture = mixed(values / np.sqrt(scales))
    found = mixed(dequantize_int4_values(rows, scales) / np.sqrt(scales))
    cell = np.abs(mixture).max(-1, keepdims=True) / 8 * (1 + 2.0**-7) + 2.0**-63
    assert (np.abs(found - mixture) <= 0.5 * cell * (1 + 1e-4)).all()


@given(ROWS)
def test_keys_of_4_bits_are_values_without_scales(keys: Any) -> None:
    ones, scales = np.ones(32, np.float32), np.linspace(0.5, 2, 32, dtype=np.float32)
    rows = quantize_int4_keys(keys, scales)
    np.testing.assert_array_equal(rows, quantize_int4_values(keys, ones))
    np.testing.assert_array_equal(dequantize_int4_keys(rows, scales), dequantize_int4_values(rows, ones))


def test_4_bits_lie_where_the_layout_says() -> None:
    """One byte holds channels i and i + 8 of each 16, read here bit by bit."""
    values = np.random.default_rng(0).normal(size=(1, 1, 32)).astype(np.float32)
    row = quantize_int4_values(values, np.ones(32, np.float32))[0, 0]
    factor = np.array([0, 0, *row[16:]], np.int8).view("<f4")[0]
    bits = np.unpackbits(row[:16].view(np.uint8), bitorder="little").reshape(2, 8, 2, 4)  # [16s, i, half, bit]
    codes = (bits * [1, 2, 4, -8]).sum(-1).swapaxes(1, 2).reshape(32)
    np.testing.assert_array_equal(codes, np.clip(np.floor(mixed(values)[0, 0] / factor), -8, 7))
    assert np.abs(codes + 0.5).max() == 7.5


def test_what_is_no_number_stays_in_its_row_of_4_bits() -> None:
    ones = np.ones(16, np.float32)
    values = np.random.default_rng(0).normal(size=(1, 4, 16)).astype(np.float32)
    whole = quantize_int4_values(values, ones)
    values[0, 1, 3], values[0, 2] = np.inf, np.nan
    with np.errstate(invalid="ignore", over="ignore"):
        found = quantize_int4_values(values, ones)
    np.testing.assert_array_equal(found[0, [0, 3]], whole[0, [0, 3]])
    assert np.isfinite(dequantize_int4_values(found, ones)).all()
    nothing = quantize_int4_values(np.zeros((1, 1, 16), np.float32), ones)
    assert np.abs(dequantize_int4_values(nothing, ones)).max() < 1e-15
