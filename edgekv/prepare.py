"""From what a user names to a model directory that runs: pull, convert, and find scales; each happens once.

    a directory made by `edgekv convert`       is used as it is
    a name in the catalog                      pulled and converted into the cache folder
    a GGUF file or a folder of safetensors     converted into the cache folder

Everything lies under one home folder (`EDGEKV_HOME`, --home, or the user's cache folder): `sources/` as published,
`models/` as converted. A converted directory carries the hash of what it was made from; a source that has changed is
converted again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from edgekv.convert import convert
from edgekv.errors import ModelNotFound, ScalesError
from edgekv.files import atomic_file
from edgekv.kv.scales import KVScales, read_scales, scales_name
from edgekv.kv.spec import Granularity, KVDtype
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel, is_converted, open_converted
from edgekv.model.pull import pull

Progress = Callable[[str, int, int | None], None]


def _silent(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


def prepare(target: str, *, home: Path, progress: Progress = _silent) -> ConvertedModel:
    """The model directory for what a user named, made if need be.

    Raises:
        ModelNotFound, DownloadFailed, BadCheckpoint, UnsupportedModel, StorageError: see edgekv.errors.
    """
    path = Path(target).expanduser()
    if is_converted(path):
        return open_converted(path)
    if target.startswith("hf:") or target in catalog.names():
        return _prepare_pulled(target, home, progress)
    if path.exists():
        return _prepare_source(path, home, progress)
    known = ", ".join(catalog.names())
    raise ModelNotFound(f"{target!r} is neither a file or folder here nor a known model: the known ones are {known}.")


def find_scales(
    model: ConvertedModel, dtype: KVDtype, granularity: Granularity, path: Path | None = None
) -> KVScales | None:
    """The scales for a cache, checked against the model; None for a float cache.

    Raises:
        ScalesError: there are none, or they do not fit. Scale 1.0 is never assumed.
    """
    if dtype == "float":
        return None
    scales = read_scales(path or model.folder / scales_name(dtype, granularity))
    scales.check(model.spec, model.fingerprint, dtype, granularity)
    return scales


def _prepare_pulled(target: str, home: Path, progress: Progress) -> ConvertedModel:
    entry = catalog.entry(target) if target in catalog.names() else None
    folder = home / "models" / target.removeprefix("hf:").replace("/", "--")
    if is_converted(folder):
        return _with_shipped_scales(open_converted(folder), entry)
    source = pull(target, home=home, progress=progress)
    if entry is None:
        return convert(source, folder, name=folder.name, progress=progress).model
    sampling = dict(vars(entry.sampling))
    model = convert(source, folder, name=entry.name, sampling=sampling, system=entry.system, progress=progress).model
    return _with_shipped_scales(model, entry)


def _with_shipped_scales(model: ConvertedModel, entry: catalog.CatalogEntry | None) -> ConvertedModel:
    """Copy the scales that the project ships for this model, where the folder has none and they fit it."""
    shipped = [] if entry is None else sorted(entry.folder.glob("kv_scales*.safetensors"))
    for path in shipped:
        if not (model.folder / path.name).exists() and _fits(path, model):
            with atomic_file(model.folder / path.name) as part:
                shutil.copyfile(path, part)
    return model


def _fits(path: Path, model: ConvertedModel) -> bool:
    """Scales made for another conversion of the model do not fit; this one will then be calibrated."""
    try:
        scales = read_scales(path)
        scales.check(model.spec, model.fingerprint, scales.dtype, scales.granularity)
    except ScalesError:
        return False
    return True


def _prepare_source(path: Path, home: Path, progress: Progress) -> ConvertedModel:
    folder = home / "models" / f"{path.resolve().stem}-{_identity(path)}"
    if is_converted(folder):
        return open_converted(folder)
    return convert(path, folder, name=path.resolve().stem, progress=progress).model


def _identity(path: Path) -> str:
    """Changes when a file of the source does: a hash of names, sizes and times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr((str(path.resolve()), states)).encode()).hexdigest()[:12]
