"""Building edgekv/native without CMake, for tests: the sources, once for each set of flags."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "edgekv" / "native"
_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-w", "-DEDGEKV_EVEX",
)  # fmt: skip
"""EDGEKV_EVEX: the kernels for AVX-VNNI run where there is AVX-512 (native/dot_256.h)."""
_OWN_FLAGS = {
    **dict.fromkeys(("kernels_avx2", "matmul_avx2", "table_avx2"), ("-mavx2", "-mfma", "-mf16c")),
    **dict.fromkeys(("kernels_avxvnni", "matmul_avxvnni"), ("-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni")),
    **dict.fromkeys(("kernels_avx512", "matmul_avx512", "table_avx512"), (
        "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
    )),
} if platform.machine() in ("x86_64", "AMD64") else {"kernels_neon": ("-march=armv8.2-a+dotprod",)}  # fmt: skip
_SETS = ("plain", "avx2", "avxvnni", "avx512")
_ATTENTION = ("attention", "kernels", *(f"kernels_{name}" for name in (*_SETS, "neon")))
_MATMUL = ("matmul", *(f"matmul_{name}" for name in _SETS))
_TABLE = ("table", "table_plain", "table_avx2", "table_avx512")
_PROGRAMS = {"test_attention": _ATTENTION, "test_matmul": _MATMUL}


def compiler() -> str | None:
    """A C++ compiler that takes GCC's options, if there is one."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build_library(folder: Path) -> Path:
    """Build the operators' library into a folder."""
    target = folder / "libedgekv_ops.so"
    _link(folder, (*_ATTENTION, *_MATMUL, *_TABLE, "op", "matmul_op", "table_op"), target, ("-shared",))
    return target


def build_program(folder: Path, name: str, *flags: str) -> Path:
    """Build test_attention or test_matmul into a folder, e.g. with sanitizers."""
    target = folder / name
    _link(folder, (*_PROGRAMS[name], name), target, ("-pthread", *flags))
    return target


def run_program(folder: Path, name: str, rounds: int, seed: int, sanitizers: str = "") -> None:
    """Build test_attention or test_matmul, with sanitizers such as address,undefined, and run it; it has to succeed."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g") if sanitizers else ()
    subprocess.run([build_program(folder, name, *flags), str(rounds), str(seed)], check=True)


def _link(folder: Path, names: tuple[str, ...], target: Path, flags: tuple[str, ...]) -> None:
    jobs, objects = [], []
    compile_flags = tuple(flag for flag in flags if flag != "-shared")
    for name in ("cpu", *names):
        objects.append(str(folder / f"{name}.o"))
        all_flags = (*_COMMON, *compile_flags, *_OWN_FLAGS.get(name, ()))
        source = str(SOURCES / f"{name}.cpp")
        jobs.append(subprocess.Popen([_compiler(), *all_flags, "-c", source, "-o", objects[-1]]))
    results = [job.wait() for job in jobs]
    assert not any(results), "it does not compile"
    subprocess.run([_compiler(), *flags, *objects, "-o", str(target)], check=True)


def _compiler() -> str:
    found = compiler()
    assert found is not None
    return found
