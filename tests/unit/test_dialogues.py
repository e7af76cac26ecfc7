"""Places at the cache by session_id."""

from __future__ import annotations

from edgekv.server.dialogues import Dialogues


def test_the_least_recently_used_is_forgotten() -> None:
    """A name keeps its place while it is among the newest; random streams are fresh and follow the seed."""
    dialogues = Dialogues(2)
    a = dialogues.of("a", 1)
    dialogues.of("b", None)
    again = dialogues.of("a", 1)
    assert a is not None
    assert again is not None
    assert again.seat is a.seat
    assert again.random.random() == a.random.random()
    dialogues.of("c", None)
    assert len(dialogues) == 2
    kept, fresh = dialogues.of("a", None), dialogues.of("b", None)
    assert kept is not None
    assert fresh is not None
    assert kept.seat is a.seat
    assert dialogues.of(None, 1) is None
