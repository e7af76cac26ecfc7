"""What a conversation is, as values: a chat's cache and the text it stands for, a whole session.

These cross between the running session (session.py), the place where a cache waits (parking.py) and the file
(session_file.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from edgekv.conversation import as_messages
from edgekv.encoded import EncodedText
from edgekv.engines.base import EngineState
from edgekv.generate import TimelineState
from edgekv.sampling import SamplingOptions
from edgekv.text.precheck import OVERFLOWS, Overflow
from edgekv.text.template import Message


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
            "departed": self.chat.known.departed.to_json(),
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
