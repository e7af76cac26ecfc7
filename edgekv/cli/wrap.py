"""Streamed text broken between words at a terminal's edge, where the terminal itself would break inside them.

What has been written cannot be taken back, so a word is held until it is complete: the text lags by at most one word.
Chinese, Japanese and Korean have no spaces, and a line may break between any two of their (wide) letters. Code between
fences of three backticks stays as it is, to be copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import category

from rich.cells import cell_len

_RUNS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """One answer's way to the terminal.

    Args:
        width: of the terminal in columns, asked at each word, since windows are resized.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._gap = self._word = ""  # of this line, not yet written
        self._line = ""  # what this line began with
        self._code = self._long = False  # inside code; inside a word that is longer than a line

    def put(self, text: str) -> str:
        """What can be written of the text so far."""
        return "".join(map(self._run, _RUNS.findall(text)))

    def close(self) -> str:
        """The rest."""
        return self._complete() + self._given_up()

    def _run(self, run: str) -> str:
        if run == "\n":
            written = self.close() + run
            self._code ^= self._line.startswith("```")
            self._column, self._line, self._long = 0, "", False
            return written
        if run.isspace():
            written = self._complete()
            self._gap, self._long = self._gap + run, False
            return written
        return "".join(map(self._letter, run))

    def _letter(self, letter: str) -> str:
        if not _stands_alone(letter):
            self._word += letter
            self._long = self._long or cell_len(self._word) > self._width()
            return self._complete() if self._code or self._long else ""
        before, self._word = self._complete(), letter
        return before + self._complete()

    def _complete(self) -> str:
        """The word that is held, behind its gap or on a new line."""
        if not self._word:
            return ""
        gap, word, width = self._gap, self._word, self._width()
        self._gap = self._word = ""
        self._line += (gap + word)[: max(3 - len(self._line), 0)]
        column = self._column + cell_len(gap) + cell_len(word)
        if self._column and column > width and not self._code and not self._long:
            self._column = cell_len(word)
            return "\n" + word
        self._column = column if column <= width else column % width
        return gap + word

    def _given_up(self) -> str:
        """White space at the end of a line."""
        gap, self._gap = self._gap, ""
        return gap


def _stands_alone(letter: str) -> bool:
    return cell_len(letter) == 2 and category(letter) == "Lo"
