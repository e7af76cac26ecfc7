"""From what a user names to a model directory that runs: pull, convert, and find scales; each happens once.

    a directory made by `edgekv convert`       is used as it is
    a name in the catalog                      pulled and converted into the cache folder
    a GGUF file or a folder of safetensors     converted into the cache folder
    another maker's ONNX graph                 adopted: described in the cache folder, run where it lies

Everything lies under one home folder (`EDGEKV_HOME`, --home, or the user's cache folder): `sources/` as published,
`models/` as converted, `known/` what was converted to what (identity.py), `locks/`. A source whose content has changed
is converted again, and its earlier conversion removed. Of several processes that want the same model one makes it, and
the others wait for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgekv.convert import ConvertReport, convert
from edgekv.errors import InvalidOption, ModelNotFound, ScalesError
from edgekv.files import atomic_file, called, exclusive, expanded, folder_size, remove_leftovers
from edgekv.identity import Record, already_made, content_key, is_pulled, pulled_folder, records
from edgekv.kv.scales import KVScales, read_scales, scales_name
from edgekv.kv.spec import FLOATS, Granularity, KVDtype
from edgekv.model import catalog
from edgekv.model.converted import TEMPLATE, ConvertedModel, is_converted, open_converted
from edgekv.model.foreign import ForeignFolder, find_foreign, folder_name, is_current
from edgekv.model.pull import pull
from edgekv.units import format_bytes
from edgekv.weights import open_source
from edgekv.weights.hub import HubFolder

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Watch:
    """Who is told what happens: how far a stage is, and a sentence when something was made, removed or waited for."""

    progress: Progress = lambda stage, done, total: None
    tell: Callable[[str], None] = lambda sentence: None


def prepare(target: str, *, home: Path, watch: Watch = Watch(), chats: bool = False) -> ConvertedModel:
    """The model directory for what a user named, made if need be.

    Args:
        chats: refuse what has no chat template, before anything is made of a folder or file that is here.

    Raises:
        ModelNotFound, DownloadFailed, BadCheckpoint, UnsupportedModel, StorageError: see edgekv.errors.
        InvalidOption: `chats`, and there is no chat template.
    """
    model = _prepared(target, home, watch, chats)
    if chats:
        _check_chats(model.description.name, (model.folder / TEMPLATE).exists())
    return model


def _prepared(target: str, home: Path, watch: Watch, chats: bool) -> ConvertedModel:
    path = expanded(target)
    if is_converted(path):
        return open_converted(path)
    if is_pulled(target):
        return _prepare_pulled(target, home, watch)
    if (foreign := find_foreign(path)) is not None:
        if chats:
            beside = HubFolder(foreign.root)
            _check_chats(target, beside.has_template, beside.missing_tokenizer)
        return _prepare_foreign(foreign, home, watch)
    if path.exists():
        return _prepare_source(path, home, watch, chats)
    known = ", ".join(catalog.names())
    hub = (
        f" A repository of a model hub is named hf:{target}." if re.fullmatch(r"[\w-]+/[\w.-]+(/\S+)?", target) else ""
    )
    raise ModelNotFound(
        f"{target!r} is neither a file or folder here nor a known model: the known ones are {known}.{hub}"
    )


def _check_chats(name: str, has_template: bool, missing_tokenizer: str = "") -> None:
    """Refuse what cannot chat, with the reason."""
    if missing_tokenizer:
        raise InvalidOption(f"{name} cannot chat: {missing_tokenizer}")
    if not has_template:
        raise InvalidOption(
            f"{name} has no chat template, so it cannot chat: use a model that has one, or continue plain text with "
            "generate() in a program or /v1/completions of `edgekv serve`."
        )


def find_scales(
    model: ConvertedModel, dtype: KVDtype, granularity: Granularity, path: Path | None = None
) -> KVScales | None:
    """The scales for a cache, checked against the model; None for a float cache.

    Raises:
        ScalesError: there are none, or they do not fit. Scale 1.0 is never assumed.
    """
    if dtype in FLOATS:
        return None
    scales = read_scales(path or model.folder / scales_name(dtype, granularity))
    scales.check(model.spec, model.fingerprint, dtype, granularity)
    return scales


def published_source(model: ConvertedModel, home: Path) -> Path:
    """The checkpoint that a model was converted from.

    Raises:
        ModelNotFound: it is not where it was.
    """
    description = model.description
    places = [Path(description.source)] if description.source else []
    if description.name in catalog.names():
        entry = catalog.entry(description.name)
        places.append(home / "sources" / entry.name / entry.file.name)
    for path in places:
        if path.exists():
            return path
    where = f" (not at {' nor at '.join(map(str, places))})" if places else ""
    raise ModelNotFound(
        f"The torch engine reads the published weights, and those of {description.name} are not here{where}: pull or "
        "convert the model again, or use --engine onnx."
    )


def _prepare_pulled(target: str, home: Path, watch: Watch) -> ConvertedModel:
    entry = catalog.entry(target) if target in catalog.names() else None
    folder = pulled_folder(target, home)
    if not is_converted(folder):
        with _making(folder, home, watch) as missing:
            if missing:
                _pull_and_convert(target, entry, folder, home, watch)
    model = open_converted(folder)
    return model if entry is None else _with_scales_of(model, entry.folder)


def _pull_and_convert(target: str, entry: catalog.CatalogEntry | None, folder: Path, home: Path, watch: Watch) -> None:
    source = pull(target, home=home, progress=watch.progress)
    if (foreign := find_foreign(source)) is not None:
        from edgekv.adopt import adopt

        adopt(foreign, folder, name=folder.name, progress=watch.progress)
        return
    sampling, system = ({}, "") if entry is None else (dict(vars(entry.sampling)), entry.system)
    report = convert(source, folder, name=folder.name, sampling=sampling, system=system, progress=watch.progress)
    _tell(folder.name, report, watch)


@contextmanager
def _making(folder: Path, home: Path, watch: Watch) -> Iterator[bool]:
    """Keep others from making a model directory meanwhile; gives whether it is still to be made."""
    told = f"Another edgekv process is making {folder.name}: waiting for it."
    with exclusive(home / "locks" / f"{folder.name}.lock", lambda: watch.tell(told)):
        remove_leftovers(folder)
        yield not is_converted(folder)


def _with_scales_of(model: ConvertedModel, folder: Path) -> ConvertedModel:
    """Copy the scales that lie in a folder, where the model has none and they fit it."""
    for path in sorted(folder.glob("kv_scales*.safetensors")):
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


def _prepare_foreign(foreign: ForeignFolder, home: Path, watch: Watch) -> ConvertedModel:
    from edgekv.adopt import adopt

    folder = home / "models" / folder_name(foreign)
    if not is_current(folder):
        with _making(folder, home, watch):
            if not is_current(folder):
                adopt(foreign, folder, name=foreign.root.resolve().name, progress=watch.progress)
    return open_converted(folder)


def _prepare_source(path: Path, home: Path, watch: Watch, chats: bool) -> ConvertedModel:
    if (made := already_made(path, home)) is not None:
        return made
    record = Record.of(path, home)
    before = home / "models" / record.conversion
    source = open_source(path)
    if chats:
        _check_chats(str(path), source.has_template, source.missing_tokenizer)
    if source.missing_tokenizer:
        watch.tell(f"The model will run on token ids only: {source.missing_tokenizer}")
    key = content_key(path, map(Path, source.files), record, watch.progress)
    folder = next((home / "models").glob(f"*-{key}"), home / "models" / f"{called(path)}-{key}")
    with _making(folder, home, watch) as missing:
        if missing:
            _convert_source(path, folder, record, watch)
    model = open_converted(folder)
    if record.conversion not in ("", folder.name):
        _replace_conversion(before, model, record, home, watch)
    record.write(path, folder.name, home)
    return model


def _convert_source(path: Path, folder: Path, record: Record, watch: Watch) -> None:
    def sha256(file: Path) -> str:
        return record.sha256(file, watch.progress)

    name = called(path)
    known = next((entry for entry in map(catalog.entry, catalog.names()) if _is_file_of(entry, path, sha256)), None)
    sampling, system = ({}, "") if known is None else (dict(vars(known.sampling)), known.system)
    report = convert(path, folder, name=name, sampling=sampling, system=system, progress=watch.progress, sha256=sha256)
    _tell(name, report, watch)
    if known is not None:
        _with_scales_of(report.model, known.folder)


def _is_file_of(entry: catalog.CatalogEntry, path: Path, sha256: Callable[[Path], str]) -> bool:
    """Whether it is the file that the catalog knows by a name: what is advised there holds for it by any other."""
    return path.is_file() and path.stat().st_size == entry.file.size_bytes and sha256(path) == entry.file.sha256


def _tell(name: str, report: ConvertReport, watch: Watch) -> None:
    watch.tell(f"{name}: {report}")
    if report.advice:
        watch.tell(report.advice)


def _replace_conversion(before: Path, model: ConvertedModel, record: Record, home: Path, watch: Watch) -> None:
    """Remove what was made of a source's earlier content, unless another source still has that; keep fitting scales."""
    others = [other for other in records(home) if other.path != record.path]
    if not is_converted(before) or any(other.conversion == before.name for other in others):
        return
    _with_scales_of(model, before)
    size = format_bytes(folder_size(before))
    shutil.rmtree(before, ignore_errors=True)
    watch.tell(f"{record.path} has changed: its earlier conversion was removed ({size}).")
