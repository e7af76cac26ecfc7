"""OnnxEngine against its contract: what it refuses, and that a failure leaves the cache as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import TinyModels
from helpers.checkpoints import VOCAB
from helpers.engines import measured_scales
from safetensors.numpy import load_file, save_file

from edgekv.convert import convert
from edgekv.engines.base import Engine
from edgekv.engines.onnx import native
from edgekv.engines.onnx.engine import OnnxEngine, open_engine
from edgekv.engines.onnx.options import OnnxOptions
from edgekv.errors import BadCheckpoint, CacheFull, EngineError, InvalidOption, ScalesError, UnsupportedModel
from edgekv.generate import Timeline
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVDtype, KVSpec, scales_dtype
from edgekv.kv.window import Move
from edgekv.model.converted import ConvertedModel, open_converted, write_description

OpenEngine = Callable[..., OnnxEngine]
IDS = np.random.default_rng(5).integers(3, VOCAB - 1, 200).tolist()  # without the last token of the vocabulary


@pytest.fixture
def model(tiny_models: TinyModels) -> ConvertedModel:
    return tiny_models.converted("llama")


@pytest.fixture(scope="module")
def scales(tiny_models: TinyModels) -> dict[str, KVScales]:
    """By dtype, per channel."""
    dtypes: tuple[KVDtype, ...] = ("int8", "int4", "fp8")
    return {dtype: measured_scales(tiny_models.converted("llama"), dtype, "channel", IDS) for dtype in dtypes}


@pytest.fixture(
    params=[
        *(f"gqa-{dtype}" for dtype in ("float", "int8", "int4")),
        *(f"native-{dtype}" for dtype in ("float", "int8", "k8v4", "int4", "fp8")),
    ]
)
def engine(request: Any, model: ConvertedModel, scales: dict[str, KVScales]) -> Iterator[OnnxEngine]:
    """An engine of each operator and dtype, 64 slots, holding 40 tokens after an eviction of 8."""
    attention, dtype = request.param.split("-")
    kv = KVSpec(64, dtype, sinks=4, stride=8)
    if attention == "native" and (reason := native.refusal(model.spec, kv, "cpu")):
        pytest.skip(reason)
    opened = open_engine(model, kv, scales.get(scales_dtype(dtype)), OnnxOptions(attention=attention))
    opened.forward(IDS[:48])
    opened.evict(Move(4, 8, 48))
    yield opened
    opened.close()


def content(engine: OnnxEngine) -> tuple[Any, ...]:
    """Everything an engine holds, as plain values that can be compared."""
    state = engine.save()
    return (*(rows.tobytes() for rows in (*state.keys, *state.values)), state.tokens, state.evicted)


def like(engine: OnnxEngine, model: ConvertedModel, scales: dict[str, KVScales], **changes: Any) -> OnnxEngine:
    """Another engine of the same kind."""
    return open_engine(model, replace(engine.kv, **changes), scales.get(scales_dtype(engine.kv.dtype)), engine._options)


def test_is_an_engine(engine: OnnxEngine) -> None:
    """The protocol, and what its properties say."""
    assert isinstance(engine, Engine)
    assert (engine.length, engine.evicted, len(engine.tokens)) == (40, 8, 40)


def test_cache_full_appends_nothing(engine: OnnxEngine) -> None:
    """Case C02: one token more than fits; then exactly as many as fit."""
    before = content(engine)
    with pytest.raises(CacheFull) as caught:
        engine.forward(IDS[:25])
    assert (caught.value.length, caught.value.tokens, caught.value.capacity) == (40, 25, 64)
    assert content(engine) == before
    engine.forward(IDS[:24])
    assert engine.length == 64
    with pytest.raises(CacheFull):
        engine.forward(IDS[:1])


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [5, 6, 1 << 40], []])
def test_bad_ids_append_nothing(engine: OnnxEngine, bad: list[int]) -> None:
    """Ids outside of the vocabulary would read foreign memory; none at all is a mistake of the caller."""
    before = content(engine)
    with pytest.raises(InvalidOption):
        engine.forward(bad)
    assert content(engine) == before


@pytest.mark.parametrize("error", [RuntimeError("backend"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_run_leaves_the_cache_as_it_was(
    engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing: int
) -> None:
    """The second of two chunks fails: the first is taken back, too, and the next run gives what it would have given."""
    monkeypatch.setattr(engine, "_chunk", 6)
    before = content(engine)
    wanted = engine.forward(IDS[:12]).copy()
    engine.truncate(40)
    session = FailingSession(engine._session, failing, error)
    monkeypatch.setattr(engine, "_session", session)
    with pytest.raises(EngineError if isinstance(error, Exception) else KeyboardInterrupt):
        engine.forward(IDS[100:112])
    assert content(engine) == before
    np.testing.assert_array_equal(engine.forward(IDS[:12]), wanted)


@pytest.mark.parametrize("error", [RuntimeError("backend"), KeyboardInterrupt()])
def test_a_failing_eviction_resets(engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Half-way the rows have moved and the pinned ones are stale: better nothing than that. A fresh start is right."""
    if engine.attention == "native":
        pytest.skip("an eviction from the ring runs nothing")
    monkeypatch.setattr(engine, "_session", FailingSession(engine._session, 0, error))
    with pytest.raises(EngineError if isinstance(error, Exception) else KeyboardInterrupt):
        engine.evict(Move(4, 8, 40))
    assert (engine.length, engine.evicted, list(engine.tokens)) == (0, 0, [])
    found = engine.forward(IDS[:20])
    engine.reset()
    np.testing.assert_array_equal(engine.forward(IDS[:20]), found)


def test_an_eviction_that_fails_while_rows_move_resets(engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the rows have moved and before anything says so."""
    owner, name = (engine._cache, "forget") if engine.attention == "native" else (engine._cache.memory, "move")
    move = getattr(owner, name)

    def interrupted(*arguments: int) -> None:
        move(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.evict(Move(4, 8, 40))
    assert (engine.length, engine.evicted) == (0, 0)
    found = engine.forward(IDS[:20])
    engine.reset()
    np.testing.assert_array_equal(engine.forward(IDS[:20]), found)


class FailingSession:
    """A session whose n-th run fails after having done its work, as an interrupt would find it."""

    def __init__(self, session: Any, failing: int, error: BaseException) -> None:
        self._session, self._failing, self._error, self._runs = session, failing, error, 0

    def run_with_iobinding(self, io: Any) -> None:
        self._session.run_with_iobinding(io)
        self._runs += 1
        if self._runs == self._failing + 1:
            raise self._error


@pytest.mark.parametrize(
    "move", [Move(4, 8, 39), Move(4, 0, 40), Move(4, 37, 40), Move(4, -1, 40), Move(3, 8, 40), Move(5, 8, 40)]
)
def test_a_move_that_does_not_fit_changes_nothing(engine: OnnxEngine, move: Move) -> None:
    """Of another length, of no rows, of more than there are, of another pinned prefix than at the last eviction."""
    before = content(engine)
    with pytest.raises(InvalidOption):
        engine.evict(move)
    assert content(engine) == before


def test_truncate_and_go_on(engine: OnnxEngine) -> None:
    """Case C12: what is kept is untouched, and the continuation equals the first time."""
    first = engine.forward(IDS[60:70]).copy()
    engine.truncate(40)
    assert (engine.length, engine.evicted) == (40, 8)
    engine.forward(IDS[90:100])
    engine.truncate(40)
    np.testing.assert_array_equal(engine.forward(IDS[60:70]), first)
    for length in (-1, 51):
        with pytest.raises(InvalidOption):
            engine.truncate(length)
    engine.truncate(0)
    assert (engine.length, engine.evicted) == (0, 0)


def test_reset_starts_at_position_0(engine: OnnxEngine, model: ConvertedModel, scales: dict[str, KVScales]) -> None:
    """After a reset an engine is like new, evictions forgotten, bit for bit."""
    engine.reset()
    found = engine.forward(IDS[:30])
    fresh = like(engine, model, scales)
    np.testing.assert_array_equal(found, fresh.forward(IDS[:30]))
    assert content(engine) == content(fresh)
    fresh.close()


def test_save_and_load(engine: OnnxEngine, model: ConvertedModel, scales: dict[str, KVScales]) -> None:
    """Case C12: a saved state is a copy, loads into a fresh engine and one in use, and is refused if too long."""
    state, before = engine.save(), content(engine)
    wanted = engine.forward(IDS[60:66]).copy()
    other = like(engine, model, scales)
    for target in (other, engine):
        target.load(state)
        assert content(target) == before
        np.testing.assert_array_equal(target.forward(IDS[60:66]), wanted)
    other.close()
    large = like(engine, model, scales, capacity=128)
    large.forward(IDS[:100])
    with pytest.raises(CacheFull):
        engine.load(large.save())
    large.close()


def test_rows_are_the_dequantised_cache(engine: OnnxEngine, model: ConvertedModel, scales: dict[str, KVScales]) -> None:
    """`rows` of any range is that part of the whole, and near the float engine's rows."""
    exact = open_engine(model, replace(engine.kv, dtype="float"), None)
    exact.forward(IDS[:48])
    exact.evict(Move(4, 8, 48))
    for layer in range(model.spec.num_layers):
        for part, wanted, whole in zip(
            engine.rows(layer, 5, 9), exact.rows(layer, 5, 9), engine.rows(layer, 0, 40), strict=True
        ):
            assert part.shape == (model.spec.num_kv_heads, 4, model.spec.head_dim)
            np.testing.assert_array_equal(part, whole[:, 5:9])
            bound = {"float": 1e-6, "int8": 0.05, "k8v4": 0.2, "fp8": 0.1, "int4": 0.6}[engine.kv.dtype]
            assert np.linalg.norm(part - wanted) <= bound * np.linalg.norm(wanted)
    exact.close()


def test_close_frees_the_session(engine: OnnxEngine) -> None:
    """A closed engine holds neither session nor cache; closing twice is fine."""
    engine.close()
    engine.close()
    assert engine.length == 0
    assert engine._session is None
    assert not hasattr(engine, "_cache")


@pytest.mark.parametrize(
    ("kv", "device", "hint"),
    [
        (KVSpec(64, "fp8"), "cuda", "int8"),
        (KVSpec(64, "fp16"), "cpu", "int8"),
        (KVSpec(64, "int4", "tensor"), "cpu", "channel"),
        (KVSpec(64, "int8"), "abacus", "cpu"),
    ],
)
def test_combinations_that_do_not_run_are_refused(model: ConvertedModel, kv: KVSpec, device: str, hint: str) -> None:
    """Case C09: at load, naming both options and what to use."""
    limits = np.ones((2, 2, 16), np.float32)
    fitting = KVScales(limits, limits, kv.dtype, kv.granularity, model.fingerprint, None)  # type: ignore[arg-type]
    with pytest.raises((UnsupportedModel, InvalidOption), match=hint):
        open_engine(model, kv, fitting, OnnxOptions(device=device))


@pytest.mark.parametrize("wrong", ["model", "dtype", "granularity", "shape", "v shape", "missing"])
def test_scales_of_something_else_are_refused(model: ConvertedModel, scales: dict[str, KVScales], wrong: str) -> None:
    """Case C11: each thing that can differ, and no scales at all."""
    right = scales["int8"]
    given = {
        "model": replace(right, fingerprint="0" * 16),
        "dtype": scales["int4"],
        "granularity": replace(right, granularity="head"),
        "shape": replace(right, k=right.k[:1], v=right.v[:1]),
        "v shape": replace(right, v=right.v[:, :1]),
        "missing": None,
    }[wrong]
    with pytest.raises(ScalesError, match="calibrate"):
        open_engine(model, KVSpec(64), given)
    open_engine(model, KVSpec(64), right).close()


@pytest.mark.parametrize("granularity", ["channel", "head", "tensor"])
def test_each_granularity_quantises_with_its_scales(
    tiny_models: TinyModels, model: ConvertedModel, granularity: Any
) -> None:
    """The codes in the cache are multiples of the scales given, whatever the granularity, and not of 1.0."""
    fitting = measured_scales(model, "int8", granularity, IDS)
    engine = open_engine(model, KVSpec(64, "int8", granularity), fitting)
    exact = open_engine(model, KVSpec(64, "float"), None)
    for each in (engine, exact):
        each.forward(IDS[:40])
    for layer in range(model.spec.num_layers):
        for found, wanted in zip(engine.rows(layer, 0, 40), exact.rows(layer, 0, 40), strict=True):
            assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
    engine.close()
    exact.close()


def poisoned(model: ConvertedModel, folder: Path, initializer: str, value: float) -> ConvertedModel:
    """A copy of a converted model in whose stored scales of one weight the last number is `value`. Its description
    has no hash of the graph, which would tell."""
    shutil.copytree(model.folder, folder)
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(tensor for tensor in graph.graph.initializer if tensor.name == initializer)
    number = np.float32(value).tobytes()
    if tensor.external_data:
        place = {entry.key: entry.value for entry in tensor.external_data}
        with (folder / "model.onnx.data").open("r+b") as data:
            data.seek(int(place["offset"]) + int(place["length"]) - 4)
            data.write(number)
    else:
        tensor.raw_data = tensor.raw_data[:-4] + number
        onnx.save(graph, folder / "model.onnx")
    write_description(folder, replace(model.description, graph_sha256=""))
    return open_converted(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.1.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ],
)
def test_a_checkpoint_with_a_number_that_is_not_finite(
    tiny_models: TinyModels, tmp_path: Path, tensor: str, value: float
) -> None:
    """Case C13: refused when it is converted, whichever tensor holds it, and nothing is left of the attempt."""
    source = tmp_path / "source"
    shutil.copytree(tiny_models.source("llama"), source)
    weights = load_file(source / "model.safetensors")
    weights[tensor] = weights[tensor].copy()
    weights[tensor].reshape(-1)[-3] = value
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match="finite"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def hides_damage(dtype: KVDtype, weight: str) -> bool:
    """Whether a bad scale in QKV stays unseen: an integer cache makes a number of a NaN, and so does MatMulNBits, which
    rounds its input to int8 (edgekv's own matmul does not). convert() refuses such weights, so only a model damaged
    afterwards gets here."""
    return "qkv" in weight and (dtype != "float" or native.matmul_refusal() is not None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "weight",
    [
        "embed.scales",
        "0.o.scales",
        "1.down.scales",
        "head.scales",
        "0.qkv.scales",
        "1.qkv.scales",
    ],
)
@pytest.mark.parametrize("dtype", ["float", "int8", "int4"])
def test_numbers_that_are_not_finite_stop_the_run(
    request: pytest.FixtureRequest,
    model: ConvertedModel,
    scales: dict[str, KVScales],
    tmp_path: Path,
    dtype: KVDtype,
    weight: str,
    value: float,
) -> None:
    """Case C13: one bad number in any weight; an integer cache must not hide it. Nothing is kept.

    The last scale of 0.qkv belongs to a value channel, and the last of the embedding and head to the last token."""
    if hides_damage(dtype, weight):
        request.applymarker(pytest.mark.xfail(reason="rounding to integers hides it", strict=True))
    damaged = poisoned(model, tmp_path / "damaged", weight, value)
    engine = open_engine(damaged, KVSpec(64, dtype, sinks=4, stride=8), scales.get(dtype))
    with pytest.raises(EngineError, match="finite"):
        engine.forward([*IDS[:20], VOCAB - 1])
    assert engine.length == 0
    engine.close()


def test_numbers_that_are_not_finite_stop_a_timeline(model: ConvertedModel, tmp_path: Path) -> None:
    """Case C13: the bad token comes late, after evictions; what was there before stays and goes on."""
    damaged = poisoned(model, tmp_path / "damaged", "embed.scales", np.nan)
    engine = open_engine(damaged, KVSpec(64, "float", sinks=4, stride=8), None)
    timeline = Timeline(engine)
    timeline.append(IDS[:100])
    before = content(engine)
    with pytest.raises(EngineError):
        timeline.append([5, 6, VOCAB - 1])
    assert content(engine) == before
    assert timeline.tokens == IDS[:100]
    assert np.isfinite(timeline.append([5, 6])[0]).all()
    engine.close()
