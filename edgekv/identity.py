"""Which conversion belongs to a source: its content decides, not its names and times.

The *key* of a source is a hash of everything a conversion reads of it: the weight files, and the small files beside
them (configs, tokenizer, template). Two copies of a model share one conversion; a touched file makes no new one, and a
changed one always does. A conversion takes minutes and hashing 4 GB three seconds (1.4 GiB/s of processor time with SHA
instructions, measured 2026-11-30; 324 MiB/s without, 2026-11-29), so the hash is that of the whole content; each file's
hash is kept in a *record*, one a source path, and made again only when the file's size, times or inode differ. With
nothing changed, finding the conversion costs a stat of each file.

    home/known/<hash of the path>.json    path, conversion, and of each file its state and SHA-256
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgekv.errors import StorageError
from edgekv.files import atomic_file, sha256_file
from edgekv.model import catalog
from edgekv.model.converted import FORMAT_VERSION, ConvertedModel, is_converted, open_converted
from edgekv.model.foreign import find_foreign, folder_name, is_current

RECORDS = "known"
_BESIDE = (".json", ".jinja", ".model")
"""Suffixes of the small files that a conversion of a folder may read."""
_WATCHED = (*_BESIDE, ".safetensors", ".gguf")

Progress = Callable[[str, int, int | None], None]
State = list[int]  # size, modification and change time in ns, inode


def is_pulled(target: str) -> bool:
    """Whether a model's name is one that is pulled: of the catalog, or of a hub."""
    return target.startswith("hf:") or target in catalog.names()


def pulled_folder(target: str, home: Path) -> Path:
    """Where what is made of such a model lies."""
    return home / "models" / target.removeprefix("hf:").replace("/", "--")


@dataclass
class Record:
    """What is known of one source."""

    path: str
    conversion: str = ""  # the name of its model directory below models/
    states: dict[str, State] = field(default_factory=dict)  # of every file that could matter
    hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 of those that were read

    @classmethod
    def of(cls, path: Path, home: Path) -> Record:
        """The record of a source, empty if there is none that can be read."""
        found = _read(_place(path, home))
        return found if found is not None and found.path == str(path.resolve()) else cls(str(path.resolve()))

    def is_current(self, path: Path) -> bool:
        """Whether no file has changed, come or gone since the record was written."""
        return bool(self.states) and self.states == _states(path)

    def state(self) -> str:
        """For people: whether the source is as it was, has changed, or is gone."""
        path = Path(self.path)
        return "gone" if not path.exists() else "unchanged" if self.is_current(path) else "changed since"

    def sha256(self, file: Path, progress: Progress) -> str:
        """The SHA-256 of a file's content, read only if the file has changed."""
        name, state = file.name, _state(file)
        if self.states.get(name) != state or name not in self.hashes:
            done = 0

            def report(more: int) -> None:
                nonlocal done
                done += more
                progress(f"reading {name}", done, state[0])

            self.hashes[name], self.states[name] = sha256_file(file, report), state
        return self.hashes[name]

    def write(self, path: Path, conversion: str, home: Path) -> None:
        """Keep what was found out; a home that cannot be written costs the next call the hashing and no more."""
        now = _states(path)
        self.hashes = {name: sha256 for name, sha256 in self.hashes.items() if name in now}
        self.conversion, self.states = conversion, now | {name: self.states[name] for name in self.hashes}
        try:
            with atomic_file(_place(path, home)) as part:
                part.write_text(json.dumps(asdict(self)), "utf-8")
        except StorageError:
            return


def records(home: Path) -> list[Record]:
    """All sources that were converted into this home."""
    found = (_read(path) for path in sorted((home / RECORDS).glob("*.json")))
    return [record for record in found if record is not None]


def already_made(path: Path, home: Path) -> ConvertedModel | None:
    """What was made of a GGUF file, a folder of safetensors or another maker's graph, unless it has changed since."""
    if (foreign := find_foreign(path)) is not None:
        folder = home / "models" / folder_name(foreign)
        return open_converted(folder) if is_current(folder) else None
    record = Record.of(path, home)
    folder = home / "models" / record.conversion
    current = bool(record.conversion) and is_converted(folder) and record.is_current(path)
    return open_converted(folder) if current else None


def content_key(path: Path, weights: Iterable[Path], record: Record, progress: Progress) -> str:
    """Twelve digits that change when anything changes that the conversion of this source depends on.

    Args:
        weights: the files that hold the weights.
    """
    beside = [file for file in path.iterdir() if file.suffix in _BESIDE] if path.is_dir() else []
    files = sorted({*weights, *beside})
    named = [(file.name if path.is_dir() else "", record.sha256(file, progress)) for file in files]
    return hashlib.sha256(repr((FORMAT_VERSION, named)).encode()).hexdigest()[:12]


def _place(path: Path, home: Path) -> Path:
    return home / RECORDS / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}.json"


def _read(place: Path) -> Record | None:
    try:
        record = Record(**json.loads(place.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    whole = isinstance(record.states, dict) and isinstance(record.hashes, dict) and isinstance(record.conversion, str)
    return record if whole else None


def _states(path: Path) -> dict[str, State]:
    files = [file for file in path.iterdir() if file.suffix in _WATCHED] if path.is_dir() else [path]
    return {file.name: _state(file) for file in files if file.is_file()}


def _state(file: Path) -> State:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
