"""Places at the cache by session_id."""

from __future__ import annotations

import weakref

from edgekv.chat import Dialogue
from edgekv.server.dialogues import Dialogues


def begun(dialogues: Dialogues, name: str, seed: int | None = None) -> Dialogue:
    """The conversation of that name, with an answer that has begun."""
    dialogue = dialogues.of(name, seed)
    assert dialogue is not None
    dialogues.keep(name)
    return dialogue


def test_the_least_recently_used_is_forgotten() -> None:
    """A name keeps its place while it is among the newest; random streams are fresh and follow the seed."""
    dialogues = Dialogues(2)
    a = begun(dialogues, "a", 1)
    begun(dialogues, "b")
    again = begun(dialogues, "a", 1)
    assert again.seat is a.seat
    assert again.random.random() == a.random.random()
    begun(dialogues, "c")
    assert len(dialogues) == 2
    seat = weakref.ref(a.seat)
    del a, again
    assert seat() is begun(dialogues, "a").seat
    begun(dialogues, "b")
    begun(dialogues, "c")
    assert seat() is None
    assert dialogues.of(None, 1) is None
    dialogues.keep(None)
    assert len(dialogues) == 2


def test_who_has_no_answer_pushes_nobody_out() -> None:
    """A request that is refused leaves nothing behind; two that wait under one new name share a place."""
    dialogues = Dialogues(1)
    a = begun(dialogues, "a")
    waiting = [dialogues.of("b", None) for _ in range(2)]
    assert len({id(dialogue.seat) for dialogue in waiting if dialogue}) == 1
    assert dialogues.of("a", None).seat is a.seat  # type: ignore[union-attr]
    assert len(dialogues) == 1
    dialogues.keep("b")
    assert dialogues.of("a", None).seat is a.seat  # type: ignore[union-attr]  # forgotten, but its request still waits
    assert len(dialogues) == 1
