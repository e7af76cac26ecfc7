"""OnnxEngine: one ONNX Runtime session over one preallocated cache.

`forward` runs chunks of at most `chunk` tokens. `evict` is the scheme of kv/window.py: rows move down, the RoPE tables
are re-made for the new positions, and the pinned prefix is run again at slot 0, which rewrites its rows at the angles
just before the window and nothing else. Its queries see only themselves, so its hidden states are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from edgekv.engines.base import (
    EngineState,
    Logits,
    PinnedAngles,
    check_ids,
    check_move,
    check_room,
    check_rows,
    check_state,
)
from edgekv.engines.onnx import native
from edgekv.engines.onnx.binding import (
    CACHE_DTYPES,
    Array,
    CacheMemory,
    DeviceCache,
    HostCache,
    LayerRows,
    StepBuffers,
    row_items,
)
from edgekv.engines.rope import rope_inputs, rope_tables, settled_ropes
from edgekv.errors import DependencyMissing, EngineError, InvalidOption, UnsupportedModel
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec
from edgekv.kv.window import Move
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

DEFAULT_CHUNK = 128
"""Tokens per prefill run. Larger chunks are no faster with an INT8 cache and need more scratch memory."""


Attention = Literal["auto", "native", "gqa"]


@dataclass(frozen=True)
class OnnxOptions:
    """How the session runs."""

    threads: int = 0  # 0: ONNX Runtime's choice, one per physical core
    device: str = "cpu"
    chunk: int = DEFAULT_CHUNK
    accuracy_level: int = 4  # 4: int8 activations inside MatMulNBits; 1: float32
    half_attention: bool | None = None  # attention in float16; None: where the device demands it
    attention: Attention = "auto"  # which operator; auto: the project's own where it is built and serves the cache

    @property
    def half(self) -> bool:
        """Whether attention runs in float16."""
        return self.device != "cpu" if self.half_attention is None else self.half_attention


class OnnxEngine:
    """One model on one device with one preallocated cache; see `edgekv.engines.base.Engine`."""

    def __init__(self, model: ConvertedModel, kv: KVSpec, scales: KVScales | None, options: OnnxOptions) -> None:
        check_combination(kv, options)
        self._spec, self._kv, self._options = model.spec, kv, options
        self._scales, self._model = scales, model
        self._session: Any = open_session(model, kv, options, self.attention, scales)
        self._io: Any = self._session.io_binding()
        self._constants: list[Array] = []  # bound by pointer, so they must live as long as the session
        self._tokens: list[int] = []
        self._evicted = 0
        self._pinned = 0  # tokens that the last eviction left at the beginning
        self._bind_cache()
        self._step = StepBuffers(self._io, options.chunk, model.spec.vocab_size, copied=options.device != "cpu")

    attention: ClassVar[Literal["native", "gqa"]] = "gqa"
    """Which operator computes attention."""
    pinned_angles: ClassVar[PinnedAngles] = "moved"
    """Where the pinned keys stand after evictions; see `EngineState`."""

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        return self._spec

    @property
    def kv(self) -> KVSpec:
        """How the cache is stored."""
        return self._kv

    @property
    def scales(self) -> KVScales | None:
        """What the codes in the cache stand for; None where it holds floats."""
        return self._scales

    @property
    def tokens(self) -> Sequence[int]:
        """The ids in the cache's slots."""
        return self._tokens

    @property
    def length(self) -> int:
        """Filled slots."""
        return len(self._tokens)

    @property
    def evicted(self) -> int:
        """Tokens that have left since the cache was last empty."""
        return self._evicted

    def forward(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits:
        """Append tokens; logits [V] after the last one, or [T, V] after each."""
        check_room(tokens, self.length, self._kv.capacity)
        check_ids(tokens, self._spec.vocab_size)
        before = self.length
        parts: list[Logits] = []
        try:
            for start in range(0, len(tokens), self._options.chunk):
                part = tokens[start : start + self._options.chunk]
                last = start + len(part) == len(tokens)
                rows = range(len(part)) if all_logits else range(len(part) - 1, len(part)) if last else range(0)
                logits = self._run(part, self.length, rows)
                if all_logits or last:
                    parts.append(logits.copy())
                self._tokens.extend(part)
        except BaseException:
            del self._tokens[before:]
            raise
        return np.concatenate(parts) if all_logits else parts[0][0]

    def evict(self, move: Move) -> None:
        """Drop rows, renumber positions, re-run the pinned prefix."""
        check_move(move, self.length)
        try:
            self._cache.move(move.start, move.start + move.count, move.length - move.start - move.count)
            del self._tokens[move.start : move.start + move.count]
            self._evicted += move.count
            self._pinned = move.start
            self._set_positions()
            self._run_pinned(move.start)
        except BaseException:
            self.reset()
            raise

    def keeps(self, length: int) -> bool:
        """Whether the cache is whole when cut back to `length` tokens: always, where each has its row."""
        return 0 <= length <= self.length

    def truncate(self, length: int) -> None:
        """Forget the tokens from slot `length` on; all of them, if the others are not kept."""
        if not 0 <= length <= self.length:
            raise InvalidOption(f"Cannot truncate to {length}: the cache holds {self.length} tokens.")
        if length == 0 or not self.keeps(length):
            self.reset()
        else:
            del self._tokens[length:]

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys and values of slots start .. stop-1, each [K, stop-start, D]."""
        k, v = (self._cache.read(part, layer, start, stop) for part in "kv")
        if self._scales is None:
            return k.astype(np.float32), v.astype(np.float32)
        codes = [_unpack_int4(x) if self._kv.dtype == "int4" else x.astype(np.float32) for x in (k, v)]
        return codes[0] * self._scales.k[layer][:, None], codes[1] * self._scales.v[layer][:, None]

    def save(self, *, copy: bool = True) -> EngineState:
        """The cache's content, as a copy or read layer by layer."""
        keys, values = (LayerRows(self._cache, part, self._spec.num_layers, self.length) for part in "kv")
        pinned = min(self._pinned, self.length)
        state = EngineState(keys, values, tuple(self._tokens), self._evicted, pinned, self.pinned_angles)
        return replace(state, keys=tuple(keys), values=tuple(values)) if copy else state

    def load(self, state: EngineState) -> None:
        """Put a saved content back; it must come from the same model, scales and dtype."""
        check_state(state, self._spec, self._kv.capacity)
        self.reset()
        try:
            self._evicted, self._pinned = state.evicted, state.pinned
            self._set_positions()
            for part, layers in (("k", state.keys), ("v", state.values)):
                for layer, rows in enumerate(layers):
                    self._put_back(part, layer, rows, len(state.tokens))
            self._tokens = list(state.tokens)
            if state.evicted and state.pinned_angles != self.pinned_angles:
                self._run_pinned(state.pinned)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget everything."""
        self._tokens = []
        self._pinned = 0
        if self._evicted:
            self._evicted = 0
            self._set_positions()

    def close(self) -> None:
        """Free the session and the cache; the engine cannot be used afterwards."""
        self._tokens = []
        self._io = self._session = None
        self._constants.clear()
        for name in ("_cache", "_step", "_tables"):
            self.__dict__.pop(name, None)

    def _run(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        """One run of the graph: `tokens` into slots past .. past+T-1, logits [R, V] (valid until the next run)."""
        self._step.set(np.asarray(tokens, np.int64), past, rows)
        self._place(past, len(tokens))
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:  # ONNX Runtime raises a class of its own per status code
            raise EngineError(f"ONNX Runtime failed on {len(tokens)} tokens after {past}: {error}") from error
        if not self._step.finite:
            raise EngineError(self._not_finite(tokens, past))
        return self._step.logits

    def _not_finite(self, tokens: Sequence[int], past: int) -> str:
        from edgekv.engines.onnx.diagnose import first_bad_layer

        layer = first_bad_layer(self._model, tokens)
        where = "" if layer is None else f" in layer {layer}"
        return (
            f"The model produced numbers that are not finite{where} on {len(tokens)} tokens after {past}; nothing of "
            "it was kept. The weights or the KV scales are damaged: convert the model again, or calibrate it again."
        )

    def _bind_cache(self) -> None:
        """Allocate the cache and bind it with its scales and positions."""
        self._cache: CacheMemory = (
            HostCache(self._spec, self._kv)
            if self._options.device == "cpu"
            else DeviceCache(self._spec, self._kv, self._options.device)
        )
        self._cache.bind(self._io)
        self._bind_scales()
        self._ropes = settled_ropes(self._spec, self._kv.capacity)
        angles = np.float16 if self._options.half else np.float32
        shape = (len(self._ropes), 2, self._kv.capacity, self._spec.head_dim // 2)  # cos and sin of each RoPE
        self._tables = np.zeros(shape, angles)
        self._set_positions()

    def _place(self, past: int, count: int) -> None:
        """Tell the graph where the next run's tokens go; the tables serve any, so there is nothing to do."""

    def _set_positions(self) -> None:
        for index, (rope, tables) in enumerate(zip(self._ropes, self._tables, strict=True)):
            tables[:] = rope_tables(rope, self._spec.head_dim, self._evicted, self._kv.capacity)
            for name, table in zip(rope_inputs(index), tables, strict=True):
                self._bind_input(name, table)

    def _bind_input(self, name: str, array: Array) -> None:
        """Bind by pointer; the caller keeps the array alive."""
        self._io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _bind_scales(self) -> None:
        if self._scales is None:
            return
        for part, scales in (("k", self._scales.k), ("v", self._scales.v)):
            for layer, values in enumerate(scales):  # [K, D]
                array = values[:1, :1].reshape(1) if self._kv.granularity == "tensor" else values[None, :, None, :]
                self._constants.append(np.ascontiguousarray(array, np.float32))
                self._bind_input(f"{part}_scale.{layer}", self._constants[-1])

    def _run_pinned(self, count: int) -> None:
        """Run the first tokens again at slot 0, which rewrites their rows and no others."""
        for start in range(0, count, self._options.chunk):
            stop = min(start + self._options.chunk, count)
            self._run(self._tokens[start:stop], start, range(0))

    def _put_back(self, part: str, layer: int, rows: Array, count: int) -> None:
        """Write the rows of `count` tokens."""
        self._check_rows(rows, layer, count)
        self._cache.write(part, layer, 0, rows)

    def _check_rows(self, rows: Array, layer: int, count: int) -> None:
        shape = (self._spec.num_kv_heads, count, row_items(self._spec, self._kv.dtype))
        check_rows(rows, layer, shape, np.dtype(CACHE_DTYPES[self._kv.dtype]))


def open_engine(
    model: ConvertedModel, kv: KVSpec, scales: KVScales | None, options: OnnxOptions | None = None
) -> OnnxEngine:
    """Open an engine after checking that scales, model and options fit together.

    Raises:
        ScalesError: the scales are missing or for something else.
        InvalidOption, UnsupportedModel: a combination that does not run.
        DependencyMissing: ONNX Runtime, or the build of it that the device needs, is not installed.
    """
    options = options or OnnxOptions()
    engine = _engine_class(model.spec, kv, options)
    if kv.dtype in ("float", "fp16"):
        return engine(model, kv, None, options)
    if scales is None:
        from edgekv.errors import ScalesError

        raise ScalesError(
            f"A {kv.dtype} cache needs KV scales for {model.folder.name}: make them with `edgekv calibrate`."
        )
    scales.check(model.spec, model.fingerprint, kv.dtype, kv.granularity)
    return engine(model, kv, scales if engine.attention == "native" else scales.without_centre(), options)


def _engine_class(spec: ModelSpec, kv: KVSpec, options: OnnxOptions) -> type[OnnxEngine]:
    """The engine for the attention operator that was asked for, or that serves best."""
    from edgekv.engines.onnx.ring import RingEngine

    if options.attention == "gqa":
        return OnnxEngine
    reason = native.refusal(spec, kv, options.device, half=options.half)
    if reason is None:
        return RingEngine
    if options.attention == "native":
        raise UnsupportedModel(f"The native attention operator cannot be used: {reason}.")
    return OnnxEngine


def check_combination(kv: KVSpec, options: OnnxOptions) -> None:
    """Refuse what does not run, before anything is loaded (case C09).

    Raises:
        InvalidOption, UnsupportedModel: says what to use instead.
    """
    if options.device not in PROVIDERS:
        raise InvalidOption(f"Unknown device {options.device!r}: choose {' or '.join(PROVIDERS)}.")
    if kv.dtype == "fp8":
        raise UnsupportedModel(
            "An FP8 cache does not run in the onnx engine (ONNX Runtime's CPU provider has none): use --kv-dtype int8, "
            "which is as small and more exact, or --engine torch."
        )
    if kv.dtype == "fp16" and not options.half:
        raise UnsupportedModel(
            "A 16-bit cache does not run on the CPU: use --kv-dtype int8, or float (32 bits) to compare with."
        )
    if kv.dtype == "float" and options.half:
        raise UnsupportedModel(
            "A 32-bit cache does not run on this device: use --kv-dtype int8, or fp16 to compare with."
        )
    if kv.dtype == "int4" and kv.granularity == "tensor":
        raise UnsupportedModel(
            "An INT4 cache with one scale per tensor is too coarse to chat: use --granularity channel."
        )


def open_session(
    model: ConvertedModel,
    kv: KVSpec,
    options: OnnxOptions,
    attention: Literal["native", "gqa"],
    scales: KVScales | None = None,
) -> Any:
    """An ONNX Runtime session over the model's graph, given this kind of cache and attention.

    Raises:
        DependencyMissing, EngineError: ONNX Runtime lacks the provider, or cannot load the graph.
    """
    ort = _import_onnxruntime()
    provider = PROVIDERS[options.device]
    if provider not in ort.get_available_providers():
        raise DependencyMissing(
            f"This onnxruntime has no {provider}. Install the build that has it: "
            "pip uninstall onnxruntime && pip install 'edgekv[cuda]'."
        )
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = options.threads
    session_options.log_severity_level = 3
    session_options.enable_mem_pattern = False  # shapes change from run to run, so patterns would only cost memory
    graph: str | bytes = str(model.graph)
    as_stored = kv.dtype == "int8" and kv.granularity != "tensor" and options.accuracy_level == 4 and not options.half
    if attention == "native" or not as_stored or model.is_foreign:
        graph, place = _other_graph(model, kv, options, attention, scales)
        session_options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    try:
        if attention == "native":
            session_options.register_custom_ops_library(str(native.library()))
        return ort.InferenceSession(graph, session_options, providers=[provider])
    except Exception as error:  # ONNX Runtime raises a class of its own per status code
        raise EngineError(f"ONNX Runtime cannot load {model.graph} with its weights: {error}") from error


def _other_graph(
    model: ConvertedModel,
    kv: KVSpec,
    options: OnnxOptions,
    attention: Literal["native", "gqa"],
    scales: KVScales | None,
) -> tuple[bytes, Path]:
    """The stored graph has an INT8 cache with a scale a channel; any other kind is made from it in memory.

    Returns the folder that its weights' places are relative to, too."""
    from edgekv.engines.onnx import adapt

    graph, folder = load_graph(model)
    adapt.set_cache(graph, kv.dtype, kv.granularity)
    adapt.set_accuracy_level(graph, options.accuracy_level)
    if options.half:
        adapt.set_half_attention(graph)
    if attention == "native":
        centred = () if scales is None else scales.centred_layers
        adapt.set_native_attention(graph, model.spec, centred)
    return bytes(graph.SerializeToString()), folder


def load_graph(model: ConvertedModel) -> tuple[onnx.ModelProto, Path]:
    """A model's graph as edgekv runs it, its large weights left in their files, and the folder that those lie in."""
    import onnx

    from edgekv.engines.onnx.foreign import adapt_foreign

    if model.is_foreign:
        adapted = adapt_foreign(model.graph)
        return adapted.model, adapted.folder
    return onnx.load(model.graph, load_external_data=False), model.folder


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise DependencyMissing(
            f"ONNX Runtime cannot be imported ({error}). Install exactly one of: pip install onnxruntime (CPU), "
            "or pip install onnxruntime-gpu (NVIDIA)."
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise DependencyMissing(
            "The onnxruntime package is there but empty, as happens when onnxruntime and onnxruntime-gpu were both "
            "installed and one removed: pip uninstall both, then install the one you need."
        )
    return onnxruntime


def _unpack_int4(packed: Array) -> Logits:
    """[K, T, D/2] bytes -> [K, T, D] codes -8 .. 7, low nibble first."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return codes.astype(np.float32) - 8
