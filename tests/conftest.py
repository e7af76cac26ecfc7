"""Fixtures: tiny converted models of every variant, the default model, engines and scales.

Set EDGEKV_HOME to a folder in which the default model has been prepared and nothing is downloaded again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from edgekv.engines.onnx.engine import OnnxEngine
    from edgekv.engines.torch.engine import TorchEngine
    from edgekv.model.converted import ConvertedModel

DATA = Path(__file__).parent / "data"

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; 0 compiles its kernels for a GPU


class TinyModels:
    """Checkpoints and conversions by name, each made once a session: the variants of helpers.checkpoints.TINY, and the
    folders of tests/data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source = cache(self._source)
        self.converted = cache(self._converted)

    def _source(self, name: str) -> Path:
        from helpers.checkpoints import TINY, write_checkpoint

        return write_checkpoint(TINY[name], self._folder / "source" / name) if name in TINY else DATA / name

    def _converted(self, name: str) -> ConvertedModel:
        from edgekv.convert import convert

        return convert(self.source(name), self._folder / "converted" / name).model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models by name."""
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def default_model() -> ConvertedModel:
    """The default model, downloaded and converted if EDGEKV_HOME (or the user's cache) does not have it."""
    from edgekv.model import catalog
    from edgekv.prepare import prepare

    return prepare(catalog.DEFAULT_MODEL, home=catalog.home())


@pytest.fixture(scope="session")
def default_state(default_model: ConvertedModel) -> dict[str, torch.Tensor]:
    """The default model's weights as held, dequantised."""
    from helpers.weights import dequantised_state_dict

    return dequantised_state_dict(default_model.folder)


ATTENTION = ("gqa", "native")
"""The attention operators that there are. A module that tests each of them overrides the fixture `attention`."""


@pytest.fixture
def attention() -> str:
    """The operator that `open_onnx` asks for."""
    return "auto"


@pytest.fixture
def open_onnx(attention: str) -> Iterator[Callable[..., OnnxEngine]]:
    """`helpers.engines.open_test_engine`; what it opened is closed after the test.

    Skips where the native operator does not serve the cache (the default then does not use it either)."""
    from helpers.engines import open_test_engine

    from edgekv.engines.onnx import native

    opened: list[OnnxEngine] = []

    def open_one(*arguments: Any, **options: Any) -> OnnxEngine:
        options = {"attention": attention} | options
        refusal = native.refusal(arguments[0].spec, arguments[1], "cpu")
        if options["attention"] == "native" and refusal:
            pytest.skip(refusal)
        opened.append(open_test_engine(*arguments, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The native operators' library: the package's, or one built here."""
    from helpers.native import build_library, compiler

    from edgekv.engines.onnx import native

    if native.library().exists():
        yield
        return
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    built = build_library(tmp_path_factory.mktemp("native"))
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "library", lambda: built)
    yield
    patch.undo()


@pytest.fixture
def open_torch() -> Iterator[Callable[..., TorchEngine]]:
    """`helpers.torch_engines.open_torch_engine`; what it opened is closed after the test."""
    from helpers.torch_engines import open_torch_engine

    opened: list[TorchEngine] = []

    def open_one(*arguments: Any, **options: Any) -> TorchEngine:
        opened.append(open_torch_engine(*arguments, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()
