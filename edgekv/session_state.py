"""What a conversation is, as values: the text that cached tokens stand for, a chat's cache, a whole session.

These cross between the running session (session.py), the place where a cache waits (parking.py) and the file
(session_file.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from edgekv.conversation import as_messages
from edgekv.engines.base import EngineState
from edgekv.generate import TimelineState
from edgekv.sampling import SamplingOptions
from edgekv.text.precheck import OVERFLOWS, Overflow
from edgekv.text.template import Message


@dataclass(frozen=True)
class EncodedText:
    """Text and its tokens, with the character at which each token starts."""

    text: str = ""
    ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def token_at(self, offset: int) -> int:
        """Index of the first token that starts at or after a character."""
        return bisect_left(self.starts, offset)

    def shared_with(self, text: str, control_ids: frozenset[int | None]) -> EncodedText:
        """The part that another text begins with. Where they differ, it ends before the last control token they share:
        only there do the tokens on either side not depend on one another."""
        if text.startswith(self.text):
            return self
        shared = bisect_right(self.starts, _common_chars(self.text, text))
        cut = next((index for index in range(shared - 1, 0, -1) if self._may_end_before(index, control_ids)), 0)
        return EncodedText(self.text[: self.starts[cut]], self.ids[:cut], self.starts[:cut]) if cut else EncodedText()

    def _may_end_before(self, index: int, control_ids: frozenset[int | None]) -> bool:
        """Whether a token is a control token whose place is known. Of an answer's tokens only the first one's is: a
        model may write a control token in the middle of its answer, where it is no text."""
        return self.ids[index] in control_ids and self.starts[index] > self.starts[index - 1]


@dataclass(frozen=True)
class ChatState:
    """What a dialogue has in a cache, and the text that its tokens stand for."""

    timeline: TimelineState
    known: EncodedText = field(default_factory=EncodedText)

    @classmethod
    def empty(cls) -> ChatState:
        """Nothing in the cache."""
        return cls(TimelineState(EngineState((), (), (), 0), (), 0))

    def with_rows_of(self, engine: EngineState) -> ChatState:
        """The same with its rows held elsewhere."""
        return replace(self, timeline=replace(self.timeline, engine=engine))


class Seat:
    """One dialogue's place at a chat: what it had in the cache, while another dialogue has the cache."""

    def __init__(self) -> None:
        self.parked: ChatState | None = None


@dataclass(frozen=True)
class SessionState:
    """A whole session: words, options, the random stream, and the cache."""

    messages: tuple[Message, ...]
    sampling: SamplingOptions
    overflow: Overflow
    random: dict[str, Any]  # the state of numpy's bit generator
    chat: ChatState
    note: str = ""  # what the model noted down of messages that it no longer sees
    noted: int = 0  # how many messages after the system prompt that note is about

    def dialogue(self) -> dict[str, Any]:
        """All but the cache's numbers, as JSON values."""
        return {
            "messages": list(self.messages),
            "sampling": asdict(self.sampling),
            "overflow": self.overflow,
            "random": self.random,
            "note": self.note,
            "noted": self.noted,
            "text": self.chat.known.text,
            "pinned": self.chat.timeline.pinned,
        }

    @classmethod
    def from_dialogue(cls, data: dict[str, Any], chat: ChatState) -> SessionState:
        """The inverse of `dialogue`.

        Raises:
            KeyError, TypeError, ValueError: it is not what `dialogue` gives.
        """
        options = data["sampling"]
        sampling = SamplingOptions(**(options | {"stop": tuple(options["stop"])}))
        np.random.default_rng().bit_generator.state = data["random"]  # refuses what is no such state
        if data["overflow"] not in OVERFLOWS:
            raise ValueError(f"overflow {data['overflow']}")
        messages = tuple(as_messages(data["messages"]))
        return cls(messages, sampling, data["overflow"], data["random"], chat, str(data["note"]), int(data["noted"]))


def _common_chars(first: str, second: str) -> int:
    """Length of the common beginning of two texts, by bisection: comparing slices is fast, characters are not."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
