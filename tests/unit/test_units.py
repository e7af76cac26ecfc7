"""Sizes in text, both ways."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import InvalidOption
from edgekv.units import GIB, KIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), (4096, 4096), ("512B", 512), ("1k", KIB), ("1KB", KIB), ("1 KiB", KIB), ("50MB", 50 * MIB),
        ("512MiB", 512 * MIB), ("4GiB", 4 * GIB), ("4 g", 4 * GIB), ("1.5g", 3 * GIB // 2), (" 2 GB ", 2 * GIB),
        ("0.5KiB", 512), ("1TiB", 1024 * GIB), ("6gIb", 6 * GIB),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size: int) -> None:
    """Units of 1024 in every spelling; GB is meant as GiB."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "0", "0GiB", "-1", "-4GiB", "4 GiBs", "GiB", "4GiB 2", "1e9", "1,5GiB", "nan", "inf", "0.0001", "4 X",
     "half", "0x10", "4.GiB", "1" * 400, "9" * 30, "1" * 310 + "TiB", -5, 0],
)  # fmt: skip
def test_everything_else_is_refused(text: str | int) -> None:
    """Refused with what was given and how to write it, however long the number is."""
    with pytest.raises(InvalidOption, match="write it as 4GiB") as caught:
        parse_bytes(text)
    assert str(text)[:10] in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.text(max_size=12))
def test_only_invalid_option_is_raised(text: str) -> None:
    """Any text is a positive size or an InvalidOption."""
    with suppress(InvalidOption):
        assert parse_bytes(text) > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1 KiB"), (1536, "1.5 KiB"),
        (112 * KIB, "112 KiB"), (10 * KIB + 512, "10.5 KiB"), (146800640, "140 MiB"), (448 * MIB, "448 MiB"),
        (2 * GIB, "2 GiB"), (1234 * GIB, "1.21 TiB"), (5000 * 1024 * GIB, "5000 TiB"), (-3 * MIB, "-3 MiB"),
        (1.5 * GIB, "1.5 GiB"),
    ],
)  # fmt: skip
def test_sizes_are_written(size: int | float, text: str) -> None:
    """Three significant digits and the largest unit that keeps the number below a thousand."""
    assert format_bytes(size) == text


@given(st.integers(1, 1 << 49))
def test_what_is_written_can_be_read(size: int) -> None:
    """Back within the three digits that were written."""
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006, abs=1)
