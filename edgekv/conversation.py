"""A conversation as a file: JSON with the messages, written atomically and read with care."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgekv.errors import InvalidOption
from edgekv.files import atomic_file
from edgekv.text.prompt import ROLES
from edgekv.text.template import Message

FORMAT = "edgekv-conversation"
FORMAT_VERSION = 1


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write messages to a file.

    Raises:
        StorageError: the file cannot be written; what was there is untouched.
    """
    data = {"format": FORMAT, "format_version": FORMAT_VERSION, "messages": list(messages)}
    with atomic_file(path) as part:  # half of a surrogate pair becomes what JSON has for it
        part.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", "utf-8", "backslashreplace")


def read_conversation(path: Path) -> list[Message]:
    """Read messages from a file.

    Raises:
        InvalidOption: there is no such file, or it is no conversation.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise InvalidOption(f"{path} is not a conversation that edgekv wrote (it is not JSON).") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("format_version") != FORMAT_VERSION:
        raise InvalidOption(f"{path} is not a conversation of format version {FORMAT_VERSION}.")
    try:
        return as_messages(data.get("messages"))
    except ValueError:
        raise InvalidOption(f"{path} holds something that is not a message with a role and a text.") from None


def as_messages(data: Any) -> list[Message]:
    """Messages from JSON values; parts that no message has are left out.

    Raises:
        ValueError: something is not a message.
    """
    if not isinstance(data, list) or not all(_is_message(message) for message in data):
        raise ValueError("not a list of messages")
    return [_message(message) for message in data]


def _message(data: dict[str, Any]) -> Message:
    message = Message(role=data["role"], content=data["content"])
    calls = data.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if isinstance(data.get(name), str):
            message[name] = data[name]
    return message


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
