"""The wheel's name says what is in it: native code for one platform, and nothing of one Python."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


TAG = """
import setuptools  # first: it will not share a process that has imported distutils without it
from scripts.build_operator import PlatformWheel

extension = setuptools.Extension("x", [])
command = PlatformWheel(setuptools.dist.Distribution({"name": "x", "version": "1", "ext_modules": [extension]}))
command.finalize_options()
print(*command.get_tag())
"""


def test_the_wheel_is_for_a_platform_and_any_python() -> None:
    if importlib.util.find_spec("setuptools") is None:  # looked for, not imported
        pytest.skip("there is no setuptools")
    found = subprocess.run([sys.executable, "-c", TAG], cwd=ROOT, capture_output=True, text=True, check=True)
    python, abi, platform = found.stdout.split()
    assert (python, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_pyproject_names_the_commands_and_the_platforms() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    for name in tool["setuptools"]["cmdclass"].values():
        *module, command = name.split(".")
        tree = ast.parse((ROOT / "/".join(module)).with_suffix(".py").read_text("utf-8"))
        assert command in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    wheels = tool["cibuildwheel"]
    assert {system: wheels[system]["archs"] for system in ("linux", "macos", "windows")} == {
        "linux": ["x86_64", "aarch64"],
        "macos": ["x86_64", "arm64"],
        "windows": ["AMD64"],
    }
    assert (ROOT / wheels["test-command"].split("{project}/")[1]).is_file()


def test_the_wheel_check_fails_without_the_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgekv.engines.onnx import native

    monkeypatch.setattr(native, "library", lambda: tmp_path / "nothing.so")
    assert load_script("check_wheel").main() == 1
    assert "not built" in capsys.readouterr().err
