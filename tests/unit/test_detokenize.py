"""Streaming text: the pieces join to the whole decode, nothing is taken back, no stop string leaks (case C22)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.pieces import pieces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgekv.errors import InvalidOption
from edgekv.text.detokenize import StreamDetokenizer
from edgekv.text.tokenizer import Tokenizer

FILE = Path(__file__).parents[1] / "data" / "llama-fp16" / "tokenizer.json"


BYTES = Tokenizer.from_file(FILE)
PIECES = Tokenizer(pieces())
EOS, EOS_PIECE = 2, 265


def byte_ids() -> list[int]:
    """The token of each byte: GPT-2's alphabet spells printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    ids = [BYTES.token_id(spelling[byte]) for byte in range(256)]
    assert None not in ids
    return [number for number in ids if number is not None]


BYTE_IDS = byte_ids()

TEXT = st.lists(
    st.sampled_from(["hello", " ", "\n", "👨‍👩‍👧‍👦", "🏳️‍🌈", "你好", "é", "\ufffd", "ab", "aab"]) | st.text(max_size=4),
    max_size=6,
).map("".join)
ENCODED = TEXT.map(BYTES.encode)
RAW = st.binary(max_size=12).map(lambda data: [BYTE_IDS[byte] for byte in data])
CUT_UTF8 = TEXT.map(lambda text: [BYTE_IDS[byte] for byte in text.encode()]).flatmap(
    lambda ids: st.integers(0, len(ids)).map(lambda cut: ids[cut:])
)
ANY = st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=8)
STREAM = st.lists(ENCODED | RAW | CUT_UTF8 | ANY | st.just([EOS]), max_size=4).map(
    lambda parts: [number for part in parts for number in part]
)
PIECE_STREAM = st.lists(
    st.integers(250, 266) | st.sampled_from([0xF0, 0x9F, 0xA6, 0x99, 0xE4, 0xBD, 0xA0, 0x0A, 0xFF]), max_size=14
)


def check(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> StreamDetokenizer:
    """Stream the ids and compare every step with whole decodes."""
    stream, joined, seen = StreamDetokenizer(tokenizer, stop), "", 0
    whole = spelled_whole(tokenizer, ids)
    ends = [(whole.find(text) + len(text), whole.find(text)) for text in stop if text in whole]
    expected = (whole[: min(ends)[1]] if ends else whole).rstrip("\ufffd")
    for token in ids:
        seen += not stream.stopped
        joined += stream.add(token)
        assert expected.startswith(joined)
        assert stream.shown == joined
        assert not joined.endswith("\ufffd")
        assert stream.shown_tokens == longest_shown(tokenizer, ids[:seen], joined)
    joined += stream.finish()
    assert joined == stream.shown == expected
    assert stream.stopped == bool(ends)
    assert stream.shown_tokens == longest_shown(tokenizer, ids[:seen], joined)
    assert stream.finish() == ""
    return stream


def spelled_whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The decode, without what is behind the last whole character of byte tokens: they are spelled all or none."""
    text_ids = [number for number in ids if tokenizer.is_text(number)]
    run = next((n for n, number in enumerate(reversed(text_ids)) if number not in tokenizer.byte_tokens), len(text_ids))
    last = bytes(text_ids[len(text_ids) - run :])  # the ids of these tokens are the bytes
    cuts = [cut for cut in range(min(4, run + 1)) if is_utf8(last[: run - cut])]
    return tokenizer.decode(text_ids[: len(text_ids) - cuts[0]]) if cuts else tokenizer.decode(text_ids)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def longest_shown(tokenizer: Tokenizer, ids: Sequence[int], shown: str) -> int:
    return max(count for count in range(len(ids) + 1) if shown.startswith(tokenizer.decode(ids[:count])))


@given(STREAM)
@settings(deadline=None, max_examples=200)
@example([BYTE_IDS[byte] for byte in "🦙".encode()[:3]])
@example([BYTE_IDS[byte] for byte in b"\xe4\xbd" + "你".encode() + b"\xff"])
@example([BYTE_IDS[byte] for byte in b"a\x99\x99" + "🦙".encode()[:2]])
@example([BYTE_IDS[byte] for byte in b"a\x99\xff\x99b\x99\x99"])
def test_joined_stream_is_the_whole_decode(ids: list[int]) -> None:
    """case C22"""
    check(BYTES, ids)


@given(PIECE_STREAM)
@settings(deadline=None, max_examples=200)
@example([256, 256, 258])
@example([0xE4, 0xBD, 0xA0, 0xFF, 259])
@example([259, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xA6])
@example([0xE4, 0xBD, 0xA0, EOS_PIECE, 0xF0, 0x9F])
@example([0x99, 0xFF, 0x99, 0xE4])
@example([263, 263, 262, 262])
def test_joined_stream_is_the_whole_decode_in_pieces(ids: list[int]) -> None:
    """case C22: leading spaces, and runs of byte tokens that are decoded as a whole or not at all."""
    check(PIECES, ids)


@given(STREAM, st.lists(st.sampled_from(["\n", "ab", "aab", "abc", "hello", "\ufffd", "你", "好é"]), max_size=3))
@settings(deadline=None, max_examples=200)
def test_stop_strings_never_leak(ids: list[int], stop: list[str]) -> None:
    """case C22"""
    check(BYTES, ids, stop)


@given(PIECE_STREAM, st.sampled_from(["a", " a", "a b", "\n", "\ufffd", "  "]))
@settings(deadline=None)
def test_stop_strings_never_leak_in_pieces(ids: list[int], stop: str) -> None:
    """case C22"""
    check(PIECES, ids, [stop])


def test_an_emoji_comes_in_one_piece() -> None:
    """case C22"""
    stream = StreamDetokenizer(BYTES)
    pieces = [stream.add(BYTE_IDS[byte]) for byte in "🦙é".encode()]
    assert pieces == ["", "", "", "🦙", "", "é"]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES])
def test_a_cut_inside_a_character_ends_before_it(tokenizer: Tokenizer) -> None:
    """A family is seven characters of three or four bytes. Wherever it is cut, whole characters are shown, and tokens
    are counted that give just these."""
    text = "好👨‍👩‍👧‍👦"
    bytes_of = BYTE_IDS if tokenizer is BYTES else range(256)
    for cut in range(len(text.encode()) + 1):
        stream, data = StreamDetokenizer(tokenizer), text.encode()[:cut]
        ids = [bytes_of[byte] for byte in data]
        shown = "".join(map(stream.add, ids)) + stream.finish()
        assert shown == stream.shown == data.decode(errors="ignore")
        assert tokenizer.decode(ids[: stream.shown_tokens]) == shown


def test_text_is_not_held_back_without_need() -> None:
    stream = StreamDetokenizer(BYTES, stop=["zzz"])
    text = "hello world, plainly"
    pieces = [stream.add(number) for number in BYTES.encode(text)]
    assert "".join(pieces) == text
    assert all(pieces)


def test_half_a_stop_string_waits_and_is_given_up() -> None:
    """case C22"""
    stream = StreamDetokenizer(BYTES, stop=["</end>"])
    assert [stream.add(number) for number in (BYTES.encode(char)[0] for char in "a</x")] == ["a", "", "", "</x"]
    assert [stream.add(BYTES.encode(char)[0]) for char in "</"] == ["", ""]
    assert stream.finish() == "</"


def test_after_the_stop_string_nothing_comes() -> None:
    stream = check(BYTES, BYTES.encode("one STOP two"), stop=["STOP"])
    assert stream.stopped
    assert (stream.shown, stream.add(BYTES.encode("x")[0]), stream.finish()) == ("one ", "", "")


def test_the_stop_string_completed_first_counts() -> None:
    """However the text is cut into tokens."""
    ids = BYTES.encode("xabc")
    for stop in (["abc", "b"], ["b", "abc"]):
        assert check(BYTES, ids, stop).shown == "xa"
    assert check(BYTES, ids, ["bc", "abc"]).shown == "x"


def test_shown_tokens_count_the_special_ones() -> None:
    """The end-of-turn token belongs to what was shown, so a cache cut there still holds it."""
    ids = [*BYTES.encode("done."), EOS]
    assert check(BYTES, ids).shown_tokens == len(ids)
    assert check(PIECES, [EOS_PIECE, 258, EOS_PIECE]).shown_tokens == 3


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidOption, match="empty"):
        StreamDetokenizer(BYTES, stop=["x", ""])


def test_a_token_costs_the_same_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode sees a handful of tokens, for prose and for broken bytes alike."""
    stream, longest = StreamDetokenizer(BYTES, stop=["never"]), 0
    decode = BYTES.decode

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(BYTES, "decode", watched)
    for token in [*BYTES.encode("some words 你好 🦙 ") * 50, *[BYTE_IDS[0x99]] * 300, *[BYTE_IDS[0xF0]] * 300]:
        stream.add(token)
    assert longest <= 8


def test_a_long_stop_string_takes_no_more_than_itself() -> None:
    """A client may send one of a megabyte; all its beginnings together would be terabytes."""
    tracemalloc.start()
    stream = StreamDetokenizer(BYTES, ["a" * 1_000_000])
    assert stream.add(BYTES.encode("b")[0]) == "b"
    assert stream.add(BYTES.encode("a")[0]) == ""
    assert stream.finish() == "a"
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()
