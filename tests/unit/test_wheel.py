"""The wheel's name says what is in it: native code for one platform, and nothing of one Python."""

from __future__ import annotations

import importlib.util
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wheel_is_for_a_platform_and_any_python() -> None:
    setuptools = pytest.importorskip("setuptools")
    distribution = setuptools.dist.Distribution(
        {"name": "x", "version": "1", "ext_modules": [setuptools.Extension("x", [])]}
    )
    command = script("build_operator").PlatformWheel(distribution)
    command.finalize_options()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_pyproject_names_the_commands_and_the_platforms() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    for name in tool["setuptools"]["cmdclass"].values():
        module, _, attribute = name.removeprefix("scripts.").partition(".")
        assert hasattr(script(module), attribute)
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
    assert script("check_wheel").main() == 1
    assert "not built" in capsys.readouterr().err
