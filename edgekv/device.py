"""What the hardware offers. The only module that asks it.

Free memory on Linux is MemAvailable, not MemFree: page cache gives way (case C17). A control group's limit counts too,
since a container is killed at its own limit and not at the host's. On a Jetson the GPU shares the system's memory, and
CUDA's own free-memory call ignores reclaimable pages, so the system's figure is used there as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import psutil

from edgekv.errors import DependencyMissing
from edgekv.units import MIB

Device = Literal["cpu", "cuda"]

_CGROUP = Path("/sys/fs/cgroup")
_TEGRA = Path("/etc/nv_tegra_release")


def free_memory(device: str = "cpu") -> int:
    """Bytes that a new process could use on a device without pushing anything out.

    Raises:
        DependencyMissing: a discrete NVIDIA GPU cannot be asked.
    """
    if device == "cuda" and not _TEGRA.exists():
        return _nvidia_free_memory()
    available = int(psutil.virtual_memory().available)
    group = _control_group_room(_CGROUP)
    return available if group is None else min(available, group)


def reserve(free_bytes: int) -> int:
    """What is left to the rest of the system: a tenth, at least 256 MiB."""
    return max(free_bytes // 10, 256 * MIB)


def physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core count once where that can be told."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _control_group_room(root: Path) -> int | None:
    """Bytes left under a memory limit of control groups v2, or None without one. Inactive file pages give way."""
    try:
        limit = (root / "memory.max").read_text().strip()
        current = int((root / "memory.current").read_text())
        statistics = (root / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    reclaimable = sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    return max(0, int(limit) - current + reclaimable)


def _nvidia_free_memory() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise DependencyMissing(
            "No NVIDIA driver was found (nvidia-smi is missing): use --device cpu, or give --memory."
        )
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return int(lines[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise DependencyMissing(f"nvidia-smi did not tell the GPU's free memory ({error}): give --memory.") from None
