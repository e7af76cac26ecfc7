"""The attention kernels, Triton's in its interpreter and their plain-torch twins, against float64 softmax attention.

Errors are |difference| / |output| of each query head and token. Measured 2026-11-29 (triton 3.9, interpreter):

    twins, float32                                 at most 3e-6; bound 1e-5
    the same, constants of 100 put back            at most 4e-5 (float32 scores of several hundred); bound 1e-4
    Triton, float32 rows                           at most 3e-6; bound 1e-5
    Triton, 8- and 16-bit rows, float16 products   at most 1.6e-3; bound 4e-3

The interpreter runs the kernels' arithmetic, not the compiler's output: what a GPU makes of them is measured by
scripts/gpu_check.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reference import relative_errors

from edgekv.engines.torch.cache import LayerRows, Part, Place, Turns
from edgekv.engines.torch.kernels import Kernels, twin
from edgekv.kv.quant import LIMIT, quantize
from edgekv.kv.rows import row_factors
from edgekv.kv.spec import ROW_FACTORS, TURN_STEP, KVDtype
from edgekv.model.spec import RopeSpec

STORED: dict[KVDtype, torch.dtype] = {
    "int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp16": torch.float16, "float": torch.float32,
}  # fmt: skip
EXACT, LARGE, HALF = 1e-5, 1e-4, 4e-3


@dataclass(frozen=True)
class Case:
    """One layer's cache and one run. K is 2 unless said; the newest `count` tokens are those that run."""

    size: int = 64
    group: int = 3
    length: int = 130  # after the run
    count: int = 1
    evicted: int = 0
    pinned: int = 0
    capacity: int = 320
    dtype: KVDtype = "int8"
    window: int | None = None
    softcap: float | None = None
    k_step: float = 0.02
    v_step: float = 0.02
    kv_heads: int = 2
    unlike: float = 0.5  # rows: standard deviation of the logarithm of their sizes
    centre: float = 0.0  # how large a constant the keys are stored without
    v_centre: float = 0.0  # the same of values, beside what is left
    attention_factor: float = 1.0  # of the RoPE: it lengthens turned centres, the rest has it in queries and keys

    def slot(self, place: int) -> int:
        """Where a place's row lies, from the description of the ring."""
        if place < self.pinned:
            return place
        number = place + self.evicted
        return self.pinned + (number - self.pinned) % (self.capacity - self.pinned)


@dataclass(frozen=True)
class Arrays:
    """What a case runs on: queries [H, T, D], rows [K, n, D] as codes and factors [K, n, 1], the newest as they are
    given, too, [K, T, D], and steps [K, D]."""

    queries: Any
    pinned_queries: Any
    new: dict[str, Any]
    codes: dict[str, Any]
    factors: dict[str, Any]
    steps: dict[str, Any]
    centre: Any  # [K, D]
    v_centre: Any  # [K, D]
    frequencies: Any  # [D/2]


def arrays(case: Case) -> Arrays:
    random = np.random.default_rng(case.length + case.size)

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    heads, past = case.kv_heads * case.group, case.length - case.count
    steps = {part: np.ones((case.kv_heads, case.size), np.float32) for part in "kv"}
    if case.dtype in LIMIT:
        scale = 127 / LIMIT[case.dtype]
        steps = {"k": case.k_step * scale * np.exp(normal(case.kv_heads, case.size) / 2),
                 "v": case.v_step * scale * np.exp(normal(case.kv_heads, case.size) / 2)}  # fmt: skip
    spread = {part: 40 * step[:, None] if case.dtype in LIMIT else step[:, None] for part, step in steps.items()}
    rows = {part: normal(case.kv_heads, case.length, case.size) * spread[part] for part in "kv"}
    for part in "kv" if case.dtype in LIMIT else "":
        rows[part] *= np.exp(case.unlike * normal(case.kv_heads, case.length, 1))
    coded = {part: codes(case, rows[part], steps[part]) for part in "kv"}
    return Arrays(
        normal(heads, case.count, case.size),
        normal(heads, case.count, case.size),
        {part: rows[part][:, past:] for part in "kv"},
        {part: coded[part][0] for part in "kv"},
        {part: coded[part][1] for part in "kv"},
        steps,
        case.centre * normal(case.kv_heads, case.size),
        case.v_centre * spread["v"][:, 0] * normal(case.kv_heads, case.size),
        np.float64(10_000) ** (-np.arange(0, 1, 2 / case.size)),
    )


def turned(case: Case, given: Arrays) -> Any:
    """The centre at the angle of every place, [K, n, D], in float64."""
    angles = np.arange(case.length)[:, None] * given.frequencies
    low, high = np.split(given.centre[:, None].astype(np.float64), 2, axis=-1)
    parts = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return case.attention_factor * np.concatenate(parts, axis=-1)


def codes(case: Case, rows: Any, step: Any) -> tuple[Any, Any]:
    """Rows [K, n, D] as codes, and factors [K, n, 1]."""
    factors = np.ones_like(rows[..., :1])
    if case.dtype in ROW_FACTORS:
        rows, step = rows / step[:, None], factors[:, 0]
        factors = row_factors(rows)
        rows = rows / factors
    if case.dtype in LIMIT:
        return quantize(rows, step[:, None], case.dtype), factors
    return rows.astype(np.float16).astype(np.float32) if case.dtype == "fp16" else rows, factors


def wanted(case: Case, given: Arrays) -> Any:
    """Attention over the rows in order of their places, in float64."""
    whole = {part: given.codes[part] * given.factors[part] * np.float64(given.steps[part][:, None]) for part in "kv"}
    keys, values = (np.repeat(whole[part], case.group, 0) for part in "kv")  # [H, n, D]
    scores = given.queries.astype(np.float64) @ keys.swapaxes(1, 2)
    if case.evicted:
        pinned = given.pinned_queries.astype(np.float64) @ keys.swapaxes(1, 2)
        scores[..., : case.pinned] = pinned[..., : case.pinned]
    if case.centre:
        centres = np.repeat(turned(case, given), case.group, 0)
        scores += (given.pinned_queries if case.evicted else given.queries).astype(np.float64) @ centres.swapaxes(1, 2)
    scores *= case.size**-0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    own, place = np.arange(case.length - case.count, case.length)[:, None], np.arange(case.length)[None]
    hidden = (place > own) | (own - place >= (case.window or case.length))
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, where=~hidden, initial=-1e300, keepdims=True)))
    return (weights / weights.sum(-1, keepdims=True)) @ values + added(case, given)


def added(case: Case, given: Arrays) -> Any:
    """What the output has of the values' centre, [H, 1, D]."""
    return np.repeat(given.v_centre, case.group, 0)[:, None].astype(np.float64)


def run(kernels: Kernels, case: Case, given: Arrays) -> tuple[torch.Tensor, LayerRows]:
    """The rows that were there are written as they are; the kernels store the others."""
    shape, past = (case.kv_heads, case.capacity, case.size), case.length - case.count
    parts = {}
    for part in "kv":
        stored, factors = torch.zeros(shape, dtype=STORED[case.dtype]), torch.zeros(shape[:-1], dtype=torch.bfloat16)
        for place in range(past):
            stored[:, case.slot(place)] = torch.from_numpy(given.codes[part][:, place]).to(STORED[case.dtype])
            factors[:, case.slot(place)] = torch.from_numpy(given.factors[part][:, place, 0]).bfloat16()
        scale = torch.from_numpy(given.steps[part]) if case.dtype in LIMIT else None
        parts[part] = Part(stored, scale, factors if case.dtype in ROW_FACTORS else None)
    rows = LayerRows(parts["k"], parts["v"])
    if case.centre:
        rope = RopeSpec(attention_factor=case.attention_factor)
        turns = Turns.of(rope, case.size, case.capacity, torch.device("cpu"))
        rows = replace(rows, keys=replace(rows.keys, centre=torch.from_numpy(given.centre)), turns=turns)
    if case.v_centre:
        rows = replace(rows, values=replace(rows.values, centre=torch.from_numpy(given.v_centre)))
    place = Place(case.capacity, torch.zeros(4, dtype=torch.int32), evicted=case.evicted, pinned=case.pinned)
    place.set(past)
    kernels.store(*(torch.from_numpy(given.new[part]) for part in "kv"), rows, place)
    queries, pinned = (torch.from_numpy(x) for x in (given.queries, given.pinned_queries))
    options: dict[str, Any] = {"scaling": case.size**-0.5, "window": case.window, "softcap": case.softcap}
    return kernels.attend(queries, pinned if case.evicted else queries, rows, place, **options), rows


def check(kernels: Kernels, case: Case, bound: float) -> None:
    given = arrays(case)
    found, rows = run(kernels, case, given)
    assert torch.isfinite(found).all()
    left = [x - added(case, given) for x in (found.numpy(), wanted(case, given))]  # a large centre excuses nothing
    assert relative_errors(*left).max() < bound
    slots = [case.slot(place) for place in range(case.length)]
    for part, held in (("k", rows.keys), ("v", rows.values)):
        assert np.array_equal(held.stored.float().numpy()[:, slots], given.codes[part])
        if held.factors is not None:
            assert np.array_equal(held.factors.float().numpy()[:, slots], given.factors[part][..., 0])


BASE = Case()
SHAPES = [replace(BASE, size=size, group=group) for size, group in (
    (64, 1), (64, 3), (64, 4), (64, 7), (64, 8), (96, 1), (96, 3), (96, 7), (128, 4), (128, 7), (128, 8), (256, 1),
    (256, 4), (256, 8),
)]  # fmt: skip
LENGTHS = [replace(BASE, length=length) for length in (1, 63, 64, 65, 319, 320)]
PROMPTS = [replace(BASE, length=length, count=count, group=group) for length, count, group in (
    (5, 5, 3), (65, 65, 1), (200, 70, 4), (320, 31, 7),
)]  # fmt: skip
WRAPPED = [
    replace(BASE, length=length, count=count, evicted=evicted, pinned=pinned)
    for length, count, evicted, pinned in (
        (320, 1, 7, 0), (319, 1, 1000, 4), (300, 1, 77, 100), (300, 40, 500, 100), (280, 3, 12345, 4), (64, 9, 333, 0),
    )
]  # fmt: skip
WINDOWS = [
    replace(case, window=window)
    for case in (BASE, WRAPPED[2], WRAPPED[3], PROMPTS[2])
    for window in (1, 50)
]  # fmt: skip
CAPPED = [replace(case, softcap=20.0) for case in (BASE, WRAPPED[3])]
DTYPES = [replace(case, dtype=dtype) for dtype in ("fp8", "fp16", "float") for case in (BASE, WRAPPED[3], SHAPES[5])]
CENTRED = [
    replace(case, centre=centre)
    for case in (BASE, SHAPES[5], WRAPPED[2], WRAPPED[3], WINDOWS[7], CAPPED[1])
    for centre in (1.0, 100.0)
    if centre == 1.0 or case.softcap is None
] + [replace(BASE, centre=10.0, attention_factor=1.2)]  # fmt: skip
VALUES_CENTRED = [
    replace(case, v_centre=5.0)
    for case in (BASE, SHAPES[5], PROMPTS[2], WRAPPED[3], WINDOWS[7], CAPPED[1], *DTYPES[:2])
]
UNLIKE = [
    replace(case, unlike=unlike, k_step=k_step)
    for case in (BASE, SHAPES[5], PROMPTS[2], WRAPPED[3])
    for unlike, k_step in ((0.0, 0.02), (3.0, 2e-5))  # factors of a ten thousandth to ten thousand times one another
]
CASES = [*SHAPES, *LENGTHS, *PROMPTS, *WRAPPED, *WINDOWS, *CAPPED, *DTYPES, *CENTRED, *VALUES_CENTRED, *UNLIKE]
EXTREME = [replace(BASE, k_step=k, v_step=v, dtype=dtype, length=90) for k, v, dtype in (
    (1e-6, 1e3, "int8"), (1e3, 1e-6, "int8"), (1e3, 1e3, "fp8"), (1e-6, 1e-6, "fp8"),
)]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *EXTREME], ids=str)
def test_twins(case: Case) -> None:
    """Very large scores make the softmax a choice of one row, which float32 makes like float64 here."""
    check(twin, case, 1e-2 if case in EXTREME else LARGE if case.centre == 100 else EXACT)


def test_two_small_tables_hold_every_angle() -> None:
    """As precisely as float32 tables of all places, which are off by 3e-8, however long the cache."""
    places = np.concatenate([np.arange(100), np.random.default_rng(0).integers(0, 1 << 20, 1000), [(1 << 20) - 1]])
    turns = Turns.of(RopeSpec(), 128, 1 << 20, torch.device("cpu"))
    starts, within = turns.starts[places // TURN_STEP], turns.within[places % TURN_STEP]
    (cos, sin), (near_cos, near_sin) = starts.chunk(2, -1), within.chunk(2, -1)
    angles = places[:, None] * np.float64(10_000) ** (-np.arange(0, 1, 2 / 128))
    for found, exact in (
        (cos * near_cos - sin * near_sin, np.cos(angles)),
        (sin * near_cos + cos * near_sin, np.sin(angles)),
    ):
        assert np.abs(found.numpy() - exact).max() < 2e-7


@pytest.fixture(scope="module")
def fused() -> Any:
    """The Triton kernels, interpreted (conftest.py sees to that)."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from edgekv.engines.torch.kernels import fused

    return fused


def triton_kernels(fused: Any, case: Case) -> Kernels:
    heads = case.group * case.kv_heads
    made: Kernels = fused.TritonKernels(heads, case.kv_heads, case.size, case.capacity, torch.device("cpu"))
    return made


@pytest.mark.parametrize("case", [replace(case, kv_heads=1) for case in CASES], ids=str)
def test_triton(fused: Any, case: Case) -> None:
    check(triton_kernels(fused, case), case, EXACT if case.dtype == "float" else HALF)


@pytest.mark.parametrize("case", [replace(case, kv_heads=1) for case in EXTREME], ids=str)
def test_triton_with_extreme_scales(fused: Any, case: Case) -> None:
    """No Inf, no NaN; and where scores are not so large that the softmax is a choice of one row, the right numbers."""
    given = arrays(case)
    found, _ = run(triton_kernels(fused, case), case, given)
    assert torch.isfinite(found).all()
    if case.k_step < 1:
        assert relative_errors(found, wanted(case, given)).max() < HALF


def test_decoding_is_split(fused: Any) -> None:
    """The cases do exercise the joining of parts."""
    assert triton_kernels(fused, BASE)._splits > 1
    assert fused._MAX_SPLITS > 1


def test_fp8_is_taken_apart_exactly(fused: Any) -> None:
    """All 254 numbers of E4M3 through the ring and back, and every halfway point rounds to the even neighbour."""
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.sort(finite[torch.isfinite(finite)]).values
    between = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, between, torch.tensor([1e4, -1e4])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(1, -1, 64)
    case = Case(dtype="fp8", kv_heads=1, length=values.shape[1], count=values.shape[1])
    stored = [torch.zeros((1, 320, 64), dtype=torch.float8_e4m3fn) for _ in "kv"]
    rows = LayerRows(*(Part(one, torch.ones(1, 64)) for one in stored))
    place = Place(320, torch.zeros(4, dtype=torch.int32))
    place.set(0)
    triton_kernels(fused, case).store(values, values, rows, place)
    wanted_codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(rows.keys.stored.float()[:, : case.length], wanted_codes)


@pytest.mark.parametrize("evicted", [0, 1, 316, 317, 632, 2**31 + 5, 10**12])
def test_what_kernels_are_told_of_evictions(evicted: int) -> None:
    """Whether there were any, and a number of 32 bits that leaves the same rest by the window's 316 slots."""
    place = Place(320, torch.zeros(4, dtype=torch.int32), evicted=evicted, pinned=4)
    place.set(100)
    past, told, pinned, capacity = place.state.tolist()
    assert (past, pinned, capacity) == (100, 4, 320)
    assert (told > 0, told % 316) == (evicted > 0, evicted % 316)
