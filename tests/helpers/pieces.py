"""A small tokenizer in SentencePiece's manner."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import decoders, models


def pieces() -> Any:
    """A SentencePiece-like backend: spaces as U+2581, the first one stripped, and byte tokens."""
    words = ["▁", "▁▁", "▁a", "a", "b", "▁hello", "\ufffd", "▁\ufffd", "好"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab={**vocab, "<s>": 265}, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
