"""`edgekv chat` in a process that is killed with SIGKILL in the middle of something, for tests/cli/test_killed.py.

    python killed_chat.py REPORT PHASE AFTER DELAY ARGUMENTS...

PHASE is prefill, decode, evict, write, flush, before-rename or after-rename. The process dies in the first such phase
after AFTER saves, DELAY seconds into it (another thread kills, so the main one is anywhere). Every save is reported
to the file REPORT when it has returned: its SHA-256 and how many messages it holds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edgekv.files
from edgekv import session_file
from edgekv.cli import run
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.session import Session

PHASES = ("prefill", "decode", "evict", "write", "flush", "before-rename", "after-rename")


class Killer:
    """Knows where the process is to die."""

    def __init__(self, report: Path, phase: str, after: int, delay_s: float) -> None:
        self._report, self._phase, self._after, self._delay_s = report, phase, after, delay_s
        self._saves, self._saving = 0, False

    def enter(self, phase: str) -> None:
        """Die from here on, if this is the phase."""
        if phase == self._phase and self._saves >= self._after and (self._saving or phase in PHASES[:3]):
            if self._delay_s:
                threading.Thread(target=self._die, daemon=True).start()
            else:
                self._die()

    def save(self, original: Callable[..., str]) -> Callable[..., str]:
        """Report what has been saved."""

        def saved(session: Session, path: Path) -> str:
            self._saving = True
            sha256 = original(session, path)
            self._saving, self._saves = False, self._saves + 1
            with self._report.open("a") as file:
                file.write(f"{sha256} {len(session.messages)}\n")
            return sha256

        return saved

    def _die(self) -> None:
        time.sleep(self._delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def hook(owner: Any, name: str, before: Callable[..., object], after: Callable[[], object] = lambda: None) -> None:
    """Call `before` with the arguments of a function, and `after` when it has returned."""
    original = getattr(owner, name)

    def hooked(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **options)
        after()
        return result

    setattr(owner, name, hooked)


def main() -> int:
    """Hook everything and chat."""
    report, phase, after, delay_s, *arguments = sys.argv[1:]
    killer = Killer(Path(report), phase, int(after), float(delay_s))
    hook(OnnxEngine, "forward", lambda engine, tokens: killer.enter("prefill" if len(tokens) > 1 else "decode"))
    hook(OnnxEngine, "append", lambda *_: killer.enter("prefill"))  # a prompt that needs evictions
    hook(OnnxEngine, "evict", lambda *_: killer.enter("evict"))
    hook(session_file, "_write", lambda *_: killer.enter("write"))
    hook(edgekv.files, "_flush", lambda *_: killer.enter("flush"))
    hook(os, "replace", lambda *_: killer.enter("before-rename"), lambda: killer.enter("after-rename"))
    Session.save = killer.save(Session.save)  # type: ignore[method-assign]
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
