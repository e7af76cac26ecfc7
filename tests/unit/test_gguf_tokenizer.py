"""Tokenizers from GGUF metadata: the same ids as the source, and refusals where the file says something unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.text.gguf_tokenizer import GGUFVocab, build_tokenizer
from edgekv.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = "abcdeĠĊĉ0123456789.,!'<>|/[]PADst" + "eÌģÃ©"  # bytes as GPT-2 spells them; the last ones are accents


def gpt2(pre: str, *words: str, merges: tuple[str, ...] = (), **fields: Any) -> GGUFVocab:
    tokens = list(dict.fromkeys([*ALPHABET, *(merge.replace(" ", "") for merge in merges), *words]))
    return GGUFVocab(model="gpt2", pre=pre, tokens=tokens, types=[NORMAL] * len(tokens), merges=merges, **fields)


def spelled(vocab: GGUFVocab, text: str) -> list[str]:
    return [vocab.tokens[number] for number in Tokenizer(build_tokenizer(vocab)).encode(text)]


def typed(vocab: GGUFVocab, **types: int) -> GGUFVocab:
    """The vocabulary with other types for some tokens; `im_end` stands for <|im_end|>."""
    wanted = {f"<|{name}|>": kind for name, kind in types.items()}
    return replace(
        vocab, types=[wanted.get(token, kind) for token, kind in zip(vocab.tokens, vocab.types, strict=True)]
    )


# ---- byte-level ------------------------------------------------------------------------------------------------------


def source() -> Any:
    """A small trained byte-level tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(["I'll say in the year 2024 that the other one said 你好，你好"], trainer)
    return backend


def as_gguf(backend: Any) -> GGUFVocab:
    """A tokenizer.json, written as GGUF would."""
    data = json.loads(backend.to_str())
    special = {token["content"] for token in data["added_tokens"]}
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    types = [CONTROL if token in special else NORMAL for token in tokens]
    merges = [" ".join(merge) for merge in data["model"]["merges"]]
    return GGUFVocab(model="gpt2", pre="gpt-2", tokens=tokens, types=types, merges=merges)


SOURCE = source()
REBUILT = build_tokenizer(as_gguf(SOURCE))
TEXT = st.lists(
    st.sampled_from(["the ", "  ", "\n\n", "I'll", "2024", "<s>", "</s>", "你好", "🦙"]) | st.text(max_size=4)
)


@given(TEXT.map("".join))
@settings(deadline=None)
def test_same_ids_as_the_source(text: str) -> None:
    ids = REBUILT.encode(text).ids
    assert ids == SOURCE.encode(text, add_special_tokens=False).ids
    assert REBUILT.decode(ids) == SOURCE.decode(ids)


def test_the_rule_decides_how_digits_split() -> None:
    merges = ("Ġ 1", "Ġ1 2", "1 2", "12 3")
    assert spelled(gpt2("gpt-2", merges=merges), " 123") == ["Ġ12", "3"]
    assert spelled(gpt2("smollm", merges=merges), " 123") == ["Ġ", "1", "2", "3"]
    assert spelled(gpt2("qwen2", merges=merges), " 123") == ["Ġ", "1", "2", "3"]
    assert spelled(gpt2("llama-bpe", merges=merges), " 1234") == ["Ġ", "123", "4"]


WORDS = {
    "smaug-bpe": ("HelloWorld's 12345 a/b\n\n", ["HelloWorld", "'s", "Ġ", "123", "45", "Ġa", "/b", "ĊĊ"]),
    "gpt-4o": ("HelloWorld's HTTPx 12345 -/\n", ["Hello", "World's", "ĠHTTPx", "Ġ", "123", "45", "Ġ-/Ċ"]),
    "tekken": ("HelloWorld's 12 -/\n", ["Hello", "World", "'s", "Ġ", "1", "2", "Ġ-/Ċ"]),
}
"""A text, and the words that the makers' rule splits it into."""


@pytest.mark.parametrize("pre", WORDS)
def test_the_words_of_a_rule(pre: str) -> None:
    backend = build_tokenizer(gpt2(pre, merges=("a b",)))
    text, words = WORDS[pre]
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words


PUBLISHED = {
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""As the models' tokenizer.json have them."""
PIECES_OF_TEXT = st.sampled_from(
    ["Hello", "WORLD", "'s", "'LL", "1234", "\n", " ", "é", "e\u0301", "你", "ǅ", "/", "-"]
)


@given(st.lists(PIECES_OF_TEXT | st.text(max_size=3), max_size=12).map("".join), st.sampled_from(sorted(PUBLISHED)))
@settings(deadline=None)
def test_the_published_pattern_gives_the_same_words(text: str, pre: str) -> None:
    """The rule as it is built here, and the published pattern in the tokenizers library."""
    split = pre_tokenizers.Split(tokenizers.Regex(PUBLISHED[pre]), "isolated")
    wanted = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    found = build_tokenizer(gpt2(pre, merges=("a b",))).pre_tokenizer
    assert found.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)


def test_llama3_takes_whole_words_without_merging() -> None:
    """The merges lead to ab + c, the vocabulary has abc."""
    merges = ("a b",)
    for pre in ("llama-bpe", "smaug-bpe", "tekken"):
        assert spelled(gpt2(pre, "abc", merges=merges), "abc") == ["abc"]
    assert spelled(gpt2("qwen2", "abc", merges=merges), "abc") == ["ab", "c"]


def test_qwen_composes_accents() -> None:
    merges = ("Ã ©", "Ì ģ")
    assert spelled(gpt2("qwen2", merges=merges), "e\u0301") == ["Ã©"]
    assert spelled(gpt2("gpt-2", merges=merges), "e\u0301") == ["e", "Ìģ"]


def test_token_types() -> None:
    """case C18: control and unknown tokens are special, user-defined ones are not, and padding rows are no text."""
    vocab = gpt2("gpt-2", "<|im_end|>", "<|unk|>", "<|think|>", "[PAD123]", merges=("a b",))
    backend = build_tokenizer(typed(vocab, im_end=CONTROL, unk=UNKNOWN, think=USER_DEFINED))
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    assert added == {"<|im_end|>": True, "<|unk|>": True, "<|think|>": False}
    assert Tokenizer(backend).special_tokens == {"<|im_end|>", "<|unk|>"}


def test_padding_rows_are_not_text() -> None:
    vocab = gpt2("gpt-2", "[PAD123]", merges=("a b",))
    types = [USER_DEFINED if token == "[PAD123]" else NORMAL for token in vocab.tokens]
    assert spelled(replace(vocab, types=types), "[PAD123]") == list("[PAD123]")


def test_tokens_that_the_metadata_names_are_special() -> None:
    """case C18: some files mark the end-of-turn token as an ordinary one."""
    vocab = gpt2("gpt-2", "<|im_end|>", merges=("a b",))
    assert Tokenizer(build_tokenizer(vocab)).special_tokens == frozenset()
    named = replace(vocab, special_ids=[vocab.tokens.index("<|im_end|>")])
    assert Tokenizer(build_tokenizer(named)).special_tokens == {"<|im_end|>"}


# ---- SentencePiece ---------------------------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SCORED = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "<": -5.0, "s": -6.0, ">": -7.0, "<s": -8.0}
SCORED |= {"ab": -0.5, "bc": -0.4, "▁a": -0.3, "abc": -0.2, "aa": -0.25, "▁▁": -0.1, "aabc": -0.15, "▁ab": -0.35}


def llama(**fields: Any) -> GGUFVocab:
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SCORED)]
    scores = [0.0] * len(PIECES) + list(SCORED.values())
    return GGUFVocab(model="llama", pre="default", tokens=[*PIECES, *SCORED], types=types, scores=scores, **fields)


def sentencepiece(text: str) -> list[str]:
    """The published algorithm, slowly: join the neighbours with the best-scored union, the leftmost first."""
    parts = list(text)
    while joins := [(-SCORED[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in SCORED]:
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelt = [[part] if part in SCORED else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in spelt for token in tokens]


PREFIXED, BARE = llama(), llama(add_space_prefix=False)
BACKENDS = {True: Tokenizer(build_tokenizer(PREFIXED)), False: Tokenizer(build_tokenizer(BARE))}


@given(st.text(alphabet="aabbc <s>é🦙\n", max_size=14), st.booleans())
@settings(deadline=None, max_examples=300)
def test_pieces_are_merged_by_score(text: str, prefix: bool) -> None:
    ids = BACKENDS[prefix].encode(text)
    spaced = (" " if prefix and text else "") + text
    assert [PREFIXED.tokens[number] for number in ids] == sentencepiece(spaced.replace(" ", "▁"))
    assert BACKENDS[prefix].decode(ids) == text


def test_text_never_merges_to_a_control_piece() -> None:
    """case C18: `<s` and `>` are pieces, `<s>` is a control token and no merge leads to it."""
    ids = BACKENDS[False].encode("<s>")
    assert [BARE.tokens[number] for number in ids] == ["<s", ">"]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "gemma4", ""])
def test_unknown_model_is_named(model: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"type '{model}'"):
        build_tokenizer(GGUFVocab(model=model, pre="", tokens=["a"]))


def test_unknown_splitting_rule_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"'viking'.*it knows .*default, .*smollm"):
        build_tokenizer(gpt2("viking", merges=("a b",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": [1, 1]}, "2 token types"),
        ({"scores": [0.0]}, "1 token scores"),
        ({"merges": ()}, "without merges"),
        ({"merges": ("a",)}, "'a', which is not a pair"),
        ({"merges": ("a zz",)}, "do not fit its tokens"),
        ({"special_ids": [10_000]}, "beyond its"),
        ({"tokens": ["a", "a"], "types": ()}, "2 tokens with the same text 'a'"),
        ({"model": "llama", "merges": ()}, "neither scores nor merges"),
    ],
)
def test_inconsistent_metadata(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        build_tokenizer(replace(gpt2("gpt-2", merges=("a b",)), **fields))
