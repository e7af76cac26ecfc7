"""Answers that must follow a JSON schema or a grammar, by llguidance (https://github.com/guidance-ai/llguidance).

The library walks its parser over the vocabulary and says after each token which may come next; what may not is set to
-inf before sampling. A mask takes some 0.1 ms. The library's own form of the vocabulary is made when it is first
needed and then kept: for SmolLM2's 49,152 tokens that takes 1.7 s and 38 MB.

JSON is written as most models were taught to write it, one space after comma and colon, and with no other white space:
a small model that may write as many line breaks as it likes sometimes writes nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.errors import DependencyMissing, EngineError, InvalidOption
from edgekv.sampling import Constraint, Float32, SamplingOptions
from edgekv.text.tokenizer import Tokenizer

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes constraints for one model.

    Args:
        vocab_size: V, which may be larger than the tokenizer's. eos_ids: what ends an answer, allowed where the grammar
            has come to an end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._vocabulary: Any = None

    def constraint(self, options: SamplingOptions) -> Constraint | None:
        """A fresh constraint for one answer, or None if the options ask for none.

        Raises:
            InvalidOption: the schema or grammar cannot be followed. DependencyMissing: llguidance is not installed.
        """
        if options.json_schema is None and options.grammar is None:
            return None
        library = _library()
        if not self._eos_ids:
            raise InvalidOption(
                "This model names no token that ends an answer, so no answer can be held to a schema or grammar."
            )
        what, text = ("grammar", options.grammar or "")
        if options.json_schema is not None:
            what, text = "JSON schema", _from_schema(library, options.json_schema)
        matcher = library.LLMatcher(self._vocabulary_of(library), text, log_level=0)
        if matcher.is_error():
            raise InvalidOption(f"The {what} cannot be followed: {_first_line(matcher.get_error())}.")
        return _Matched(matcher, self._vocab_size)

    def _vocabulary_of(self, library: Any) -> Any:
        if self._vocabulary is None:
            self._vocabulary = library.LLTokenizer(
                self._tokenizer.published(), n_vocab=self._vocab_size, eos_token=self._eos_ids
            )
        return self._vocabulary


class _Matched:
    """One answer's way through a grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self, logits: Float32) -> Float32:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        self._check(bool(allowed.any()))
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self._check(self._matcher.consume_token(token))

    def _check(self, fine: bool) -> None:
        if not fine:
            raise EngineError(f"The answer's grammar has come to a dead end: {_first_line(self._matcher.get_error())}.")


def _from_schema(library: Any, schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"The JSON schema is not JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise InvalidOption("The JSON schema is not an object.")
    try:
        text: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
    except ValueError as error:  # nested too deeply, or half of a surrogate pair in it
        raise InvalidOption(f"The JSON schema cannot be followed: {_first_line(str(error))}.") from None
    return text


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise DependencyMissing(
            "Answers that follow a schema or a grammar need llguidance: pip install 'edgekv[serve]'."
        ) from None
    return llguidance


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown reason"])[0].rstrip(".")
