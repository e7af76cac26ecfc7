"""Events as OpenAI's objects: whole answers and chunks, of a chat and of a completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgekv.generate import TokenScored, Usage
from edgekv.text.toolcalls import ToolCall

Json = dict[str, Any]


def usage_json(usage: Usage) -> Json:
    """Token counts. `reused_tokens` and `evicted_tokens` are not OpenAI's; the first is also its `cached_tokens`."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "reused_tokens": usage.reused_tokens,
        "evicted_tokens": usage.evicted_tokens,
    }


@dataclass(frozen=True)
class Piece:
    """What is new in a chunk, or all there is in a whole answer."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    scores: tuple[TokenScored, ...] = ()


class Shape(Protocol):
    """The shape of one endpoint's objects."""

    def whole(self, piece: Piece, reason: str, usage: Usage) -> Json: ...
    def first(self) -> Json | None: ...
    def chunk(self, piece: Piece) -> Json: ...
    def last(self, reason: str) -> Json: ...
    def usage_chunk(self, usage: Usage) -> Json: ...


@dataclass
class _Head:
    """What every object of one answer begins with."""

    model: str
    prefix: str
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def object(self, kind: str, choices: Sequence[Json], **rest: Any) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": None, "choices": list(choices)} | rest


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, model: str, *, scored: bool) -> None:
        self._head, self._scored, self._calls = _Head(model, "chatcmpl"), scored, 0

    def whole(self, piece: Piece, reason: str, usage: Usage) -> Json:
        message: Json = {"role": "assistant", "content": piece.text or (None if piece.calls else ""), "refusal": None}
        if piece.calls:
            message["tool_calls"] = self._numbered(piece.calls, with_index=False)
        choice = {"index": 0, "message": message, "logprobs": self._scores(piece), "finish_reason": reason}
        return self._head.object("chat.completion", [choice], usage=usage_json(usage))

    def first(self) -> Json:
        return self._delta({"role": "assistant", "content": ""})

    def chunk(self, piece: Piece) -> Json:
        delta: Json = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = self._numbered(piece.calls, with_index=True)
        return self._delta(delta, self._scores(piece))

    def last(self, reason: str) -> Json:
        return self._delta({}, reason=reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._head.object("chat.completion.chunk", [], usage=usage_json(usage))

    def _delta(self, delta: Json, scores: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": scores, "finish_reason": reason}
        return self._head.object("chat.completion.chunk", [choice])

    def _numbered(self, calls: Sequence[ToolCall], *, with_index: bool) -> list[Json]:
        numbered = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            item: Json = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            numbered.append({"index": self._calls, **item} if with_index else item)
            self._calls += 1
        return numbered

    def _scores(self, piece: Piece) -> Json | None:
        if not self._scored or not piece.scores:
            return None
        return {"content": [_chat_score(event) for event in piece.scores], "refusal": None}


class TextShape:
    """/v1/completions."""

    def __init__(self, model: str, *, scored: bool) -> None:
        self._head, self._scored, self._offset = _Head(model, "cmpl"), scored, 0

    def whole(self, piece: Piece, reason: str, usage: Usage) -> Json:
        return self._object(piece, reason) | {"usage": usage_json(usage)}

    def first(self) -> None:
        return None

    def chunk(self, piece: Piece) -> Json:
        return self._object(piece)

    def last(self, reason: str) -> Json:
        return self._object(Piece(), reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._head.object("text_completion", [], usage=usage_json(usage))

    def _object(self, piece: Piece, reason: str | None = None) -> Json:
        scores = self._scores(piece.scores) if self._scored and piece.scores else None
        choice = {"index": 0, "text": piece.text, "logprobs": scores, "finish_reason": reason}
        return self._head.object("text_completion", [choice])

    def _scores(self, events: Sequence[TokenScored]) -> Json:
        offsets = []
        for event in events:
            offsets.append(self._offset)
            self._offset += len(event.text)
        tops = [dict(zip(event.top, (logprob for _, logprob in event.score.top), strict=True)) for event in events]
        return {
            "tokens": [event.text for event in events],
            "token_logprobs": [event.score.logprob for event in events],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _chat_score(event: TokenScored) -> Json:
    tops = zip(event.top, event.score.top, strict=True)
    return _score(event.text, event.score.logprob) | {
        "top_logprobs": [_score(text, logprob) for text, (_, logprob) in tops]
    }


def _score(text: str, logprob: float) -> Json:
    """`bytes` is null for a token that is only a part of a character."""
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}
