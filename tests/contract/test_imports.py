"""The house stands as agreed: imports fall in one direction, and light commands load no tensor library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import edgekv

PACKAGE = Path(edgekv.__file__).parent

RANKS = {
    "about": 0, "errors": 0, "units": 0, "files": 0, "slices": 0, "uninterrupted": 0,
    "model.spec": 1, "kv.spec": 1,
    "model": 2, "weights": 2, "kv": 2, "text": 2, "device": 2, "sampling": 2,
    "engines": 3, "holding": 3,
    "generate": 4, "calibrate": 4, "evaluate": 4, "convert": 4, "adopt": 4, "identity": 4,
    "chat": 5, "session": 5, "bench": 5, "lossy": 5, "prepare": 5, "conversation": 5, "sharing": 5,
    "encoded": 4, "session_state": 5, "session_file": 5, "session_store": 5, "notes": 4, "parking": 5,
    "options": 6, "api": 6, "aio": 6,
    "cli": 7, "server": 7, "__main__": 7,
}  # fmt: skip

TENSOR_LIBRARIES = ("torch", "onnxruntime", "transformers")

UNIX = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}
"""Modules of Python's that Windows lacks."""


def modules() -> dict[str, Path]:
    """Dotted name below edgekv -> file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def rank(module: str) -> int:
    """The rank of the longest known prefix."""
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:size])) in RANKS:
            return RANKS[prefix]
    raise AssertionError(f"edgekv.{module} has no rank: add it to RANKS")


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Modules below edgekv that a file imports, those for type checkers left out."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    known = modules()
    return {name.removeprefix("edgekv.") for name in names if name.removeprefix("edgekv.") in known}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_fall(module: str) -> None:
    """No module imports one of a higher rank."""
    rising = {other for other in imports(modules()[module]) if rank(other) > rank(module)}
    assert not rising, f"edgekv.{module} (rank {rank(module)}) imports {rising}"


def test_no_import_cycles() -> None:
    """Modules imported when a module is loaded form no cycle."""
    graph = {name: imports(path, top_level_only=True) - {name} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in sorted(graph[name]):
                if not name.startswith(f"{other}."):  # a package's __init__ is loaded before its modules anyway
                    visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("folder", ["model", "kv", "text", "weights", "calibrate"])
def test_no_tensor_library_below_the_engines(folder: str) -> None:
    """Only engines import torch, onnxruntime or transformers."""
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in (*TENSOR_LIBRARIES, "onnx")], path


def loaded(code: str) -> set[str]:
    """Top-level modules loaded after running code in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import edgekv",
        "from edgekv.cli import run; run(['--help'])",
        "from edgekv.cli import run; run(['plan', 'CONFIG', '--memory', '8GiB'])",
    ],
)
def test_light_commands_load_no_tensor_library(code: str) -> None:
    """`edgekv --help`, `edgekv plan` and `import edgekv` are light."""
    config = Path(__file__).parents[1] / "data" / "llama-fp16" / "config.json"
    assert not loaded(code.replace("CONFIG", str(config))) & {*TENSOR_LIBRARIES, "onnx"}


def test_public_names() -> None:
    """Every public name is there, and the lazy table names the same ones as __all__."""
    for name in edgekv.__all__:
        assert getattr(edgekv, name) is not None
    assert sorted([*edgekv._MODULES, "__version__"]) == sorted(edgekv.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = edgekv.nothing_like_it


@pytest.mark.parametrize("module", sorted(modules()))
def test_windows_can_import_it(module: str) -> None:
    """What Unix alone has is imported where it is used, behind a check of the system."""
    named = {
        name.split(".")[0]
        for node in ast.parse(modules()[module].read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert not named & UNIX
