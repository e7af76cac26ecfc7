"""Conversations in files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekv.conversation import FORMAT, FORMAT_VERSION, read_conversation, write_conversation
from edgekv.errors import InvalidOption, StorageError
from edgekv.text.prompt import ROLES
from edgekv.text.template import Message

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Warum?\r\n\t«是» 🙂 \x00 <|im_end|>"},
    {"role": "assistant", "content": ""},
]


def whole(**changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "messages": list(TALK)} | changes


def test_roundtrip(tmp_path: Path) -> None:
    """Every character comes back, and the file is readable by people."""
    write_conversation(tmp_path / "talk.json", TALK)
    assert read_conversation(tmp_path / "talk.json") == TALK
    assert "«是» 🙂" in (tmp_path / "talk.json").read_text("utf-8")
    assert os.listdir(tmp_path) == ["talk.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(ROLES), st.text()), max_size=5))
def test_any_messages_come_back(tmp_path: Path, turns: list[tuple[str, str]]) -> None:
    """Property: write, then read, is the identity."""
    messages = [Message(role=role, content=content) for role, content in turns]
    write_conversation(tmp_path / "talk.json", messages)
    assert read_conversation(tmp_path / "talk.json") == messages


def test_half_a_surrogate_pair_comes_back(tmp_path: Path) -> None:
    """A byte that is no UTF-8, read from a pipe: JSON has an escape for it, UTF-8 has none."""
    messages = [Message(role="system", content="caf\udce9 \U0001f680")]
    write_conversation(tmp_path / "talk.json", messages)
    assert read_conversation(tmp_path / "talk.json") == messages


def test_unknown_fields_of_a_message_are_left_out(tmp_path: Path) -> None:
    """Only role and content go on to the template."""
    (tmp_path / "x").write_text(json.dumps(whole(messages=[{"role": "user", "content": "a", "tool_calls": [1]}])))
    assert read_conversation(tmp_path / "x") == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "data",
    [
        [], None, 3, "text", {}, whole(format="other"), whole(format_version=2), whole(format_version="1"),
        whole(messages=None), whole(messages={}), whole(messages=["hello"]), whole(messages=[{"role": "user"}]),
        whole(messages=[{"content": "x"}]), whole(messages=[{"role": "user", "content": None}]),
        whole(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        whole(messages=[{"role": "User", "content": "x"}]), whole(messages=[{"role": "<|user|>", "content": "x"}]),
        whole(messages=[{"role": ["user"], "content": "x"}]), whole(messages=[*TALK, None]),
    ],
)  # fmt: skip
def test_what_is_no_conversation(tmp_path: Path, data: Any) -> None:
    """Refused, naming the file; a role ends up in control tokens and is never free text."""
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(InvalidOption, match=r"x\.json"):
        read_conversation(tmp_path / "x.json")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"hello", b"[" * 100_000, b"{}" + b"\0" * 9])
def test_what_is_not_json(tmp_path: Path, raw: bytes) -> None:
    """Refused, however it is broken."""
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(InvalidOption, match=r"x\.json is not a conversation"):
        read_conversation(tmp_path / "x.json")


def test_missing_and_unreadable(tmp_path: Path) -> None:
    """No such file, and a folder."""
    with pytest.raises(InvalidOption, match="No such file"):
        read_conversation(tmp_path / "none.json")
    with pytest.raises(InvalidOption, match="cannot be read"):
        read_conversation(tmp_path)


def test_a_failed_write_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation saved before is not lost to a full disk."""
    path = tmp_path / "talk.json"
    write_conversation(path, TALK)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_conversation(path, TALK[:1])
    assert read_conversation(path) == TALK
    assert os.listdir(tmp_path) == ["talk.json"]
