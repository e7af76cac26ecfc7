"""Answers that follow a schema or a grammar, and what is refused. The random model says anything, so the grammar does
all the work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chat import make_chat_model

import edgekv
from edgekv.errors import InvalidOption
from edgekv.sampling import Sampler, SamplingOptions, score_token, softmax
from edgekv.server.toolgrammar import forced_call
from edgekv.text.grammar import Grammars
from edgekv.text.toolcalls import Style, ToolCall, call_parser

USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgekv.Runtime]:
    """A tiny random model with a cache of 256 tokens."""
    model = make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))
    with edgekv.load(model.folder, memory="4GiB", context=256, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema(runtime: edgekv.Runtime, seed: int) -> None:
    """Whatever is sampled parses, has the keys, and is within the bounds; the end is the grammar's own."""
    reply = runtime.chat(USER, json_schema=SCHEMA, temperature=1.5, seed=seed)
    answer = json.loads(reply.text)
    assert reply.finish_reason == "stop"
    assert set(answer) == {"name", "age"}
    assert len(answer["name"]) <= 5
    assert 0 <= answer["age"] <= 99


def test_an_answer_follows_its_grammar(runtime: edgekv.Runtime) -> None:
    """A grammar in Lark."""
    assert runtime.chat(USER, grammar='start: ("yes" | "no") "."').text in ("yes.", "no.")


def test_the_answer_after_it_is_free_again(runtime: edgekv.Runtime) -> None:
    """A constraint is for one answer."""
    before = runtime.chat(USER, max_new_tokens=12).text
    runtime.chat(USER, json_schema=SCHEMA)
    assert runtime.chat(USER, max_new_tokens=12).text == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": "{"}, "is not JSON"),
        ({"json_schema": "[]"}, "not an object"),
        ({"json_schema": '{"type": "objekt"}'}, "objekt"),
        ({"json_schema": '{"a":' * 300 + "1" + "}" * 300}, "cannot be followed: recursion"),
        ({"json_schema": '{"properties": {"\\ud800": {}}}'}, "cannot be followed: unexpected end of hex"),
        ({"grammar": "start: nothing"}, "cannot be followed"),
        ({"grammar": "start: /a/", "json_schema": "{}"}, "not both"),
        ({"top_logprobs": 21}, "between 0 and 20"),
        ({"top_logprobs": 1.5}, "whole number"),
    ],
)
def test_refusals(runtime: edgekv.Runtime, options: dict[str, object], words: str) -> None:
    """One sentence, before anything runs."""
    runtime.chat_state.reset()
    with pytest.raises(edgekv.InvalidOption, match=words):
        runtime.chat(USER, **options)
    assert runtime.chat_state.timeline.tokens == []


def test_scores_are_the_models_own(runtime: edgekv.Runtime) -> None:
    """One event a token, in order; greedy takes the first of the top; they are what float64 says of the logits."""
    events = list(runtime.stream(USER, temperature=0, top_logprobs=3, max_new_tokens=6))
    scored = [event for event in events if isinstance(event, edgekv.TokenScored)]
    assert len(scored) == 6
    assert all(event.score.token == event.score.top[0][0] and len(event.top) == 3 for event in scored)
    assert "".join(event.text for event in scored) == events[-1].text  # type: ignore[union-attr]


def test_scores_equal_the_softmax() -> None:
    """Against the obvious computation; the constraint changes the choice, not the scores."""
    logits = np.random.default_rng(0).normal(0, 5, 400).astype(np.float32)
    score = score_token(logits, 7, 20)
    exact = np.log(softmax(logits.astype(np.float64)).astype(np.float64))  # type: ignore[arg-type]
    assert score.logprob == pytest.approx(exact[7], abs=1e-5)  # softmax rounds to float32: half an ulp of a log
    assert [token for token, _ in score.top] == list(np.argsort(-exact)[:20])
    assert score_token(logits, 7, 0).top == ()


def test_a_constraint_narrows_the_choice() -> None:
    """The sampler masks before it chooses and reports what it chose."""

    class OnlyOdd:
        def __init__(self) -> None:
            self.accepted: list[int] = []

        def mask(self, logits: np.ndarray) -> np.ndarray:
            return np.where(np.arange(len(logits)) % 2, logits, -np.inf).astype(np.float32)

        def accept(self, token: int) -> None:
            self.accepted.append(token)

    odd = OnlyOdd()
    sampler = Sampler(SamplingOptions(temperature=2.0, seed=0), odd)
    chosen = [sampler(np.zeros(64, np.float32)) for _ in range(50)]
    assert chosen == odd.accepted
    assert all(token % 2 for token in chosen)


def test_a_model_that_ends_no_answer_is_refused(runtime: edgekv.Runtime) -> None:
    """llguidance wants a token for the end."""
    tokenizer = runtime.chat_state.tokenizer
    grammars = Grammars(tokenizer, runtime.model.spec.vocab_size, [])
    with pytest.raises(InvalidOption, match="names no token that ends an answer"):
        grammars.constraint(SamplingOptions(json_schema='{"const": 1}'))
    assert grammars.constraint(SamplingOptions()) is None


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
NAMED = POINT | {"properties": {"$ref": {"$ref": "#/$defs/N"}}, "required": ["$ref"], "$defs": {"N": {"const": "#/a"}}}


def with_definition(inner: dict[str, Any]) -> dict[str, Any]:
    """Parameters as pydantic writes them where a model holds another."""
    outer = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}
    return outer | {"additionalProperties": False, "$defs": {"P": inner}}


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_parameters_may_refer_to_themselves(runtime: edgekv.Runtime, style: Style) -> None:
    """Two tools with a definition of the same name, each its own; a property may be called like the keyword."""
    schemas = {"one": with_definition(POINT), "two": with_definition({"const": {"$ref": "#/x"}}), "three": NAMED}
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in schemas.items()]
    expected = {"one": {"p": {"x": int}}, "two": {"p": {"$ref": "#/x"}}, "three": {"$ref": "#/a"}}
    for name in schemas:
        forced = forced_call(style, tools, [name], runtime.chat_state.tokenizer.token_id)
        text = runtime.chat(USER, temperature=1.0, seed=3, **forced).text
        parser = call_parser(style, [name])
        (call,) = [part for part in (*parser.put(text), *parser.close()) if isinstance(part, ToolCall)]
        found = json.loads(call.arguments)
        assert found == expected[name] or (
            name == "one" and isinstance(found["p"].pop("x"), int) and found == {"p": {}}
        )
    together = forced_call(style, tools, list(schemas), runtime.chat_state.tokenizer.token_id)
    assert runtime.chat(USER, temperature=1.0, seed=4, **together).finish_reason == "stop"
