"""English text that every Python carries, and the default model's config as transformers reads it."""

from __future__ import annotations

import pydoc_data.topics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.model.converted import ConvertedModel

TOPICS = ("assignment", "binary", "bltin-exceptions", "class", "customization", "execmodel", "exprlists", "floating")
"""A fixed slice of the language reference: prose with little code in it."""


def prose(characters: int) -> str:
    """The beginning of the chosen topics."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in TOPICS if name in topics)[:characters]


def prose_ids(model: ConvertedModel, count: int) -> list[int]:
    """The first `count` tokens of the prose."""
    from edgekv.text.tokenizer import Tokenizer

    ids = Tokenizer.from_file(model.folder / "tokenizer.json").encode(prose(8 * count))
    assert len(ids) >= count
    return ids[:count]


def default_source() -> tuple[str, str]:
    """(folder, file name) of the default model's GGUF file."""
    from edgekv.model import catalog

    entry = catalog.entry(catalog.DEFAULT_MODEL)
    return str(catalog.home() / "sources" / entry.name), entry.file.name


def default_config() -> Any:
    """The config that transformers reads out of the GGUF file."""
    from transformers import AutoConfig

    folder, name = default_source()
    return AutoConfig.from_pretrained(folder, gguf_file=name)
