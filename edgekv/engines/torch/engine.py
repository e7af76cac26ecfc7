"""TorchEngine: a transformers model over one preallocated ring; see `edgekv.engines.base.Engine`.

Two ways of computing: "float", float32 with dense weights, is what a CPU runs and the reference for everything; "bf16"
multiplies the publisher's integers by bfloat16 activations, which is what CUDA runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from edgekv.engines.base import Logits, check_ids, check_room
from edgekv.engines.cached import CachedEngine, fitting_scales
from edgekv.engines.rope import rotated_centre
from edgekv.engines.torch.attention import Angles, LayerAttention, connect
from edgekv.engines.torch.cache import RingCache
from edgekv.engines.torch.graph import DecodeStep
from edgekv.engines.torch.kernels import KernelChoice, Kernels, open_kernels
from edgekv.engines.torch.loader import Published, load_model
from edgekv.errors import (
    DependencyMissing,
    EngineError,
    MemoryBudgetError,
    UnsupportedModel,
)
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import MIN_CAPACITY, PREFILL_CHUNK, KVSpec

FP8_CAPABILITY = (8, 0)
"""FP8 rows are taken apart in integers, so no FP8 hardware is needed; the float16 products and the int4 kernels of the
weights want Ampere's matrix units."""

Precision = Literal["auto", "float", "bf16"]


@dataclass(frozen=True)
class TorchOptions:
    """How the model runs."""

    threads: int = 0  # CPU threads; 0: torch's choice
    device: str = "cpu"
    chunk: int = PREFILL_CHUNK
    precision: Precision = "auto"  # float: float32, dense; bf16: packed weights; auto: float on a CPU, else bf16
    kernels: KernelChoice = "auto"  # of attention; on a CPU Triton's run in its interpreter only

    @property
    def dtype(self) -> torch.dtype:
        """The compute type."""
        if self.precision == "auto":
            return torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.float32 if self.precision == "float" else torch.bfloat16


class TorchEngine(CachedEngine):
    """One model on one device with one preallocated cache; see `edgekv.engines.base.Engine`."""

    _cache: RingCache

    def __init__(self, published: Published, kv: KVSpec, scales: KVScales | None, options: TorchOptions) -> None:
        super().__init__(published.source.spec, kv, scales, options.chunk)
        self._device = torch.device(options.device)
        if options.threads:
            torch.set_num_threads(options.threads)
        self._model: Any = load_model(published, options.dtype, self._device)
        self._cache = RingCache(self._spec, kv, scales, self._device)
        self._angles = Angles(self._spec, kv.capacity, options.chunk, self._device)
        self._sum = torch.zeros((), device=self._device)  # of the last run's hidden states
        kernels = open_kernels(options.kernels, self._spec, kv.capacity, self._device)
        self._connect(kernels)
        captured = self._device.type == "cuda" and kernels.captured
        self._step = DecodeStep(self._model, self._spec.vocab_size, self._device, captured=captured)

    def rows(self, layer: int, start: int, stop: int) -> tuple[Logits, Logits]:
        """Dequantised keys (at the angles of slot + evicted) and values of slots start .. stop-1, [K, n, D]."""
        keys, values = (self._cache.floats(part, layer, start, stop) for part in "kv")
        pinned = max(0, min(self._cache.pinned, stop) - start)
        if self.evicted and pinned:
            rope = self._spec.rope_layers[layer]
            keys[:, :pinned] = self._angles.moved_on(keys[:, :pinned], rope, self.evicted)
        found = keys.numpy()
        if self._scales is not None and (centre := self._scales.centre_of(layer)) is not None:
            found += rotated_centre(centre, self._spec, self._kv.capacity, start + self.evicted, stop - start)
        return found, values.numpy()

    def close(self) -> None:
        """Free the model and the cache; the engine cannot be used afterwards."""
        self._tokens = []
        if "_hook" in self.__dict__:
            self._hook.remove()  # it refers to this engine, which would keep both alive
        for name in ("_hook", "_step", "_model", "_cache", "_angles"):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _connect(self, kernels: Kernels) -> None:
        attentions = [
            LayerAttention(self._cache.layer(layer), self._cache.place, self._angles, rope, kernels)
            for layer, rope in enumerate(self._spec.rope_layers)
        ]
        connect(self._model, self._spec, attentions)
        self._hook = self._model.base_model.register_forward_hook(self._note_sum)

    def _note_sum(self, module: Any, inputs: Any, output: Any) -> None:
        self._sum = output.last_hidden_state.float().sum()  # not finite if a term is not

    @torch.inference_mode()
    def decode(self, token: int, count: int, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """Append `token` and what the model says after it, chosen on the device: `count` tokens, of which the last is
        not in the cache yet. Nothing is read back before the end.

        Raises:
            CacheFull, InvalidOption, EngineError: as `forward`; nothing was appended.
        """
        check_room([token] * count, self.length, self._kv.capacity)
        check_ids([token], self._spec.vocab_size)
        step, past = self._step, self.length
        random = torch.Generator(self._device).manual_seed(seed)
        step.start(token, temperature)
        said = torch.zeros(count, dtype=torch.int64, device=self._device)
        for index in range(count):
            self._cache.place.set(past + index)
            self._angles.set(self._cache.place, 1)
            if temperature:
                step.uniform.uniform_(generator=random)
            step.run()
            said[index] = step.token[0, 0]
        if not np.isfinite(step.check.item()):
            raise EngineError(f"The model produced numbers that are not finite on {count} tokens after {past}.")
        chosen = [int(one) for one in said.tolist()]
        self._tokens.extend([token, *chosen[:-1]])
        return chosen

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], past: int, rows: range) -> Logits:
        """One run of the model: `tokens` into places past .. past+T-1, logits [R, V]."""
        self._cache.place.set(past)
        self._angles.set(self._cache.place, len(tokens))
        ids = torch.tensor([tokens], device=self._device)
        try:
            logits = self._one(tokens[0]) if len(tokens) == len(rows) == 1 else self._logits(ids, rows)
        except RuntimeError as error:  # torch's own, out of memory among them
            raise EngineError(f"torch failed on {len(tokens)} tokens after {past}: {error}") from error
        if not (np.isfinite(self._sum.item()) and np.isfinite(logits.sum())):
            raise EngineError(
                f"The model produced numbers that are not finite{self._where(ids)} on {len(tokens)} tokens after "
                f"{past}; nothing of it was kept. The weights or the KV scales are damaged: convert the model again, "
                "or calibrate it again."
            )
        return logits

    def _logits(self, ids: torch.Tensor, rows: range) -> Logits:
        """Logits [R, V] on the host; a family's own factors and caps are in them."""
        options = {"use_cache": False, "return_dict": True}
        if not rows:
            self._model.base_model(input_ids=ids, **options)
            return np.zeros((0, self._spec.vocab_size), np.float32)
        kept = torch.arange(rows.start, rows.stop, device=self._device)
        logits = self._model(input_ids=ids, logits_to_keep=kept, **options).logits[0]
        return np.asarray(logits.float().cpu().numpy())

    def _one(self, token: int) -> Logits:
        """Logits [1, V] of one token, by the captured step."""
        self._step.start(token, 0.0)
        self._step.run()
        self._sum = self._step.check
        return np.array(self._step.logits[None].cpu().numpy())  # a copy: the next step overwrites them

    def _where(self, ids: torch.Tensor) -> str:
        """The first layer whose output is not finite, found by running the tokens again."""
        bad: list[int] = []

        def note(index: int, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not torch.isfinite(hidden).all():
                bad.append(index)

        hooks = [
            layer.register_forward_hook(lambda module, inputs, output, index=index: note(index, output))
            for index, layer in enumerate(self._model.base_model.layers)
        ]
        self._model.base_model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return f" in layer {bad[0]}" if bad else ""


def open_engine(
    published: Published, fingerprint: str, kv: KVSpec, scales: KVScales | None, options: TorchOptions | None = None
) -> TorchEngine:
    """Open an engine after checking that scales, model and options fit together.

    Raises:
        ScalesError: the scales are missing or for something else.
        UnsupportedModel: a combination that does not run.
    """
    options = options or TorchOptions()
    check_combination(kv, options)
    scales = fitting_scales(scales, kv, published.source.spec, fingerprint, published.path.name)
    return _open_or_shrink(published, kv, scales, options)


def _open_or_shrink(published: Published, kv: KVSpec, scales: KVScales | None, options: TorchOptions) -> TorchEngine:
    """An engine; if the device's memory does not suffice, once more with half the cache, and a warning that says so.

    Raises:
        MemoryBudgetError: that did not fit either.
    """
    try:
        return TorchEngine(published, kv, scales, options)
    except torch.OutOfMemoryError:
        smaller = halved(kv)  # and nothing else here: the traceback keeps the model alive
    if options.device == "cuda":
        torch.cuda.empty_cache()
    message = f"A cache of {kv.capacity} tokens did not fit the device's memory: it holds {smaller.capacity} instead."
    try:
        engine = TorchEngine(published, smaller, scales, options)
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"Neither {kv.capacity} nor {smaller.capacity} tokens of cache fit the device's memory: use a smaller "
            "model, a smaller --context, or close other programs."
        ) from error
    warnings.warn(message, stacklevel=2)
    return engine


def halved(kv: KVSpec) -> KVSpec:
    """The same kind of cache with half the capacity; sinks and stride as far as they fit."""
    capacity = max(kv.capacity // 2, MIN_CAPACITY)
    pinned = capacity // 4
    return replace(
        kv, capacity=capacity, sinks=min(kv.sinks, pinned), stride=max(1, kv.stride * capacity // kv.capacity)
    )


def check_combination(kv: KVSpec, options: TorchOptions) -> None:
    """Refuse what does not run, before anything is loaded.

    Raises:
        UnsupportedModel: says what to use instead.
    """
    if kv.dtype in ("int4", "k8v4"):
        raise UnsupportedModel(
            f"No {kv.dtype.upper()} cache runs in the torch engine: use --kv-dtype int8, or --engine onnx."
        )
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise DependencyMissing(
                "This torch finds no CUDA device: use --device cpu, or install a CUDA build of torch."
            )
        check_capability(kv, torch.cuda.get_device_capability())


def check_capability(kv: KVSpec, capability: tuple[int, int]) -> None:
    """Refuse what a GPU of this compute capability does not do.

    Raises:
        UnsupportedModel: FP8 before Ampere.
    """
    if kv.dtype == "fp8" and capability < FP8_CAPABILITY:
        raise UnsupportedModel(
            f"An FP8 cache needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} (Ampere) or "
            f"newer; this one has {capability[0]}.{capability[1]}: use --kv-dtype int8."
        )
