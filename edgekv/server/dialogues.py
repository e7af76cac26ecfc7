"""Conversations by `session_id`: each has a place at the cache of its own, the least recently used ones are forgotten.

A client still sends the whole conversation; the name only says whose it is, so that its cache waits (edgekv/parking.py)
while others have their turn. One that has been forgotten is read again, and answered the same. Who is refused pushes
nobody out.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from edgekv.chat import Dialogue
from edgekv.session_state import Seat


class Dialogues:
    """Keeps at most `limit` places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Seat] = OrderedDict()
        self._seats: WeakValueDictionary[str, Seat] = WeakValueDictionary()  # these, and those of who waits in line

    def of(self, session_id: str | None, seed: int | None) -> Dialogue | None:
        """The conversation of that name, with a fresh random stream; None without a name."""
        if session_id is None:
            return None
        dialogue = Dialogue(seed)
        dialogue.seat = self._seats.setdefault(session_id, dialogue.seat)
        return dialogue

    def keep(self, session_id: str | None) -> None:
        """A conversation's answer has begun: from now on its place is kept, and the oldest one's may not be."""
        if session_id is None:
            return
        self._kept[session_id] = self._seats[session_id]
        self._kept.move_to_end(session_id)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)
