"""A virtual environment for the scripts: made once, filled again only when the package's metadata or C++ changes.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)


def ensure(name: str, extras: str, first: tuple[str, ...] = ()) -> Path:
    """Make the environment if need be and return its Python.

    Args:
        name: folder under the project's root. extras: of the project, e.g. "[dev]" or "". first: requirements that are
            installed before and by themselves (torch: an open range would pull a CUDA build of several GB).
    """
    if sys.version_info < MINIMUM:
        sys.exit(f"edgekv needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer; this is {sys.version.split()[0]}.")
    folder = ROOT / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "edgekv.stamp"
    wanted = _digest(extras, first)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {folder.name} (once; a minute or two) ...", file=sys.stderr, flush=True)
    if not python.exists():
        _create(folder)
    for requirements in (*([item] for item in first), ["-e", f"{ROOT}{extras}"]):
        _pip(python, requirements)
    stamp.write_text(wanted)
    return python


def _create(folder: Path) -> None:
    try:
        venv.create(folder, with_pip=True, clear=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"Could not make {folder}: {error}. On Debian and Ubuntu: apt install python3-venv.")


def _pip(python: Path, requirements: list[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"Installing {' '.join(requirements)} failed; pip's own message is above.")


def _digest(extras: str, first: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((extras, first, sys.version_info[:2], str(ROOT))).encode())
    for path in sorted([ROOT / "pyproject.toml", ROOT / "scripts" / "build_operator.py", *_built()]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _built() -> list[Path]:
    """What the native operator is built from: neither its notes nor its test and benchmark programs."""
    files = [path for path in (ROOT / "edgekv" / "native").iterdir() if path.suffix in (".cpp", ".h", ".inl", ".txt")]
    return [path for path in files if not path.name.startswith(("test_", "bench_"))]
