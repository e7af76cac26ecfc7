"""Folders that hold another maker's ONNX graph, told apart by their files; nothing is opened but small JSON files.

    genai_config.json  model.onnx  model.onnx.data  tokenizer.json      onnxruntime-genai's builder
    config.json  tokenizer.json  onnx/model_q4.onnx  onnx/...           repositories made for browsers
    config.json  model.onnx                                             optimum's exporter

A folder that holds safetensors too is left to the converter, which keeps the publisher's integers; naming the .onnx
file itself asks for the graph. Of several graphs of one model the first in PREFERENCE is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.converted import is_converted, open_converted
from edgekv.weights.hub import read_json

GENAI_CONFIG = "genai_config.json"

PREFERENCE = ("model_q4", "model", "model_q4f16", "model_fp16", "model_quantized", "model_int8", "model_uint8")
"""File names without .onnx, best first: 4 bits with float32 between the layers, then float32, then float16."""


@dataclass(frozen=True)
class ForeignFolder:
    """A graph and what lies beside it."""

    graph: Path
    root: Path  # where configs and tokenizer lie
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    genai: Mapping[str, Any] = field(default_factory=dict)  # the "model" table of genai_config.json

    @property
    def convertible(self) -> bool:
        """Whether the float weights that `edgekv convert` takes lie here too."""
        return any(self.root.glob("*.safetensors"))


def find_foreign(path: Path) -> ForeignFolder | None:
    """What another maker's graph at `path` consists of; None if there is no such graph.

    Raises:
        BadCheckpoint: a config cannot be read, or names a graph that is not there.
        UnsupportedModel: several graphs, none of which is the obvious one.
    """
    if path.is_file():
        return _described(path, _root_of(path)) if path.suffix == ".onnx" else None
    if not path.is_dir() or ((path / "config.json").exists() and any(path.glob("*.safetensors"))):
        return None
    if (path / GENAI_CONFIG).exists():
        return _described(path / _genai_graph(path), path)
    for folder in (path / "onnx", path):
        graphs = sorted(folder.glob("*.onnx"))
        if graphs:
            return _described(_preferred(graphs), _root_of(graphs[0]))
    return None


def _root_of(graph: Path) -> Path:
    """The graph's own folder, or the one above it if that is where the configs lie."""
    here = graph.absolute().parent
    named = ("config.json", GENAI_CONFIG, "tokenizer.json")
    return here if here.name != "onnx" or any((here / name).exists() for name in named) else here.parent


def _preferred(graphs: list[Path]) -> Path:
    if len(graphs) == 1:
        return graphs[0]
    for name in PREFERENCE:
        for graph in graphs:
            if graph.stem == name:
                return graph
    raise UnsupportedModel(
        f"{graphs[0].parent} holds {len(graphs)} ONNX graphs and none is called {' or '.join(PREFERENCE)}: name the "
        f"one to run, e.g. {graphs[0]}."
    )


def _genai_graph(folder: Path) -> str:
    decoder = _genai_model(folder).get("decoder")
    name = decoder.get("filename") if isinstance(decoder, Mapping) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise UnsupportedModel(f"{folder / GENAI_CONFIG} names no decoder.filename: edgekv runs decoders of one graph.")
    return name


def _described(graph: Path, root: Path) -> ForeignFolder:
    if not graph.is_file():
        raise BadCheckpoint(f"{root} lacks {graph.name}, the graph that its {GENAI_CONFIG} names: download it.")
    return ForeignFolder(
        graph.absolute(),
        root,
        read_json(root / "config.json", optional=True),
        read_json(root / "generation_config.json", optional=True),
        _genai_model(root),
    )


def _genai_model(folder: Path) -> Mapping[str, Any]:
    model = read_json(folder / GENAI_CONFIG, optional=True).get("model", {})
    if not isinstance(model, Mapping):
        raise BadCheckpoint(f"{folder / GENAI_CONFIG}: model is {model!r}, not a table of fields.")
    return model


def is_current(folder: Path) -> bool:
    """Whether there is such a directory and the files that it reads in place are what they were."""
    try:
        return is_converted(folder) and open_converted(folder).is_foreign
    except BadCheckpoint:
        return False


def folder_name(foreign: ForeignFolder) -> str:
    """The name of a graph's directory: what people call it, and a hash of where it lies."""
    called = foreign.root.resolve().name
    return f"{called}-{hashlib.sha256(str(foreign.graph.resolve()).encode()).hexdigest()[:12]}"
