"""Free memory: what a new process may really use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgekv import device
from edgekv.errors import DependencyMissing
from edgekv.units import GIB, MIB

AVAILABLE, FREE = 6 * GIB, 1 * GIB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with most of its memory in the page cache, without control groups, GPU or Tegra."""
    memory = SimpleNamespace(available=AVAILABLE, free=FREE)
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr(device, "_TEGRA", tmp_path / "nv_tegra_release")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    return tmp_path


def control_group(root: Path, limit: str, current: str, stat: str = "anon 5\ninactive_file 0\n") -> None:
    (root / "memory.max").write_text(limit + "\n")
    (root / "memory.current").write_text(current + "\n")
    (root / "memory.stat").write_text(stat)


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> list[list[str]]:
    """Put an nvidia-smi in the path that prints this; returns the commands it is given."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device.subprocess, "run", run)
    return calls


def test_page_cache_counts_as_free() -> None:
    """case C17: MemAvailable, not MemFree."""
    assert device.free_memory("cpu") == AVAILABLE


def test_the_figure_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux psutil's `available` is MemAvailable of /proc/meminfo."""
    monkeypatch.undo()
    if not Path("/proc/meminfo").exists():
        pytest.skip("not Linux")
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = int(lines["MemAvailable"].split()[0]) * 1024
    assert device.psutil.virtual_memory().available == pytest.approx(kernel, rel=0.2)


@pytest.mark.parametrize(
    ("limit", "current", "stat", "room"),
    [
        ("max", str(3 * GIB), "inactive_file 5\n", AVAILABLE),
        (str(2 * GIB), str(GIB), "anon 1\nfile 2\n", GIB),
        (str(2 * GIB), str(GIB), f"anon 1\ninactive_file {256 * MIB}\nactive_file 9\n", GIB + 256 * MIB),
        (str(2 * GIB), str(3 * GIB), "inactive_file 0\n", 0),  # above a limit that was lowered
        (str(64 * GIB), str(GIB), "inactive_file 0\n", AVAILABLE),  # the host has less than the limit allows
        ("garbage", "1", "inactive_file 0\n", AVAILABLE),
        (str(GIB), "garbage", "inactive_file 0\n", AVAILABLE),
        (str(GIB), "1", "inactive_file\n", AVAILABLE),
        (str(GIB), "1", "inactive_file many\n", AVAILABLE),
    ],
)
def test_control_group_limits(machine: Path, limit: str, current: str, stat: str, room: int) -> None:
    """A container has its own limit; reclaimable file pages give way; an unreadable group is no limit."""
    control_group(machine, limit, current, stat)
    assert device.free_memory() == room


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
def test_a_control_group_with_missing_files(machine: Path, missing: str) -> None:
    """The root group of a host has no limit files."""
    control_group(machine, str(GIB), "0")
    (machine / missing).unlink()
    assert device.free_memory() == AVAILABLE


def test_a_discrete_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU's free memory, in MiB as nvidia-smi counts."""
    calls = nvidia_smi(monkeypatch, "23456\n81000\n")
    assert device.free_memory("cuda") == 23456 * MIB
    assert "--query-gpu=memory.free" in calls[0]
    assert device.free_memory("cpu") == AVAILABLE
    assert len(calls) == 1


def test_a_jetson_uses_the_systems_figure(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case C17: on unified memory the page cache is not used memory; nvidia-smi is not even asked."""
    calls = nvidia_smi(monkeypatch, "17\n")
    (machine / "nv_tegra_release").write_text("# R36\n")
    assert device.free_memory("cuda") == AVAILABLE
    assert calls == []
    control_group(machine, str(GIB), "0")
    assert device.free_memory("cuda") == GIB


@pytest.mark.parametrize("answer", ["[N/A]\n", "[Not Supported]\n"])
def test_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """case C17: other integrated GPUs say that they have no figure; the system's is the right one."""
    nvidia_smi(monkeypatch, answer)
    assert device.free_memory("cuda") == AVAILABLE


def test_no_nvidia_smi() -> None:
    """Refused with both ways out."""
    with pytest.raises(DependencyMissing, match=r"nvidia-smi is missing.*--device cpu.*--memory"):
        device.free_memory("cuda")


@pytest.mark.parametrize(
    "answer",
    ["", "\n", "No devices were found\n", OSError("no exec"), subprocess.TimeoutExpired("nvidia-smi", 20),
     subprocess.CalledProcessError(9, "nvidia-smi")],
)  # fmt: skip
def test_nvidia_smi_without_an_answer(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    """Whatever goes wrong with the tool: one sentence, and --memory as the way out."""
    nvidia_smi(monkeypatch, answer)
    with pytest.raises(DependencyMissing, match="give --memory"):
        device.free_memory("cuda")


def test_reserve() -> None:
    """A tenth of what is free, but never less than 256 MiB."""
    assert device.reserve(10 * GIB) == GIB
    assert device.reserve(GIB) == 256 * MIB
    assert device.reserve(0) == 256 * MIB


def test_cores_are_those_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container given two of sixteen cores gets two threads, and hardware threads count once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5}, raising=False)
    monkeypatch.setattr(device.psutil, "cpu_count", lambda logical: 16)
    assert device.physical_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert device.physical_cores() == 16
    monkeypatch.setattr(device.psutil, "cpu_count", lambda logical: None)
    assert device.physical_cores() == 32
