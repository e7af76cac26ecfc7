"""Bytes to and from text: "6 GiB" <-> 6442450944. Binary units throughout; "GB" is read as GiB, as users mean it."""

from __future__ import annotations

import re

from edgekv.errors import InvalidOption

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_FACTORS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Read "4GiB", "512 MB", "1.5g" or a plain number of bytes.

    Raises:
        InvalidOption: the text is not a size, or is zero.
    """
    match = _PATTERN.fullmatch(str(text))
    size = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if not 1 <= size < 1 << 60:
        raise InvalidOption(
            f"{str(text)[:40]!r} is not a size in bytes: write it as 4GiB, 512MiB or a positive number."
        )
    return int(size)


def format_bytes(size: int | float) -> str:
    """Write a size with three significant digits: 146800640 -> "140 MiB"."""
    value, unit = float(size), "B"
    for next_unit in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, next_unit
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
