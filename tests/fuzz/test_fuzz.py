"""Damaged files of every kind that a user may have: refused in one sentence, or harmless. No traceback, hang or crash.

Each case takes a range of seeds, so a failure can be run again by its number. The default run is short; the long one is
`pytest tests/fuzz -m slow`. Readers of weights have their own mutations in tests/unit (headers and configs).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.mutate import mutate

from edgekv.conversation import read_conversation
from edgekv.errors import EdgeKVError
from edgekv.text.template import ChatTemplate, Message
from edgekv.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "llama-fp16"
TEXT = "Hi \U0001f600 <s> w\u00f6rld \u4f60"
TEMPLATE = """{%- set ns = namespace(n=0) %}{{- bos_token }}
{%- macro turn(m, last=false) %}
  {{- '<s>' + m['role'] + '\\n' + m.content | trim }}{% if not last %}{{ eos_token }}{% endif %}
{%- endmacro %}
{%- for m in messages if m.role in ['user', 'assistant', 'system'] %}
  {%- set ns.n = ns.n + loop.index * 2 %}{{ turn(m, last=loop.last) ~ '\\n' }}
  {%- if loop.index > 30 %}{{ raise_exception('too many: %d' | format(ns.n)) }}{% endif %}
{%- endfor %}{{ messages | tojson(indent=2) | length if tools }}
{%- if add_generation_prompt %}{{ '<s>assistant'.ljust(20)[:12] }}{% endif %}"""


def seeds(short: int, long: int) -> list[object]:
    """Ranges of seeds: the short one, and with -m slow a long one."""
    return [range(short), pytest.param(range(short, long), marks=pytest.mark.slow)]


def refused(read: Callable[[bytes], object], whole: bytes, numbers: range) -> int:
    """How many mutations of a file are refused, each in one line; any other exception is a failure."""
    count = 0
    for seed in numbers:
        try:
            read(mutate(whole, seed))
        except EdgeKVError as error:
            count += 1
            if "\n" in str(error):
                pytest.fail(f"seed {seed}: more than a line: {error}")
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    return count


@pytest.mark.parametrize("numbers", seeds(300, 20_000))
def test_templates(numbers: range) -> None:
    """A mutated template renders or is refused."""
    messages = [Message(role=role, content=TEXT) for role in ("system", "user", "assistant", "user")]

    def read(data: bytes) -> None:
        ChatTemplate(data.decode("utf-8", "replace"), bos_token="<s>", eos_token="</s>").render(messages)

    assert 0 < refused(read, TEMPLATE.encode(), numbers) < len(numbers)


@pytest.mark.parametrize("numbers", seeds(60, 5_000))
def test_tokenizers(numbers: range, tmp_path: Path) -> None:
    """A mutated tokenizer file is refused, or encodes and decodes."""
    path = tmp_path / "tokenizer.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        tokenizer = Tokenizer.from_file(path)
        tokenizer.decode(tokenizer.encode(TEXT))
        tokenizer.encode_guarded("<s>user\nHello</s>")

    assert refused(read, (DATA / "tokenizer.json").read_bytes(), numbers) > 0


@pytest.mark.parametrize("numbers", seeds(300, 20_000))
def test_conversations(numbers: range, tmp_path: Path) -> None:
    """A mutated conversation is refused, or holds nothing but texts."""
    path = tmp_path / "talk.json"
    whole = json.dumps({"format_version": 1, "messages": [{"role": "user", "content": "Hi"}] * 3}).encode()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert all(isinstance(message["content"], str) for message in read_conversation(path))

    assert refused(read, whole, numbers) > len(numbers) // 2
