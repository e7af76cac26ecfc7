"""Damaged files of every kind that a user may have: refused in one sentence, or harmless. No traceback, hang or crash.

Each case takes a range of seeds, so a failure can be run again by its number. The default run is short; the long one is
`pytest tests/fuzz -m slow`. Readers of weights have their own mutations in tests/unit (headers and configs).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.chat import make_chat_model
from helpers.mutate import mutate

from edgekv.conversation import read_conversation
from edgekv.errors import EdgeKVError
from edgekv.model.converted import ConvertedModel
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

# Loads mutated copies of a model directory and lets them answer, seed after seed; only refusals of edgekv's own pass.
LOADER = """
import shutil, sys
from pathlib import Path
import edgekv
from helpers.mutate import mutate

source, work, first, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
names = sorted(path.name for path in source.iterdir() if path.is_file())
refused = 0
for seed in range(first, first + count):
    name = names[seed % len(names)]
    print(seed, name, flush=True)
    (work / name).write_bytes(mutate((source / name).read_bytes(), seed))
    try:
        with edgekv.load(work, memory="4GiB", context=256, threads=1) as runtime:
            runtime.chat([{"role": "user", "content": "Hello"}], max_new_tokens=3)
    except edgekv.EdgeKVError as error:
        refused += 1
        assert str(error) and "\\n" not in str(error), error
    shutil.copyfile(source / name, work / name)
print("refused", refused)
"""


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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales."""
    return make_chat_model(DATA, tmp_path_factory.mktemp("chat"))


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


@pytest.mark.parametrize("numbers", seeds(60, 3_000))
def test_model_directories(numbers: range, chat_model: ConvertedModel, tmp_path: Path) -> None:
    """Description, graph, weights, scales, tokenizer, template: a damaged one is refused or answers something. The
    graph goes to ONNX Runtime, so a process of its own says whether it crashed."""
    work = tmp_path / "work"
    shutil.copytree(chat_model.folder, work)
    command = [sys.executable, "-c", LOADER, str(chat_model.folder), str(work), str(numbers.start), str(len(numbers))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60 + 5 * len(numbers), env=environment, check=False
    )
    assert result.returncode == 0, f"{result.stdout[-200:]} {result.stderr[-2000:]}"
    assert int(result.stdout.split()[-1]) > len(numbers) // 4
