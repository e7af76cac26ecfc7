"""edgekv: chat with a 4-bit model on a small device for as long as you like, in a fixed amount of memory.

    import edgekv

    with edgekv.load("smollm2-135m-instruct", memory="1GiB") as runtime:
        print(runtime.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

Names are loaded when they are first used: importing edgekv imports no tensor library.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own takes as long to load as all else here
__version__ = "0.1.0"

if TYPE_CHECKING:
    from typing import Any

    from edgekv.aio import AsyncRuntime
    from edgekv.api import LoadOptions, Reply, Runtime, load
    from edgekv.chat import Dialogue
    from edgekv.errors import (
        BadCheckpoint,
        Busy,
        ContextOverflow,
        DependencyMissing,
        DownloadFailed,
        EdgeKVError,
        EngineError,
        InvalidOption,
        MemoryBudgetError,
        ModelNotFound,
        ScalesError,
        SessionError,
        StorageError,
        TemplateError,
        UnsupportedModel,
    )
    from edgekv.generate import Evicted, Finished, NotedDown, PrefillProgress, TextDelta, TokenScored, Usage
    from edgekv.kv.plan import Plan
    from edgekv.sampling import SamplingOptions
    from edgekv.session import Session
    from edgekv.text.precheck import LengthReport

_HOMES = {
    "edgekv.aio": ("AsyncRuntime",),
    "edgekv.api": ("LoadOptions", "Reply", "Runtime", "load"),
    "edgekv.chat": ("Dialogue",),
    "edgekv.errors": (
        "BadCheckpoint", "Busy", "ContextOverflow", "DependencyMissing", "DownloadFailed", "EdgeKVError", "EngineError",
        "InvalidOption", "MemoryBudgetError", "ModelNotFound", "ScalesError", "SessionError", "StorageError",
        "TemplateError", "UnsupportedModel",
    ),
    "edgekv.generate": ("Evicted", "Finished", "NotedDown", "PrefillProgress", "TextDelta", "TokenScored", "Usage"),
    "edgekv.kv.plan": ("Plan",),
    "edgekv.sampling": ("SamplingOptions",),
    "edgekv.session": ("Session",),
    "edgekv.text.precheck": ("LengthReport",),
}  # fmt: skip
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncRuntime",
    "BadCheckpoint",
    "Busy",
    "ContextOverflow",
    "DependencyMissing",
    "Dialogue",
    "DownloadFailed",
    "EdgeKVError",
    "EngineError",
    "Evicted",
    "Finished",
    "InvalidOption",
    "LengthReport",
    "LoadOptions",
    "MemoryBudgetError",
    "ModelNotFound",
    "NotedDown",
    "Plan",
    "PrefillProgress",
    "Reply",
    "Runtime",
    "SamplingOptions",
    "ScalesError",
    "Session",
    "SessionError",
    "StorageError",
    "TemplateError",
    "TextDelta",
    "TokenScored",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
