"""Seeded damage to files and texts, for fuzzing."""

from __future__ import annotations

import random

INTERESTING = (
    b"\0",
    b"\xff",
    b"\x80",
    b"-1",
    b"null",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"\xed\xa0\x80",
    b"99999999999999999999",
)


def mutate(data: bytes, seed: int) -> bytes:
    """One to four edits: bits flipped, bytes overwritten, pieces cut out, doubled, moved, replaced; the end cut."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) or 1)
        stop = start + chance.choice((1, 1, 2, 8, 64))
        piece = data[start:stop]
        edits = (
            bytes(byte ^ (1 << chance.randrange(8)) for byte in piece),
            chance.randbytes(len(piece)),
            b"",
            piece * chance.choice((2, 3, 1000)),
            chance.choice(INTERESTING),
            data[(other := chance.randrange(len(data) or 1)) : other + len(piece)],
        )
        data = data[:start] + chance.choice(edits) + data[stop:]
        if chance.random() < 0.1:
            data = data[:start]
    return data
