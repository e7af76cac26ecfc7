"""The tokenizer, and the guard that keeps what a user types from becoming control tokens.

A chat template mixes its own control tokens with the users' words in one string, and a tokenizer cannot tell which is
which. So contents are *guarded* before the template sees them:

    guard        "a<|im_end|>b" -> "a<" G "|im_end|>b"      G = U+FDD0, a noncharacter that no text contains on purpose
    render       the template runs over guarded contents; only its own control tokens are whole
    encode       split at the whole control tokens, take every G out again, tokenise the rest as plain text

A literal G in a content is escaped, so guarding can be undone exactly. Nothing else is changed, and the plain text is
tokenised in one call of the library in which a private stand-in holds the place of each control token: merges across
the border of template and content, and whatever the library does at the edge of a control token (`lstrip`, `rstrip`,
SentencePiece's leading space), are the library's own. Text without control tokens therefore has exactly the ids that
the library gives to the whole string.

The guard covers control *tokens*. A marker that the vocabulary does not hold as a special token (the `[INST]` of some
Mistral models) is ordinary text to the model, and here. A special token of one character cannot be guarded and is
always read as text; no model known to us has one.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from edgekv.errors import BadCheckpoint, InvalidOption

GUARD = "\ufdd0"
"""Marks a place where a control token would otherwise be read into a content."""

_MARK = "\ufdd1"  # after a GUARD: the GUARD is literal; twice: a literal mark
_ESCAPES = {GUARD: GUARD + _MARK, _MARK: GUARD + _MARK + _MARK}
_LITERAL = re.compile(f"[{GUARD}{_MARK}]")
_GUARDED = re.compile(f"{GUARD}(?:{_MARK}{_MARK}?)?")
_UNESCAPES = {GUARD: "", GUARD + _MARK: GUARD, GUARD + _MARK + _MARK: _MARK}


@dataclass(frozen=True)
class GuardedEncoding:
    """The ids of a guarded text, and the character of that text at which each of them starts (never decreasing)."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]

    def token_at(self, char_offset: int) -> int:
        """Index of the first token that starts at or after a character offset; the token count if none does."""
        return bisect_left(self.starts, char_offset)


class Tokenizer:
    """A model's tokenizer. It adds no special tokens by itself: the chat template says which there are.

    Takes over `backend`: truncation, padding and the post-processor are switched off in it, stand-ins are added to it.
    """

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # it would add special tokens, and trim the spaces off the offsets
        backend.encode_special_tokens = True  # which means: as text
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self._special_ids = {token.content: number for number, token in added.items() if token.special}
        self.special_tokens: frozenset[str] = frozenset(self._special_ids)
        self._slots = _StandIns(backend, [token for token in added.values() if token.special])
        self._silent = frozenset(self._special_ids.values()) | self._slots.ids
        self._borders = _Borders(self.special_tokens)
        self._added = _longest_first(token.content for token in added.values())
        unknown = getattr(backend.model, "unk_token", None)
        self._never_text = frozenset(n for content, n in self._special_ids.items() if content != unknown)
        self.byte_tokens: frozenset[int] = self._find_byte_tokens()

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            BadCheckpoint: the file is missing or is not a tokenizer.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"The tokenizer {path} could not be read: {error.strerror}.") from None
        try:
            return cls(tokenizers.Tokenizer.from_buffer(data))
        except Exception as error:  # the library raises bare Exception, too
            raise BadCheckpoint(f"{path} is not a tokenizer file that can be used: {_one_line(error)}.") from None

    def token_id(self, content: str) -> int | None:
        """The id of a token, special or not, by its text in the vocabulary."""
        number: int | None = self._backend.token_to_id(content)
        return number

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no special token is recognised in it, none is added.

        Raises:
            InvalidOption: the text holds half of a surrogate pair, which is not text.
        """
        return [number for number, _ in self._plain(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all the ids together, special tokens left out."""
        visible = [number for number in ids if number not in self._silent]
        text: str = self._backend.decode(visible, skip_special_tokens=True)
        return text

    def is_text(self, token_id: int) -> bool:
        """Whether a token can contribute to `decode`: special, unknown and empty ones cannot."""
        return token_id not in self._silent and bool(self._backend.id_to_token(token_id))

    def piece(self, token_id: int) -> str:
        """What one token adds to a text: its own characters, a space at its beginning included; "" if it is silent."""
        anchor = self._anchor
        return self.decode([*anchor, token_id])[len(self.decode(anchor)) :]

    def published(self) -> str:
        """The tokenizer as JSON, without what this class has added to it."""
        data = json.loads(self._backend.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] not in self._slots.ids]
        return json.dumps(data, ensure_ascii=False)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token for others to follow: decoders leave a space out at the beginning of a text."""
        return self.encode("a")[-1:]

    def guard(self, content: str) -> str:
        """Make a content safe to put into a template: `unguard` gives it back, `encode_guarded` reads it as text.

        Raises:
            InvalidOption: it is no text.
        """
        check_text(content)
        content = _LITERAL.sub(lambda match: _ESCAPES[match[0]], content)
        return self._borders.close(content)

    @staticmethod
    def unguard(text: str) -> str:
        """The inverse of `guard`; also takes the guards out of a text rendered from guarded contents."""
        return _GUARDED.sub(lambda match: _UNESCAPES[match[0]], text)

    def encode_guarded(self, text: str) -> GuardedEncoding:
        """Ids of a rendered template: its control tokens are control tokens, the guarded contents are text.

        Raises:
            InvalidOption: the text holds half of a surrogate pair, which is not text.
        """
        controls, pieces = self._split(text)
        control = iter(controls)
        plain = "".join(piece.text for piece in pieces)
        ids, starts = [], []
        for number, offset in self._plain(plain):
            ids.append(next(control) if number in self._slots.ids else number)
            starts.append(offset)
        return GuardedEncoding(tuple(ids), tuple(_guarded_offsets(starts, pieces)))

    def _split(self, text: str) -> tuple[list[int], list[_Piece]]:
        """The ids of the control tokens in a guarded text, and the text with stand-ins for them and without guards."""
        controls: list[int] = []
        pieces: list[_Piece] = []
        end = 0
        for match in self._added.finditer(text) if self._added else ():
            if match[0] in self._slots.of:
                pieces += [*_unguarded(text[end : match.start()], end), _Piece(self._slots.of[match[0]], match.start())]
                controls.append(self._special_ids[match[0]])
                end = match.end()
        pieces += _unguarded(text[end:], end)
        return controls, pieces

    def _plain(self, text: str) -> Iterator[tuple[int, int]]:
        """(id, first character) of each token of a text in which no special token is recognised."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except TypeError:
            check_text(text)
            raise
        for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in self._never_text:
                yield from ((part, start) for part in self._spell(number))
            else:
                yield number, start

    def _spell(self, number: int) -> list[int]:
        """A special token that the merges of plain text led to, character by character instead."""
        model, content = self._backend.model, self._backend.id_to_token(number)
        parts = [token.id for char in content for token in model.tokenize(char)]
        return [part for part in parts if part not in self._never_text]

    def _find_byte_tokens(self) -> frozenset[int]:
        """Ids of <0x00> .. <0xFF> if the decoder joins them to UTF-8, else nothing."""
        ids = [self.token_id(f"<0x{byte:02X}>") for byte in range(256)]
        sample = [ids[byte] for byte in "é".encode()]
        if None in sample or "é" not in self._backend.decode(sample):
            return frozenset()
        return frozenset(number for number in ids if number is not None)


@dataclass(frozen=True)
class _Piece:
    """A stretch of the text handed to the library, and the offset in the guarded text that its first character has."""

    text: str
    start: int


class _StandIns:
    """Tokens, added to the library's own, that hold the places of control tokens while the rest is tokenised.

    There is one for each way a control token treats its neighbourhood. The name holds a random number, so that no text
    can contain it; the ids lie above the vocabulary and never leave this module.
    """

    def __init__(self, backend: Any, specials: Iterable[Any]) -> None:
        nonce = secrets.token_hex(8)
        self.of: dict[str, str] = {}
        for token in specials:
            if len(token.content) > 1:
                manner = f"{token.lstrip:d}{token.rstrip:d}{token.normalized:d}"
                self.of[token.content] = f"{GUARD}{nonce}{manner}{GUARD}"
        names = {self.of[token.content]: token for token in specials if token.content in self.of}
        for name, like in names.items():
            flags = {"lstrip": like.lstrip, "rstrip": like.rstrip, "normalized": like.normalized}
            backend.add_tokens([tokenizers.AddedToken(name, special=False, single_word=False, **flags)])
        self.ids = frozenset(backend.token_to_id(name) for name in names)


class _Borders:
    """Puts a GUARD into each control token in a content, and where one could arise across the content's ends."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._specials = [content for content in specials if len(content) > 1]
        self._longest = max(map(len, self._specials), default=0)
        self._heads = {content[:cut] for content in self._specials for cut in range(1, len(content))}
        self._tails = {content[cut:] for content in self._specials for cut in range(1, len(content))}
        alternatives = "|".join(map(re.escape, self._specials))
        self._inside = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if alternatives else None

    def close(self, content: str) -> str:
        if not self._inside or not content:
            return content
        sizes = range(1, min(self._longest, len(content) + 1))
        before = GUARD if any(content[:size] in self._tails for size in sizes) else ""
        after = GUARD if any(content[-size:] in self._heads for size in sizes) or self._may_be_middle(content) else ""
        return before + self._inside.sub(rf"\1{GUARD}", content) + after

    def _may_be_middle(self, content: str) -> bool:
        return len(content) < self._longest and any(content in special for special in self._specials)


def _longest_first(contents: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the contents, the longest where several begin, as the library's own search does."""
    ordered = sorted(filter(None, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _unguarded(text: str, start: int) -> Iterator[_Piece]:
    """The pieces between the guards and escapes of a text that begins at offset `start` of the guarded text."""
    end = 0
    for match in _GUARDED.finditer(text):
        yield _Piece(text[end : match.start()], start + end)
        yield _Piece(_UNESCAPES[match[0]], start + match.start())
        end = match.end()
    yield _Piece(text[end:], start + end)


def _guarded_offsets(offsets: Sequence[int], pieces: Sequence[_Piece]) -> Iterator[int]:
    """Offsets in the joined pieces, as offsets in the guarded text; never decreasing."""
    begins = [0, *accumulate(len(piece.text) for piece in pieces)][: len(pieces)]
    latest = 0
    for offset in offsets:
        index = bisect_right(begins, offset) - 1  # of pieces that begin here, the last is the one with text
        latest = max(latest, pieces[index].start + offset - begins[index])
        yield latest


def check_text(text: Any) -> None:
    """Refuse what is no text, with the place in it.

    Raises:
        InvalidOption: it is not a string, or holds half of a surrogate pair (what Python makes of bytes that are no
            UTF-8, too).
    """
    if not isinstance(text, str):
        raise InvalidOption(f"The text is of type {type(text).__name__}; it must be a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = f", for the byte 0x{code - 0xDC00:02X} that is no UTF-8" if 0xDC80 <= code <= 0xDCFF else ""
        raise InvalidOption(
            f"The text is not valid Unicode: character {error.start} is half of a surrogate pair (U+{code:04X}){byte}. "
            "Remove that character."
        ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
