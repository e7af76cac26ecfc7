"""The C++ reads like the rest: lines of at most 120 characters, as ruff holds Python to."""

from __future__ import annotations

from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "edgekv" / "native"
SOURCES = sorted(path for path in NATIVE.iterdir() if path.suffix in (".cpp", ".h", ".inl"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_lines_fit(path: Path) -> None:
    long = [number for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > 120]
    assert not long, f"{path.name} has longer ones: {long}"
