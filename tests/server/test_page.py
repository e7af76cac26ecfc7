"""The chat page: in a headless Chromium where there is one, and its pure parts in a JavaScript engine of their own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import py_mini_racer
import pytest
from helpers.browser import Page, browser_page
from helpers.chat import make_chat_model
from helpers.chromium import Browser, find_browser
from helpers.serving import serving, serving_runtime

import edgekv
from edgekv.model.converted import ConvertedModel

PAGE = Path(__file__).parents[2] / "edgekv" / "server" / "page"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model, greedy."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def url(chat_model: ConvertedModel) -> Iterator[str]:
    """A server whose model takes its time, as real ones do, so that there is something to stop."""
    runtime = edgekv.load(chat_model.folder, memory="4GiB", context=2048, threads=1, overflow="window")
    engine = runtime.chat_state.timeline.engine
    forward = engine.forward

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.03)
        return forward(*arguments, **options)

    engine.forward = slowly  # type: ignore[method-assign]
    with serving_runtime(runtime) as address:
        yield address


class TestFiles:
    """What is served."""

    def test_the_policy_allows_this_server_alone(self, url: str) -> None:
        """No inline code or style, no other origin, and nothing in the files that would need one."""
        answer = httpx.get(url)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        for path in PAGE.iterdir():
            text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", "")), path
            assert not re.search(r"\son\w+=|style=|innerHTML|eval\(", text), path

    def test_every_file_is_there_with_its_type(self, url: str) -> None:
        """What the page links to is served, as what it is."""
        links = re.findall(r'(?:href|src)="(/[^"]+)"', httpx.get(url).text)
        types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert len(links) == 3
        for link in [*links, "/page/stream.js"]:
            answer = httpx.get(url + link)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(types[link.rpartition(".")[2]])
        assert httpx.get(f"{url}/page/../app.py").status_code == 404


class TestPureParts:
    """stream.js without a document."""

    @pytest.fixture(scope="class")
    @staticmethod
    def engine() -> Any:
        """An engine in which the module's functions are global."""
        context = py_mini_racer.MiniRacer()
        context.eval(re.sub(r"^export ", "", (PAGE / "stream.js").read_text("utf-8"), flags=re.MULTILINE))
        context.eval("function all(parts) { const p = new EventParser(); return parts.flatMap((x) => p.put(x)); }")
        return context

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
    def test_events_whatever_the_pieces(self, engine: Any, size: int) -> None:
        """The same events however the network cuts the text."""
        text = 'data: {"a":1}\n\n: reading 1 of 2\n\ndata: x\r\ndata: y\r\n\r\ndata: [DONE]\n\ndata: unfinished'
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        told = json.loads(engine.eval(f"JSON.stringify(all({json.dumps(pieces)}))"))
        assert told == [{"data": '{"a":1}'}, {"comment": "reading 1 of 2"}, {"data": "x\ny"}, {"data": "[DONE]"}]

    @pytest.mark.parametrize(
        ("text", "blocks"),
        [
            ("One\n\nTwo\nlines", [("text", "One"), ("text", "Two\nlines")]),
            ("a\n```py\nx = 1\n\ny\n```\nb", [("text", "a"), ("code", "x = 1\n\ny"), ("text", "b")]),
            ("```\nx\n```\n\nAfter\n", [("code", "x"), ("text", "After")]),
            ("```\nstill open", [("code", "still open")]),
            ("~~~\n```\n~~~", [("code", "```")]),
            ("", []),
        ],
    )
    def test_blocks(self, engine: Any, text: str, blocks: list[tuple[str, str]]) -> None:
        """Fences and paragraphs."""
        told = json.loads(engine.eval(f"JSON.stringify(blocksOf({json.dumps(text)}))"))
        assert [(block["kind"], block["text"]) for block in told] == blocks

    def test_spans_and_sizes(self, engine: Any) -> None:
        """Code and strong text; numbers for people. What is no mark stays as it is."""
        told = json.loads(engine.eval("JSON.stringify(spansOf('a `<b>` **c** * d ` e'))"))
        assert [(span["kind"], span["text"]) for span in told] == [
            ("plain", "a "), ("code", "<b>"), ("plain", " "), ("strong", "c"), ("plain", " * d ` e"),
        ]  # fmt: skip
        sizes = [engine.eval(f"bytesAsText({size})") for size in (0, 1023, 1536, 359_661_568, 6 << 30)]
        assert sizes == ["0 B", "1023 B", "1.5 KiB", "343 MiB", "6.0 GiB"]


@pytest.fixture(scope="module")
def browser() -> Browser:
    """A headless Chromium."""
    found = find_browser()
    if found is None:
        pytest.skip("there is no Chromium, and npm could not fetch one (Debian: apt install chromium)")
    return found


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A browser's page; at the end nothing was thrown, and no request or policy failed."""
    with browser_page(browser, tmp_path / "profile") as made:
        yield made
        assert made.complaints == []


def ready(page: Page) -> None:
    """Until the page is idle and knows the model."""
    page.wait("document.getElementById('model').textContent !== ''")
    page.wait("document.getElementById('stop').hidden")


def say(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter", 13, "\r")


def count(page: Page, selector: str) -> int:
    """How many elements there are."""
    return int(page.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def stored(page: Page) -> list[dict[str, str]]:
    """The conversation, as it is sent with the next message."""
    messages: list[dict[str, str]] = json.loads(page.run("sessionStorage.getItem('edgekv.messages')"))
    return messages


class TestInTheBrowser:
    """By keyboard, at a desk and on a phone."""

    def test_a_conversation(self, page: Page, url: str) -> None:
        """Send, read, retry, a second turn, a reload, a new chat; the bars show the cache."""
        page.open(url)
        ready(page)
        page.run("document.getElementById('max-tokens').value = 12")
        say(page, "Hello <b>there</b> </s>")
        page.wait("document.querySelector('.meta button') !== null")
        ready(page)
        assert "Hello <b>there</b> </s>" in page.text()
        assert count(page, "#log b") == 0
        first = page.run("document.querySelector('.assistant .body').textContent")
        assert first
        assert "12 tokens" in page.text()
        page.run("document.querySelector('.meta button').click()")
        ready(page)
        assert count(page, "#log > li") == 2
        page.run("document.getElementById('temperature').value = 0")
        assert page.run("document.querySelector('.assistant .body').textContent") == first
        say(page, "And on")
        page.wait("document.querySelectorAll('#log > li').length === 4")
        ready(page)
        page.wait("document.getElementById('context').value > 0.01")
        assert re.search(r"\d+ / 2048 tokens", page.text())
        page.open(url)
        ready(page)
        assert count(page, "#log > li") == 4
        page.run("document.getElementById('fresh').click()")
        assert count(page, "#log > li") == 0
        assert page.run("document.activeElement.id") == "text"

    def test_stop(self, page: Page, url: str) -> None:
        """Esc ends an answer at once: what was shown stays, the server has stopped, the next message is answered."""
        page.open(url)
        ready(page)
        say(page, "Talk for long")
        page.wait("document.querySelector('.assistant .body').textContent.length > 40")
        assert page.run("document.getElementById('log').getAttribute('aria-busy')") == "true"
        page.press("Escape", 27)
        page.wait("document.getElementById('stop').hidden")
        shown = page.run("document.querySelector('.assistant .body').textContent")
        assert len(shown) > 40
        assert "stopped" in page.text()
        page.wait("fetch('/v1/state').then((r) => r.json()).then((s) => s.requests_running === 0)")
        page.run("document.getElementById('max-tokens').value = 3")
        say(page, "Go on")
        page.wait("document.querySelectorAll('.assistant').length === 2")
        ready(page)
        assert page.run("document.querySelector('.assistant .body').textContent") == shown

    def test_a_refusal_is_shown(self, page: Page, url: str) -> None:
        """The server's own sentence, as an alert, and a way to go on."""
        page.open(url)
        ready(page)
        say(page, "word " * 500)
        page.wait("document.querySelector('[role=alert]') !== null")
        assert "One message is" in page.run("document.querySelector('[role=alert]').textContent")
        assert count(page, ".meta button") == 1
        page.complaints.clear()  # the browser logs every 400

    def test_a_refused_message_is_taken_back(self, page: Page, url: str) -> None:
        """Its text is in the box again, before what was typed meanwhile; what is sent next is sent without it."""
        page.open(url)
        ready(page)
        page.run("document.getElementById('max-tokens').value = 3")
        say(page, "Hello")
        page.wait("document.querySelector('.meta button') !== null")
        ready(page)
        before, long = stored(page), "word " * 500
        say(page, long)
        page.type("next")
        page.wait("document.querySelector('[role=alert]') !== null")
        ready(page)
        assert stored(page) == before
        assert page.run("document.getElementById('text').value") == f"{long.strip()}\n\nnext"
        assert count(page, "#log > .user") == 1
        page.run("document.querySelector('.meta button').click()")
        page.wait("document.getElementById('text').value !== ''")  # refused again
        ready(page)
        assert count(page, "[role=alert]") == 1
        page.run("document.getElementById('text').value = 'short'")
        page.press("Enter", 13, "\r")
        page.wait("document.querySelectorAll('#log > li').length === 4")
        ready(page)
        assert count(page, "[role=alert]") == 0
        assert [message["role"] for message in stored(page)] == ["user", "assistant"] * 2
        assert stored(page)[2]["content"] == "short"
        page.complaints.clear()  # the browser logs every 400

    def test_stopped_before_it_began(self, page: Page, url: str) -> None:
        """A message that nothing was said to is in the box again: a conversation has no two questions in a row."""
        page.open(url)
        ready(page)
        long = {"model": "tiny-chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1900}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=long | {"stream": True}) as other:
            next(other.iter_lines())
            say(page, "Hello")
            page.wait("document.getElementById('stop').hidden === false")
            page.press("Escape", 27)
            ready(page)
            assert stored(page) == []
            assert "stopped" in page.text()
            assert page.run("document.getElementById('text').value") == "Hello"
        page.run("document.getElementById('max-tokens').value = 3")
        page.run("document.querySelector('.meta button').click()")
        page.wait("document.querySelector('.assistant .body').textContent.length > 1")
        ready(page)
        assert [message["role"] for message in stored(page)] == ["user", "assistant"]
        assert count(page, "#log > li") == 2

    def test_a_new_chat_in_the_middle_of_an_answer(self, page: Page, url: str) -> None:
        """The answer that was being made is no part of the new conversation."""
        page.open(url)
        ready(page)
        say(page, "Talk for long")
        page.wait("document.querySelector('.assistant .body').textContent.length > 10")
        page.run("document.getElementById('fresh').click()")
        page.wait("document.getElementById('stop').hidden")
        assert stored(page) == []
        assert page.run("document.getElementById('status').textContent") == "A new conversation."
        page.run("document.getElementById('max-tokens').value = 3")
        say(page, "Another")
        page.wait("document.querySelector('.meta button') !== null")
        ready(page)
        assert [message["role"] for message in stored(page)] == ["user", "assistant"]

    def test_a_long_question_is_followed(self, page: Page, url: str) -> None:
        """What was just sent is in view, and so is its answer, however long the question."""
        page.resize(360, 640, phone=True)
        page.open(url)
        ready(page)
        page.run("document.getElementById('max-tokens').value = 3")
        for turns in (1, 2):
            say(page, "a long question " * 60)
            page.wait(f"document.querySelectorAll('.assistant').length === {turns}")
            ready(page)
            log = "document.getElementById('log')"
            page.wait(f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 10", seconds=5)

    @pytest.mark.parametrize(("width", "height", "phone"), [(1200, 800, False), (360, 640, True)])
    def test_it_fits(self, page: Page, url: str, width: int, height: int, phone: bool) -> None:
        """Nothing is wider than the window; what is touched is large enough; every control has a name."""
        page.resize(width, height, phone=phone)
        page.open(url)
        ready(page)
        page.run("document.getElementById('max-tokens').value = 40")
        say(page, "A long word " + "x" * 200)
        page.wait("document.querySelector('.meta button') !== null")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
        retry, log = (
            json.loads(page.run(f"JSON.stringify(document.querySelector('{name}').getBoundingClientRect())"))
            for name in (".meta button", "#log")
        )
        assert retry["bottom"] <= log["bottom"], "the end of an answer is scrolled into view"
        send = page.run("JSON.stringify(document.getElementById('send').getBoundingClientRect())")
        assert json.loads(send)["height"] >= (44 if phone else 36)
        assert json.loads(send)["bottom"] <= height
        names = page.call("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "textbox", "spinbutton", "meter"}
        found = [n for n in names if n.get("role", {}).get("value") in controls]
        assert len(found) >= 6
        assert all(node["name"]["value"] for node in found)


def test_the_key_is_asked_for(page: Page, chat_model: ConvertedModel) -> None:
    """A wrong key is asked for again; the right one lasts for the tab and is nowhere in the page's address."""
    with serving(chat_model.folder, api_key="secret-key") as url:
        page.open(url)
        for key in ("wrong-key", "secret-key"):
            page.wait("document.getElementById('key-dialog').open")
            page.run("document.getElementById('key').focus()")
            page.type(key)
            page.press("Enter", 13, "\r")
        ready(page)
        page.run("document.getElementById('max-tokens').value = 3")
        say(page, "Hello")
        page.wait("document.querySelector('.meta button') !== null")
        page.open(url)
        ready(page)
        assert "secret" not in page.run("location.href + document.cookie + JSON.stringify(localStorage)")
    page.complaints.clear()  # the browser logs every 401
