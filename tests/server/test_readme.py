"""The programs in the README's chapters on serving and embedding, run as they stand, on a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from helpers.chat import make_chat_model
from helpers.serving import serving

from edgekv.model.converted import ConvertedModel

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model in the place of the default one."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


def program(mark: str, **changes: str) -> str:
    """The README's program that contains a mark, with names exchanged."""
    (text,) = [text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if mark in text]
    for old, new in changes.items():
        text = text.replace({"model": "smollm2-135m-instruct", "address": "http://127.0.0.1:8080"}[old], new)
    return text


def run(text: str, folder: Path, stdin: str = "") -> str:
    """Run a program in a folder; what it prints."""
    command = [sys.executable, "-c", text]
    result = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_openai_client(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """It prints an answer."""
    with serving(chat_model.folder) as url:
        assert run(program("from openai", model="tiny-chat", address=url), tmp_path).strip()


def test_the_fastapi_endpoint(chat_model: ConvertedModel) -> None:
    """It answers, twice the same."""
    names: dict[str, object] = {}
    exec(program("FastAPI", model=str(chat_model.folder)), names)
    with TestClient(names["app"]) as client:  # type: ignore[arg-type]
        first = client.get("/ask", params={"question": "Hello?"})
        assert first.status_code == 200
        assert first.text
        assert client.get("/ask", params={"question": "Hello?"}).text == first.text


def test_the_voice_assistant(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """It answers what it hears until it hears "stop"."""
    said = run(program("input(", model=str(chat_model.folder)), tmp_path, "Hello\nAgain\nstop\n")
    assert said.count("you: ") == 3


def test_the_batch(chat_model: ConvertedModel, tmp_path: Path) -> None:
    """A row a question, in order; the one that is too long has an error."""
    (tmp_path / "questions.txt").write_text("One?\n" + "long " * 500 + "\nThree?\n")
    run(program("answers.jsonl", model=str(chat_model.folder)), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [("answer" in row, "error" in row) for row in rows] == [(True, False), (False, True), (True, False)]
    assert rows[0]["question"] == "One?"
