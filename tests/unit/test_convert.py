"""Conversion: whole or not at all, faithful or said so, and no input that ends in a traceback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from conftest import TinyModels
from helpers.checkpoints import VOCAB
from safetensors.torch import load_file, save_file
from test_weights import write_gguf

from edgekv.convert import ConvertOptions, convert
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.errors import BadCheckpoint, EdgeKVError, InvalidOption, ModelNotFound, StorageError, UnsupportedModel
from edgekv.holding import Holding
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import DATA, DESCRIPTION, GRAPH, TEMPLATE, TOKENIZER, open_converted
from edgekv.weights import open_source
from edgekv.weights.base import Form


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(os.listdir(folder))


def hashes(folder: Path) -> dict[str, str]:
    """Every file's hash: two equal ones mean that nothing was touched."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def tied_gguf(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, tied, Q4_0: what is smallest and quickest to convert."""
    return write_gguf(tiny_models.source("one-layer"), tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q4_0")


def edgekv(*arguments: Any, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line, with a limit on the size of files if one is given."""

    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "edgekv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=set_limit)


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_a_conversion_says_what_it_is(tied_gguf: Path, tmp_path: Path) -> None:
    """All files are there, the description fits them, and the report has its figures."""
    steps: list[tuple[str, int, int]] = []
    report = convert(
        tied_gguf, tmp_path / "out", name="tiny", sampling={"temperature": 0.3}, system="Be brief.",
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == sorted([DESCRIPTION, DATA, GRAPH, TEMPLATE, TOKENIZER])
    found = open_converted(tmp_path / "out").description
    assert found == report.model.description
    assert (found.name, found.sampling, found.system) == ("tiny", {"temperature": 0.3}, "Be brief.")
    assert (found.source_scheme, found.scheme) == ("GGUF Q4_0, Q8_0", "int4/32, int8/32")
    assert found.source_sha256 == hashlib.sha256(tied_gguf.read_bytes()).hexdigest()
    assert found.weight_bytes == (tmp_path / "out" / DATA).stat().st_size
    assert (found.bos_token, found.eos_token, found.add_bos) == ("<s>", "</s>", True)
    assert report.seconds > 0
    assert report.peak_rss_bytes > 50 << 20
    assert [done for _, done, _ in steps] == list(range(1, len(steps) + 1))
    assert {total for _, _, total in steps} == {len(steps)}


def test_the_peak_is_this_processs_own() -> None:
    """A large process that starts edgekv does not lend it its size."""
    child = "from edgekv.convert import peak_rss_bytes; print(peak_rss_bytes())"
    parent = f"import subprocess, sys; x = b'1' * (400 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    assert 10 << 20 < int(done.stdout) < 300 << 20


def test_the_same_source_makes_the_same_files(tied_gguf: Path, tmp_path: Path) -> None:
    """Byte for byte, so that scales made on one machine fit on another."""
    first, second = (convert(tied_gguf, tmp_path / out, name="x").model for out in ("a", "b"))
    assert hashes(first.folder) == hashes(second.folder)
    assert first.fingerprint == second.fingerprint


def test_integers_are_kept(tied_gguf: Path, tmp_path: Path) -> None:
    """Q4_0 goes in unchanged: nothing was rounded, and the report says so."""
    assert convert(tied_gguf, tmp_path / "out").max_weight_error == 0


@pytest.mark.parametrize(("bits", "low", "high"), [(4, 0.03, 0.12), (8, 0.002, 0.008)])
def test_rounded_floats_report_their_error(
    tiny_models: TinyModels, tmp_path: Path, bits: int, low: float, high: float
) -> None:
    """A float source must be rounded: the largest relative error of a layer is in the report, in its known range."""
    report = convert(tiny_models.source("one-layer"), tmp_path / "out", ConvertOptions(bits=bits))
    assert low < report.max_weight_error < high
    assert report.model.description.scheme == ("int4/32, int8/32" if bits == 4 else "int8/32")


def test_lossy_int4_reports_its_error(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Q5_1 is held in its 5 bits; only --lossy int4 makes 4 of it, with its error and another fingerprint."""
    source = write_gguf(tiny_models.source("one-layer"), tmp_path / "q.gguf", "Q5_1")
    faithful = convert(source, tmp_path / "faithful")
    lossy = convert(source, tmp_path / "lossy", ConvertOptions(lossy="int4"))
    assert (faithful.max_weight_error, faithful.model.description.scheme) == (0, "int5+shift/32, int8/32")
    assert lossy.max_weight_error > 0.005
    assert lossy.model.description.scheme == "int4/32, int8/32 requantised"
    assert lossy.model.description.weight_bytes < faithful.model.description.weight_bytes
    assert lossy.model.fingerprint != faithful.model.fingerprint


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_own_product_holds_is_noted(
    kind: str, tiny_models: TinyModels, tmp_path: Path, open_onnx: Callable[..., OnnxEngine]
) -> None:
    """For the plan: every matrix in the bits it has. The logits are as near to those of products in float32 as those of
    ONNX Runtime's products are (measured 0.96 to 1.04 times)."""
    model = convert(write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf", kind), tmp_path / "model").model
    kv, ids = KVSpec(64, "float"), np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    own, usual = (open_onnx(model, kv, level=4, matmul=which) for which in ("native", "onnxruntime"))
    exact = open_onnx(model, kv, level=1).forward(ids, all_logits=True)
    embedding = Form("int", 8, 32).bytes_of((VOCAB, model.spec.hidden_size))
    assert own._packed is not None
    assert own._packed.nbytes + embedding == model.description.packed_bytes
    errors = [np.linalg.norm(engine.forward(ids, all_logits=True) - exact) for engine in (own, usual)]
    assert errors[0] < 1.5 * errors[1] < 0.1 * np.linalg.norm(exact)


def test_a_tied_embedding_is_stored_once(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C26: embedding and head are the same bytes of the data file; a head of its own adds its size."""
    tied = convert(tiny_models.source("one-layer"), tmp_path / "tied").model
    apart_source = Path(shutil.copytree(tiny_models.source("one-layer"), tmp_path / "apart-source"))
    state = load_file(apart_source / "model.safetensors")
    save_file(
        state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, apart_source / "model.safetensors"
    )
    config = json.loads((apart_source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (apart_source / "config.json").write_text(json.dumps(config))
    apart = convert(apart_source, tmp_path / "apart").model
    added = apart.description.weight_bytes - tied.description.weight_bytes
    assert 512 * 64 <= added <= 512 * 64 * 1.5  # 8-bit codes, scales and zero points
    graph = onnx.load(tied.folder / GRAPH, load_external_data=False).graph
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.name in ("embed.codes", "head.codes")
    }
    assert places["embed.codes"]["offset"] == places["head.codes"]["offset"]
    assert places["embed.codes"]["length"] == places["head.codes"]["length"] == str(512 * 64)


@pytest.mark.parametrize(
    ("values", "match"),
    [({"bits": 3}, "3 bits.*4 or 8"), ({"bits": 16}, "16 bits"), ({"group": 48}, "48.*32, 64, 128"),
     ({"group": 0}, "Blocks of 0"), ({"lossy": "int2"}, "'int2'.*int4")],
)  # fmt: skip
def test_impossible_options(values: dict[str, Any], match: str) -> None:
    """Refused when they are made, with the possible ones."""
    with pytest.raises(InvalidOption, match=match):
        ConvertOptions(**values)


def test_a_group_that_does_not_divide(tiny_models: TinyModels, tmp_path: Path) -> None:
    """64 columns are no blocks of 128: refused with the remedy, and the remedy works."""
    with pytest.raises(UnsupportedModel, match=r"64 columns.*blocks of 128.*--group 32"):
        convert(tiny_models.source("one-layer"), tmp_path / "out", ConvertOptions(group=128))
    assert names(tmp_path) == []
    assert convert(tiny_models.source("one-layer"), tmp_path / "out", ConvertOptions(group=64)).max_weight_error > 0


@pytest.mark.parametrize(
    ("name", "columns", "group", "advice"),
    [("0.q", 96, 64, ": use --group 32"), ("0.q", 80, 32, ", and no smaller"), ("0.q", 80, 64, ", and no smaller"),
     ("embed", 80, 64, ", and no smaller")],
)  # fmt: skip
def test_a_group_that_does_not_divide_has_a_remedy_or_none(name: str, columns: int, group: int, advice: str) -> None:
    """--group 32 is advised where it helps."""
    with pytest.raises(UnsupportedModel, match=f"{columns} columns.*do not divide{advice}"):
        Holding(False, ConvertOptions(group=group)).form(name, columns, Form("float"))


# ---- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("fault"), MemoryError()])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_fault_in_the_middle_leaves_nothing(
    tied_gguf: Path, tmp_path: Path, step: int, error: BaseException, replacing: bool
) -> None:
    """Ctrl-C or a fault after any part: no directory, or the one that was there, byte for byte."""
    out = tmp_path / "out"
    if replacing:
        convert(tied_gguf, out, name="old")
    before = hashes(out) if replacing else {}

    def fail(what: str, done: int, total: int) -> None:
        if done == step:
            raise error

    with pytest.raises(type(error)):
        convert(tied_gguf, out, name="new", progress=fail)
    assert names(tmp_path) == (["out"] if replacing else [])
    assert (hashes(out) if replacing else {}) == before


def test_an_earlier_model_is_replaced_whole(tied_gguf: Path, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Nothing of the old directory stays, in particular not the scales that were made for it."""
    convert(tiny_models.source("one-layer"), tmp_path / "out", name="old")
    (tmp_path / "out" / "kv_scales.safetensors").write_bytes(b"old")
    model = convert(tied_gguf, tmp_path / "out", name="new").model
    assert names(tmp_path / "out") == sorted([DESCRIPTION, DATA, GRAPH, TEMPLATE, TOKENIZER])
    assert open_converted(tmp_path / "out").description.name == model.description.name == "new"


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_full_disk(tied_gguf: Path, tmp_path: Path, share: float) -> None:
    """No more than a share of the data file may be written: the command says so in one sentence with numbers, exit code
    2, and leaves nothing."""
    whole = convert(tied_gguf, tmp_path / "whole").model
    limit = int(share * whole.description.weight_bytes)
    shutil.rmtree(whole.folder)
    done = edgekv("convert", tied_gguf, tmp_path / "out", limit=limit)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("error: Could not write ")
    assert "File too large" in line
    assert "free on that disk" in line
    assert "Free some space" in line
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == []


def test_no_space_left(tied_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at the end, when the files are flushed to the disk."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left.*free on that disk.*nothing was changed"):
        convert(tied_gguf, tmp_path / "out")
    assert names(tmp_path) == []


def occupy_with_files(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")


def occupy_with_another_onnx_model(out: Path) -> None:
    """An export of another tool, which has a model.onnx too."""
    out.mkdir()
    (out / GRAPH).write_bytes(b"theirs")


@pytest.mark.parametrize(
    "occupy", [occupy_with_files, occupy_with_another_onnx_model, Path.mkdir, lambda out: out.write_text("a file")]
)
def test_what_is_no_model_is_not_replaced(tied_gguf: Path, tmp_path: Path, occupy: Callable[[Path], Any]) -> None:
    """Somebody's folder or file: refused, untouched."""
    occupy(tmp_path / "out")
    before = hashes(tmp_path / "out") if (tmp_path / "out").is_dir() else (tmp_path / "out").read_bytes()
    with pytest.raises(InvalidOption, match="is not a model directory: choose another place"):
        convert(tied_gguf, tmp_path / "out")
    after = hashes(tmp_path / "out") if (tmp_path / "out").is_dir() else (tmp_path / "out").read_bytes()
    assert after == before
    assert names(tmp_path) == ["out"]


def test_a_source_inside_the_output_is_not_replaced(tied_gguf: Path, tmp_path: Path) -> None:
    """Converting a file into the folder it lies in would delete it."""
    convert(tied_gguf, tmp_path / "out")
    source = Path(shutil.copyfile(tied_gguf, tmp_path / "out" / "source.gguf"))
    with pytest.raises(InvalidOption, match="which would be replaced"):
        convert(source, tmp_path / "out")
    assert source.read_bytes() == tied_gguf.read_bytes()


# ---- bad input -------------------------------------------------------------------------------------------------------


def header_size(path: Path) -> int:
    return int(gguf.GGUFReader(path).data_offset)


def test_truncated_gguf_files(tied_gguf: Path, tmp_path: Path) -> None:
    """Twenty seeded lengths, half of them in the header: one sentence that names the file and its size."""
    raw, head, random_ = tied_gguf.read_bytes(), header_size(tied_gguf), random.Random(0)
    lengths = [0, 3, 4, 23, 24, len(raw) - 1, *(random_.randrange(head) for _ in range(7))]
    lengths += [random_.randrange(head, len(raw)) for _ in range(7)]
    path = tmp_path / "cut.gguf"
    for length in lengths:
        path.write_bytes(raw[:length])
        with pytest.raises(BadCheckpoint) as caught:
            convert(path, tmp_path / "out")
        message = str(caught.value)
        assert "cut.gguf" in message
        assert f"{length:,} bytes" in message
        assert "\n" not in message
    assert names(tmp_path) == ["cut.gguf"]


def test_a_truncated_file_on_the_command_line(tied_gguf: Path, tmp_path: Path) -> None:
    """One line on stderr, nothing on stdout, exit code 2, nothing written."""
    (tmp_path / "cut.gguf").write_bytes(tied_gguf.read_bytes()[:9000])
    done = edgekv("convert", tmp_path / "cut.gguf", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "9,000 bytes" in line
    assert "download it again" in line
    assert names(tmp_path) == ["cut.gguf"]


@pytest.mark.parametrize("seed", range(10))
def test_damaged_gguf_headers(tied_gguf: Path, tmp_path: Path, seed: int) -> None:
    """A hundred seeded mutations of one to three bytes, most of them where counts, types and shapes are: an error of
    edgekv's own or a model that opens; never another exception, a hang, or a half-written folder."""
    raw, random_ = tied_gguf.read_bytes(), random.Random(seed)
    reader = gguf.GGUFReader(tied_gguf)
    tensors, tokens = reader.tensors[0].field.offset, reader.fields["tokenizer.ggml.tokens"].offset
    regions = [(0, 64), (24, tokens + 48), (tensors, int(reader.data_offset)), (0, int(reader.data_offset))]
    path, refused = tmp_path / "x.gguf", 0
    for number in range(10):
        damaged = bytearray(raw)
        for _ in range(random_.randint(1, 3)):
            damaged[random_.randrange(*regions[number % len(regions)])] = random_.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(damaged)
        try:
            open_converted(convert(path, tmp_path / "out").model.folder)
        except EdgeKVError as error:
            refused += 1
            assert "\n" not in str(error), error  # noqa: PT017
    assert refused
    assert set(names(tmp_path)) <= {"out", "x.gguf"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
)
def test_weights_that_are_not_finite(tiny_models: TinyModels, tmp_path: Path, value: float, tensor: str) -> None:
    """case C13: refused at conversion, without a warning, and nothing is left."""
    source = Path(shutil.copytree(tiny_models.source("one-layer"), tmp_path / "source"))
    state = load_file(source / "model.safetensors")
    state[tensor].view(-1)[5] = torch.tensor(value)
    save_file(state, source / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="not finite"):
        convert(source, tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_gguf_scales_that_are_not_finite(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C13: a NaN among the fp16 numbers of Q4_0 and Q4_1 blocks, scale or minimum."""
    for kind, place in (("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2)):
        path = write_gguf(tiny_models.source("one-layer"), tmp_path / "x.gguf", kind)
        (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight"]
        start = int(tensor.data_offset)
        raw = bytearray(path.read_bytes())
        raw[start + place : start + place + 2] = np.array([np.nan], np.float16).tobytes()
        path.write_bytes(raw)
        with pytest.raises(BadCheckpoint, match="not finite"):
            convert(path, tmp_path / "out")
        assert names(tmp_path) == ["x.gguf"]


def test_sources_that_are_none(tmp_path: Path) -> None:
    """Nothing there, or nothing of use."""
    with pytest.raises(ModelNotFound):
        convert(tmp_path / "none", tmp_path / "out")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(BadCheckpoint):
        convert(tmp_path / "empty.gguf", tmp_path / "out")
    assert names(tmp_path) == ["empty.gguf"]


# ---- opening what was converted --------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A converted model that a test may damage."""
    return Path(shutil.copytree(tiny_models.converted("one-layer").folder, tmp_path / "model"))


@pytest.mark.parametrize("name", [DATA, GRAPH, TOKENIZER])
def test_a_model_directory_that_lost_a_file(model_folder: Path, name: str) -> None:
    """Named, before anything loads."""
    (model_folder / name).unlink()
    with pytest.raises(BadCheckpoint, match=name.replace(".", r"\.")):
        open_converted(model_folder)


def test_a_data_file_that_was_cut(model_folder: Path) -> None:
    """Both sizes are named."""
    size = (model_folder / DATA).stat().st_size
    os.truncate(model_folder / DATA, size - 1)
    with pytest.raises(BadCheckpoint, match=f"{size - 1:,} bytes instead of {size:,}"):
        open_converted(model_folder)


def test_damaged_descriptions(model_folder: Path) -> None:
    """Every field gone or of another type, one after the other: one sentence that names the file; and a field that
    decides numbers cannot change behind the fingerprint's back."""
    path = model_folder / DESCRIPTION
    data = json.loads(path.read_text())
    for content in ("", "{", "[]", "null", "{}", "[" * 100_000, "\ufeff{}"):
        path.write_text(content, "utf-8")
        with pytest.raises(BadCheckpoint, match=r"edgekv\.json"):
            open_converted(model_folder)
    for field in data:
        kept = {name: value for name, value in data.items() if name != field}
        for changed in (kept, data | {field: None}, data | {field: {"a": 1}}):
            path.write_text(json.dumps(changed))
            with contextlib.suppress(BadCheckpoint):
                assert open_converted(model_folder).fingerprint == data["fingerprint"]
    for field in data["spec"]:
        path.write_text(json.dumps(data | {"spec": data["spec"] | {field: 3}}))
        with pytest.raises(BadCheckpoint):
            open_converted(model_folder)
    path.write_text(json.dumps(data | {"format_version": 2}))
    with pytest.raises(BadCheckpoint, match="format version 2"):
        open_converted(model_folder)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    """Named, with the way to one."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ModelNotFound, match=r"is not a model directory.*edgekv convert"):
            open_converted(path)


def test_the_converted_spec_is_the_sources(tiny_models: TinyModels) -> None:
    """Through JSON and back, for every variant."""
    for name in ("one-layer", "llama3-rope", "linear-rope", "wide-heads", "qwen2"):
        assert tiny_models.converted(name).spec == open_source(tiny_models.source(name)).spec
