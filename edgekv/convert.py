"""`edgekv convert`: a published checkpoint -> a model directory that the onnx engine runs.

How weights are held is decided in holding.py, faithful by default. Matrices are read, held and written
in blocks of rows, so that a conversion needs little more memory than a layer takes as integers (README), and the
directory appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from edgekv.engines.onnx import native
from edgekv.errors import BadCheckpoint, InvalidOption
from edgekv.files import atomic_directory, sha256_file
from edgekv.holding import TABLES, ConvertOptions, Holding, Rounding, scheme_name
from edgekv.model.converted import (
    DATA,
    GRAPH,
    TEMPLATE,
    TOKENIZER,
    ConvertedModel,
    Description,
    is_converted,
    open_converted,
    write_description,
)
from edgekv.uninterrupted import uninterrupted
from edgekv.units import format_bytes
from edgekv.weights import Held, WeightSource, open_source
from edgekv.weights.base import NO_TOKENIZER, Form, TokenizerFiles, form_of, join_rows, packed_bytes

Progress = Callable[[str, int, int], None]  # what was done, parts done, parts in all


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did."""

    model: ConvertedModel
    seconds: float
    peak_rss_bytes: int
    missing_tokenizer: str  # why there is none, and what to do; empty: there is
    max_weight_error: float  # largest relative error of a rounded layer; 0 when all integers were kept

    @property
    def advice(self) -> str:
        """See `advice`."""
        return advice(self.model.description.scheme)

    def __str__(self) -> str:
        """What came out and what it took, for people."""
        made = self.model.description
        return (
            f"{made.source_scheme} held as {made.scheme}, {format_bytes(made.weight_bytes)}; "
            f"{self.seconds:.1f} s, peak memory {format_bytes(self.peak_rss_bytes)}"
        )


def convert(
    source_path: Path,
    out: Path,
    options: ConvertOptions | None = None,
    *,
    name: str = "",
    sampling: dict[str, float] | None = None,
    system: str = "",
    progress: Progress = lambda what, done, total: None,
    sha256: Callable[[Path], str] = sha256_file,
) -> ConvertReport:
    """Convert a GGUF file or a folder of safetensors.

    Args:
        source_path: what to read; without a tokenizer it becomes a model that runs on token ids only.
        out: the directory to make; an earlier model directory there is replaced.
        name, sampling, system: written into the description, for the chat's defaults; `sampling` over what the
            makers recommend beside the weights.
        sha256: gives a file's hash; a caller that knows some saves reading them again.

    Raises:
        ModelNotFound, BadCheckpoint, UnsupportedModel: the source cannot be used.
        StorageError: the directory cannot be written.
    """
    started = time.perf_counter()
    if out.exists() and not is_converted(out):
        raise InvalidOption(f"{out} exists and is not a model directory: choose another place for the output.")
    if source_path.resolve().is_relative_to(out.resolve()):
        raise InvalidOption(
            f"{source_path} lies in {out}, which would be replaced: choose another place for the output."
        )
    options = options or ConvertOptions()
    source = open_source(source_path)
    holder = _Holder(source, options)
    with atomic_directory(out) as folder:
        texts = NO_TOKENIZER if source.missing_tokenizer else source.tokenizer()
        _write_text_files(texts, folder)
        _write_graph(source, holder, folder, progress)
        size = (folder / DATA).stat().st_size
        description = _describe(source, holder, texts, size, _source_hash(source, sha256))
        advised = {**source.sampling, **(sampling or {})}
        described = replace(description, name=name or out.name, sampling=advised, system=system)
        made_from = replace(described, source=str(source_path.resolve()), holding=_changes(options))
        write_description(folder, replace(made_from, graph_sha256=sha256_file(folder / GRAPH)))
    seconds = time.perf_counter() - started
    missing = source.missing_tokenizer
    return ConvertReport(open_converted(out), seconds, peak_rss_bytes(), missing, holder.max_error)


def reopen(model: ConvertedModel, source_path: Path) -> tuple[WeightSource, Callable[[str], Held]]:
    """What a model was converted from, and a function that gives each of its matrices as the model holds it.

    Raises:
        BadCheckpoint: these are other weights. ModelNotFound: there are none.
    """
    source = open_source(source_path)
    if _source_hash(source, sha256_file) != model.description.source_sha256:
        raise BadCheckpoint(
            f"{source_path} holds other weights than {model.folder} was made from: convert the model again."
        )
    rules = Holding(source.quantised, ConvertOptions(**model.description.holding))
    return source, lambda name: rules.hold(name, source.matrix(name))[0]


def _changes(options: ConvertOptions) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {name: value for name, value in vars(options).items() if value != getattr(ConvertOptions(), name)}


def advice(scheme: str) -> str:
    """What a user may want to know of a scheme (`scheme_name`) before using it on this machine; empty: nothing."""
    reason = native.table_refusal()
    if reason is None or not any(f"{kind}/" in scheme for kind in TABLES):
        return ""
    return (
        f"ONNX Runtime unpacks bitsandbytes' codes at every step, since edgekv's own operator is not used: {reason}. "
        "`edgekv convert FOLDER OUT --lossy int8` rounds them to 8 bits, which is many times as fast, and prints what "
        "that cost."
    )


def peak_rss_bytes() -> int:
    """The most memory this process has had resident; getrusage on Linux counts what its parent had before exec."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Holder:
    """Gives each matrix as it is held, and keeps the forms and what rounding did."""

    def __init__(self, source: WeightSource, options: ConvertOptions) -> None:
        self._source, self._rules = source, Holding(source.quantised, options)
        self._forms: set[Form] = set()
        self._tied = source.spec.tied_embeddings
        self.packed_bytes = 0  # see Description
        self._roundings: dict[str, Rounding] = {}

    @property
    def scheme(self) -> str:
        """See `scheme_name`."""
        return scheme_name(self._forms, self._rules.options)

    @property
    def max_error(self) -> float:
        """The largest relative error of a rounded matrix."""
        return max((rounding.error for rounding in self._roundings.values()), default=0.0)

    def __call__(self, name: str) -> Held:
        return join_rows(self.blocks(name))

    def blocks(self, name: str) -> Iterator[Held]:
        """The matrix in blocks of rows."""
        for block in self._source.blocks(name):
            held, rounding = self._rules.hold(name, block)
            self._forms.add(form_of(held))
            looked_up = name == "embed" and not self._tied  # stays in the file, row by row
            self.packed_bytes += form_of(held).bytes_of(held.shape) if looked_up else packed_bytes(held)
            self._roundings[name] = self._roundings.get(name, Rounding()) + rounding
            yield held


def _write_text_files(texts: TokenizerFiles, folder: Path) -> None:
    if texts.tokenizer_json:
        (folder / TOKENIZER).write_text(texts.tokenizer_json, "utf-8")
    if texts.chat_template:
        (folder / TEMPLATE).write_text(texts.chat_template, "utf-8")


def _write_graph(source: WeightSource, holder: _Holder, folder: Path, progress: Progress) -> None:
    with uninterrupted():
        import onnx

    from edgekv.engines.onnx.adapt import set_cache
    from edgekv.engines.onnx.build import build

    total = source.spec.num_layers + 3
    for done, (what, model) in enumerate(build(source, holder, folder / DATA), start=1):
        progress(what, done, total)
        if model is not None:
            set_cache(model, "int8", "channel")
            onnx.save(model, folder / GRAPH)


def _describe(
    source: WeightSource, holder: _Holder, texts: TokenizerFiles, size: int, source_sha256: str
) -> Description:
    return Description(
        name="",
        spec=source.spec,
        source_scheme=source.scheme,
        scheme=holder.scheme,
        source_sha256=source_sha256,
        weight_bytes=size,
        packed_bytes=holder.packed_bytes,
        bos_token=texts.bos_token,
        eos_token=texts.eos_token,
        add_bos=texts.add_bos,
        tokenizer=bool(texts.tokenizer_json),
    )


def _source_hash(source: WeightSource, sha256: Callable[[Path], str]) -> str:
    """One file: its SHA-256. Several: the SHA-256 of theirs, in order of name."""
    hashes = [sha256(Path(file)) for file in source.files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
