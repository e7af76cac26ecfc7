"""Conversations by `session_id`: each has a place at the cache of its own, the least recently used ones are forgotten.

A client still sends the whole conversation; the name only says whose it is, so that its cache waits (edgekv/parking.py)
while others have their turn. One that has been forgotten is read again, and answered the same.
"""

from __future__ import annotations

from collections import OrderedDict

from edgekv.chat import Dialogue
from edgekv.session_state import Seat


class Dialogues:
    """At most `limit` places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seats: OrderedDict[str, Seat] = OrderedDict()

    def of(self, session_id: str | None, seed: int | None) -> Dialogue | None:
        """The conversation of that name, with a fresh random stream; None without a name."""
        if session_id is None:
            return None
        dialogue = Dialogue(seed)
        dialogue.seat = self._seats.setdefault(session_id, dialogue.seat)
        self._seats.move_to_end(session_id)
        if len(self._seats) > self._limit:
            self._seats.popitem(last=False)
        return dialogue

    def __len__(self) -> int:
        return len(self._seats)
