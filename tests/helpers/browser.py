"""A headless Chromium, driven over the pipes of its DevTools protocol: no driver program, no WebSocket library."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.chromium import Browser

HAND_OVER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, which reads its commands from 3 and answers on 4."""


class Page:
    """One page, and what it complained about."""

    def __init__(self, commands: int, replies: int) -> None:
        self._out, self._in = os.fdopen(commands, "wb", buffering=0), os.fdopen(replies, "rb", buffering=0)
        self._number, self._held, self._session = 0, b"", ""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """The window's size, and whether it is a phone with a touch screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def open(self, url: str) -> None:
        """Go there and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition} did not come true; the page shows: {self.text()}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        options = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def text(self) -> str:
        """All the text that is shown."""
        return str(self.run("document.body?.innerText ?? ''"))

    def screenshot(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Close the pipes."""
        self._out.close()
        self._in.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = self._in.read(1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(str(params["entry"]))


@contextmanager
def browser_page(browser: Browser, profile: Path) -> Iterator[Page]:
    """Start the browser with a fresh profile and one page."""
    command = [
        browser.program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-background-networking",
    ]  # fmt: skip
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = (to_browser[0], from_browser[1])
    launch = [sys.executable, "-c", HAND_OVER, *map(str, ends), *command]
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(launch, pass_fds=ends, env=os.environ | browser.environment, **quietly)
    for end in ends:
        os.close(end)
    page = Page(to_browser[1], from_browser[0])
    try:
        yield page
    finally:
        process.terminate()
        process.wait(30)
        page.close()
