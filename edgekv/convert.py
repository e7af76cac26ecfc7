"""`edgekv convert`: a published checkpoint -> a model directory that the onnx engine runs.

Faithful by default: what the publisher stored is what runs. Integers with integer zero points are kept as they are, and
so are the codes of bitsandbytes; the rest of GGUF is held in 8 bits (weights/gguf.py). What the publisher of a
quantised model left in float stays so: linear layers in float32, embedding and head as two 8-bit matrices that add up
to the 16 bits. The weights of a float model must be rounded: 4-bit asymmetric in blocks of 32 unless asked otherwise,
embedding and head in 8 bits always. `lossy="int4"` rounds everything to 4 bits, and says what that costs. One tensor is
in memory at a time and the directory appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from edgekv.about import about
from edgekv.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from edgekv.files import atomic_directory, sha256_file
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
from edgekv.weights import BlockWeight, Bnb4Weight, Held, Matrix, SplitWeight, WeightSource, open_source
from edgekv.weights.base import Float32, TokenizerFiles
from edgekv.weights.quantize import quantize_blocks, split_blocks

GROUPS = (32, 64, 128)
WHOLE = ("embed", "head")
"""The matrices that are never held in 4 bits unless the publisher did."""

Progress = Callable[[str, int, int], None]  # what was done, parts done, parts in all


@dataclass(frozen=True)
class ConvertOptions:
    """How weights that cannot be kept as integers are held.

    Raises:
        InvalidOption: a value is out of range.
    """

    bits: int = about("Bits of rounded weights, 4 or 8 (float sources).", default=4)
    group: int = about("Columns that share a scale: 32, 64 or 128 (float sources).", default=32)
    lossy: Literal["", "int4"] = about("int4 rounds what would need 8 bits to 4, at a loss.", default="")

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InvalidOption(f"Weights of {self.bits} bits cannot be made: choose 4 or 8.")
        if self.group not in GROUPS:
            raise InvalidOption(f"Blocks of {self.group} cannot be made: choose {', '.join(map(str, GROUPS))}.")
        if self.lossy not in ("", "int4"):
            raise InvalidOption(f"Unknown lossy scheme {self.lossy!r}: the only one is int4.")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did."""

    model: ConvertedModel
    seconds: float
    peak_rss_bytes: int
    max_weight_error: float  # largest relative error of a rounded layer; 0 when all integers were kept


def convert(
    source_path: Path,
    out: Path,
    options: ConvertOptions | None = None,
    *,
    name: str = "",
    sampling: dict[str, float] | None = None,
    system: str = "",
    progress: Progress = lambda what, done, total: None,
) -> ConvertReport:
    """Convert a GGUF file or a folder of safetensors.

    Args:
        source_path: what to read. out: the directory to make; an earlier model directory there is replaced.
        name, sampling, system: written into the description, for the chat's defaults.

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
    source = open_source(source_path)
    holder = _Holder(source, options or ConvertOptions())
    with atomic_directory(out) as folder:
        texts = source.tokenizer()
        _write_text_files(texts, folder)
        _write_graph(source, holder, folder, progress)
        size = (folder / DATA).stat().st_size
        description = _describe(source, holder, texts, size)
        described = replace(description, name=name or out.name, sampling=sampling or {}, system=system)
        write_description(folder, described)
    return ConvertReport(open_converted(out), time.perf_counter() - started, peak_rss_bytes(), holder.max_error)


def peak_rss_bytes() -> int:
    """The most memory this process has had resident; getrusage on Linux counts what its parent had before exec."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Holder:
    """Decides how each matrix is held, and keeps the largest rounding error."""

    def __init__(self, source: WeightSource, options: ConvertOptions) -> None:
        self._source, self._options = source, options
        self.max_error = 0.0
        self._kinds: set[str] = set()

    @property
    def scheme(self) -> str:
        """How everything is held: "int4/32, int8/32" are bits / block; "int8+8" is a sum of two."""
        return ", ".join(sorted(self._kinds)) + (" requantised" if self._options.lossy else "")

    def __call__(self, name: str) -> Held:
        weight = self._source.matrix(name)
        if not np.isfinite(_factors(weight)).all():
            raise BadCheckpoint(f"The weights of {name} hold numbers that are not finite: download the model again.")
        held = self._hold(name, weight)
        self._kinds.add(_kind(held))
        return held

    def _hold(self, name: str, weight: Matrix) -> Held:
        lossy = bool(self._options.lossy)
        if isinstance(weight, BlockWeight) and (weight.bits == 4 or name in WHOLE or not lossy):
            return _in_operator_blocks(name, weight)
        if isinstance(weight, Bnb4Weight) and not lossy:
            return weight
        if isinstance(weight, np.ndarray):
            return self._hold_floats(name, weight)
        return self._round(name, weight.dequantize())

    def _hold_floats(self, name: str, values: Float32) -> Held:
        if not self._source.quantised or self._options.lossy:
            return self._round(name, values)
        if name not in WHOLE:
            return values
        _check_blocks(name, values, 32)
        return split_blocks(values, group=32)

    def _round(self, name: str, values: Float32) -> BlockWeight:
        whole = name in WHOLE
        bits = 8 if whole else 4 if self._options.lossy else self._options.bits
        group = 32 if whole else self._options.group
        _check_blocks(name, values, group)
        held = quantize_blocks(values, bits=bits, group=group)
        self.max_error = max(self.max_error, _relative_error(values, held))
        return held


def _check_blocks(name: str, values: Float32, group: int) -> None:
    if values.shape[1] % group:
        raise UnsupportedModel(
            f"{name} has {values.shape[1]} columns, which blocks of {group} do not divide: use --group 32."
        )


def _in_operator_blocks(name: str, weight: BlockWeight) -> BlockWeight:
    """The same numbers in blocks that MatMulNBits takes: one group of 1536 columns becomes six equal blocks of 256."""
    group = weight.operator_group
    if group is None:
        raise UnsupportedModel(
            f"{name} has {weight.shape[1]} columns in groups of {weight.group}, which no block of 16 to 256 divides."
        )
    return weight.to_group(group)


def _factors(held: Held) -> Float32:
    """The numbers that are finite if all weights are."""
    if isinstance(held, BlockWeight):
        return held.scales
    if isinstance(held, SplitWeight):
        return held.low.scales
    return held.absmax if isinstance(held, Bnb4Weight) else held


def _kind(held: Held) -> str:
    if isinstance(held, BlockWeight):
        return f"int{held.bits}/{held.group}"
    if isinstance(held, SplitWeight):
        return f"int8+8/{held.high.group}"
    return f"{held.kind}/{held.block}" if isinstance(held, Bnb4Weight) else "float32"


def _relative_error(values: Float32, held: BlockWeight) -> float:
    """Root mean square of the rounding over that of the weights, on a sample of the rows."""
    step = max(1, len(held.codes) // 256)
    rows = np.arange(0, len(held.codes), step)
    reference = values[rows]
    difference = reference - held.take_rows(rows).dequantize()
    return float(np.linalg.norm(difference) / max(float(np.linalg.norm(reference)), 1e-30))


def _write_text_files(texts: TokenizerFiles, folder: Path) -> None:
    (folder / TOKENIZER).write_text(texts.tokenizer_json, "utf-8")
    if texts.chat_template:
        (folder / TEMPLATE).write_text(texts.chat_template, "utf-8")


def _write_graph(source: WeightSource, holder: _Holder, folder: Path, progress: Progress) -> None:
    import onnx

    from edgekv.engines.onnx.adapt import set_cache
    from edgekv.engines.onnx.build import build

    total = source.spec.num_layers + 3
    for done, (what, model) in enumerate(build(source, holder, folder / DATA), start=1):
        progress(what, done, total)
        if model is not None:
            set_cache(model, "int8", "channel")
            onnx.save(model, folder / GRAPH)


def _describe(source: WeightSource, holder: _Holder, texts: TokenizerFiles, size: int) -> Description:
    return Description(
        name="",
        spec=source.spec,
        source_scheme=source.scheme,
        scheme=holder.scheme,
        source_sha256=_source_hash(source),
        weight_bytes=size,
        bos_token=texts.bos_token,
        eos_token=texts.eos_token,
        add_bos=texts.add_bos,
    )


def _source_hash(source: WeightSource) -> str:
    """One file: its SHA-256. Several: the SHA-256 of theirs, in order of name."""
    hashes = [sha256_file(Path(file)) for file in source.files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
