"""Many clients at once, some of whom leave in the middle: nobody gets another's answer, or none."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.chat import make_chat_model

import edgekv
from edgekv.model.converted import ConvertedModel
from edgekv.units import MIB

CLIENTS, QUESTIONS, CONTEXT = 8, 12, 512
LEAVES = 0.3
"""The share of requests whose client goes away at a random moment ..."""
LEAVES_WITHIN_S = 0.05
"""... of the time in which most are still waiting or being answered, on a fast machine too."""

GROWTH = 4 * MIB
"""What resident memory may grow by after the first 40 requests, whether 80 follow or 400: allocators keep some pages
(measured: 0.8 and 1.0 MiB)."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model, greedy: the same question always has the same answer."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@contextmanager
def server_process(model: ConvertedModel) -> Iterator[str]:
    """`edgekv serve` in a process of its own, so that its memory is its own."""
    options = ["--port", "0", "--context", str(CONTEXT), "--threads", "1", "--memory", "4GiB"]
    command = [sys.executable, "-m", "edgekv", "serve", str(model.folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[2]
        finally:
            process.terminate()
            process.wait(30)


def question(number: int) -> dict[str, Any]:
    """One of the requests: some share a beginning, lengths differ."""
    system = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    messages = [*system, {"role": "user", "content": f"Question {number}: " + "please " * (number % 5)}]
    return {"model": "tiny-chat", "messages": messages, "max_tokens": 10 + 5 * (number % 4)}


def answers_alone(model: ConvertedModel) -> list[str]:
    """Each question's answer on an empty cache."""
    with edgekv.load(model.folder, memory="4GiB", context=CONTEXT, threads=1) as runtime:
        answers = []
        for number in range(QUESTIONS):
            runtime.chat_state.reset()
            asked = question(number)
            answers.append(runtime.chat(asked["messages"], max_new_tokens=asked["max_tokens"]).text)
        return answers


async def one_request(client: httpx.AsyncClient, chance: random.Random, answers: list[str]) -> str:
    """Ask, perhaps leave; what became of it. A wrong answer fails at once."""
    number, stream = chance.randrange(QUESTIONS), chance.random() < 0.6
    leaves = chance.random() < LEAVES
    body = question(number) | {"stream": stream, "session_id": f"user-{chance.randrange(4)}"}
    asked = _streamed(client, body) if stream else _whole(client, body)
    try:
        text = await asyncio.wait_for(asked, chance.uniform(0, LEAVES_WITHIN_S) if leaves else 60)
    except TimeoutError:
        assert leaves, "an answer took longer than a minute"
        return "left"
    assert text == answers[number], f"question {number} got another answer"
    return "right"


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text, ended = "", False
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert ended, "a stream ended without [DONE]"
    return text


async def many(url: str, requests: int, answers: list[str], seed: int) -> Counter[str]:
    """CLIENTS at once, each with so many requests one after another."""

    async def one_client(number: int) -> list[str]:
        chance = random.Random(1000 * seed + number)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return [await one_request(client, chance, answers) for _ in range(requests)]

    return Counter(outcome for done in await asyncio.gather(*map(one_client, range(CLIENTS))) for outcome in done)


def idle_state(url: str) -> dict[str, int]:
    """The server's state when nothing runs or waits any more."""
    for _ in range(1000):
        state: dict[str, int] = httpx.get(f"{url}/v1/state").json()
        if not state["requests_running"] and not state["requests_waiting"]:
            return state
    raise AssertionError(f"the server did not come to rest: {state}")


@pytest.mark.parametrize("requests", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_every_answer_is_right(chat_model: ConvertedModel, requests: int) -> None:
    """Every client that stays gets its own answer; those that leave hold nobody up; memory stays where it is."""
    answers = answers_alone(chat_model)
    assert len(set(answers)) == QUESTIONS
    with server_process(chat_model) as url:
        asyncio.run(many(url, 5, answers, seed=0))
        before = idle_state(url)["resident_bytes"]
        outcomes = asyncio.run(many(url, requests, answers, seed=1))
        after = idle_state(url)["resident_bytes"]
        assert outcomes.total() == CLIENTS * requests
        assert outcomes["left"] > requests
        assert after - before < GROWTH, f"{(after - before) / MIB:.1f} MiB more after {outcomes.total()} requests"
        print(f"{dict(outcomes)}, memory {before / MIB:.1f} -> {after / MIB:.1f} MiB")
        rows = [row for row in httpx.get(f"{url}/metrics").text.splitlines() if row.startswith("edgekv_requests_total")]
        chats = {row.split('status="')[1][:3] for row in rows if "chat" in row}
        assert chats == {"200", "499"}, rows
