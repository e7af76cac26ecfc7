"""A dataclass field with its default and its one line of help, so that the command line is made from the dataclass."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def about(help_text: str, *, default: Any = None) -> Any:
    """A field with help; the command line reads both (edgekv/cli/options.py)."""
    return field(default=default, metadata={"help": help_text})
