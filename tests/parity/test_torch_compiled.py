"""The Triton kernels compiled for graphics cards, on a machine that has none: what the interpreter cannot tell.

Shared memory, registers and spills decide whether a kernel starts at all and how fast it is. Found on 2026-11-30, when
kernels had only ever been interpreted: reading a prompt with heads of 128 took 128 KiB of shared memory (a consumer
card has 99), 1.2 to 1.5 KB of every thread's registers lay in memory, and each place cost an integer division.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPER = Path(__file__).parents[1] / "helpers" / "compiled_kernels.py"
SHARED = 99 * 1024  # of a block, compute capability 8.6 and 8.9 (CUDA C++ programming guide); 8.0 and 9.0 have more
SPILLED = 96  # bytes of a thread's registers in memory: at most 24 at 8.6 and 80 at 9.0 in all cases below


def case(size: int, group: int, count: int, dtype: str, centred: bool = False) -> dict[str, Any]:
    """Arguments of the helper's `launches`."""
    return {"size": size, "group": group, "count": count, "dtype": dtype, "centred": centred}


USUAL = [
    case(64, 3, 1, "int8"),
    case(128, 6, 1, "int8"),
    case(128, 6, 128, "int8"),
    case(128, 6, 1, "int8", True),
    case(128, 6, 128, "fp8", True),
]
ALL = [
    case(size, group, count, dtype, centred)
    for size in (64, 96, 128, 256)
    for group, count in ((1, 1), (8, 1), (4, 128))
    for dtype, centred in (("int8", False), ("int8", True), ("fp8", True), ("fp16", False), ("float", False))
]


def check(capability: int, cases: list[dict[str, Any]]) -> None:
    """Compile all of them in a process that does not interpret, and hold each to the bounds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HELPER), str(capability), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(cases)
    for found in lines:
        for name, facts in found["kernels"].items():
            where = f"{name}, {found}"
            assert facts["shared"] <= SHARED, where
            assert facts["spilled"] <= SPILLED, where
            assert facts["single_bytes"] == 0 or name == "_store", where
        assert found["kernels"]["_attend"]["matrix"] > 0 or found["dtype"] == "float", found


def test_a_consumer_card_has_room_for_every_kernel() -> None:
    check(86, USUAL)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_size_and_cache(capability: int) -> None:
    check(capability, ALL)
