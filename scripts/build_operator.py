"""Builds the native attention operator (edgekv/native) with CMake where a C++ compiler is there.

pyproject.toml names these classes as setuptools' build_ext and bdist_wheel commands. Without a compiler the build goes
on without the library, and says so: edgekv then runs on ONNX Runtime's own attention operator, slower on long chats and
otherwise the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parents[1] / "edgekv" / "native"


class BuildOperator(build_ext):
    """Runs CMake into the build folder, or beside the sources for an editable install."""

    def run(self) -> None:
        target = SOURCE / "_lib" if self.inplace else Path(self.build_lib).resolve() / "edgekv" / "native" / "_lib"
        try:
            with tempfile.TemporaryDirectory() as work:
                _cmake("-S", str(SOURCE), "-B", work, f"-DEDGEKV_LIBRARY_DIR={target}", "-DCMAKE_BUILD_TYPE=Release")
                _cmake("--build", work, "--config", "Release", "--parallel", str(os.cpu_count() or 1))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"edgekv: the native operator is not built ({error}); edgekv works without it.", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """One wheel a platform for every Python 3: the operator is loaded by ONNX Runtime and knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def _cmake(*arguments: str) -> None:
    subprocess.run(["cmake", *arguments], check=True)
