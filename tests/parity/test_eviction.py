"""Sinks + window against the float model that defines the policy (helpers/reference.py), at every token.

Tolerances, measured 2026-11-29 on x86-64, onnxruntime 1.32.0, accuracy level 1, tiny models of helpers/checkpoints.py:

    float cache     largest relative error 2e-6 over 240 evicted tokens; bound 1e-4 (an eviction that
                    leaves out one step of the scheme gives 0.2 to 1)
    INT8, INT4      the error without eviction is the codes' own; measured with eviction, as ratio to that without: mean
                    0.8 to 1.1, largest position 0.8 to 1.5. Bounds: mean 1.5, largest 2.5 times. (No sinks: 20 times.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ATTENTION, TinyModels
from helpers.checkpoints import ROPE_KINDS, TINY, VOCAB
from helpers.engines import measured_scales
from helpers.reference import SinkModel, relative_errors
from helpers.weights import dequantised_state_dict
from transformers import AutoConfig

from edgekv.engines.onnx import engine as onnx_engine
from edgekv.engines.onnx.binding import DeviceCache
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.onnx.ring import RingInputs, RunPart
from edgekv.engines.rope import rope_tables, rotate
from edgekv.errors import InvalidOption
from edgekv.generate import Timeline
from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.kv.window import Move

FLOAT_TOLERANCE = 1e-4
OpenEngine = Callable[..., OnnxEngine]
Evict = Callable[[OnnxEngine, Move], None]


@pytest.fixture(params=ATTENTION)
def attention(request: Any) -> str:
    """Every test here runs with each attention operator."""
    return str(request.param)


def random_ids(count: int, seed: int = 1, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, count).tolist()


def reference(
    tiny_models: TinyModels, name: str, capacity: int | None = None, stride: int = 0, pinned: int = 0
) -> SinkModel:
    """The defining model on the very weights that the converted graph holds."""
    config = AutoConfig.from_pretrained(tiny_models.source(name))
    return SinkModel(config, dequantised_state_dict(tiny_models.converted(name).folder), capacity, stride, pinned)


def run(engine: OnnxEngine, ids: Sequence[int], pinned: int = 0, turns: Sequence[int] = ()) -> tuple[Any, Timeline]:
    """Logits after each token, through the product's own timeline."""
    timeline = Timeline(engine)
    timeline.rewind(ids, pinned)
    return timeline.append(list(ids), turns, all_logits=True)[0], timeline


@dataclass(frozen=True)
class Shape:
    """A cache: capacity, stride, pinned tokens, and the chunk the engine runs at once."""

    capacity: int
    stride: int
    pinned: int
    chunk: int = 128


SHAPES = (
    Shape(64, 8, 0),
    Shape(64, 8, 4),
    Shape(64, 1, 4),
    Shape(64, 48, 16),
    Shape(96, 12, 20),
    Shape(96, 12, 20, chunk=8),
    Shape(96, 5, 20, chunk=1),
    Shape(80, 60, 20, chunk=7),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROPE_KINDS)
def test_logits_equal_the_reference_at_every_token(
    tiny_models: TinyModels, open_onnx: OpenEngine, name: str, shape: Shape
) -> None:
    """Case C06: pinned, stride and chunk in every mix, for every rotary kind, through several evictions."""
    ids = random_ids(260)
    kv = KVSpec(shape.capacity, "float", sinks=min(4, shape.pinned), stride=shape.stride)
    engine = open_onnx(tiny_models.converted(name), kv, chunk=shape.chunk)
    found, timeline = run(engine, ids, shape.pinned)
    wanted = reference(tiny_models, name, shape.capacity, shape.stride, shape.pinned)
    errors = relative_errors(found, wanted.run(ids))
    assert engine.evicted >= 2 * shape.stride
    assert list(engine.tokens) == [ids[number] for number in wanted.held]
    assert timeline.tokens == ids
    assert errors.max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("name", [name for name in TINY if name not in ROPE_KINDS])
def test_logits_equal_the_reference_for_every_architecture(
    tiny_models: TinyModels, open_onnx: OpenEngine, name: str
) -> None:
    """Case C06, C27: one layer and three, shared and separate KV heads, a head size of its own, QKV bias."""
    ids = random_ids(260)
    engine = open_onnx(tiny_models.converted(name), KVSpec(64, "float", sinks=4, stride=8))
    found, _ = run(engine, ids)
    assert relative_errors(found, reference(tiny_models, name, 64, 8, 4).run(ids)).max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2"])
def test_whole_turns_leave_as_in_the_reference(tiny_models: TinyModels, open_onnx: OpenEngine, name: str) -> None:
    """Case C06: uneven moves, because turns begin at tokens that no stride divides."""
    ids = random_ids(300)
    turns = [9, 23, 24, 61, 77, 90, 101, 130, 139, 163, 190, 211, 240, 255, 281]
    engine = open_onnx(tiny_models.converted(name), KVSpec(64, "float", sinks=4, stride=8))
    found, _ = run(engine, ids, 9, turns)
    wanted = reference(tiny_models, name, 64, 8, 9)
    errors = relative_errors(found, wanted.run(ids, turns))
    assert engine.evicted % 8, "no turn start fell into the zone, so the test shows nothing"
    assert list(engine.tokens) == [ids[number] for number in wanted.held]
    assert errors.max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2"])
def test_cached_rows_equal_the_reference(tiny_models: TinyModels, open_onnx: OpenEngine, name: str) -> None:
    """Case C06: not only what comes out but what is stored, pinned rows included, at the positions it claims."""
    ids = random_ids(200)
    engine = open_onnx(tiny_models.converted(name), KVSpec(64, "float", sinks=4, stride=8))
    run(engine, ids)
    wanted = reference(tiny_models, name, 64, 8, 4)
    wanted.run(ids)
    for layer in range(engine.spec.num_layers):
        k, v = engine.rows(layer, 0, engine.length)
        wanted_k, wanted_v = wanted.rotated(layer, engine.evicted)
        assert relative_errors(k, wanted_k).max() < FLOAT_TOLERANCE
        assert relative_errors(v, wanted_v).max() < FLOAT_TOLERANCE


def test_far_beyond_the_trained_length(tiny_models: TinyModels, open_onnx: OpenEngine) -> None:
    """Case C06: after 6,000 tokens, three times max_position_embeddings, the error has not grown."""
    ids = random_ids(6000)
    engine = open_onnx(tiny_models.converted("llama"), KVSpec(64, "float", sinks=4, stride=16))
    found, _ = run(engine, ids)
    wanted = reference(tiny_models, "llama", 64, 16, 4).run(ids)
    assert engine.evicted > 2 * engine.spec.max_context
    assert relative_errors(found[-200:], wanted[-200:]).max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("more", [10**6, 2**31 + 7, 10**12])
def test_positions_of_a_chat_of_years(tiny_models: TinyModels, open_onnx: OpenEngine, more: int) -> None:
    """As if `more` tokens had left before: keys turned on by as much give the same logits, also over the next eviction.
    Angles made in float32 are off by 0.017 radians at the first of these, and 32 bits do not hold the others."""
    ids = random_ids(147)
    engine = open_onnx(tiny_models.converted("llama"), KVSpec(64, "float", sinks=4, stride=8))
    run(engine, ids)
    state = engine.save()

    def go_on() -> Any:
        first = engine.forward(ids[:5], all_logits=True)
        engine.evict(Move(4, 8, 64))
        return np.concatenate([first, engine.forward(ids[5:13], all_logits=True)])

    wanted, own = go_on(), state.pinned if state.pinned_angles == "own" else 0
    turn = rope_tables(engine.spec.rope, engine.spec.head_dim, more, 1)
    keys = [np.concatenate([rows[:, :own], rotate(rows[:, own:], *turn)], axis=1) for rows in state.keys]
    engine.load(replace(state, keys=keys, evicted=state.evicted + more))
    assert relative_errors(go_on(), wanted).max() < FLOAT_TOLERANCE
    assert engine.evicted == state.evicted + more + 8


QUANTISED: tuple[KVDtype, ...] = ("int8", "int4")


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("pinned", [0, 4, 20])
@pytest.mark.parametrize("name", [*ROPE_KINDS, "qwen2"])
def test_eviction_costs_a_quantised_cache_nothing(
    tiny_models: TinyModels, open_onnx: OpenEngine, name: str, pinned: int, dtype: KVDtype
) -> None:
    """Cases C05, C06: the error after evictions is what the codes make it without any, relative to a float cache."""
    ids = random_ids(400)
    model = tiny_models.converted(name)
    scales = measured_scales(model, dtype, "channel", random_ids(300, seed=2))
    whole, _ = run(open_onnx(model, KVSpec(448, dtype), scales), ids)
    own = relative_errors(whole, reference(tiny_models, name).run(ids))
    engine = open_onnx(model, KVSpec(96, dtype, sinks=min(4, pinned), stride=12), scales)
    found, _ = run(engine, ids, pinned)
    errors = relative_errors(found, reference(tiny_models, name, 96, 12, pinned).run(ids))[96:]
    assert engine.evicted > 2 * 96
    assert errors.mean() < 1.5 * own.mean()
    assert errors.max() < 2.5 * own.max()


@pytest.mark.parametrize("dtype", ["float", "int8"])
def test_sinks_change_the_cache_and_the_logits(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """Case C08: a runtime that ignored `sinks` would pass every other test of length and speed."""
    ids = random_ids(150)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    engines = [open_onnx(model, KVSpec(64, dtype, sinks=sinks, stride=8), scales) for sinks in (0, 4)]
    without, kept = (run(engine, ids)[0] for engine in engines)
    assert list(engines[0].tokens)[:4] != ids[:4]
    assert list(engines[1].tokens)[:4] == ids[:4]
    assert not np.array_equal(engines[0].save().keys[0], engines[1].save().keys[0])
    assert relative_errors(without[:64], kept[:64]).max() < 1e-6, "nothing has left yet"
    assert relative_errors(without[64:], kept[64:]).mean() > 0.1


def test_one_layer_equals_a_fresh_prefill_and_more_layers_do_not(
    tiny_models: TinyModels, open_onnx: OpenEngine
) -> None:
    """With one layer a kept key knows nothing of tokens that left; with more it has attended to them."""
    errors = {}
    for name in ("one-layer", "llama"):
        ids = random_ids(150)
        model = tiny_models.converted(name)
        engine = open_onnx(model, KVSpec(64, "float", sinks=4, stride=8))
        found, _ = run(engine, ids)
        fresh = open_onnx(model, KVSpec(64, "float")).forward(list(engine.tokens))
        errors[name] = relative_errors(found[-1], fresh).item()
    assert errors["one-layer"] < FLOAT_TOLERANCE
    assert errors["llama"] > 100 * FLOAT_TOLERANCE


@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_turn_by_turn_equals_all_at_once(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """Case C07: each turn sends the whole conversation again; what is cached is kept, and the end is the same.

    Float: equal to 1e-5. Quantised: a hidden state that differs in its last bit may round to the neighbouring code, so
    the codes may differ by one in places (measured: none to 0.3 %), and that is all.
    """
    ids = random_ids(300)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    turns = [0, 20, 31, 75, 80, 122, 160, 200, 231, 290]
    whole = open_onnx(model, kv, scales)
    all_at_once, _ = run(whole, ids, 4, turns)
    parts = open_onnx(model, kv, scales)
    timeline, logits = Timeline(parts), None
    for end in [*turns[1:], len(ids)]:
        done = timeline.rewind(ids[:end], 4)
        assert done == max((start for start in turns if start < end), default=0)
        logits, _ = timeline.append(ids[done:end], [start for start in turns if start < end])
    assert timeline.tokens == ids
    assert (parts.evicted, list(parts.tokens)) == (whole.evicted, list(whole.tokens))
    if dtype == "float":
        assert relative_errors(logits, all_at_once[-1]).item() < 1e-5
    assert_same_rows(whole, parts)


@pytest.mark.parametrize("dtype", ["float", "int8"])
def test_chunk_sizes_do_not_matter(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """Case C07: one token at a time, seven, or as many as fit; before and after evictions."""
    ids = random_ids(200)
    model = tiny_models.converted("llama3-rope")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    engines = [open_onnx(model, kv, scales, chunk=chunk) for chunk in (128, 7, 1)]
    results = [run(engine, ids)[0] for engine in engines]
    for engine, logits in zip(engines[1:], results[1:], strict=True):
        assert_same_rows(engines[0], engine)
        if dtype == "float":
            assert relative_errors(logits, results[0]).max() < 1e-5


def assert_same_rows(first: OnnxEngine, second: OnnxEngine) -> None:
    """Stored rows are equal: floats to 1e-5 of a row, codes up to one step in under 1 % of the places."""
    assert first.length == second.length
    for a, b in zip(
        (*first.save().keys, *first.save().values), (*second.save().keys, *second.save().values), strict=True
    ):
        if a.dtype == np.float32:
            assert relative_errors(a, b).max() < 1e-5
        else:
            codes = [codes_of(x, first.kv.dtype) for x in (a, b)]
            difference = np.abs(codes[0] - codes[1])
            assert difference.max() <= 1
            assert np.mean(difference > 0) < 0.01


def codes_of(rows: Any, dtype: KVDtype) -> Any:
    """Codes, one an item, of rows that may hold two in a byte, and behind them the two bytes of a factor."""
    if dtype != "int4":
        return rows.astype(int)
    if rows.dtype == np.uint8:
        return np.stack([rows & 0xF, rows >> 4]).astype(int)
    both = rows[..., :-2].astype(int)
    return np.stack([(both % 16 ^ 8) - 8, both >> 4])


@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_an_empty_cache_is_saved_and_loaded(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """The smallest state there is."""
    ids = random_ids(70)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    engine = open_onnx(model, KVSpec(64, dtype, sinks=4, stride=8), scales)
    empty = engine.save()
    wanted, _ = run(engine, ids)
    engine.load(empty)
    assert (engine.length, engine.evicted) == (0, 0)
    np.testing.assert_array_equal(run(engine, ids)[0], wanted)


def test_taking_back_after_an_eviction(tiny_models: TinyModels, open_onnx: OpenEngine) -> None:
    """Case C12: after the tail is forgotten and another continuation is given, logits are the reference's."""
    ids, other = random_ids(140), random_ids(90, seed=7)
    engine = open_onnx(tiny_models.converted("llama"), KVSpec(64, "float", sinks=4, stride=8))
    _, timeline = run(engine, ids)
    wanted = reference(tiny_models, "llama", 64, 8, 4)
    wanted.run(ids)
    kept = timeline.rewind([*ids[:125], *other], 4)
    wanted.forget(140 - 125)
    assert kept == 125
    assert engine.evicted > 0
    found, _ = timeline.append(other, all_logits=True)
    assert relative_errors(found, wanted.run(other)).max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_saved_and_loaded_goes_on_the_same(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """Case C12: a cache put into a fresh engine, evictions behind and ahead of it, gives the same bits."""
    ids = random_ids(200)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    first, second = (open_onnx(model, kv, scales) for _ in range(2))
    run(first, ids[:150])
    second.load(first.save())
    assert (second.evicted, list(second.tokens)) == (first.evicted, list(first.tokens))
    for engine in (first, second):
        while engine.length + 8 > kv.capacity:
            engine.evict(Move(4, 8, engine.length))
    np.testing.assert_array_equal(first.forward(ids[150:158]), second.forward(ids[150:158]))


@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_rows_beyond_the_length_are_never_read(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """What truncation and eviction leave behind in memory has no influence: it is overwritten with poison here."""
    ids = random_ids(150)
    model = tiny_models.converted("qwen2")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    kv = KVSpec(64, dtype, sinks=4, stride=16)
    results = []
    for poison in (False, True):
        engine = open_onnx(model, kv, scales)
        timeline = Timeline(engine)
        parts = []
        for start in range(0, 150, 6):
            if poison:
                poison_tail(engine)
            parts.append(timeline.append(ids[start : start + 6], all_logits=True)[0])
        results.append(np.concatenate(parts))
        assert engine.evicted
    np.testing.assert_array_equal(results[0], results[1])


def memory_of(engine: OnnxEngine) -> Any:
    """What takes rows at any place."""
    return getattr(engine._cache, "memory", engine._cache)


def poison_tail(engine: OnnxEngine) -> None:
    if engine.length == engine.kv.capacity:
        return
    for part, layer in [(part, layer) for part in "kv" for layer in range(engine.spec.num_layers)]:
        rows = engine._cache.read(part, layer, engine.length, engine.kv.capacity)
        worst = {"float": np.nan, "int8": 127, "int4": -1}[engine.kv.dtype]  # -1: all bits, whatever the type
        memory_of(engine).write(part, layer, engine.length, np.full(rows.shape, worst).astype(rows.dtype))


@pytest.mark.parametrize("attention", ["gqa"])
@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_device_cache_equals_host_cache(
    tiny_models: TinyModels, open_onnx: OpenEngine, monkeypatch: pytest.MonkeyPatch, dtype: KVDtype
) -> None:
    """The cache kept in OrtValues, as on a GPU, on the CPU provider: the same bits, through evictions and reloads."""
    ids = random_ids(200)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    host = open_onnx(model, kv, scales)
    monkeypatch.setattr(onnx_engine, "HostCache", lambda spec, kv: DeviceCache(spec, kv, "cpu"))
    device = open_onnx(model, kv, scales)
    assert isinstance(memory_of(device), DeviceCache)
    np.testing.assert_array_equal(run(host, ids)[0], run(device, ids)[0])
    saved = host.save()
    for mine, other in zip((*saved.keys, *saved.values), (*device.save().keys, *device.save().values), strict=True):
        np.testing.assert_array_equal(mine, other)
    device.reset()
    device.load(saved)
    for engine in (host, device):
        engine.evict(Move(4, 8, engine.length))
    np.testing.assert_array_equal(host.forward(ids[:5]), device.forward(ids[:5]))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_three_times_the_capacity(tiny_models: TinyModels, open_onnx: OpenEngine, dtype: KVDtype) -> None:
    """Case C05: greedy generation far past the capacity; its logits stay as near the reference's as before."""
    model = tiny_models.converted("llama-fp16")
    scales = measured_scales(model, dtype, "channel", random_ids(300, vocab=1024))
    engine = open_onnx(model, KVSpec(64, dtype, sinks=4, stride=8), scales)
    timeline, ids, rows = Timeline(engine), random_ids(10, vocab=1024), []
    logits = timeline.append(ids)[0]
    while len(ids) < 3 * 64 + 10:
        rows.append(logits)
        ids.append(int(np.argmax(logits)))
        logits = timeline.append(ids[-1:])[0]
    assert engine.evicted >= 2 * 64
    assert engine.length <= 64
    assert timeline.tokens == ids
    wanted = reference(tiny_models, "llama-fp16", 64, 8, 4).run(ids)[9:-1]
    errors = relative_errors(np.stack(rows), wanted)
    assert errors[64:].mean() < 1.5 * errors[:54].mean()
    assert len(set(ids[-64:])) > 4, "it only repeats itself"


def _without_new_angles(engine: OnnxEngine, move: Move) -> None:
    OnnxEngine.evict(engine, move)
    engine._inputs.tables[0] = rope_tables(engine.spec.rope, engine.spec.head_dim, 0, engine.kv.capacity)


def _without_pinned_rerun(engine: OnnxEngine, move: Move) -> None:
    rows = [[engine._cache.read(part, layer, 0, move.start) for layer in range(2)] for part in "kv"]
    OnnxEngine.evict(engine, move)
    for part, layers in zip("kv", rows, strict=True):
        for layer, kept in enumerate(layers):
            memory_of(engine).write(part, layer, 0, kept)


def _one_row_too_few(engine: OnnxEngine, move: Move) -> None:
    OnnxEngine.evict(engine, move)
    memory_of(engine).move(move.start, move.start + 1, engine.length - move.start - 1)


def _without_second_rotation(engine: OnnxEngine, move: Move) -> None:
    type(engine).evict(engine, move)
    place = RingInputs.place_parts

    def broken(parts: Sequence[RunPart]) -> None:
        place(engine._inputs, parts)
        for angles in engine._inputs.angles.values():
            table = angles.fill(parts[0].past + parts[0].evicted, np.zeros(sum(part.tokens for part in parts)))
            table[2:] = table[:2]

    engine._inputs.place_parts = broken


def _one_slot_beside(engine: OnnxEngine, move: Move) -> None:
    type(engine).evict(engine, move)
    place = RingInputs.place_parts

    def broken(parts: Sequence[RunPart]) -> None:
        place(engine._inputs, parts)
        engine._inputs._state[: len(parts), 2] += 1  # the operator is told of one pinned slot too many

    engine._inputs.place_parts = broken


@pytest.mark.parametrize(
    ("attention", "broken"),
    [
        ("gqa", _without_new_angles),
        ("gqa", _without_pinned_rerun),
        ("gqa", _one_row_too_few),
        ("native", _without_second_rotation),
        ("native", _one_slot_beside),
    ],
)
@pytest.mark.parametrize("dtype", ["float", "int8"])
def test_the_bounds_catch_a_broken_eviction(
    tiny_models: TinyModels, open_onnx: OpenEngine, broken: Evict, dtype: KVDtype
) -> None:
    """The tests above can fail: an eviction that leaves out one step of the scheme is far outside every bound."""
    ids = random_ids(150)
    model = tiny_models.converted("llama")
    scales = measured_scales(model, dtype, "channel", ids) if dtype != "float" else None
    engine = open_onnx(model, KVSpec(64, dtype, sinks=4, stride=8), scales)
    engine.evict = lambda move: broken(engine, move)  # type: ignore[method-assign]
    errors = relative_errors(run(engine, ids)[0], reference(tiny_models, "llama", 64, 8, 4).run(ids))
    assert errors[64:].mean() > 3 * max(FLOAT_TOLERANCE, errors[:64].mean().item())


DEFAULT_SHAPE = Shape(128, 16, 4)
DEFAULT_TOKENS = 220


@pytest.fixture(scope="module")
def default_ids(default_model: Any) -> list[int]:
    from helpers.prose import prose_ids

    return prose_ids(default_model, DEFAULT_TOKENS)


@pytest.fixture(scope="module")
def default_wanted(default_state: dict[str, torch.Tensor], default_ids: list[int]) -> torch.Tensor:
    """The reference over the default model's weights, float32 (its own rounding is 1e-5 of a logit row)."""
    from helpers.prose import default_config

    shape = DEFAULT_SHAPE
    model = SinkModel(default_config(), default_state, shape.capacity, shape.stride, shape.pinned, dtype=torch.float32)
    return model.run(default_ids)


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("native", "float"),
        ("gqa", "int8"),
        pytest.param("gqa", "float", marks=pytest.mark.slow),
        pytest.param("native", "int8", marks=pytest.mark.slow),
    ],
)
def test_default_model_equals_the_reference(
    default_model: Any, default_ids: list[int], default_wanted: torch.Tensor, open_onnx: OpenEngine, dtype: KVDtype
) -> None:
    """Cases C05, C06 on real weights and English. Measured over 192 evicted tokens: float 5e-6; INT8 mean 0.015 after
    evictions against 0.017 before."""
    shape = DEFAULT_SHAPE
    scales = measured_scales(default_model, dtype, "channel", default_ids) if dtype != "float" else None
    engine = open_onnx(default_model, KVSpec(shape.capacity, dtype, sinks=shape.pinned, stride=shape.stride), scales)
    found, _ = run(engine, default_ids)
    errors = relative_errors(found, default_wanted)
    assert engine.evicted == 96
    if dtype == "float":
        assert errors.max() < FLOAT_TOLERANCE
    else:
        before, after = errors[: shape.capacity], errors[shape.capacity :]
        assert after.mean() < 1.5 * before.mean()
        assert after.max() < 2.5 * before.max()


@pytest.mark.parametrize("attention", ["gqa"])
@pytest.mark.parametrize("evicting", [True, False])
def test_a_saved_content_goes_from_one_operator_to_the_other(
    tiny_models: TinyModels, open_onnx: OpenEngine, evicting: bool
) -> None:
    """A ring keeps pinned keys at the angles of their own slots, a moved cache at those before the window. Each loads
    the other's content exactly: it goes on as the reference does, into another capacity too, and back again.

    Loaded without turning the pinned keys, the float error is 0.2 and more (the bound is 1e-4)."""
    ids = random_ids(185 if evicting else 55)
    model = tiny_models.converted("llama")
    kv = KVSpec(64, "float", sinks=4, stride=8)
    names = ("native", "gqa")
    wanted = reference(tiny_models, "llama", 64, 8, 9)
    wanted.run(ids)
    first = open_onnx(model, kv, attention="native")
    run(first, ids, 9)
    state = first.save()
    following = random_ids(5, seed=3)
    exact = wanted.run(following)
    for name in (*names[::-1], *names):  # ring -> moved -> ring -> ring -> moved
        other = open_onnx(model, replace(kv, capacity=80), attention=name)
        other.load(state)
        state = other.save()
        assert (other.evicted, list(other.tokens)) == (first.evicted, list(first.tokens))
        errors = relative_errors(other.forward(following, all_logits=True), exact)
        assert errors.max() < FLOAT_TOLERANCE


@pytest.mark.parametrize("attention", ["gqa"])
@pytest.mark.parametrize(("saved", "other"), [("native", "gqa"), ("gqa", "native")])
def test_rows_of_another_kind_are_refused(
    tiny_models: TinyModels, open_onnx: OpenEngine, saved: str, other: str
) -> None:
    """INT8 rows with a factor and without: neither operator takes the other's, and it is empty afterwards."""
    model, ids = tiny_models.converted("llama"), random_ids(40)
    scales = measured_scales(model, "int8", "channel", ids)
    kv = KVSpec(64, "int8", sinks=4, stride=8)
    first, second = (open_onnx(model, kv, scales, attention=name) for name in (saved, other))
    first.forward(ids)
    second.forward(ids[:3])
    with pytest.raises(InvalidOption, match=r"Layer 0 of this content is int8 \[2, 40, \d+\]; this cache holds int8"):
        second.load(first.save())
    assert second.length == 0
