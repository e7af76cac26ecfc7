"""A request's JSON as a `Call`. Every field is read, known to be without effect here, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgekv.errors import InvalidOption
from edgekv.sampling import MAX_TOP_LOGPROBS, SamplingOptions
from edgekv.server.problems import Problem, refused
from edgekv.text.prompt import ROLES
from edgekv.text.template import Message, Tool

IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that are for OpenAI's own books: they change no answer, there or here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
}
"""Fields that are accepted with the values that ask for nothing."""

SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_seconds": "max_seconds",
}  # fmt: skip
"""Numbers of a request -> fields of SamplingOptions. The last four are not OpenAI's."""

MAX_DEPTH = 100
"""How deep lists and objects may be nested in a body; walking through more would end at Python's recursion limit."""

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Call:
    """What is to be answered.

    Attributes:
        messages: of a chat; empty for a completion, which has `prompt`. sampling: fields of SamplingOptions.
        tools: what the model may call. forced: names of which one must be called; empty: none must.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    stream: bool = False
    include_usage: bool = False
    session_id: str | None = None
    tools: tuple[Tool, ...] = ()
    forced: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_field(self) -> str:
        """The name of the field that the prompt was given in."""
        return "messages" if self.messages else "prompt"


class Fields:
    """A JSON object whose fields are taken one by one; what is left at the end is refused. null is absent."""

    def __init__(self, data: Any, where: str = "") -> None:
        if not isinstance(data, dict):
            raise refused(f"{where or 'The body'} is not a JSON object.", where or None, "invalid_type")
        self._data = {name: value for name, value in data.items() if value is not None}
        self.where = where

    def path(self, name: str) -> str:
        """The field's name from the body's root."""
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, kinds: type | tuple[type, ...], what: str) -> Any:
        """A field's value, or None if it is absent."""
        value = self._data.pop(name, None)
        numeric_bool = isinstance(value, bool) and kinds is not bool
        if value is not None and (numeric_bool or not isinstance(value, kinds)):
            raise refused(f"{self.path(name)} must be {what}.", self.path(name), "invalid_type")
        return value

    def need(self, name: str, kinds: type | tuple[type, ...], what: str) -> Any:
        """A field that must be there."""
        value = self.take(name, kinds, what)
        if value is None:
            raise refused(f"{self.path(name)} is missing: it must be {what}.", self.path(name), "missing_field")
        return value

    def one_of(self, name: str, choices: Collection[str]) -> str | None:
        """A word among these, or None if it is absent."""
        value: str | None = self.take(name, str, "a string")
        if value is not None and value not in choices:
            raise refused(f"{self.path(name)} is {value!r}: it must be one of {', '.join(choices)}.", self.path(name))
        return value

    def finish(self) -> None:
        """Refuse what has not been taken."""
        for name in IGNORED if not self.where else ():
            self._data.pop(name, None)
        for name, value in self._data.items():
            if name in NEUTRAL and not self.where:
                if value in NEUTRAL[name]:
                    continue
                fine = json.dumps(NEUTRAL[name][0])
                raise refused(f"{name} is supported only as {fine} by this server.", name, "unsupported_value")
            raise refused(f"{self.path(name)} is not supported by this server.", self.path(name), "unsupported_field")


def read_json(body: bytes) -> Any:
    """The body's JSON value."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refused(f"The body is not JSON: {error}.", code="invalid_json") from None
    _check_depth(data, "The body")
    return data


def _check_depth(data: Any, what: str, param: str | None = None) -> None:
    """Refuse what is nested so deeply that it could not be walked through."""
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [item for part in level if isinstance(part, dict | list) for item in _items(part)]
        if not level:
            return
    raise refused(f"{what} is nested more than {MAX_DEPTH} deep: make it flatter.", param, "nested_too_deeply")


def _items(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def chat_call(data: Any) -> Call:
    """A call of /v1/chat/completions.

    Raises:
        Problem: it cannot be answered, with the field that it is about.
    """
    fields = Fields(data)
    common = _common(fields)
    sampling = common.pop("sampling")
    common["session_id"] = _session_id(fields)
    messages = fields.need("messages", list, "a list of messages")
    if not messages:
        raise refused("messages is empty: at least one is needed.", "messages")
    common["messages"] = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(messages))
    sampling |= _chat_logprobs(fields) | _response_format(fields)
    tools = _tools(fields)
    common |= _tool_choice(fields, tools)
    fields.finish()
    if common["forced"] and "json_schema" in sampling:
        raise refused("response_format cannot be combined with a tool call that is required.", "tool_choice")
    return Call(**common, sampling=sampling)


def text_call(data: Any) -> Call:
    """A call of /v1/completions. Raises Problem as `chat_call`."""
    fields = Fields(data)
    common = _common(fields)
    prompt = fields.need("prompt", (str, list), "a string")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise refused("prompt must be one string: send one request a prompt.", "prompt", "unsupported_value")
        prompt = prompt[0]
    if (top := fields.take("logprobs", int, "a whole number")) is not None:
        _check_sampling("logprobs", "top_logprobs", top)
        common["sampling"]["top_logprobs"] = top
    fields.finish()
    return Call(**common, prompt=prompt)


def _common(fields: Fields) -> dict[str, Any]:
    stream = fields.take("stream", bool, "true or false") or False
    options = Fields(fields.take("stream_options", dict, "an object") or {}, "stream_options")
    include_usage = options.take("include_usage", bool, "true or false") or False
    options.take("include_obfuscation", bool, "true or false")
    options.finish()
    return {
        "model": fields.need("model", str, "a model's name"),
        "stream": stream,
        "include_usage": include_usage,
        "sampling": _sampling(fields),
    }


def _session_id(fields: Fields) -> str | None:
    session_id: str | None = fields.take("session_id", str, "a string")
    if session_id is not None and not 0 < len(session_id) <= 128:
        raise refused("session_id must be 1 to 128 characters.", "session_id")
    return session_id


def _sampling(fields: Fields) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for name, option in SAMPLING.items():
        value = fields.take(name, (int, float), "a number")
        if value is not None:
            _check_sampling(name, option, value)
            sampling[option] = value
    stop = fields.take("stop", (str, list), "a string or a list of strings")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(text, str) and text for text in texts):
            raise refused("stop must be strings, none of them empty.", "stop")
        sampling["stop"] = tuple(texts)
    return sampling


def _check_sampling(name: str, option: str, value: float) -> None:
    """Refuse a value in terms of the client's field, not of the option that it becomes."""
    try:
        SamplingOptions(**{option: value})  # type: ignore[arg-type]
    except InvalidOption as error:
        raise refused(str(error).replace(option, name, 1), name) from None


def _chat_logprobs(fields: Fields) -> dict[str, Any]:
    wanted = fields.take("logprobs", bool, "true or false") or False
    top = fields.take("top_logprobs", int, "a whole number")
    if top is not None and not (wanted and 0 <= top <= MAX_TOP_LOGPROBS):
        raise refused(f"top_logprobs needs logprobs=true and is 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
    return {"top_logprobs": top or 0} if wanted else {}


def _response_format(fields: Fields) -> dict[str, Any]:
    data = fields.take("response_format", dict, "an object")
    if data is None:
        return {}
    form = Fields(data, "response_format")
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        inner = Fields(form.need("json_schema", dict, "an object"), "response_format.json_schema")
        schema = inner.need("schema", dict, "a JSON schema")
        for name in ("name", "description"):
            inner.take(name, str, "a string")
        inner.take("strict", bool, "true or false")
        inner.finish()
    form.finish()
    return {"json_schema": json.dumps(schema)} if kind in ("json_object", "json_schema") else {}


def _message(data: Any, where: str) -> Message:
    fields = Fields(data, where)
    role = fields.one_of("role", ROLES)
    if role is None:
        raise refused(f"{where}.role is missing.", f"{where}.role", "missing_field")
    calls = fields.take("tool_calls", list, "a list of tool calls") or []
    content = _content(fields, optional=bool(calls))
    message = Message(role=role, content=content)
    for name in ("name", "tool_call_id"):
        if (value := fields.take(name, str, "a string")) is not None:
            message[name] = value
    if calls:
        message["tool_calls"] = [_called(item, f"{where}.tool_calls[{n}]") for n, item in enumerate(calls)]
    fields.take("refusal", str, "a string")
    if fields.take("annotations", list, "a list"):
        raise refused(f"{where}.annotations is not supported by this server.", f"{where}.annotations")
    fields.finish()
    return message


def _content(fields: Fields, *, optional: bool) -> str:
    content = fields.take("content", (str, list), "a string or a list of text parts")
    if isinstance(content, list):
        return "".join(_part(item, f"{fields.path('content')}[{index}]") for index, item in enumerate(content))
    if content is None and not optional:
        raise refused(f"{fields.path('content')} is missing.", fields.path("content"), "missing_field")
    return content or ""


def _part(data: Any, where: str) -> str:
    part = Fields(data, where)
    kind = part.need("type", str, "'text'")
    if kind != "text":
        raise refused(f"{where} is {kind!r}: this model reads text only.", where, "unsupported_value")
    text: str = part.need("text", str, "a string")
    part.finish()
    return text


def _called(data: Any, where: str) -> dict[str, Any]:
    """A call in the history. The client sends the arguments as text, templates want them as a mapping."""
    fields = Fields(data, where)
    number, kind = fields.need("id", str, "a string"), fields.one_of("type", ("function",)) or "function"
    function = Fields(fields.need("function", dict, "an object"), f"{where}.function")
    name, text = function.need("name", str, "a string"), function.need("arguments", str, "JSON as a string")
    function.finish()
    fields.take("index", int, "a whole number")
    fields.finish()
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    path = f"{where}.function.arguments"
    if not isinstance(arguments, dict):
        raise refused(f"{path} is not a JSON object.", path)
    _check_depth(arguments, path, path)
    return {"id": number, "type": kind, "function": {"name": name, "arguments": arguments}}


def _tools(fields: Fields) -> tuple[Tool, ...]:
    tools = fields.take("tools", list, "a list of tools") or []
    return tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(tools))


def _tool(data: Any, where: str) -> Tool:
    fields = Fields(data, where)
    fields.one_of("type", ("function",))
    function = Fields(fields.need("function", dict, "an object"), f"{where}.function")
    told = {
        "name": function.need("name", str, "a string"),
        "description": function.take("description", str, "a string") or "",
        "parameters": function.take("parameters", dict, "a JSON schema") or {"type": "object", "properties": {}},
    }
    function.take("strict", bool, "true or false")
    function.finish()
    fields.finish()
    return {"type": "function", "function": told}


def _tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> dict[str, Any]:
    """`tools` and `forced` of the call. With "none" the model is not told of the tools."""
    names = [tool["function"]["name"] for tool in tools]
    choice = fields.take("tool_choice", (str, dict), "a string or an object") or "auto"
    if isinstance(choice, dict):
        form = Fields(choice, "tool_choice")
        form.one_of("type", ("function",))
        function = Fields(form.need("function", dict, "an object"), "tool_choice.function")
        name = function.need("name", str, "a string")
        function.finish()
        form.finish()
        if name not in names:
            raise refused(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
        return {"tools": tools, "forced": (name,)}
    if choice not in ("auto", "none", "required"):
        raise refused(f"tool_choice is {choice!r}: it must be auto, none, required or a function.", "tool_choice")
    if choice == "required" and not tools:
        raise refused("tool_choice is 'required', but there are no tools.", "tool_choice")
    return {"tools": () if choice == "none" else tools, "forced": tuple(names) if choice == "required" else ()}


Parse = Callable[[Any], Call]
__all__ = ["Call", "Parse", "Problem", "chat_call", "read_json", "text_call"]
