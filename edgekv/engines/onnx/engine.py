"""OnnxEngine: one ONNX Runtime session over one preallocated cache.

Two operators compute attention, and each wants its cache in its own way: edgekv's own ("native") a ring (ring.py),
ONNX Runtime's GroupQueryAttention ("gqa") rows that move down (moved.py). All else is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edgekv.engines.base import Logits, check_ids, check_moves
from edgekv.engines.cached import CachedEngine, fitting_scales
from edgekv.engines.onnx import native
from edgekv.engines.onnx.binding import Array, DeviceCache, HostCache, StepBuffers, bind_array
from edgekv.engines.onnx.centre import CentreTable
from edgekv.engines.onnx.moved import MovedCache, MovedInputs
from edgekv.engines.onnx.ring import Part, RingCache, RingInputs
from edgekv.errors import DependencyMissing, EngineError, InvalidOption, UnsupportedModel
from edgekv.kv.quant import E4M3
from edgekv.kv.rows import own_rows
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import OWN_OPERATOR_ONLY, KVDtype, KVSpec
from edgekv.kv.window import Move
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

DEFAULT_CHUNK = 128
"""Tokens per prefill run. Larger chunks are no faster with an INT8 cache and need more scratch memory."""


ACCURACY_LEVELS: dict[str, int] = {"int8": 4, "float": 1}
"""Of MatMulNBits, by what it rounds the activations to before it multiplies them."""

Attention = Literal["auto", "native", "gqa"]
MatMul = Literal["auto", "native", "onnxruntime"]


@dataclass(frozen=True)
class OnnxOptions:
    """How the session runs."""

    threads: int = 0  # 0: ONNX Runtime's choice, one per physical core
    device: str = "cpu"
    chunk: int = DEFAULT_CHUNK
    accuracy_level: int = ACCURACY_LEVELS["int8"]
    half_attention: bool | None = None  # attention in float16; None: where the device demands it
    attention: Attention = "auto"  # which operator; auto: the project's own where it is built and serves the cache
    matmul: MatMul = "auto"  # which product with packed weights; auto: the project's own where it is faster

    @property
    def half(self) -> bool:
        """Whether attention runs in float16."""
        return self.device != "cpu" if self.half_attention is None else self.half_attention


class OnnxEngine(CachedEngine):
    """One model on one device with one preallocated cache; see `edgekv.engines.base.Engine`.

    Args:
        attention: which operator computes it; each has a cache and inputs of its own.
    """

    _cache: RingCache | MovedCache
    _inputs: RingInputs | MovedInputs

    def __init__(
        self,
        model: ConvertedModel,
        kv: KVSpec,
        scales: KVScales | None,
        options: OnnxOptions,
        attention: Literal["native", "gqa"],
    ) -> None:
        super().__init__(model.spec, kv, scales, options.chunk)
        self.attention = attention
        self._model, self._options = model, options
        session, self._packed = open_session(model, kv, options, attention, scales)
        self._session: Any = session
        self._io: Any = session.io_binding()
        if self._packed is not None:
            bind_array(self._io, native.PACKED_WEIGHTS, self._packed)
        if attention == "native":
            self._cache, self._inputs = _ring(self._io, model.spec, kv, scales, options)
        else:
            self._cache, self._inputs = _moved(self._io, model.spec, kv, scales, options)
        self._over_evictions = self._inputs if isinstance(self._inputs, RingInputs) and self._inputs.may_evict else None
        self._cache.bind(self._io)
        self._step = StepBuffers(self._io, options.chunk, model.spec.vocab_size, copied=options.device != "cpu")

    @property
    def packed(self) -> bool:
        """Whether edgekv's own product holds the weights."""
        return self._packed is not None

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys (at the angles of slot + evicted) and values of slots start .. stop-1, each [K, n, D]; of a
        layer that holds only its last tokens those that are there."""
        k, v = (self._cache.read(part, layer, start, stop) for part in "kv")
        keys, values = self._dequantized(layer, k, v)
        if self._scales is not None and self._scales.v_centre is not None:
            values += self._scales.v_centre[layer][:, None]
        return self._inputs.restored(layer, start, keys), values

    def _dequantized(self, layer: int, k: Array, v: Array) -> tuple[Logits, Logits]:
        """What stored rows of keys and values stand for."""
        if self._scales is None:
            return k.astype(np.float32), v.astype(np.float32)
        k_scales, v_scales = self._scales.k[layer][:, None], self._scales.v[layer][:, None]
        if self.row_factors:
            keys, values = (own_rows(self._kv.dtype, part)[1] for part in "kv")
            return keys(k, k_scales), values(v, v_scales)
        numbers = [_NUMBERS[self._kv.dtype](rows).astype(np.float32) for rows in (k, v)]
        return numbers[0] * k_scales, numbers[1] * v_scales

    def close(self) -> None:
        """Free the session and the cache; the engine cannot be used afterwards."""
        self._tokens = []
        self._io = self._session = None
        for name in ("_cache", "_inputs", "_step", "_packed"):
            self.__dict__.pop(name, None)

    def append(self, tokens: Sequence[int], moves: Sequence[Move], *, all_logits: bool = False) -> Logits:
        """As `CachedEngine.append`. In a ring an eviction only counts, so one run of the graph goes over it, and reads
        the weights once for the tokens before and behind it. If that fails the cache is empty."""
        if self._over_evictions is None:
            return super().append(tokens, moves, all_logits=all_logits)
        check_moves(moves, len(tokens), self.length, self._kv.capacity)
        check_ids(tokens, self._spec.vocab_size)
        waiting, logits = list(moves), []
        with self._emptied_on_failure():
            for start in range(0, len(tokens), self._chunk):
                run = tokens[start : start + self._chunk]
                first = 0 if all_logits else len(run) - (start + len(run) == len(tokens))
                self._over_evictions.place_parts(list(self._enter(self._over_evictions, run, waiting)))
                logits.append(self._execute(run, self.length - len(run), range(first, len(run))))
        return np.concatenate(logits) if all_logits else logits[-1][0]

    def _enter(self, inputs: RingInputs, tokens: Sequence[int], waiting: list[Move]) -> Iterator[Part]:
        """Count a run's tokens as cached, and make those moves that are due within it."""
        while tokens:
            if self.length == self._kv.capacity:
                self.evict(waiting.pop(0))
            past, count = self.length, min(len(tokens), self._kv.capacity - self.length)
            self._tokens.extend(tokens[:count])
            tokens = tokens[count:]
            yield inputs.enter(past, count)

    def _run(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        """One run of the graph: `tokens` into slots past .. past+T-1, logits [R, V]."""
        self._inputs.place(past, len(tokens))
        return self._execute(tokens, past, rows)

    def _execute(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        self._step.set(np.asarray(tokens, np.int64), past, rows)
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:  # ONNX Runtime raises a class of its own per status code
            raise EngineError(f"ONNX Runtime failed on {len(tokens)} tokens after {past}: {error}") from error
        if not self._step.finite:
            raise EngineError(self._not_finite(tokens, past))
        return self._step.logits.copy()

    def _not_finite(self, tokens: Sequence[int], past: int) -> str:
        from edgekv.engines.onnx.diagnose import first_bad_layer

        layer = first_bad_layer(self._model, tokens)
        where = "" if layer is None else f" in layer {layer}"
        return (
            f"The model produced numbers that are not finite{where} on {len(tokens)} tokens after {past}; nothing of "
            "it was kept. The weights or the KV scales are damaged: convert the model again, or calibrate it again."
        )


def _ring(
    io: Any, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, options: OnnxOptions
) -> tuple[RingCache, RingInputs]:
    """For edgekv's own operator."""
    slots = [kv.ring_slots(window, options.chunk) for window in spec.windows]
    centre = None if scales is None or scales.k_centre is None else CentreTable(spec, kv, scales)
    cache = RingCache(spec, kv, slots, centre)
    return cache, RingInputs(io, cache, spec, kv, scales, options.chunk)


def _moved(
    io: Any, spec: ModelSpec, kv: KVSpec, scales: KVScales | None, options: OnnxOptions
) -> tuple[MovedCache, MovedInputs]:
    """For ONNX Runtime's operator."""
    memory = HostCache(spec, kv) if options.device == "cpu" else DeviceCache(spec, kv, options.device)
    cache = MovedCache(memory, spec, kv)
    return cache, MovedInputs(io, cache, spec, kv, scales, half=options.half)


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
    check_combination(kv, options)
    attention = _operator(model.spec, kv, options)
    scales = fitting_scales(scales, kv, model.spec, model.fingerprint, model.folder.name)
    if scales is not None and attention == "gqa":
        scales = scales.without_centre()
    return OnnxEngine(model, kv, scales, options, attention)


def _operator(spec: ModelSpec, kv: KVSpec, options: OnnxOptions) -> Literal["native", "gqa"]:
    """The attention operator that was asked for, or that serves best."""
    if options.attention == "gqa":
        return "gqa"
    reason = native.refusal(spec, kv, options.device, half=options.half)
    if reason is None:
        return "native"
    if options.attention == "native":
        raise UnsupportedModel(f"The native attention operator cannot be used: {reason}.")
    _check_own(kv, reason)
    return "gqa"


def _check_own(kv: KVSpec, reason: str) -> None:
    """Refuse a cache that only the project's own operator holds, where that is not used for this reason."""
    if kv.dtype in OWN_OPERATOR_ONLY:
        raise UnsupportedModel(
            f"A {kv.dtype.upper()} cache needs edgekv's own attention operator, which is not used: {reason}. "
            "Use --kv-dtype int8."
        )
    if kv.dtype == "fp8":
        raise UnsupportedModel(
            f"An FP8 cache needs edgekv's own attention operator, which is not used: {reason}. Use --kv-dtype int8, "
            "which is as small and more exact, or --engine torch."
        )


def check_combination(kv: KVSpec, options: OnnxOptions) -> None:
    """Refuse what does not run, before anything is loaded (case C09).

    Raises:
        InvalidOption, UnsupportedModel: says what to use instead.
    """
    if options.device not in PROVIDERS:
        raise InvalidOption(f"Unknown device {options.device!r}: choose {' or '.join(PROVIDERS)}.")
    if options.attention == "gqa" or options.device != "cpu":
        _check_own(kv, "GroupQueryAttention was asked for" if options.device == "cpu" else "it runs on the CPU")
    elif reason := native.unavailable():
        _check_own(kv, reason)
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
) -> tuple[Any, Array | None]:
    """An ONNX Runtime session over the model's graph, given this kind of cache and attention.

    Returns the packed weights that are to be bound, too; None where MatMulNBits has its own.

    Raises:
        DependencyMissing, EngineError: ONNX Runtime lacks the provider, or cannot load the graph.
        UnsupportedModel: the product that was asked for cannot be used.
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
    own_matmul, own_table = _own_matmul(options), _own_table(options)
    weights, tables = None, False
    as_stored = kv.dtype == "int8" and kv.granularity != "tensor" and options.accuracy_level == 4 and not options.half
    if attention == "native" or own_matmul or own_table or not as_stored or model.is_foreign:
        made, place = _other_graph(model, kv, options, attention, scales)
        weights = _packed(made, place, options.threads) if own_matmul else None
        tables = own_table and _with_tables(made)
        graph = bytes(made.SerializeToString())
        session_options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    try:
        if attention == "native" or weights is not None or tables:
            session_options.register_custom_ops_library(str(native.library()))
        return ort.InferenceSession(graph, session_options, providers=[provider]), weights
    except Exception as error:  # ONNX Runtime raises a class of its own per status code
        raise EngineError(f"ONNX Runtime cannot load {model.graph} with its weights: {error}") from error


def _own_matmul(options: OnnxOptions) -> bool:
    """Whether the project's own product takes the place of MatMulNBits."""
    if options.matmul == "onnxruntime":
        return False
    suits = options.device == "cpu" and options.accuracy_level == 4
    if options.matmul == "auto":
        return suits and native.matmul_refusal() is None
    reason = native.unavailable() if suits else "it runs on the CPU, with inputs rounded to 8 bits"
    if reason is not None:
        raise UnsupportedModel(f"The native product with packed weights cannot be used: {reason}.")
    return True


def _own_table(options: OnnxOptions) -> bool:
    """Whether the project's own product takes the place of MatMulBnb4; it is as exact at every accuracy level."""
    return options.matmul != "onnxruntime" and options.device == "cpu" and native.table_refusal() is None


def _with_tables(graph: onnx.ModelProto) -> bool:
    from edgekv.engines.onnx.table import set_table_matmul

    return set_table_matmul(graph)


def _packed(graph: onnx.ModelProto, folder: Path, threads: int) -> Array | None:
    from edgekv.engines.onnx.packed import set_packed_matmul

    return set_packed_matmul(graph, folder, threads)


def _other_graph(
    model: ConvertedModel,
    kv: KVSpec,
    options: OnnxOptions,
    attention: Literal["native", "gqa"],
    scales: KVScales | None,
) -> tuple[onnx.ModelProto, Path]:
    """The stored graph has an INT8 cache with a scale a channel; any other kind is made from it in memory.

    Returns the folder that its weights' places are relative to, too."""
    from edgekv.engines.onnx import adapt

    graph, folder = load_graph(model)
    adapt.set_cache(graph, kv.dtype, kv.granularity)
    adapt.set_accuracy_level(graph, options.accuracy_level)
    if options.half:
        adapt.set_half_attention(graph)
    if attention == "native":
        centred = adapt.WHOLE if scales is None else adapt.Centred.by(scales)
        adapt.set_native_attention(graph, model.spec, kv.dtype, centred)
    return graph, folder


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


def _unpack_int4(packed: Array) -> Array:
    """[K, T, D/2] bytes -> [K, T, D] codes -8 .. 7, low nibble first."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return codes.astype(np.int8) - 8


_NUMBERS: dict[KVDtype, Callable[[Array], Array]] = {
    "int8": lambda rows: rows,
    "int4": _unpack_int4,
    "fp8": lambda rows: E4M3[rows],
}
"""What codes without factors stand for, but for their scales."""
