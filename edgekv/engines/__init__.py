"""Backends, each in its own package behind the protocol of base.py; heavy imports happen when one is opened.

    onnx    ONNX Runtime: the base install, on CPU and CUDA
    torch   transformers over edgekv's own cache: the extra `torch`; Triton kernels on CUDA, FP8 caches there or where
            edgekv's own operator was not built

`choose` says which one serves a request, and why, before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from edgekv.errors import DependencyMissing, InvalidOption
from edgekv.kv.spec import OWN_OPERATOR_ONLY, KVDtype

EngineName = Literal["auto", "onnx", "torch"]

TORCH_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Choice:
    """An engine, and for people why it was taken."""

    name: Literal["onnx", "torch"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} engine ({self.reason})"


def choose(engine: EngineName, device: str, dtype: KVDtype) -> Choice:
    """The engine for a request.

    Raises:
        DependencyMissing: the torch engine was asked for and is not installed.
        InvalidOption: there is no such engine.
    """
    missing = [name for name in TORCH_PACKAGES if find_spec(name) is None]
    if engine == "onnx":
        return Choice("onnx", "asked for")
    if engine == "torch":
        if missing:
            raise DependencyMissing(
                f"The torch engine needs {' and '.join(missing)}, not installed here: pip install 'edgekv[torch]'."
            )
        return Choice("torch", "asked for")
    if engine != "auto":
        raise InvalidOption(f"Unknown engine {engine!r}: choose auto, onnx or torch.")
    if missing:
        return Choice("onnx", f"{' and '.join(missing)} not installed")
    return _better(device, dtype)


def _better(device: str, dtype: KVDtype) -> Choice:
    """Between the two, both being installed."""
    if dtype in OWN_OPERATOR_ONLY:
        return Choice("onnx", f"the only one with a {dtype.upper()} cache")
    if device == "cpu":
        return _on_cpu(dtype)
    if dtype == "fp8":
        return Choice("torch", "the only one with an FP8 cache there")
    import torch

    if torch.cuda.is_available():
        return Choice("torch", "its kernels read the cache as it is stored; not measured against onnx yet")
    return Choice("onnx", "this torch has no CUDA")


def _on_cpu(dtype: KVDtype) -> Choice:
    from edgekv.engines.onnx import native

    if dtype == "fp8" and native.unavailable():
        return Choice("torch", "the only one here with an FP8 cache")
    return Choice("onnx", "the faster one on a CPU")
