"""What the hardware offers. The only module that asks it.

Free memory on Linux is MemAvailable, not MemFree: page cache gives way. A control group's limit counts too,
since a container is killed at its own limit and not at the host's. On a Jetson the GPU shares the system's memory, and
CUDA's own free-memory call ignores reclaimable pages, so the system's figure is used there and on every other GPU that
nvidia-smi knows to have no memory of its own (DGX Spark).
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
    own = _nvidia_free_memory() if device == "cuda" and not _TEGRA.exists() else None
    if own is not None:
        return own
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
        statistics = dict(line.split(maxsplit=1) for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - current + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _nvidia_free_memory() -> int | None:
    """Bytes free on the first GPU; None if it has no memory of its own (nvidia-smi then answers "[N/A]")."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise DependencyMissing(
            "No NVIDIA driver was found (nvidia-smi is missing): use --device cpu, or give --memory."
        )
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return None if lines[0].startswith("[N") else int(lines[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise DependencyMissing(f"nvidia-smi did not tell the GPU's free memory ({error}): give --memory.") from None
