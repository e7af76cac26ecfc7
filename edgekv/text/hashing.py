"""Hashes of how a text (or its ids) begins, for whoever has to know it again and not to keep it (BLAKE2b)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

HASH_BYTES = 16

_CHUNK = 1 << 16  # characters at a time: a copy of a whole conversation would be the largest thing that a turn makes


def beginnings(text: str, ends: Iterable[int]) -> Iterator[bytes]:
    """The hash of text[:end] for each of `ends`, which never decrease, in one go over the text."""
    made, at = hashlib.blake2b(digest_size=HASH_BYTES), 0
    for end in ends:
        while at < end:
            stop = min(at + _CHUNK, end)
            made.update(text[at:stop].encode("utf-8", "surrogatepass"))
            at = stop
        yield made.copy().digest()


def beginning(text: str, end: int) -> bytes:
    """The hash of text[:end]."""
    return next(beginnings(text, (end,)))


def hash_of(data: memoryview) -> bytes:
    """The hash of some numbers, as they lie in memory."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
