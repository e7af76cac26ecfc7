"""Streamed answers at a terminal's edge."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from edgekv.cli.wrap import WordWrap


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(lambda: width)
    return "".join(map(wrap.put, pieces)) + wrap.close()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two", "three four"]),
        ("one two three", ["one two", "three"]),
        ("exactly10c and", ["exactly10c", "and"]),
        ("a verylongwordthatisnowhere b", ["a verylongwordthatisnowhere b"]),
        ("one\n\n  two  three\n", ["one", "", "  two", "three", ""]),
        (
            "```\nprint(one, two, three)\n```\none two three",
            ["```", "print(one, two, three)", "```", "one two", "three"],
        ),
        ("\u6f22\u5b57\u6f22\u5b57\u6f22\u5b57", ["\u6f22\u5b57\u6f22\u5b57\u6f22", "\u5b57"]),
        ("trailing  ", ["trailing  "]),
        ("", [""]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str]) -> None:
    """White space where a line breaks is the break; all else stays, code and what is longer than a line too."""
    assert wrapped([text], 10).split("\n") == lines
    assert wrapped(list(text), 10).split("\n") == lines


TEXTS = st.text(st.sampled_from("ab \n`\u6f22\u00e9\U0001f600\t."), max_size=120)


@given(TEXTS, st.integers(2, 30), st.data())
def test_nothing_is_lost_and_pieces_make_no_difference(text: str, width: int, data: st.DataObject) -> None:
    """Every word is written, in order, and no line of whole words is longer than the terminal."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = wrapped(pieces, width)
    assert found == wrapped([text], width)
    assert "".join(found.split()) == "".join(text.split())
    if "```" not in text and all(cell_len(word) < width for word in re.split(r"\s|\u6f22", text)):
        assert all(cell_len(line.rstrip()) <= width for line in found.split("\n"))


def test_a_word_is_held_until_it_is_complete() -> None:
    """And no longer: one letter of the next is not waited for where letters stand alone."""
    wrap = WordWrap(lambda: 20)
    pieces = ("Hel", "lo", " wor", "ld.", "\n", "\u6f22", "x" * 25)
    assert [wrap.put(piece) for piece in pieces] == ["", "", "Hello", "", " world.\n", "\u6f22", "x" * 25]
