"""OnnxEngine: one ONNX Runtime session over one preallocated cache.

Two operators compute attention, and each wants its cache in its own way: edgekv's own ("native") a ring (ring.py),
ONNX Runtime's GroupQueryAttention ("gqa") rows that move down (moved.py). All else is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edgekv.engines.base import Logits, check_ids, check_moves
from edgekv.engines.cached import CachedEngine, fitting_scales
from edgekv.engines.memory import joined, own_copy
from edgekv.engines.onnx import native
from edgekv.engines.onnx.binding import Array, DeviceCache, HostCache, StepBuffers, bind_array
from edgekv.engines.onnx.centre import CentreTable
from edgekv.engines.onnx.moved import MovedCache, MovedInputs
from edgekv.engines.onnx.opening import open_session
from edgekv.engines.onnx.options import OnnxOptions, Operator, attention_operator, check_combination
from edgekv.engines.onnx.ring import RingCache, RingInputs, RunPart
from edgekv.errors import EngineError
from edgekv.kv.quant import E4M3
from edgekv.kv.rows import own_rows
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.kv.window import Move
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec


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
        attention: Operator,
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
        """Whether edgekv's own matmul holds the weights."""
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
        if self.row_factors == "mixed":
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
        return joined(logits) if all_logits else logits[-1][0]

    def _enter(self, inputs: RingInputs, tokens: Sequence[int], waiting: list[Move]) -> Iterator[RunPart]:
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
        return own_copy(self._step.logits)

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
    attention = attention_operator(model.spec, kv, options)
    scales = fitting_scales(scales, kv, model.spec, model.fingerprint, model.folder.name)
    if scales is not None and attention == "gqa":
        scales = scales.without_centre()
    return OnnxEngine(model, kv, scales, options, attention)


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
