"""Set up edgekv and chat: `python3 scripts/quickstart.py`, or with `--prompt "Why is the sky blue?"` for one answer.

Makes .venv, installs the project, fetches the default model on first use and hands over to `edgekv chat`; every
option of that command works here.
"""

from __future__ import annotations

import subprocess
import sys

from _venv import ensure


def main() -> int:
    """Set up and chat; returns the chat's exit code."""
    python = ensure(".venv", "")
    try:
        return subprocess.run([str(python), "-m", "edgekv", "chat", *sys.argv[1:]], check=False).returncode
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
