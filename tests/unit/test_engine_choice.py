"""Which engine serves a request: asked for, or decided, always with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv import engines
from edgekv.engines import choose
from edgekv.engines.onnx import native
from edgekv.errors import DependencyMissing, InvalidOption


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the base install."""
    found: Callable[[str], Any] = lambda name: None if name in engines.TORCH_PACKAGES else object()  # noqa: E731
    monkeypatch.setattr(engines, "find_spec", found)


def test_auto_on_a_cpu_is_the_faster_one() -> None:
    choice = choose("auto", "cpu", "int8")
    assert str(choice) == "onnx engine (the faster one on a CPU)"


def test_auto_takes_the_one_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 is held by edgekv's own operator and by torch."""
    assert choose("auto", "cpu", "fp8").name == ("torch" if native.unavailable() else "onnx")
    assert choose("auto", "cuda", "fp8").name == "torch"
    monkeypatch.setattr(native, "library", lambda: tmp_path / "nothing.so")
    assert choose("auto", "cpu", "fp8").name == "torch"
    assert choose("auto", "cuda", "k8v4").name == "onnx"


def test_what_is_asked_for_is_taken() -> None:
    assert choose("onnx", "cuda", "fp8").name == "onnx"
    assert choose("torch", "cpu", "int8").name == "torch"


def test_without_the_extra(without_torch: None) -> None:
    """The base install runs, and says what the other engine needs."""
    assert str(choose("auto", "cpu", "int8")) == "onnx engine (torch and transformers not installed)"
    assert choose("auto", "cpu", "fp8").name == "onnx"
    with pytest.raises(DependencyMissing, match=r"pip install 'edgekv\[torch\]'"):
        choose("torch", "cpu", "int8")


def test_no_other_engine() -> None:
    with pytest.raises(InvalidOption, match="choose auto, onnx or torch"):
        choose("mlx", "cpu", "int8")  # type: ignore[arg-type]
