"""The server under the official client and under plain HTTP: what works, what is refused and how, who may ask."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers.chat import make_chat_model
from helpers.serving import serving, serving_runtime
from helpers.tools import HERMES, LLAMA

import edgekv
from edgekv.aio import AsyncEvents
from edgekv.engines.cached import CachedEngine
from edgekv.generate import Event, Finished
from edgekv.model.converted import ConvertedModel
from edgekv.server import run

USER = [{"role": "user", "content": "Hello there"}]
CHAT = {"model": "tiny-chat", "messages": USER}


DEEP = reduce(lambda inner, _: {"a": inner}, range(480), {})
"""Deeper than Python goes down by itself; json reads it, though."""


def called(arguments: Any) -> dict[str, Any]:
    """A tool call as clients send them back."""
    return {"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments)}}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template that takes tools; greedy by default."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"), HERMES)


@pytest.fixture(scope="module")
def url(chat_model: ConvertedModel) -> Iterator[str]:
    """A server without a key."""
    with serving(chat_model.folder, context=2048, alias=("other-name",)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    """The official client; what it raises is what the server said, it does not try again."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(chat_model: ConvertedModel) -> edgekv.Reply:
    """What the library answers to USER."""
    with edgekv.load(chat_model.folder, memory="4GiB", context=256, threads=1) as runtime:
        return runtime.chat(USER, max_new_tokens=12)


class TestChat:
    """/v1/chat/completions."""

    def test_the_answer_is_the_librarys(self, client: openai.OpenAI, expected: edgekv.Reply) -> None:
        """Text, reason, counts."""
        reply = client.chat.completions.create(**CHAT, max_tokens=12)
        assert reply.choices[0].message.content == expected.text
        assert reply.choices[0].finish_reason == expected.finish_reason
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == expected.usage.input_tokens
        assert reply.usage.completion_tokens == 12
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
        again = client.chat.completions.create(**CHAT, max_completion_tokens=12)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == expected.usage.input_tokens - 1
        assert again.usage.model_extra == {"reused_tokens": expected.usage.input_tokens - 1, "evicted_tokens": 0}

    def test_a_stream_joined_is_the_answer(self, client: openai.OpenAI, expected: edgekv.Reply) -> None:
        """Role first, deltas, one reason, usage last and only if wanted."""
        wanted = {"include_usage": True}
        chunks = list(client.chat.completions.create(**CHAT, max_tokens=12, stream=True, stream_options=wanted))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert len({chunk.id for chunk in chunks}) == 1
        plain = list(client.chat.completions.create(**CHAT, max_tokens=2, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in plain)

    def test_log_probabilities(self, client: openai.OpenAI) -> None:
        """One entry a token, in a stream as in a whole answer; greedy takes the first."""
        options = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**CHAT, **options).choices[0].logprobs
        chunks = list(client.chat.completions.create(**CHAT, **options, stream=True))
        streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        assert whole is not None
        assert whole.content is not None
        assert len(whole.content) == 6
        assert all(
            item.logprob == item.top_logprobs[0].logprob and len(item.top_logprobs) == 2 for item in whole.content
        )
        assert [item for part in streamed for item in part.content or []] == whole.content

    def test_sampling_parameters_arrive(self, client: openai.OpenAI, expected: edgekv.Reply) -> None:
        """seed and temperature, stop as text and as a list, top_p small enough to be greedy."""
        texts = [
            client.chat.completions.create(**CHAT, max_tokens=12, temperature=1.0, seed=seed).choices[0].message.content
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]
        greedy = client.chat.completions.create(**CHAT, max_tokens=12, temperature=1.0, top_p=1e-6)
        assert greedy.choices[0].message.content == expected.text
        mark = expected.text[len(expected.text) // 2 :][:8]
        for stop in (mark, [mark]):
            reply = client.chat.completions.create(**CHAT, max_tokens=12, stop=stop)
            assert reply.choices[0].message.content == expected.text[: expected.text.index(mark)]
            assert reply.choices[0].finish_reason == "stop"

    def test_structured_output(self, client: openai.OpenAI) -> None:
        """json_schema and json_object, also from a random model."""
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        reply = client.chat.completions.create(**CHAT, response_format=form)
        assert json.loads(reply.choices[0].message.content or "")["ok"] in (True, False)
        free = client.chat.completions.create(**CHAT, response_format={"type": "json_object"}, max_tokens=40)
        assert (free.choices[0].message.content or "").startswith("{")

    def test_sessions_keep_their_caches(self, client: openai.OpenAI) -> None:
        """Two conversations in turn: each goes on where it was, though the other has had the cache meanwhile."""

        def ask(session: str, *words: str) -> openai.types.CompletionUsage:
            messages = [{"role": "user", "content": f"{session} {word} " * 10} for word in words]
            reply = client.chat.completions.create(
                model="tiny-chat", messages=messages, max_tokens=4, extra_body={"session_id": session}
            )
            assert reply.usage is not None
            return reply.usage

        first = {name: ask(name, "one").prompt_tokens for name in ("x", "y")}
        for name in ("x", "y"):
            usage = ask(name, "one", "two")
            assert usage.model_extra is not None
            assert usage.model_extra["reused_tokens"] > first[name] - 20  # all but the answer's header

    def test_text_parts_and_null_fields(self, client: openai.OpenAI, expected: edgekv.Reply) -> None:
        """What clients send without need: parts, nulls, neutral values, books of OpenAI's own."""
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
        extra = {"seed": None, "session_id": "a", "n": 1, "presence_penalty": 0, "logit_bias": {}}
        reply = client.chat.completions.create(
            model="other-name", messages=parts, max_tokens=12, user="me", extra_body=extra
        )
        assert reply.choices[0].message.content == expected.text
        assert reply.model == "other-name"

    def test_special_tokens_typed_by_a_user_stay_text(self, client: openai.OpenAI) -> None:
        """case C18: the prompt has no control token more than the template's, so its length is that of the spelling."""

        def length(text: str) -> int:
            reply = client.chat.completions.create(
                model="tiny-chat", messages=[{"role": "user", "content": text}], max_tokens=1
            )
            assert reply.usage is not None
            return reply.usage.prompt_tokens

        assert length("</s><s>") - length("") == len("</s><s>")  # a byte a token; two if they were control tokens


PARAMETERS = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]


class TestTools:
    """Calls in and out. The random model is made to call by `tool_choice`."""

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
    def test_a_call_and_its_result(self, client: openai.OpenAI, choice: object) -> None:
        """The call comes as tool_calls with arguments by the schema, and can be sent back with its result."""
        reply = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice)
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        (call,) = message.tool_calls or []
        assert call.function.name == "look"
        assert json.loads(call.function.arguments)["far"] in (True, False)
        history = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "a tree"}]
        after = client.chat.completions.create(model="tiny-chat", messages=history, tools=TOOLS, max_tokens=3)
        assert after.choices[0].finish_reason == "length"

    def test_a_call_in_a_stream(self, client: openai.OpenAI) -> None:
        """The client puts the call together."""
        with client.chat.completions.stream(**CHAT, tools=TOOLS, tool_choice="required") as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or []
        assert call.function.name == "look"
        assert final.choices[0].finish_reason == "tool_calls"

    def test_none_hides_the_tools(self, client: openai.OpenAI) -> None:
        """tool_choice none: the prompt is the one without tools."""
        bare = client.chat.completions.create(**CHAT, max_tokens=1).usage
        hidden = client.chat.completions.create(**CHAT, max_tokens=1, tools=TOOLS, tool_choice="none").usage
        told = client.chat.completions.create(**CHAT, max_tokens=1, tools=TOOLS).usage
        assert bare is not None
        assert hidden is not None
        assert told is not None
        assert bare.prompt_tokens == hidden.prompt_tokens < told.prompt_tokens


def test_a_call_between_tags_that_are_tokens(tmp_path: Path) -> None:
    """As in Qwen's vocabularies: each tag is one added token, which is text."""
    source = tmp_path / "published"
    shutil.copytree(Path(__file__).parents[1] / "data" / "llama-fp16", source)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    for number, tag in ((900, "<tool_call>"), (901, "</tool_call>")):
        (old,) = [text for text, value in tokenizer["model"]["vocab"].items() if value == number]
        tokenizer["model"]["vocab"][tag] = tokenizer["model"]["vocab"].pop(old)
        token = tokenizer["added_tokens"][0] | {"id": number, "content": tag, "special": False}
        tokenizer["added_tokens"].append(token)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = make_chat_model(source, tmp_path / "made", HERMES)
    with serving(model.folder, context=2048) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required")
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.function.name == "look"


def test_a_call_in_llamas_manner(tmp_path: Path) -> None:
    """The whole answer is the call; a free answer with tools offered stays text, streamed."""
    model = make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path, LLAMA)
    with serving(model.folder, context=2048) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required")
        (call,) = reply.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments)["far"] in (True, False)
        free = client.chat.completions.create(**CHAT, tools=TOOLS, max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in free)


class TestOtherEndpoints:
    """/v1/completions, /v1/models, /health, /metrics."""

    def test_completions(self, client: openai.OpenAI, chat_model: ConvertedModel) -> None:
        """Plain text goes on as the library goes on with it, whole and streamed."""
        with edgekv.load(chat_model.folder, memory="4GiB", context=256, threads=1) as runtime:
            expected = runtime.generate("Once upon", max_new_tokens=8).text
        whole = client.completions.create(model="tiny-chat", prompt="Once upon", max_tokens=8, logprobs=1)
        assert whole.choices[0].text == expected
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.token_logprobs or []) == 8
        chunks = client.completions.create(model="tiny-chat", prompt=["Once upon"], max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected

    def test_models(self, client: openai.OpenAI) -> None:
        """The model and its other names."""
        assert [model.id for model in client.models.list()] == ["tiny-chat", "other-name"]
        assert client.models.retrieve("other-name").owned_by == "edgekv"
        with pytest.raises(openai.NotFoundError, match="gpt-5"):
            client.models.retrieve("gpt-5")

    def test_health_state_and_metrics(self, client: openai.OpenAI, url: str) -> None:
        """Metrics count what was done."""
        assert httpx.get(f"{url}/health").json()["status"] == "ok"

        def output() -> int:
            (line,) = [row for row in httpx.get(f"{url}/metrics").text.splitlines() if 'kind="output"' in row]
            return int(line.split()[-1])

        client.chat.completions.create(**CHAT, max_tokens=1)
        before = output()
        client.chat.completions.create(**CHAT, max_tokens=5)
        assert output() == before + 5
        state = httpx.get(f"{url}/v1/state").json()
        assert state["cache_capacity_tokens"] == 2048
        assert 0 < state["cache_tokens"] <= 2048

    def test_plain_curl(self, url: str, expected: edgekv.Reply) -> None:
        """As OpenAI's own documentation calls it."""
        body = json.dumps(CHAT | {"max_tokens": 12})
        command = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except FileNotFoundError:
            pytest.skip("there is no curl")
        assert json.loads(run.stdout)["choices"][0]["message"]["content"] == expected.text


REFUSED = [
    ({}, {"n": 2}, "n is supported only as 1"),
    ({}, {"frequency_penalty": 1}, "frequency_penalty"),
    ({}, {"functions": []}, "functions is not supported"),
    ({}, {"temprature": 1}, "temprature is not supported"),
    ({}, {"temperature": "hot"}, "temperature must be a number"),
    ({}, {"temperature": True}, "temperature must be a number"),
    ({}, {"temperature": 1000}, "temperature is 1000"),
    ({}, {"max_tokens": 0}, "max_tokens is 0"),
    ({}, {"max_tokens": 1.5}, "max_tokens is 1.5"),
    ({}, {"\ud800": 1}, "\\ud800 is not supported"),
    ({"messages": [{"role": "user", "content": "x", "\ud800": 1}]}, {}, "messages[0].\\ud800 is not supported"),
    ({"messages": [{"role": "user", "content": "caf\udce9"}]}, {}, "character 3 is half of a surrogate pair"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}, "more than 100 deep"),
    ({}, {"tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "The body is nested more than 100 deep"),
    ({"messages": [{"role": "assistant", "tool_calls": [called(DEEP)]}]}, {}, "arguments is nested more than 100"),
    ({}, {"top_logprobs": 2}, "top_logprobs needs"),
    ({}, {"max_seconds": 0}, "max_seconds is 0"),
    ({}, {"session_id": ""}, "session_id must be"),
    ({}, {"stop": [""]}, "stop must be"),
    ({}, {"stream_options": {"nope": 1}}, "stream_options.nope"),
    ({}, {"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "objekt"),
    ({}, {"tool_choice": "required"}, "there are no tools"),
    ({}, {"tool_choice": {"function": {"name": "f"}, "strict": True}}, "tool_choice.strict is not supported"),
    ({}, {"tool_choice": {"function": {"name": "f", "x": 1}}}, "tool_choice.function.x is not supported"),
    ({"messages": []}, {}, "messages is empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, {}, "messages[0].role is 'king'"),
    ({"messages": [{"role": "user"}]}, {}, "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, {}, "image_url"),
    ({"messages": "hello"}, {}, "messages must be a list"),
    ({"model": 3}, {}, "model must be"),
]


class TestRefusals:
    """Every error is in OpenAI's shape and raises the client's own exception."""

    def test_a_prompt_that_does_not_fit(self, client: openai.OpenAI) -> None:
        """case C01: the code that clients know, and both numbers; streaming or not."""
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(
                    model="tiny-chat", messages=[{"role": "user", "content": "word " * 500}], stream=stream
                )
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.body["max_allowed"] == 2047  # type: ignore[index]
            assert "or begin a new conversation. Whoever runs this server" in caught.value.message
            assert caught.value.body["input_tokens"] > 2400  # type: ignore[index]

    def test_a_plain_prompt_is_refused_in_its_own_terms(self, client: openai.OpenAI) -> None:
        """A completion has a prompt and logprobs, no messages and no top_logprobs."""
        for options, param, words in (
            ({"prompt": "word " * 500}, "prompt", "2048"),
            ({"prompt": "x", "logprobs": 30}, "logprobs", "logprobs is 30"),
            ({"prompt": "x", "logprobs": -1}, "logprobs", "logprobs is -1"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                client.completions.create(model="tiny-chat", **options)
            assert caught.value.param == param
            assert "top_logprobs" not in caught.value.message

    @pytest.mark.parametrize(("changes", "extra", "words"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
    def test_bad_fields_by_name(self, url: str, changes: dict, extra: dict, words: str) -> None:
        """400 with one sentence."""
        body = json.dumps(CHAT | changes | extra)
        reply = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert words in error["message"]

    def test_other_statuses(self, client: openai.OpenAI, url: str) -> None:
        """Each with the error's shape."""
        with pytest.raises(openai.NotFoundError, match="gpt-5"):
            client.chat.completions.create(model="gpt-5", messages=USER)
        answers = {
            404: httpx.get(f"{url}/v1/nothing"),
            405: httpx.get(f"{url}/v1/chat/completions"),
            400: httpx.post(f"{url}/v1/completions", content="{", headers={"Content-Type": "application/json"}),
            415: httpx.post(f"{url}/v1/completions", data={"prompt": "x"}),
        }
        for status, answer in answers.items():
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert [answers[status].json()["error"]["code"] for status in (404, 405)] == ["not_found", "method_not_allowed"]

    def test_only_this_machines_names_and_pages(self, url: str) -> None:
        """A page elsewhere, or a name that was pointed here, is turned away (no key is set)."""
        assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"Origin": "http://["}).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"Origin": url}).status_code == 200


@pytest.fixture(scope="module")
def small(chat_model: ConvertedModel) -> Iterator[str]:
    """Everything small, and a key."""
    limits = {"max_waiting": 1, "max_wait_s": 0.1, "max_body_bytes": 2000, "body_timeout_s": 0.3}
    with serving(chat_model.folder, api_key="secret-key", context=2048, **limits) as address:
        yield address


@pytest.fixture(scope="module")
def keyed(small: str) -> Iterator[openai.OpenAI]:
    """A client with the key."""
    with openai.OpenAI(base_url=f"{small}/v1", api_key="secret-key", max_retries=0) as made:
        yield made


class TestLimits:
    """Bodies, times, the queue, the key: on a server with small ones."""

    def test_the_key(self, small: str, keyed: openai.OpenAI) -> None:
        """Without it or with another one: 401. The page and /health are open."""
        assert [model.id for model in keyed.models.list()] == ["tiny-chat"]
        with pytest.raises(openai.AuthenticationError, match="wrong"):
            openai.OpenAI(base_url=f"{small}/v1", api_key="other", max_retries=0).models.list()
        assert httpx.get(f"{small}/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{small}/metrics").status_code == 401
        assert httpx.get(f"{small}/health").status_code == 200

    def test_a_large_body(self, keyed: openai.OpenAI, small: str) -> None:
        """413, told or not told beforehand how large it is."""
        with pytest.raises(openai.APIStatusError) as caught:
            keyed.completions.create(model="tiny-chat", prompt="x" * 3000)
        assert caught.value.status_code == 413
        headers = {"Authorization": "Bearer secret-key", "Content-Type": "application/json"}
        chunked = httpx.post(f"{small}/v1/completions", content=iter([b"x" * 1500, b"x" * 1500]), headers=headers)
        assert chunked.status_code == 413

    def test_slow_clients(self, small: str) -> None:
        """A body that does not come: 408. Headers that do not come: the connection is closed."""
        host, port = small.removeprefix("http://").split(":")
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret-key\r\n"
            "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(head.encode())
            assert b" 408 " in slow.recv(4096)
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert slow.recv(4096) == b""
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000)
            assert b" 400 " in slow.recv(4096)

    def test_the_queue(self, keyed: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
        """While one is answered, one waits (and is told when it has waited too long), and the next is refused."""
        slow = slowed(CachedEngine.forward, 0.05)  # a few tokens are then longer than anyone waits
        monkeypatch.setattr(CachedEngine, "forward", slow)
        first = keyed.completions.create(model="tiny-chat", prompt="Go", max_tokens=1900, stream=True, seed=1)
        next(iter(first))
        with pytest.raises(openai.InternalServerError) as late:
            keyed.completions.create(model="tiny-chat", prompt="Go", max_tokens=1)
        assert late.value.status_code == 503
        assert late.value.code == "queue_timeout"
        with ThreadPoolExecutor(2) as pool:  # two at once: one of them finds the line full
            ask = partial(keyed.completions.create, model="tiny-chat", prompt="Go", max_tokens=1)
            jobs = [pool.submit(ask) for _ in range(2)]
            codes = sorted(getattr(job.exception(), "code", "answered") for job in jobs)
        assert codes == ["queue_full", "queue_timeout"]
        first.close()
        patience = time.monotonic() + 10
        while True:
            try:
                assert keyed.completions.create(model="tiny-chat", prompt="Go", max_tokens=1).choices
                break
            except openai.InternalServerError:
                assert time.monotonic() < patience


def test_a_refused_request_pushes_no_conversation_out(chat_model: ConvertedModel) -> None:
    """One conversation is kept, and it still is after another's prompt that does not fit."""
    with serving(chat_model.folder, max_sessions=1) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:

        def ask(words: str, **extra: str) -> int:
            messages = [{"role": "user", "content": words}]
            reply = client.chat.completions.create(model="tiny-chat", messages=messages, max_tokens=1, extra_body=extra)
            assert reply.usage is not None
            return int(reply.usage.model_extra["reused_tokens"])  # type: ignore[index]

        ask("please " * 20, session_id="a")
        for name in ("b", "c"):
            with pytest.raises(openai.BadRequestError, match="tokens"):
                ask("word " * 200, session_id=name)
        ask("something else")
        assert ask("please " * 20, session_id="a") > 100
        assert httpx.get(f"{url}/v1/state").json()["sessions"] == 1


def test_a_failure_in_the_middle_is_told(chat_model: ConvertedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails: an error event that the client raises, or 500; and the next answer is right."""
    runtime = edgekv.load(chat_model.folder, memory="4GiB", context=256, threads=1)
    expected = runtime.chat(USER, max_new_tokens=8).text
    engine, fails_at = runtime.chat_state.timeline.engine, iter([])
    forward = engine.forward

    def failing(*arguments: object, **options: object) -> object:
        if next(fails_at, None):
            raise edgekv.EngineError("The backend failed.")
        return forward(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "forward", failing)
    with serving_runtime(runtime) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        fails_at = iter([False] * 4 + [True])
        stream = client.chat.completions.create(**CHAT, max_tokens=8, stream=True)
        with pytest.raises(openai.APIError, match="The backend failed"):
            list(stream)
        fails_at = iter([False] * 4 + [True])
        with pytest.raises(openai.InternalServerError, match="The backend failed") as caught:
            client.chat.completions.create(**CHAT, max_tokens=8)
        assert caught.value.code == "engine_error"
        assert client.chat.completions.create(**CHAT, max_tokens=8).choices[0].message.content == expected


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_the_server_is_told(
    chat_model: ConvertedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    """Answers that would take too long are ended shortly before the server is, whether they have begun or wait: as an
    event, or as 503. Whoever has not asked yet is let go. Nothing of it is an exception in a log."""
    monkeypatch.setattr(run, "END_S", 2)
    monkeypatch.setattr(CachedEngine, "forward", slowed(CachedEngine.forward, 0.05))
    with ThreadPoolExecutor(3) as pool, ExitStack() as clients, socket.socket() as quiet:
        with serving(chat_model.folder, context=2048) as url:
            client = clients.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0))
            ask = partial(client.chat.completions.create, **CHAT, max_tokens=1900)
            first = pool.submit(lambda: list(ask(stream=True)) if stream else ask())
            while not httpx.get(f"{url}/v1/state").json()["requests_running"]:
                time.sleep(0.005)
            waiting = [pool.submit(ask, stream=streamed) for streamed in (False, True)]
            host, port = url.removeprefix("http://").split(":")
            quiet.connect((host, int(port)))
            quiet.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            quiet.sendall(b"Content-Length: 10\r\n\r\n")
            while httpx.get(f"{url}/v1/state").json()["requests_waiting"] < 2:
                time.sleep(0.005)
        errors = [job.exception() for job in (first, *waiting)]
        assert [getattr(error, "code", error) for error in errors] == ["server_ending"] * 3
        assert [getattr(error, "status_code", None) for error in errors] == [None if stream else 503, 503, 503]
        quiet.settimeout(5)
        with suppress(ConnectionResetError):
            assert quiet.recv(4096) == b""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_an_end_is_told(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Events that stop without Finished, as those of an answer that was dropped: an error, no complete answer."""
    following = AsyncEvents.__anext__

    async def cut(events: AsyncEvents) -> Event:
        event = await following(events)
        if isinstance(event, Finished):
            raise StopAsyncIteration
        return event

    monkeypatch.setattr(AsyncEvents, "__anext__", cut)
    with pytest.raises(openai.APIError, match="ended before it was complete"):
        list(client.chat.completions.create(**CHAT, max_tokens=4, stream=stream))


def slowed(forward: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """An engine's `forward` that takes its time."""

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments, **options)

    return slow


def test_a_closed_socket_ends_the_answer(chat_model: ConvertedModel) -> None:
    """At once: the next request does not wait for the rest of an answer that nobody reads, and it is right."""
    with serving(chat_model.folder, context=2048) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        quiet = client.chat.completions.create(**CHAT, max_tokens=12).choices[0].message.content
        for options in ({"stream": True}, {}):
            body = json.dumps(CHAT | {"max_tokens": 1900} | options).encode()
            host, port = url.removeprefix("http://").split(":")
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=10) as gone:
                gone.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                while httpx.get(f"{url}/v1/state").json()["cache_tokens"] < 60:
                    time.sleep(0.005)
            patience = time.monotonic() + 5
            while httpx.get(f"{url}/v1/state").json()["requests_running"]:
                assert time.monotonic() < patience
            assert httpx.get(f"{url}/v1/state").json()["cache_tokens"] < 1900
            assert client.chat.completions.create(**CHAT, max_tokens=12).choices[0].message.content == quiet
        assert "edgekv_cancelled_total 2" in httpx.get(f"{url}/metrics").text
