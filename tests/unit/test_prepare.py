"""From a name to a model directory: each step once, and again only when the source has changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DATA, TinyModels
from helpers.gguf_files import write_gguf

from edgekv import prepare as module
from edgekv.api import open_text
from edgekv.convert import convert
from edgekv.errors import BadCheckpoint, ModelNotFound, ScalesError
from edgekv.kv.scales import DEFAULT_NAME, KVScales, Provenance, scales_name, write_scales
from edgekv.model import catalog
from edgekv.model.catalog import FileSpec
from edgekv.model.converted import ConvertedModel, open_converted
from edgekv.prepare import Watch, find_scales, prepare

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


def test_a_touched_source_is_not(source: Path, tmp_path: Path, conversions: Calls) -> None:
    """Times, a file that no conversion reads, the folder's place: the content is the same, and so is the model."""
    home = tmp_path / "home"
    first = prepare(str(source), home=home)
    os.utime(source / "model.safetensors", ns=(1, 1))
    (source / "README.md").write_text("notes")
    assert prepare(str(source), home=home).folder == first.folder
    moved = source.rename(tmp_path / "moved")
    assert prepare(str(moved), home=home).folder == first.folder
    assert len(conversions) == 1


def change_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))


def change_generation(source: Path) -> None:
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))


def change_template(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")


def change_weights_in_secret(source: Path) -> None:
    """One byte of the last tensor; size and times are as they were."""
    path = source / "model.safetensors"
    before, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize(
    "change", [change_config, change_generation, change_template, change_weights_in_secret], ids=lambda c: c.__name__
)
def test_a_changed_source_is_converted_again(
    source: Path, tmp_path: Path, conversions: Calls, change: Callable[[Path], None]
) -> None:
    """Any change of content makes a new conversion; the one that no source has any more is removed, and that is told.
    Changing it back converts again."""
    home, told = tmp_path / "home", []
    first = prepare(str(source), home=home)
    shutil.copytree(source, tmp_path / "before")
    change(source)
    second = prepare(str(source), home=home, watch=Watch(tell=told.append))
    assert second.folder != first.folder
    assert os.listdir(home / "models") == [second.folder.name]
    assert any("earlier conversion was removed" in line for line in told)
    assert prepare(str(source), home=home).folder == second.folder
    assert prepare(str(tmp_path / "before"), home=home).folder.name == f"before-{first.folder.name[5:]}"
    assert len(conversions) == 3


def test_a_conversion_that_another_source_uses_stays(source: Path, tmp_path: Path, conversions: Calls) -> None:
    """Two copies share one conversion; when one of them changes, the other keeps it."""
    other, home = Path(shutil.copytree(source, tmp_path / "elsewhere" / "tiny")), tmp_path / "home"
    first = prepare(str(source), home=home)
    assert prepare(str(other), home=home).folder == first.folder
    assert len(conversions) == 1
    change_config(source)
    assert prepare(str(source), home=home).folder != first.folder
    assert prepare(str(other), home=home).folder == first.folder
    assert len(conversions) == 2


def test_scales_survive_a_change_that_leaves_the_numbers(source: Path, tmp_path: Path) -> None:
    """A new template is a new conversion with the same fingerprint: measured scales are kept. Other weights: not."""
    home = tmp_path / "home"
    first = prepare(str(source), home=home)
    write_scales(first.folder / DEFAULT_NAME, scales_for(first))
    change_template(source)
    second = prepare(str(source), home=home)
    assert second.folder != first.folder
    assert (second.folder / DEFAULT_NAME).exists()
    change_weights_in_secret(source)
    assert not (prepare(str(source), home=home).folder / DEFAULT_NAME).exists()


def test_an_unchanged_source_is_not_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later uses start at once: nothing is hashed, not even a header is opened."""
    home = tmp_path / "home"
    first = prepare(str(source), home=home)
    for name in ("open_source", "content_key", "exclusive"):
        monkeypatch.setattr(module, name, lambda *a, **b: pytest.fail("read again"))
    assert prepare(str(source), home=home).folder == first.folder


def test_only_changed_files_are_hashed(source: Path, tmp_path: Path) -> None:
    """A new template costs the hash of the template."""
    home, stages = tmp_path / "home", set()
    prepare(str(source), home=home)
    change_template(source)
    prepare(str(source), home=home, watch=Watch(progress=lambda stage, done, total: stages.add(stage)))
    assert {stage for stage in stages if stage.startswith("reading")} == {"reading chat_template.jinja"}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"path": 3}', '{"path": "x", "states": []}'])
def test_a_damaged_record_is_as_none(source: Path, tmp_path: Path, content: str, conversions: Calls) -> None:
    """The conversion is found again by its content."""
    home = tmp_path / "home"
    first = prepare(str(source), home=home)
    (record,) = (home / "known").iterdir()
    record.write_text(content)
    assert prepare(str(source), home=home).folder == first.folder
    assert len(conversions) == 1


@pytest.mark.parametrize("older", ["", "tokenizer.model", "vocab.json"])
def test_a_source_without_a_tokenizer(source: Path, tmp_path: Path, older: str, conversions: Calls) -> None:
    """Told before it is converted, with the line that makes one, if that exists; it then runs on ids."""
    (source / "tokenizer.json").unlink()
    if older:
        (source / older).write_text("{}")
    wanted = rf"has {older} but no .*AutoTokenizer.*save_pretrained" if older else "no tokenizer.json: copy"
    told: list[str] = []
    model = prepare(str(source), home=tmp_path / "home", watch=Watch(tell=told.append))
    assert re.search(rf"token ids only: .*{wanted}", told[0])
    assert not model.description.tokenizer
    assert len(conversions) == 1


def test_a_model_without_a_tokenizer(source: Path, tmp_path: Path) -> None:
    """Converted by hand it opens, and is refused where text is needed, until there is a tokenizer."""
    tokenizer = (source / "tokenizer.json").read_bytes()
    (source / "tokenizer.json").unlink()
    model = convert(source, tmp_path / "model").model
    assert not open_converted(model.folder).description.tokenizer
    with pytest.raises(BadCheckpoint, match=r"no tokenizer: copy the model's tokenizer\.json into it"):
        open_text(model)
    (model.folder / "tokenizer.json").write_bytes(tokenizer)
    assert open_text(model)[0].encode("a")


# ---- several processes -----------------------------------------------------------------------------------------------

PREPARE = """
import sys, time
from pathlib import Path
from edgekv import prepare as module

def progress(stage, done, total):
    while stage.startswith("layer") and not Path(sys.argv[3]).exists():
        time.sleep(0.02)

watch = module.Watch(progress, lambda sentence: print(sentence, flush=True))
print("model", module.prepare(sys.argv[1], home=Path(sys.argv[2]), watch=watch).folder, flush=True)
"""


def start(source: Path, home: Path, go: Path) -> subprocess.Popen[str]:
    """A process that prepares, and does not leave the first layer before the file `go` is there."""
    command = [sys.executable, "-c", PREPARE, str(source), str(home), str(go)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(pattern: str, folder: Path) -> None:
    """Until a file appears."""
    for _ in range(4000):
        if list(folder.glob(pattern)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {folder}")


def start_two(source: Path, home: Path, go: Path) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """One that converts, and one that has said that it waits."""
    first = start(source, home, go)
    wait_for("models/.tiny-*.part/model.onnx.data", home)
    second = start(source, home, go)
    assert second.stdout is not None
    assert second.stdout.readline().startswith("Another edgekv process is making tiny-")
    return first, second


def test_a_second_process_waits_for_the_first(source: Path, tmp_path: Path) -> None:
    """Two at once: one converts, the other says that it waits and then takes the same model."""
    home, go = tmp_path / "home", tmp_path / "go"
    processes = start_two(source, home, go)
    go.touch()
    made, found = (process.communicate(timeout=200)[0].splitlines() for process in processes)
    assert "held as int4/32, int8/32" in made[0]
    assert made[1:] == found
    assert found[0].startswith(f"model {home}")


def test_a_killed_process_blocks_nobody(source: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a conversion, with another process waiting: that one converts, and clears away what the
    first one left."""
    home, go = tmp_path / "home", tmp_path / "go"
    first, second = start_two(source, home, go)
    first.kill()
    first.communicate(timeout=200)
    go.touch()
    lines = second.communicate(timeout=200)[0].splitlines()
    assert "held as int4/32, int8/32" in lines[0]
    assert lines[-1].startswith("model ")
    assert [name for name in os.listdir(home / "models") if name.startswith(".")] == []


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
        if stage.startswith("layer"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), home=home, watch=Watch(progress=interrupt))
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


def test_a_file_of_the_catalog_is_known_under_any_name(
    shop: Catalog, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is advised for it there, and its scales, are the model's."""
    file = tmp_path / "My.Model.gguf"
    config = json.loads((source / "config.json").read_text())
    write_gguf(source, file, "llama", config, {})
    known = FileSpec("other.gguf", hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size)
    entry = replace(shop.entry, file=known)
    monkeypatch.setattr(catalog, "entry", lambda name, *a: entry)
    first = prepare(str(file), home=tmp_path / "first")
    assert first.description.name == "My.Model"
    assert first.description.system == "Be brief."
    assert first.description.sampling == vars(entry.sampling)
    write_scales(entry.folder / DEFAULT_NAME, scales_for(first))
    assert find_scales(prepare(str(file), home=tmp_path / "second"), "int8", "channel") is not None
    monkeypatch.setattr(catalog, "entry", lambda name, *a: replace(entry, file=replace(known, sha256="0" * 64)))
    assert prepare(str(file), home=tmp_path / "third").description.system == ""


def test_a_hub_repository_of_a_graph_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder of one does."""
    monkeypatch.setattr(module, "pull", lambda *a, **b: DATA / "onnx" / "browser-q4")
    model = prepare("hf:org/graph", home=tmp_path)
    assert model.folder == tmp_path / "models" / "org--graph"
    assert (model.is_foreign, model.description.name) == (True, "org--graph")
    assert prepare("hf:org/graph", home=tmp_path).fingerprint == model.fingerprint


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
