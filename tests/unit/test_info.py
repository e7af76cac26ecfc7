"""`edgekv info` on checkpoints that were never converted: what was recognised, and what edgekv will do with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import TinyModels
from helpers.checkpoints import DATA
from helpers.families import VARIANTS, write_variant
from helpers.published import AWQ, GPTQ, Bnb, Packed, Published, copy_fixture
from test_weights import write_gguf

from edgekv.cli import run
from edgekv.convert import ConvertOptions, convert
from edgekv.holding import Holding, scheme_name
from edgekv.prepare import prepare
from edgekv.weights import open_source


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal on which no line is folded."""
    monkeypatch.setenv("COLUMNS", "400")


def info(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[str]]:
    """The rows of the table: first cell -> the second ones, in order."""
    assert run(["info", *map(str, arguments)]) == 0
    rows: dict[str, list[str]] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        first, _, rest = line.rstrip().partition("  ")
        name = first or name
        rows.setdefault(name, []).append(rest.strip())
    return rows


def test_a_gptq_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Family, format, group size, zero points, act-order, RoPE, context, template, 16-bit layers, operator."""
    rows = info(capsys, DATA / "llama-gptq-g32-asym-actorder", "--home", tmp_path)
    assert rows["family"][0].startswith("llama, 2 layers")
    assert rows["format"] == ["int4/32 (GPTQ, asymmetric, act-order), bfloat16"]
    assert rows["group size"] == ["32"]
    assert rows["zero points"] == ["stored (asymmetric)"]
    assert rows["act-order"] == ["yes"]
    assert rows["RoPE"] == ["default, theta 10000"]
    assert rows["context"] == ["2048 tokens"]
    assert rows["left in float"] == ["embed, head"]
    assert rows["chat template"] == ["none: generate() only"]
    assert rows["held as"][0].startswith("int4/32, int8+8/32 (bits/block), about")
    assert "14 of int4/32 -> int4/32: the same integers" in rows["held as"]
    assert rows["state"][0].startswith("not converted yet")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "ropes", "windows"),
    [
        (
            "gemma3",
            ["linear x8, theta 1e+06 in 1 of 2 layers", "default, theta 10000 in 1 of 2 layers"],
            "24 tokens in 1 of 2 layers",
        ),
        ("smollm3", ["default, theta 2e+06 in 1 of 2 layers"], "none: every layer sees the whole context"),
        ("phi3-partial", ["default, theta 10000, 8 of 16 channels"], "none: every layer sees the whole context"),
    ],
)
def test_layers_that_differ(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, ropes: list[str], windows: str
) -> None:
    """Windows, and rotary embeddings by layer."""
    rows = info(capsys, write_variant(VARIANTS[name], tmp_path / "source"), "--home", tmp_path / "home")
    assert rows["RoPE"] == ropes
    assert rows["windows"] == [windows]


@pytest.mark.parametrize(
    ("published", "wanted"),
    [
        (Published("awq", AWQ(-1, symmetric=True)), {"group size": "a whole row", "zero points": "none stored"}),
        (Published("gptq", GPTQ(64), floats=("k_proj", "1.mlp.up")), {"left in float": "embed, k of layers 0, 1, up"}),
        (Published("packed", Packed(symmetric=False)), {"zero points": "stored (asymmetric)", "group size": "32"}),
        (Published("fp4", Bnb("fp4", double=True)), {"table": "fp4", "double quantisation": "yes"}),
    ],
    ids=lambda value: value.name if isinstance(value, Published) else "",
)
def test_other_formats(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, published: Published, wanted: dict[str, str]
) -> None:
    """Each has the rows that its format is about."""
    published.write(tmp_path / "source")
    rows = info(capsys, tmp_path / "source", "--home", tmp_path)
    for name, value in wanted.items():
        assert rows[name][0].startswith(value), rows


def test_gguf(capsys: pytest.CaptureFixture[str], tiny_models: TinyModels, tmp_path: Path) -> None:
    """Which types there are, and that Q4_1 keeps its integers."""
    path = write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf", "Q4_1")
    rows = info(capsys, path, "--home", tmp_path / "home")
    assert rows["format"][0].startswith("GGUF Q4_1")
    wanted = "14 of Q4_1 -> int4+shift/32: the same integers, each block with a float that is added"
    assert wanted in rows["held as"]


@pytest.mark.parametrize(
    ("field", "wanted"),
    [("pre", "tiny.gguf splits text by the rule 'viking'"), ("model", "tiny.gguf has a tokenizer of type 'viking'")],
)
def test_a_gguf_file_with_an_unknown_tokenizer(
    capsys: pytest.CaptureFixture[str], tiny_models: TinyModels, tmp_path: Path, field: str, wanted: str
) -> None:
    """Said before anything is converted."""
    edit = {f"tokenizer.ggml.{field}": "viking"}
    path = write_gguf(tiny_models.source("llama"), tmp_path / "tiny.gguf", "Q4_1", lambda m, t: m.update(edit))
    rows = info(capsys, path, "--home", tmp_path / "home")
    assert rows["tokenizer"][0].startswith(wanted)
    assert "cannot chat" in rows["state"][0]


def test_a_float_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its weights will be rounded, and info says so."""
    rows = info(capsys, DATA / "llama-fp16", "--home", tmp_path)
    assert "14 of float16 -> int4/32: rounded to 4 bits" in rows["held as"]
    assert "left in float" not in rows


def test_a_converted_source(capsys: pytest.CaptureFixture[str], tiny_models: TinyModels, tmp_path: Path) -> None:
    """Says where the model is; the list of models says what it was made of."""
    source = tiny_models.source("one-layer")
    folder = prepare(str(source), home=tmp_path).folder
    assert info(capsys, source, "--home", tmp_path)["state"] == [f"converted: {folder}"]
    run(["info", "--home", str(tmp_path)])
    text = "".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert folder.name in text
    assert "(unchanged)" in text


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/model.safetensors")))
@pytest.mark.parametrize("lossy", ["", "int4", "int8"])
def test_what_is_told_is_what_is_done(name: str, lossy: str, tmp_path: Path) -> None:
    """The forms and the size that follow from metadata are those of the conversion; the size within 4 %, which is what
    norms, absent zero points and tensors that are small enough for the graph file make."""
    folder, options = copy_fixture(name, tmp_path / "source"), ConvertOptions(lossy=lossy)  # type: ignore[arg-type]
    source = open_source(folder)
    matrices = list(Holding(source.quantised, options).forms(source))
    done = convert(folder, tmp_path / "model", options).model.description
    assert done.scheme == scheme_name({form for _, _, form in matrices}, options)
    assert done.weight_bytes == pytest.approx(sum(form.bytes_of(at.shape) for _, at, form in matrices), rel=0.04)
