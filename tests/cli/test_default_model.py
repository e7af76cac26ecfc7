"""The default model, end to end: fetched through the project's own pull, it answers, and the README's program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.model.converted import ConvertedModel

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run with this Python, from an empty folder's point of view."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.usefixtures("default_model")
def test_the_first_answer_names_paris() -> None:
    """`edgekv chat` with nothing but a question."""
    result = run("-m", "edgekv", "chat", "-p", "What is the capital of France?")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.usefixtures("default_model")
def test_the_program_in_the_readme_runs() -> None:
    """It prints two answers."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    result = run("-c", program)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "Rome" in result.stdout


def test_peak_memory_at_the_whole_context(default_model: ConvertedModel) -> None:
    """`edgekv chat` at capacity 8192 stays under 500 MB (Linux counts what is resident)."""
    code = (
        "from edgekv.cli import run\n"
        "from edgekv.convert import peak_rss_bytes\n"
        "run(['chat', '-p', 'Say hello.', '--context', '8192', '--max-new-tokens', '20'])\n"
        "print('peak', peak_rss_bytes())\n"
    )
    result = run("-c", code)
    assert int(result.stdout.split()[-1]) < 500e6
    assert default_model.spec.max_context == 8192


def test_readme_commands_exist() -> None:
    """Every `edgekv COMMAND` that the README names is a command, and every script it names is there."""
    from edgekv.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"`edgekv ([a-z]+)", text)) == set(COMMANDS)
    for script in re.findall(r"scripts/\w+\.py", text):
        assert (ROOT / script).exists(), script
