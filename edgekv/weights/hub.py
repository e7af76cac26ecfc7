"""A folder laid out as on the Hugging Face hub, whatever holds its weights: its JSON files and its tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgekv.errors import BadCheckpoint
from edgekv.text.turns import ENDS
from edgekv.weights.base import TokenizerFiles

_OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
"""SentencePiece's, GPT-2's and Mistral's files."""


class HubFolder:
    """The small files beside the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tokenizer(self) -> TokenizerFiles:
        """tokenizer.json as it lies in the folder, with the template and special tokens of tokenizer_config.json."""
        path = self.folder / "tokenizer.json"
        if self.missing_tokenizer:
            raise BadCheckpoint(self.missing_tokenizer)
        config = self._json("tokenizer_config.json", optional=True)
        text, bos = _text(path), _token_text(config.get("bos_token"))
        return TokenizerFiles(
            tokenizer_json=text,
            chat_template=self._template(config),
            bos_token=bos,
            eos_token=_token_text(config.get("eos_token")),
            add_bos=_adds_bos(path, text, bos),
        )

    @property
    def missing_tokenizer(self) -> str:
        """See WeightSource. Tokenizers in older forms are told of with the line that makes the file of them."""
        if (self.folder / "tokenizer.json").exists():
            return ""
        older = next((name for name in _OLDER_TOKENIZERS if (self.folder / name).exists()), "")
        if not older:
            return f"{self.folder} has no tokenizer.json: copy the model's tokenizer files beside its weights."
        return (
            f'{self.folder} has {older} but no tokenizer.json: where transformers is installed, `python -c "from '
            f"transformers import AutoTokenizer as T; T.from_pretrained('{self.folder}')"
            f".save_pretrained('{self.folder}')\"` makes it."
        )

    @property
    def has_template(self) -> bool:
        """See WeightSource."""
        return self._template(self._json("tokenizer_config.json", optional=True)) is not None

    @property
    def turn_ends(self) -> set[int]:
        """The ids of known ends of turns that the chat template writes: configs often leave them out."""
        config = self._json("tokenizer_config.json", optional=True)
        written = [text for text in ENDS if text in (self._template(config) or "")]
        return {number for number, text in self._added(config) if text in written} if written else set()

    def _added(self, config: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Tokens that were added to the vocabulary, id and text."""
        table = config.get("added_tokens_decoder")
        if not isinstance(table, dict):
            added = self._json("tokenizer.json", optional=True).get("added_tokens")
            table = {token.get("id"): token for token in added or () if isinstance(token, dict)}
        for number, token in table.items():
            if str(number).isdecimal():
                yield int(number), _token_text(token)

    def _template(self, config: dict[str, Any]) -> str | None:
        """The template in a file of its own, else the one in tokenizer_config.json."""
        file = self.folder / "chat_template.jinja"
        return _default_template(_text(file) if file.exists() else config.get("chat_template"))

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        return read_json(self.folder / name, optional=optional)


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; an optional file that is not there is empty.

    Raises:
        BadCheckpoint: it cannot be read, or holds something else.
    """
    if optional and not path.exists():
        return {}
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise BadCheckpoint(f"{path} holds {type(data).__name__}, not an object with fields.")
    return data


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}.") from None


def _default_template(template: Any) -> str | None:
    """Some configs hold a list of named templates instead of one."""
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    """A special token is stored as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _adds_bos(path: Path, tokenizer_json: str, bos: str) -> bool:
    """Whether the tokenizer's own post-processor puts BOS before a text."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"{path} is not a tokenizer file that can be used: {error}.") from None
    return bool(bos) and tokenizer.encode("").ids[:1] == [tokenizer.token_to_id(bos)]
