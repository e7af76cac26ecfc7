"""A model directory as edgekv runs it, described by its edgekv.json; reading it loads no tensor library.

    edgekv.json          ModelSpec, weight scheme, fingerprint, source hash, special tokens, sampling defaults
    model.onnx(.data)    the graph with an INT8 cache and its weights
    tokenizer.json  chat_template.jinja  kv_scales*.safetensors

Where another maker's ONNX graph is run as it lies (adopt.py), it and its weights stay in that folder: edgekv.json names
them and what they were like when they were read.

The *fingerprint* says which numbers the weights are: the geometry, the source files' hash and the scheme they are held
in. Scales and sessions carry it and are refused by any other model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from edgekv.errors import BadCheckpoint, ModelNotFound
from edgekv.files import atomic_file, sha256_file
from edgekv.model.spec import ModelSpec

FORMAT_VERSION = 1
DESCRIPTION = "edgekv.json"
GRAPH = "model.onnx"
DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Description:
    """The content of edgekv.json."""

    name: str
    spec: ModelSpec
    source_scheme: str  # what the publisher stored
    scheme: str  # how it is held
    source_sha256: str
    weight_bytes: int  # size of the data file
    packed_bytes: int = 0  # what edgekv's own matmul holds of it, in the bits that the weights have; 0: not noted
    graph_sha256: str = ""  # of the graph that was written; empty: made before edgekv noted it, or another maker's
    bos_token: str = ""
    eos_token: str = ""
    tokenizer: bool = True  # whether the source had one
    add_bos: bool = False  # whether the tokenizer puts BOS before plain text
    sampling: dict[str, float] = field(default_factory=dict)  # the maker's recommendation
    system: str = ""  # the system prompt of `edgekv chat`, unless another is given
    graph: str = ""  # another maker's graph, run where it lies; empty: the one in this folder
    graph_files: dict[str, list[int]] = field(default_factory=dict)  # its files there: size, time of change in ns
    source: str = ""  # where the published weights were; the torch engine reads them again
    holding: dict[str, Any] = field(default_factory=dict)  # ConvertOptions that are not at their defaults

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that decides the numbers in the cache."""
        text = "\n".join((self.spec.digest(), self.source_sha256, self.scheme))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ConvertedModel:
    """A model directory and its description."""

    folder: Path
    description: Description

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        return self.description.spec

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        return self.description.fingerprint

    @property
    def graph(self) -> Path:
        """The ONNX graph, beside its weights."""
        return Path(self.description.graph) if self.is_foreign else self.folder / GRAPH

    @property
    def is_foreign(self) -> bool:
        """Whether the graph is another maker's, adapted whenever it is loaded."""
        return bool(self.description.graph)


def file_state(path: Path) -> list[int]:
    """What a file read in place is recognised by: size and time of change in ns; of one that is gone, nothing."""
    found = path.stat() if path.is_file() else None
    return [] if found is None else [found.st_size, found.st_mtime_ns]


def is_converted(folder: Path) -> bool:
    """Whether this is a directory that `edgekv convert` made."""
    return (folder / DESCRIPTION).is_file()


def write_description(folder: Path, description: Description) -> None:
    """Write edgekv.json."""
    data = {"format_version": FORMAT_VERSION, "fingerprint": description.fingerprint} | asdict(description)
    data["spec"] = description.spec.to_json()
    with atomic_file(folder / DESCRIPTION) as part:
        part.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def open_converted(folder: Path) -> ConvertedModel:
    """Read a model directory's description and make sure that its files are whole.

    Raises:
        ModelNotFound: it is no model directory.
        BadCheckpoint: the description or a file is damaged.
    """
    if not is_converted(folder):
        raise ModelNotFound(f"{folder} is not a model directory (no {DESCRIPTION}): make one with `edgekv convert`.")
    path = folder / DESCRIPTION
    try:
        description = _parse(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} cannot be read ({error}): convert the model again, or delete {folder}.") from None
    model = ConvertedModel(folder, description)
    _check_place(model) if model.is_foreign else _check_data(model)
    needed = [TOKENIZER] * description.tokenizer + [GRAPH] * (not model.is_foreign)
    for name in needed:
        if not (folder / name).is_file():
            raise BadCheckpoint(f"{folder} has no {name}: convert the model again, or delete it.")
    return model


def _check_place(model: ConvertedModel) -> None:
    """The files that are read in place must be what they were."""
    for name, state in model.description.graph_files.items():
        path = model.graph.parent / name
        if file_state(path) != state:
            what = "has changed" if path.exists() else "is gone"
            raise BadCheckpoint(f"{path} {what} since {model.folder} was made for it: name the model by its own path.")


def _check_data(model: ConvertedModel) -> None:
    folder, description = model.folder, model.description
    data = folder / DATA
    size = data.stat().st_size if data.exists() else 0
    if size != description.weight_bytes:
        raise BadCheckpoint(
            f"{data} has {size:,} bytes instead of {description.weight_bytes:,}: "
            f"convert the model again, or delete {folder}."
        )
    graph = folder / GRAPH
    if description.graph_sha256 and graph.is_file() and sha256_file(graph) != description.graph_sha256:
        raise BadCheckpoint(f"{graph} is not as edgekv wrote it: convert the model again, or delete {folder}.")


def _parse(data: dict[str, Any]) -> Description:
    version, fingerprint = data.pop("format_version"), data.pop("fingerprint")
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}, this edgekv reads {FORMAT_VERSION}")
    description = Description(**(data | {"spec": ModelSpec.from_json(data["spec"])}))
    for name, hint in get_type_hints(Description).items():
        if not isinstance(getattr(description, name), get_origin(hint) or hint):
            raise TypeError(f"{name} is {getattr(description, name)!r}")
    if description.fingerprint != fingerprint:
        raise ValueError("its fingerprint does not fit its fields")
    return description
