"""From a name to a model directory: each step once, and again only when the source has changed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyModels

from edgekv import prepare as module
from edgekv.errors import BadCheckpoint, ModelNotFound, ScalesError
from edgekv.kv.scales import DEFAULT_NAME, KVScales, Provenance, scales_name, write_scales
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel
from edgekv.prepare import find_scales, prepare

Calls = list[Path]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The outputs of every conversion that is made."""
    calls: Calls = []
    convert = module.convert

    def counted(source: Path, out: Path, *arguments: Any, **options: Any) -> Any:
        calls.append(out)
        return convert(source, out, *arguments, **options)

    monkeypatch.setattr(module, "convert", counted)
    return calls


@pytest.fixture
def source(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_models.source("one-layer"), tmp_path / "tiny"))


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: equal ones mean that nothing was written."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.iterdir()}


def scales_for(model: ConvertedModel, **changes: Any) -> KVScales:
    spec = model.spec
    ones = np.ones((spec.num_layers, spec.num_kv_heads, spec.head_dim), np.float32)
    provenance = Provenance("envelope", 1.1, 10, "test")
    return replace(KVScales(ones, ones, "int8", "channel", model.fingerprint, provenance), **changes)


# ---- files and folders of one's own ----------------------------------------------------------------------------------


def test_a_source_is_converted_once(source: Path, tmp_path: Path, conversions: Calls) -> None:
    """The second call finds the first one's model and does not touch it."""
    home = tmp_path / "home"
    first = prepare(str(source), home=home)
    assert first.folder.parent == home / "models"
    assert first.folder.name.startswith("tiny-")
    assert first.description.name == "tiny"
    before = states(first.folder)
    second = prepare(str(source), home=home)
    assert (second.folder, states(second.folder), len(conversions)) == (first.folder, before, 1)
    assert os.listdir(home / "models") == [first.folder.name]


def test_a_changed_source_is_converted_again(source: Path, tmp_path: Path, conversions: Calls) -> None:
    """Another size, another time, another file: each leads to a new conversion with its own fingerprint or folder."""
    home, folders = tmp_path / "home", set()
    config = json.loads((source / "config.json").read_text())
    folders.add(prepare(str(source), home=home).folder)
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    changed = prepare(str(source), home=home)
    assert changed.spec.rms_eps == 1e-4
    folders.add(changed.folder)
    os.utime(source / "model.safetensors", ns=(1, 1))
    folders.add(prepare(str(source), home=home).folder)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    folders.add(prepare(str(source), home=home).folder)
    assert len(folders) == len(conversions) == 4


def test_two_sources_of_one_name(source: Path, tmp_path: Path) -> None:
    """Folders of the same name in different places do not share a model."""
    other = Path(shutil.copytree(source, tmp_path / "elsewhere" / "tiny"))
    home = tmp_path / "home"
    assert prepare(str(source), home=home).folder != prepare(str(other), home=home).folder


def test_a_model_directory_is_used_where_it_is(tiny_models: TinyModels, tmp_path: Path, conversions: Calls) -> None:
    """No copy, no conversion, no home folder; a relative path and a tilde are paths too."""
    folder = tiny_models.converted("one-layer").folder
    assert prepare(str(folder), home=tmp_path / "home").folder == folder
    assert prepare(os.path.relpath(folder), home=tmp_path / "home").folder.resolve() == folder.resolve()
    assert conversions == []
    assert not (tmp_path / "home").exists()


def test_an_interrupted_conversion_is_made_again(source: Path, tmp_path: Path, conversions: Calls) -> None:
    """Ctrl-C leaves nothing that looks like a model, so the next call starts afresh."""
    home = tmp_path / "home"

    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), home=home, progress=interrupt)
    assert os.listdir(home / "models") == []
    assert prepare(str(source), home=home).spec.num_layers == 1
    assert len(conversions) == 2


@pytest.mark.parametrize("target", ["no-such-model", "./nowhere", "smollm2", "SMOLLM2-135M-INSTRUCT", "/nope/x.gguf"])
def test_names_that_do_not_exist(tmp_path: Path, target: str) -> None:
    """Named, with the names there are; nothing is made."""
    with pytest.raises(ModelNotFound, match=catalog.DEFAULT_MODEL) as caught:
        prepare(target, home=tmp_path / "home")
    assert repr(target) in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_things_that_are_no_model(tmp_path: Path) -> None:
    """A file and a folder that exist and hold no weights."""
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    for target in ("notes.txt", "folder"):
        with pytest.raises(ModelNotFound):
            prepare(str(tmp_path / target), home=tmp_path / "home")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadCheckpoint):
        prepare(str(tmp_path / "cut.gguf"), home=tmp_path / "home")


# ---- the catalog -----------------------------------------------------------------------------------------------------


class Catalog:
    """A catalog with one model, whose download is a local folder."""

    def __init__(self, entry: catalog.CatalogEntry, source: Path) -> None:
        self.entry, self.source, self.pulled = entry, source, 0

    def pull(self, target: str, *, home: Path, progress: Any) -> Path:
        self.pulled += 1
        return self.source


@pytest.fixture
def shop(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A model named "tiny" that ships no scales yet."""
    (tmp_path / "entry").mkdir()
    published = catalog.entry(catalog.DEFAULT_MODEL)
    made = Catalog(replace(published, name="tiny", folder=tmp_path / "entry", system="Be brief."), source)
    monkeypatch.setattr(catalog, "names", lambda *a: ["tiny"])
    monkeypatch.setattr(catalog, "entry", lambda name, *a: made.entry)
    monkeypatch.setattr(module, "pull", made.pull)
    return made


def test_a_name_is_pulled_and_converted_once(shop: Catalog, tmp_path: Path, conversions: Calls) -> None:
    """The makers' sampling and the system prompt are written into the model; the second call fetches nothing."""
    home = tmp_path / "home"
    model = prepare("tiny", home=home)
    assert model.folder == home / "models" / "tiny"
    assert model.description.system == "Be brief."
    assert model.description.sampling["temperature"] == shop.entry.sampling.temperature
    before = states(model.folder)
    assert prepare("tiny", home=home).folder == model.folder
    assert states(model.folder) == before
    assert (shop.pulled, len(conversions)) == (1, 1)


def test_a_hub_repository_has_a_folder_of_its_own(shop: Catalog, tmp_path: Path) -> None:
    """hf:ORG/REPO becomes ORG--REPO below models/."""
    model = prepare("hf:org/repo", home=tmp_path / "home")
    assert model.folder == tmp_path / "home" / "models" / "org--repo"
    assert model.description.name == "org--repo"


def test_shipped_scales_that_fit_are_adopted(shop: Catalog, tmp_path: Path) -> None:
    """For every dtype the project ships, at the first call and at a later one; they then serve the cache."""
    home = tmp_path / "home"
    model = prepare("tiny", home=home)
    assert not list(model.folder.glob("kv_scales*"))
    write_scales(shop.entry.folder / DEFAULT_NAME, scales_for(model))
    fp8 = scales_name("fp8", "channel")
    write_scales(shop.entry.folder / fp8, scales_for(model, dtype="fp8"))
    prepare("tiny", home=home)
    assert (model.folder / DEFAULT_NAME).read_bytes() == (shop.entry.folder / DEFAULT_NAME).read_bytes()
    assert (model.folder / fp8).exists()
    found = find_scales(model, "int8", "channel")
    assert found is not None
    assert found.fingerprint == model.fingerprint


def test_shipped_scales_that_do_not_fit_are_left(shop: Catalog, tmp_path: Path) -> None:
    """case C11: scales of another conversion are not copied, whatever their name says."""
    model = prepare("tiny", home=tmp_path / "home")
    write_scales(shop.entry.folder / DEFAULT_NAME, scales_for(model, fingerprint="0" * 16))
    prepare("tiny", home=tmp_path / "home")
    assert not (model.folder / DEFAULT_NAME).exists()
    with pytest.raises(ScalesError, match=r"no KV scales.*edgekv calibrate"):
        find_scales(model, "int8", "channel")


def test_ones_own_scales_are_kept(shop: Catalog, tmp_path: Path) -> None:
    """What the user calibrated is not replaced by what the project ships."""
    model = prepare("tiny", home=tmp_path / "home")
    own = scales_for(model, provenance=Provenance("mse", 1.0, 99, "my own text"))
    write_scales(model.folder / DEFAULT_NAME, own)
    write_scales(shop.entry.folder / DEFAULT_NAME, scales_for(model))
    prepare("tiny", home=tmp_path / "home")
    found = find_scales(model, "int8", "channel")
    assert found is not None
    assert found.provenance.corpus == "my own text"


# ---- scales for a cache ----------------------------------------------------------------------------------------------


def test_find_scales(tiny_models: TinyModels, tmp_path: Path) -> None:
    """case C11: a float cache needs none; any other has its own file, checked, or one that is given, checked too."""
    model = tiny_models.converted("one-layer")
    assert find_scales(model, "float", "channel") is None
    path = tmp_path / "mine.safetensors"
    write_scales(path, scales_for(model))
    assert find_scales(model, "int8", "channel", path) is not None
    with pytest.raises(ScalesError, match=r"dtype int8.*dtype fp8"):
        find_scales(model, "fp8", "channel", path)
    with pytest.raises(ScalesError, match="granularity"):
        find_scales(model, "int8", "head", path)
    with pytest.raises(ScalesError, match="no KV scales"):
        find_scales(model, "int8", "head")
    write_scales(path, scales_for(model, fingerprint="f" * 16))
    with pytest.raises(ScalesError, match=f"model {'f' * 16}"):
        find_scales(model, "int8", "channel", path)
