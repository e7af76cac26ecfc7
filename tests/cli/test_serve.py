"""`edgekv serve` as a user meets it: it starts, answers, ends on Ctrl-C, and refuses with one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers.chat import make_chat_model

from edgekv.errors import InvalidOption
from edgekv.server.options import ServeOptions, is_loopback

DATA = Path(__file__).parents[1] / "data" / "llama-fp16"


def test_it_starts_answers_and_ends(tmp_path: Path) -> None:
    """The address is on stdout as soon as it listens; SIGINT ends it without a traceback."""
    model = make_chat_model(DATA, tmp_path)
    command = [sys.executable, "-m", "edgekv", "serve", str(model.folder), "--port", "0", "--context", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        url = line.split()[2]
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert reply.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    """The first one lets an answer go on for a while, the second ends it now: the client is told, and no log is."""
    model = make_chat_model(DATA, tmp_path)
    command = [sys.executable, "-m", "edgekv", "serve", str(model.folder), "--port", "0", "--context", "256"]
    with subprocess.Popen(
        [*command, "--overflow", "window"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[2]
        schema = {"schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 10**5}}
        form = {"type": "json_schema", "json_schema": schema}
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10**6}
        body |= {"stream": True, "response_format": form}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            going_on = time.monotonic() + 1
            while time.monotonic() < going_on:
                next(lines)
            process.send_signal(signal.SIGINT)
            *_, last = filter(None, lines)
        assert "server_ending" in last
        assert process.wait(5) == 0
        (line,) = process.stderr  # of the beginning, and no traceback
        assert "a second Ctrl-C ends them at once" in line


def test_without_the_extra_it_says_what_to_install() -> None:
    """One sentence and exit code 2, before anything is downloaded or loaded."""
    code = (
        "import sys\n"
        "sys.modules['starlette'] = None\n"
        "from edgekv.cli import run\n"
        "sys.exit(run(['serve', 'no-such-model']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: The server needs starlette, which is not installed: pip install 'edgekv[serve]'."
    )


def test_a_network_address_needs_a_key() -> None:
    """From the command line, and from the variable of the environment."""
    command = [sys.executable, "-m", "edgekv", "serve", "no-such-model", "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "needs a key" in refused.stderr
    environment = os.environ | {"EDGEKV_API_KEY": "long-enough"}
    other = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "no-such-model" in other.stderr


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org", "no-such-host.invalid"])
def test_what_is_no_address_is_refused(host: str) -> None:
    """One sentence and exit code 2, before any model is looked for."""
    command = [sys.executable, "-m", "edgekv", "serve", "no-such-model", "--host", host, "--api-key", "long-enough"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: Cannot listen on {host} port 8080: ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"max_wait_s": 0}, "max_wait_s is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"api_key": "short"}, "at least 8"),
        ({"host": "::"}, "needs a key"),
        ({"host": "192.168.1.7"}, "needs a key"),
    ],
)
def test_options_are_checked(options: dict[str, object], words: str) -> None:
    """One sentence each."""
    with pytest.raises(InvalidOption, match=words):
        ServeOptions(**options)


def test_loopback_names() -> None:
    """What counts as this machine's own."""
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "example.org", "localhost.example.org", ""))
