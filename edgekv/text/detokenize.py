"""Text from a stream of tokens, as early as it is certain and never later taken back.

A token is not a piece of text: a character may need several, a leading space may depend on the token before. So a
token is decoded together with a few before it, and only what the whole sequence is bound to decode to is let out:

    ids       ... | context | pending      cut: up to here decode(ids) is settled; pending: tokens since
    text          decode(context + pending) less decode(context)

Held back are: a final U+FFFD, which the next byte may still turn into a character; a run of byte tokens of a
SentencePiece vocabulary, which the decoder spells as a whole or not at all; and the end of the text while it could be
the beginning of a stop string. All the pieces together equal the whole decode, or the whole decode up to the first
stop string, less what is no character at its end: wherever an answer is cut, its text ends with a whole character. (A
model that writes U+FFFD itself as the last character loses it. Bytes that are no character in the middle of an answer
are a U+FFFD each, as in every decoder: no later token makes them one.) A token costs the decoding of a handful of
tokens, whatever the length of the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.errors import InvalidOption
from edgekv.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST = 4  # bytes of a character in UTF-8


@dataclass(frozen=True)
class _Cut:
    """A place in the stream where decode(ids[:tokens]) is `chars` long and no later token changes it."""

    tokens: int = 0
    chars: int = 0
    context: tuple[int, ...] = ()  # the text tokens just before, without which the next could lose its space
    context_chars: int = 0


class StreamDetokenizer:
    """Turns token ids into text as they come.

    Args:
        tokenizer: decodes.
        stop: strings that end the text. The one completed first counts, of several completed at once the longest.

    Raises:
        InvalidOption: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._gate = _StopGate(stop)
        self._ids: list[int] = []
        self._cuts = [_Cut()]
        self._pending: list[int] = []  # text tokens since the last cut
        self._settled = 0  # characters of the pending text that have gone to the gate

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; tokens after that are ignored."""
        return self._gate.stopped

    @property
    def shown(self) -> str:
        """All the text let out so far."""
        return "".join(self._gate.passed)

    @property
    def shown_tokens(self) -> int:
        """The largest n for which decode(ids[:n]) is a beginning of `shown`."""
        shown = self.shown
        index = bisect_right(self._cuts, len(shown), key=lambda cut: cut.chars)
        cut = self._cuts[index - 1]
        end = self._cuts[index].tokens if index < len(self._cuts) else len(self._ids)
        for count in range(end, cut.tokens, -1):
            if shown.startswith(self._after(cut, self._ids[cut.tokens : count]), cut.chars):
                return count
        return cut.tokens

    def add(self, token_id: int) -> str:
        """Take one token; returns the text that has become certain, often ''."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._gate.put(self._advance(token_id))

    def finish(self) -> str:
        """No more tokens come: returns the rest of the text, without a character that is not whole."""
        if self.stopped:
            return ""
        text = self._whole()
        new, self._settled = text[self._settled :], len(text)
        return self._gate.put(new) + self._gate.close()

    def _whole(self) -> str:
        """The pending text. A run of byte tokens is spelled as a whole or not at all, so the bytes of a character that
        is not whole are left out before."""
        cut, pending = self._cuts[-1], self._pending
        in_run = bool(pending) and pending[-1] in self._tokenizer.byte_tokens
        fewer = range(min(_LONGEST, len(pending) + 1) if in_run else 0)
        texts = (self._after(cut, pending[: len(pending) - count]) for count in fewer)
        return next((text for text in texts if not text.endswith(_REPLACEMENT)), self._after(cut, pending))

    def _advance(self, token_id: int) -> str:
        """The text that this token settles."""
        if not self._tokenizer.is_text(token_id):
            return ""
        self._pending.append(token_id)
        if token_id in self._tokenizer.byte_tokens:
            return ""
        text = self._after(self._cuts[-1], self._pending)
        certain = text.removesuffix(_REPLACEMENT)
        new, self._settled = certain[self._settled :], len(certain)
        if certain == text:
            self._cut_here(text)
        elif len(self._pending) > 1:
            self._cut_before_last(text)
        return new

    def _after(self, cut: _Cut, ids: Sequence[int]) -> str:
        """What `ids` add to the text when they follow a cut."""
        return self._tokenizer.decode([*cut.context, *ids])[cut.context_chars :]

    def _cut_here(self, text: str) -> None:
        context = tuple(self._pending)
        chars = self._cuts[-1].chars + len(text)
        self._cuts.append(_Cut(len(self._ids), chars, context, len(self._tokenizer.decode(context))))
        self._pending, self._settled = [], 0

    def _cut_before_last(self, text: str) -> None:
        """The text ends in U+FFFD. If the last token does not continue what came before it, cut there.

        It does not if the two sides decode separately to the same: an unfinished character that the last token's bytes
        went on with would have counted as one U+FFFD in the whole, and as two apart.
        """
        *before, final = self._pending
        head, tail = self._after(self._cuts[-1], before), self._tokenizer.decode([final])
        if head + tail == text:
            self._cuts.append(_Cut(len(self._ids) - 1, self._cuts[-1].chars + len(head)))
            self._pending, self._settled = [final], len(tail) - 1


class _StopGate:
    """Lets text through up to a stop string, and keeps back an end that may become one. What has passed never ends in
    U+FFFD."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidOption("A stop string is empty, so every answer would be: leave it out.")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.passed: list[str] = []
        self.stopped = False

    def put(self, text: str) -> str:
        self._held += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._pass(min(found)[1])
        return self._pass(len(self._held) - self._possible_beginning())

    def close(self) -> str:
        return "" if self.stopped else self._pass(len(self._held))

    def _possible_beginning(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        sizes = range(min(self._longest - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stop)), 0)

    def _pass(self, size: int) -> str:
        text = self._held[:size].rstrip(_REPLACEMENT)
        self._held = self._held[len(text) :]
        if text:
            self.passed.append(text)
        return text
