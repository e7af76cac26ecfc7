"""Text and its tokens, of which the beginning may have left the cache.

A conversation has no end, so what is kept of it for good has to be small. Of text whose tokens have left, a chat needs
the words no more, nor the ids, nor where each token begins: it only has to know the beginning of the next prompt again
(by its hash) and where its turns begin (12 bytes each, to say which of them have left):

    departed: lengths, hashes, turns     | text, ids, starts
    0                                    chars, tokens                          (counted from the very first)

The border is a control token's beginning: only there do the tokens on either side not depend on one another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgekv.slices import common_length
from edgekv.text.hashing import beginning, hash_of


def ids_array(ids: Sequence[int] = ()) -> array[int]:
    """Token ids, 4 bytes each."""
    return array("i", ids)


def offsets_array(offsets: Sequence[int] = ()) -> array[int]:
    """Characters at which something begins, 8 bytes each."""
    return array("q", offsets)


@dataclass(frozen=True)
class Departed:
    """The beginning of a text whose tokens have left: enough to know it again.

    Attributes:
        text_hash, ids_hash: of these characters and of these ids (BLAKE2b, hexadecimal).
        turn_chars, turn_tokens: where turns begin in it.
    """

    chars: int = 0
    tokens: int = 0
    text_hash: str = ""
    ids_hash: str = ""
    turn_chars: array[int] = field(default_factory=offsets_array)
    turn_tokens: array[int] = field(default_factory=ids_array)

    @classmethod
    def of(cls, text: str, ids: array[int], chars: int, turns: Sequence[tuple[int, int]]) -> Departed:
        """text[:chars] and all of `ids`, which stand for it; turns: (character, token) of each beginning of a turn."""
        inside = [turn for turn in turns if turn[0] < chars]
        turn_chars, turn_tokens = zip(*inside, strict=True) if inside else ((), ())
        hashes = beginning(text, chars).hex(), _ids_hash(ids, len(ids))
        return cls(chars, len(ids), *hashes, offsets_array(turn_chars), ids_array(turn_tokens))

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Departed:
        """The inverse of `to_json`; nothing has departed if there is no such value.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is not what `to_json` gives.
        """
        if data is None:
            return cls()
        turns = offsets_array(data["turn_chars"]), ids_array(data["turn_tokens"])
        chars, tokens = int(data["chars"]), int(data["tokens"])
        if len(turns[0]) != len(turns[1]) or min(chars, tokens, *turns[0], *turns[1]) < 0:
            raise ValueError("departed text that cannot be")
        return cls(chars, tokens, str(data["text_hash"]), str(data["ids_hash"]), *turns)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        turns = {"turn_chars": self.turn_chars.tolist(), "turn_tokens": self.turn_tokens.tolist()}
        return {
            "chars": self.chars,
            "tokens": self.tokens,
            "text_hash": self.text_hash,
            "ids_hash": self.ids_hash,
        } | turns

    def begins(self, text: str, ids: array[int]) -> bool:
        """Whether a text begins with this, and so do the ids of what has passed through the cache."""
        if not self.tokens:
            return True
        return (
            len(text) >= self.chars
            and len(ids) >= self.tokens
            and beginning(text, self.chars).hex() == self.text_hash
            and _ids_hash(ids, self.tokens) == self.ids_hash
        )

    def tokens_at(self, offsets: Sequence[int]) -> list[int]:
        """The token at the first known place at or after each character: a turn's beginning, or the end of this."""
        indices = np.searchsorted(np.asarray(self.turn_chars, np.int64), np.asarray(offsets, np.int64))
        tokens: list[int] = np.append(np.asarray(self.turn_tokens, np.int64), self.tokens)[indices].tolist()
        return tokens


@dataclass(frozen=True)
class EncodedText:
    """Text and its tokens, with the character at which each token starts.

    Attributes:
        text, ids: those that have not departed. starts: where each of these tokens begins, counted from the very first
            character, departed ones included.
    """

    text: str = ""
    ids: array[int] = field(default_factory=ids_array)
    starts: array[int] = field(default_factory=offsets_array)
    departed: Departed = field(default_factory=Departed)

    @property
    def chars(self) -> int:
        """Characters, departed ones included."""
        return self.departed.chars + len(self.text)

    @property
    def tokens(self) -> int:
        """Tokens, departed ones included."""
        return self.departed.tokens + len(self.ids)

    def token_at(self, offset: int) -> int:
        """Index of the first token that starts at or after a character; in the departed part only turns are known."""
        return self.tokens_at((offset,))[0]

    def tokens_at(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """`token_at` of each of these, which never decrease. A conversation has thousands of turns."""
        inside = bisect_left(offsets, self.departed.chars)
        before = self.departed.tokens_at(offsets[:inside]) if inside else ()
        return *before, *(self.departed.tokens + bisect_left(self.starts, offset) for offset in offsets[inside:])

    def followed_by(self, text: str, ids: Sequence[int], starts: Sequence[int]) -> EncodedText:
        """With more text behind; starts: counted from its own first character."""
        behind = offsets_array([self.chars + start for start in starts])
        return EncodedText(self.text + text, self.ids + ids_array(ids), self.starts + behind, self.departed)

    def shared_with(self, text: str, passed: array[int], control_ids: frozenset[int | None]) -> EncodedText:
        """The part that another text begins with. Where they differ, it ends before the last control token they share:
        only there do the tokens on either side not depend on one another.

        Args:
            passed: the ids of what has passed through the cache, which have to begin with the departed ones.
        """
        if not self.departed.begins(text, passed):
            return EncodedText()
        if text.startswith(self.text, self.departed.chars):
            return self
        same = self.departed.chars + common_length(self.text, text[self.departed.chars :])
        return self._until(self._control_before(bisect_right(self.starts, same), control_ids))

    def without(
        self,
        tokens: int,
        text: str,
        passed: array[int],
        turns: Sequence[tuple[int, int]],
        control_ids: frozenset[int | None],
    ) -> EncodedText:
        """The same once `tokens` tokens have left: all of them depart up to the last control token's beginning.

        Args:
            text, passed: the whole text, and all its ids. turns: (character, token) of each beginning of a turn.
        """
        index = self._control_before(min(tokens - self.departed.tokens + 1, len(self.ids)), control_ids)
        if not index:
            return self
        start, count = self.starts[index], self.departed.tokens + index
        departed = Departed.of(text, passed[:count], start, turns)
        return EncodedText(text[start : self.chars], self.ids[index:], self.starts[index:], departed)

    def _until(self, index: int) -> EncodedText:
        if not index:
            return EncodedText(departed=self.departed)
        text = self.text[: self.starts[index] - self.departed.chars]
        return EncodedText(text, self.ids[:index], self.starts[:index], self.departed)

    def _control_before(self, end: int, control_ids: frozenset[int | None]) -> int:
        """The last of the tokens 1 .. end-1 that others may end before; 0: there is none."""
        return next((index for index in range(end - 1, 0, -1) if self._may_end_before(index, control_ids)), 0)

    def _may_end_before(self, index: int, control_ids: frozenset[int | None]) -> bool:
        """Whether a token is a control token whose place is known. Of an answer's tokens only the first one's is: a
        model may write a control token in the middle of its answer, where it is no text."""
        return self.ids[index] in control_ids and self.starts[index] > self.starts[index - 1]


def _ids_hash(ids: array[int], count: int) -> str:
    return hash_of(memoryview(ids)[:count]).hex()
