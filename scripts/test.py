"""Set up and run the whole test suite: `python3 scripts/test.py [pytest arguments]`. CI runs exactly this.

Makes .venv-test with the dev extras (torch first and explicitly: an open range would pull gigabytes of CUDA), then
ruff, mypy and pytest. Tests that need the default model fetch it through the project's own `pull`.
"""

from __future__ import annotations

import subprocess
import sys

from _venv import ROOT, ensure

CHECKS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])


def main() -> int:
    """Run everything; returns the first exit code that is not 0."""
    python = str(ensure(".venv-test", "[dev]", first=("torch==2.13.0",)))
    if len(sys.argv) == 1:
        for check in CHECKS:
            print("$ " + " ".join(check), flush=True)
            code = subprocess.run([python, "-m", *check], cwd=ROOT, check=False).returncode
            if code:
                return code
    return subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
