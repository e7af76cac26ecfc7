"""Five hundred and more damaged headers and configs, seeded, of a checkpoint in every format: each is refused in one
sentence or read; none ends in another exception or a hang. A failure names its format and seed.

Reading is all that a conversion does but for the graph: every matrix and vector, the tokenizer, and what `info` tells
beforehand. Each tenth case is converted whole, and leaves nothing if it is refused.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModels
from helpers.mutate import mutate
from helpers.published import AWQ, GPTQ, Bnb, Packed, Published
from safetensors.torch import load_file, save_file
from test_weights import write_gguf

from edgekv.convert import ConvertOptions, convert
from edgekv.errors import EdgeKVError
from edgekv.holding import Holding
from edgekv.model.converted import is_converted
from edgekv.weights import open_source
from edgekv.weights.base import WeightSource

SECONDS = 20  # of processor time, for one case: a hang takes more, the slowest case 0.3
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 7, 2**31 - 1, 2**40, 2**70, 0.5, -1.5, 1e308, float("nan"), float("inf"), "", "128",
    "gptq", "float32", "../../etc/passwd", "\ud800", [], [1], [[]], [0] * 50, {}, {"a": {}}, {"weight_map": 1}, "\0",
)  # fmt: skip

Folder = Callable[[TinyModels, Path], Path]


def published(method: Any, **options: Any) -> Folder:
    def write(models: TinyModels, folder: Path) -> Path:
        small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        Published("mutated", method, tiny=small, **options).write(folder)
        return folder

    return write


def sharded(models: TinyModels, folder: Path) -> Path:
    """Floats in two shards with an index."""
    shutil.copytree(models.source("one-layer"), folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(state), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gguf(kind: str) -> Folder:
    def write(models: TinyModels, folder: Path) -> Path:
        folder.mkdir()
        write_gguf(models.source("one-layer"), folder / "model.gguf", kind)
        return folder

    return write


FORMATS: dict[str, Folder] = {
    "floats": sharded,
    "awq": published(AWQ(32)),
    "gptq": published(GPTQ(32, g_idx="act-order"), family="qwen2"),
    "packed": published(Packed(32, symmetric=False)),
    "nf4": published(Bnb(double=True)),
    "q4_0": gguf("Q4_0"),
    "q5_1": gguf("Q5_1"),
}
COUNT = 80  # of each


def damage_json(text: str, chance: random.Random) -> str:
    """One value somewhere in it replaced, removed, or put under another name."""
    data = json.loads(text)
    place, key = None, None
    found: Any = data
    while isinstance(found, dict | list) and found and (place is None or chance.random() < 0.8):
        place, key = found, chance.choice(list(found) if isinstance(found, dict) else range(len(found)))
        found = place[key]
    if place is None:
        return json.dumps(chance.choice(JUNK))
    kind = chance.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[f"{key}x"] = place.pop(key)
    elif kind == 2 and isinstance(found, int):
        place[key] = chance.choice((found + 1, found * 2, -found, found * 10**12, found / 2))
    else:
        place[key] = chance.choice(JUNK)
    return json.dumps(data)


def damage_header(data: bytes, chance: random.Random) -> bytes:
    """The header of a safetensors file with a damaged entry, or the length before it."""
    (size,) = struct.unpack("<Q", data[:8])
    if chance.random() < 0.1:
        return struct.pack("<Q", chance.choice((0, 1, size - 1, size + 1, 2**31, 2**63))) + data[8:]
    header = damage_json(data[8 : 8 + size].decode(), chance).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def damage_gguf(data: bytes, chance: random.Random) -> bytes:
    """Some bytes of the first 2,000, where the geometry is, or anywhere before the weights."""
    end = 2000 if chance.random() < 0.5 else len(data) // 3
    return mutate(data[:end], chance.randrange(1 << 30)) + data[end:]


def damage(file: Path, chance: random.Random) -> bytes:
    """A damaged copy of a file's content."""
    data = file.read_bytes()
    if file.suffix == ".gguf":
        return damage_gguf(data, chance)
    if chance.random() < 0.2:
        return mutate(data, chance.randrange(1 << 30))
    if file.suffix == ".safetensors":
        return damage_header(data, chance)
    return damage_json(data.decode(), chance).encode("utf-8", "surrogatepass")


def read_all(source: WeightSource) -> None:
    """Everything that a conversion reads."""
    for name, _, _ in Holding(source.quantised, ConvertOptions()).forms(source):
        source.matrix(name)
    for layer in range(source.spec.num_layers):
        for part in ("attn_norm", "ffn_norm", *["q.bias", "k.bias", "v.bias"] * source.spec.qkv_bias):
            source.vector(f"{layer}.{part}")
    source.vector("norm")
    source.tokenizer()
    assert isinstance(source.scheme, str)
    assert source.facts is not None


def refusal(path: Path, out: Path | None) -> str:
    """Why it is refused; empty: it was read, or converted to `out`."""
    try:
        if out is None:
            read_all(open_source(path))
        else:
            convert(path, out)
    except EdgeKVError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_headers_and_configs(name: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Most are refused; some damage does no harm."""
    folder, refused = FORMATS[name](tiny_models, tmp_path / "source"), 0
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".safetensors", ".gguf")]
    whole = {file: file.read_bytes() for file in files}
    assert refusal(folder, tmp_path / "whole") == ""
    for seed in range(COUNT):
        chance = random.Random(f"{name} {seed}")
        file = files[seed % len(files)]
        file.write_bytes(damage(file, chance))
        started, out = time.process_time(), tmp_path / "out" if seed % 10 == 0 else None
        try:
            reason = refusal(folder, out)
        except Exception as error:
            pytest.fail(f"{name}, seed {seed}, {file.name}: {type(error).__name__}: {error}")
        assert time.process_time() - started < SECONDS, (name, seed, file.name)
        assert "\n" not in reason, (name, seed, reason)
        assert reason == "" or out is None or not out.exists() or is_converted(out), (name, seed, reason)
        refused += bool(reason)
        file.write_bytes(whole[file])
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert COUNT // 4 < refused < COUNT, refused
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
