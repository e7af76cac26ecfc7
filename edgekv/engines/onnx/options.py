"""What an OnnxEngine can be opened with, and which combinations of it run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.engines.onnx import native
from edgekv.errors import InvalidOption, UnsupportedModel
from edgekv.kv.spec import OWN_OPERATOR_ONLY, PREFILL_CHUNK, KVSpec
from edgekv.model.spec import ModelSpec

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

ACCURACY_LEVELS: dict[str, int] = {"int8": 4, "float": 1}
"""Of MatMulNBits, by what it rounds the activations to before it multiplies them."""

Attention = Literal["auto", "native", "gqa"]
Operator = Literal["native", "gqa"]
MatMul = Literal["auto", "native", "onnxruntime"]


@dataclass(frozen=True)
class OnnxOptions:
    """How the session runs."""

    threads: int = 0  # 0: ONNX Runtime's choice, one per physical core
    device: str = "cpu"
    chunk: int = PREFILL_CHUNK
    accuracy_level: int = ACCURACY_LEVELS["int8"]
    half_attention: bool | None = None  # attention in float16; None: where the device demands it
    attention: Attention = "auto"  # which operator; auto: the project's own where it is built and serves the cache
    matmul: MatMul = "auto"  # which matmul for quantised weights; auto: edgekv's own where it is faster

    @property
    def half(self) -> bool:
        """Whether attention runs in float16."""
        return self.device != "cpu" if self.half_attention is None else self.half_attention


def check_combination(kv: KVSpec, options: OnnxOptions) -> None:
    """Refuse what does not run, before anything is loaded.

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


def attention_operator(spec: ModelSpec, kv: KVSpec, options: OnnxOptions) -> Operator:
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
