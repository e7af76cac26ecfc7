"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with a status that its clients understand.

429 and 503 are tried again by the official clients on their own, 4xx are not.
"""

from __future__ import annotations

from typing import Any

from edgekv.errors import Busy, ContextOverflow, DependencyMissing, EdgeKVError, InvalidOption, TemplateError


class Problem(Exception):
    """A request that is not answered.

    Attributes:
        extra: what the error object carries besides OpenAI's four keys.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)
        self.status, self.code, self.extra = status, code, extra

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status in (401, 403):
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.extra}

    @property
    def headers(self) -> dict[str, str]:
        """When to come back, for a problem that passes."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def _sendable(text: str) -> str:
    """The text with each half of a surrogate pair, which a client may send and nobody can encode, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> Problem:
    """A request that can never be answered as it is."""
    return Problem(400, message, code, param)


def problem_of(error: EdgeKVError, prompt_field: str = "messages") -> Problem:
    """What an error of the runtime is to a client, who gave the prompt in a field of that name."""
    if isinstance(error, ContextOverflow):
        numbers = {"input_tokens": error.input_tokens, "max_allowed": error.max_allowed}
        return Problem(400, error.told_client, "context_length_exceeded", prompt_field, **numbers)
    if isinstance(error, Busy):
        return Problem(429, str(error), "queue_full") if error.full else Problem(503, str(error), "queue_timeout")
    if isinstance(error, TemplateError):
        return Problem(400, str(error), "template_error", "messages")
    if isinstance(error, InvalidOption):
        return Problem(400, str(error), "invalid_value")
    if isinstance(error, DependencyMissing):
        return Problem(501, str(error), "not_installed")
    return Problem(500, str(error), "engine_error")
