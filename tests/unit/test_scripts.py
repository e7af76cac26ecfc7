"""The scripts that set edgekv up: scripts/_venv.py and scripts/quickstart.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def venv_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/_venv.py over a copy of what it looks at."""
    spec = importlib.util.spec_from_file_location("_venv", ROOT / "scripts" / "_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "scripts", "edgekv/native"):
        source, copy = ROOT / name, tmp_path / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_only_what_is_built_or_installed_is_a_reason_to_install_again(venv_script: ModuleType, tmp_path: Path) -> None:
    """Notes, tests and benchmarks are neither; sources, their build and the package's metadata are."""
    native = tmp_path / "edgekv" / "native"
    before = venv_script._digest("", ())
    for name in ("NOTES.md", "test_attention.cpp", "bench_pool.h", ".gitignore"):
        (native / name).write_text("changed")
    assert venv_script._digest("", ()) == before
    for path in (native / "matmul.cpp", native / "CMakeLists.txt", native / "norm.inl", tmp_path / "pyproject.toml"):
        path.write_text("changed")
        assert venv_script._digest("", ()) != before
        before = venv_script._digest("", ())


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_a_ctrl_c_is_the_chats(tmp_path: Path) -> None:
    """A terminal gives it to both processes: the chat makes of it what it likes, and quickstart waits."""
    chat = tmp_path / "chat"
    chat.write_text("#!/bin/sh\ntrap 'sleep 1; echo stopped; exit 7' INT\necho begun\nwhile :; do sleep 0.1; done\n")
    chat.chmod(0o755)
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import quickstart\n"
        f"quickstart.ensure = lambda *_: {str(chat)!r}; sys.exit(quickstart.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "stopped\n"
    assert process.returncode == 7
