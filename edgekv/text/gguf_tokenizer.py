"""The tokenizer of a GGUF file, rebuilt from its metadata.

GGUF stores a vocabulary but not the program that uses it: `tokenizer.ggml.model` says which kind it is and, for
byte-level BPE, `tokenizer.ggml.pre` names the rule that splits text into words. Both kinds are rebuilt here from what
their makers publish:

    gpt2    byte-level BPE (GPT-2); the rule of each known `pre` is in _SPLITS
    llama   SentencePiece BPE with scores: a merge is any pair whose union is in the vocabulary, best score first;
            spaces are U+2581, one is put in front of a text, what no piece covers is spelt in byte tokens

Ids were compared with the reference encodings that llama.cpp ships (made with the models' own tokenizers) and with
llama.cpp itself. Two things differ from llama.cpp, both towards the models' own tokenizers: Qwen's NFC normalisation is
done, and the padding rows that converters name [PAD151646] are not recognised in text.

Llama 3's words are taken whole where a file of them says smaug-bpe, too (SmolLM3, fine-tunes of Llama 3): so the models
were trained; llama.cpp merges there.

A `pre` that is not listed is refused, not guessed: a wrong splitting rule gives a model that works, only worse.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from edgekv.errors import BadCheckpoint, UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF token types; 5 is unused, 6 is a byte
_PADDING = re.compile(r"\[PAD\d+\]")
_SPACE = "\u2581"
_BARE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class GGUFVocab:
    """The `tokenizer.ggml.*` metadata of a GGUF file.

    Attributes:
        model, pre: the kind of tokenizer, and the splitting rule of a byte-level one ("" if the file has none).
        tokens, types: text and token type of each id; no types means that all are normal.
        merges: "left right" pairs in order; scores: one a token. Each kind needs one of the two.
        add_bos: what the file says about a leading BOS. Not used here: the chat template decides.
        add_space_prefix: whether SentencePiece's leading space is added; None means yes.
        special_ids: ids that the metadata names (BOS, EOS, EOT, ...), and marks of turns: special whatever their type.
        marks_strip: whether special tokens swallow the white space behind them, which GGUF does not store: Phi-3's do,
            except _BARE (llama.cpp knows it by the model's name).
    """

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int] = ()
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    special_ids: Sequence[int] = ()
    marks_strip: bool = False

    def __post_init__(self) -> None:
        for name in ("types", "scores"):
            count = len(getattr(self, name))
            if count not in (0, len(self.tokens)):
                raise BadCheckpoint(f"The GGUF file has {len(self.tokens)} tokens but {count} token {name}.")
        if len(set(self.tokens)) != len(self.tokens):
            text, count = Counter(self.tokens).most_common(1)[0]
            raise BadCheckpoint(f"The GGUF file has {count} tokens with the same text {text!r}.")
        if any(not 0 <= number < len(self.tokens) for number in self.special_ids):
            raise BadCheckpoint(f"The GGUF file names special tokens beyond its {len(self.tokens)} tokens.")

    def type_of(self, number: int) -> int:
        """The token type of an id."""
        return self.types[number] if self.types else _NORMAL


def build_tokenizer(vocab: GGUFVocab) -> Any:
    """A `tokenizers.Tokenizer` with the ids of the file.

    Raises:
        UnsupportedModel: the kind of tokenizer, or its splitting rule, is not one of those known here.
        BadCheckpoint: merges or scores are missing or do not fit the tokens.
    """
    if reason := unknown_kind(vocab.model, vocab.pre):
        raise UnsupportedModel(f"The GGUF file {reason}")
    tokenizer = _BUILDERS[vocab.model](vocab)
    tokenizer.add_special_tokens([_special(content, vocab) for content in _special_contents(vocab)])
    tokenizer.add_tokens(
        [tokenizers.AddedToken(content, normalized=False, special=False) for content in _plain_contents(vocab)]
    )
    return tokenizer


def unknown_kind(model: str, pre: str) -> str:
    """Why a vocabulary of this kind and splitting rule is not read, what is said of its file; empty: it is read."""
    if model not in _BUILDERS:
        return (
            f"has a tokenizer of type {model!r}; edgekv reads {' and '.join(_BUILDERS)}. "
            "Use a checkpoint that comes with a tokenizer.json."
        )
    if model == "llama" or pre in _SPLITS:
        return ""
    known = ", ".join(sorted(filter(None, _SPLITS)))
    return (
        f"splits text by the rule {pre!r}, which edgekv does not know (it knows {known}). "
        "Use a checkpoint that comes with a tokenizer.json."
    )


# Splitting rules of byte-level BPE ------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_BEFORE_WORD, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_ENDS = rf"{_UPPER}*{_LOWER}+", rf"{_UPPER}+{_LOWER}*"  # a word begins anew where its letters turn to capitals
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = "|".join([*(f"{_BEFORE_WORD}{word}{_CONTRACTIONS}?" for word in _WORD_ENDS), rf"\p{{N}}{{1,3}}|{_CASED_REST}"])
_TEKKEN = "|".join([*(f"{_BEFORE_WORD}{word}" for word in _WORD_ENDS), rf"\p{{N}}|{_CASED_REST}"])


@dataclass(frozen=True)
class _Split:
    """How a family splits text before the merges: by a pattern, or as GPT-2 does if there is none."""

    pattern: str = ""
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is taken as it is, without merging


_SPLITS = {
    **dict.fromkeys(("", "default", "gpt-2", "mpt"), _Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Split(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _Split(_LLAMA3, whole_words=True)),
    "gpt-4o": _Split(_GPT4O),
    "tekken": _Split(_TEKKEN, whole_words=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(_QWEN2, nfc=True)),
}


def _byte_level(vocab: GGUFVocab) -> Any:
    split = _SPLITS[vocab.pre]
    if not vocab.merges:
        raise BadCheckpoint("The GGUF file has a byte-level vocabulary without merges, so no text can be encoded.")
    tokenizer = tokenizers.Tokenizer(_bpe(vocab, _listed_merges(vocab), ignore_merges=split.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if split.nfc else None
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# SentencePiece --------------------------------------------------------------------------------------------------------


def _sentencepiece(vocab: GGUFVocab) -> Any:
    if not vocab.merges and not vocab.scores:
        raise BadCheckpoint("The GGUF file has a SentencePiece vocabulary with neither scores nor merges.")
    merges = _listed_merges(vocab) if vocab.merges else _scored_merges(vocab)
    unknown = next((text for number, text in enumerate(vocab.tokens) if vocab.type_of(number) == _UNKNOWN), None)
    tokenizer = tokenizers.Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocab.add_space_prefix is not False
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _scored_merges(vocab: GGUFVocab) -> list[tuple[str, str]]:
    """Every way to make a normal piece out of two others, the best-scored piece first."""
    pieces = {text: number for number, text in enumerate(vocab.tokens) if vocab.type_of(number) == _NORMAL}
    ranked = sorted(pieces, key=lambda text: -vocab.scores[pieces[text]])
    return [
        (text[:cut], text[cut:])
        for text in ranked
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By the kind of tokenizer."""

# Both -----------------------------------------------------------------------------------------------------------------


def _bpe(vocab: GGUFVocab, merges: list[tuple[str, str]], **options: Any) -> Any:
    ids = {text: number for number, text in enumerate(vocab.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"The merges of the GGUF file do not fit its tokens: {error}.") from None


def _listed_merges(vocab: GGUFVocab) -> list[tuple[str, str]]:
    merges = []
    for merge in vocab.merges:
        left, found, right = merge.partition(" ")
        if not (left and found and right):
            raise BadCheckpoint(f"The GGUF file has the merge {merge!r}, which is not a pair of tokens.")
        merges.append((left, right))
    return merges


def _special_contents(vocab: GGUFVocab) -> Iterator[str]:
    named = frozenset(vocab.special_ids)
    for number, content in enumerate(vocab.tokens):
        if content and (number in named or vocab.type_of(number) in (_CONTROL, _UNKNOWN)):
            yield content


def _plain_contents(vocab: GGUFVocab) -> Iterator[str]:
    named = frozenset(vocab.special_ids)
    for number, content in enumerate(vocab.tokens):
        if (
            content
            and vocab.type_of(number) == _USER_DEFINED
            and number not in named
            and not _PADDING.fullmatch(content)
        ):
            yield content


def _special(content: str, vocab: GGUFVocab) -> Any:
    strips = vocab.marks_strip and content not in _BARE
    return tokenizers.AddedToken(content, normalized=False, special=True, rstrip=strips)
