"""Set up edgekv and chat: `python3 scripts/quickstart.py`, or with `--prompt "Why is the sky blue?"` for one answer.

Makes .venv, installs the project, fetches the default model on first use and hands over to `edgekv chat`; every
option of that command works here.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from _venv import ensure


def main() -> int:
    """Set up and chat; returns the chat's exit code."""
    try:
        python = ensure(".venv", "")
    except KeyboardInterrupt:
        return 130
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the chat's; subprocess.run would kill that a moment later
    return subprocess.run([str(python), "-m", "edgekv", "chat", *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
