"""Compiles the Triton kernels as a graphics card would be given them, without one: prints a JSON object a case.

`python compiled_kernels.py CAPABILITY CASES`, CASES being JSON: a list of the arguments of `launches`. What is compiled
are the product's own launches: they are caught instead of being run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from edgekv.engines.torch.cache import LayerRows, Part, Place, Turns
from edgekv.engines.torch.kernels import fused
from edgekv.model.spec import RopeSpec

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp16": torch.float16, "float": torch.float32}
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32",
    torch.bfloat16: "*bf16",
}  # fmt: skip
KERNELS = ("_store", "_attend", "_combine")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Caught:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.launches.append((self.kernel, arguments, options))


def launches(size: int, group: int, count: int, dtype: str, centred: bool) -> list[Any]:
    """Those of one layer's run of `count` tokens in a cache of 8192."""
    kv_heads, capacity = 2, 8192
    place = Place(capacity, torch.zeros(4, dtype=torch.int32))
    stored = torch.zeros((kv_heads, capacity, size), dtype=STORED[dtype])
    scale = torch.ones((kv_heads, size)) if dtype in ("int8", "fp8") else None
    centre = torch.ones((kv_heads, size)) if centred else None
    turns = Turns.of(RopeSpec(), size, capacity, torch.device("cpu")) if centred else None
    factors = torch.ones((kv_heads, capacity), dtype=torch.bfloat16) if dtype == "int8" else None
    part = Part(stored, scale, factors, centre)
    rows = LayerRows(part, part, turns)
    found: list[Any] = []
    real = {name: getattr(fused, name) for name in KERNELS}
    for name, kernel in real.items():
        setattr(fused, name, Caught(kernel, found))
    try:
        kernels = fused.TritonKernels(kv_heads * group, kv_heads, size, capacity, torch.device("cpu"))
        kernels.store(torch.zeros((kv_heads, count, size)), torch.zeros((kv_heads, count, size)), rows, place)
        queries = torch.zeros((kv_heads * group, count, size))
        kernels.attend(queries, queries, rows, place, scaling=0.1)
    finally:
        for name, kernel in real.items():
            setattr(fused, name, kernel)
    return found


def compiled(capability: int, kernel: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """One launch for a card of this compute capability, with what Triton would know of its arguments."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    build = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    constants = {name: value for name, value in options.items() if name not in build}
    constants |= {name: None for name, value in given.items() if value is None}
    signature, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = given.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name], hints[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                hints[i,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=build)


def facts(made: Any) -> dict[str, int]:
    """What the machine code takes, in bytes or registers of a thread, and counts of instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        printed = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    used = dict(part.split(":", 1) for part in printed.split() if ":" in part)
    code = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"]),
        "matrix": code.count("mma.sync") + code.count("wgmma.mma"),
        "single_bytes": code.count("ld.global.b8"),
    }


def main() -> None:
    """Each case on a line of its own."""
    capability = int(sys.argv[1])
    for case in json.loads(sys.argv[2]):
        parts = {}
        for kernel, arguments, options in launches(**case):
            parts[kernel.fn.__name__] = facts(compiled(capability, kernel, arguments, options))
        print(json.dumps(case | {"kernels": parts}), flush=True)


if __name__ == "__main__":
    main()
