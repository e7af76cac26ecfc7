"""A Hugging Face folder with safetensors, float or in a published 4-bit format, as a WeightSource.

This file knows the folder: configs, shards, tensor names, shapes, tokenizer. How the tensors of one quantised layer
become a matrix is the business of a LinearScheme, one file a format (awq, gptq, compressed_tensors, bitsandbytes),
chosen by `quantization_config.quant_method`. A layer without that scheme's tensors is read as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import BadCheckpoint, ModelError, UnsupportedModel
from edgekv.model.families import spec_from_config
from edgekv.model.recommended import from_generation_config
from edgekv.model.spec import ModelSpec
from edgekv.weights.awq import AWQ
from edgekv.weights.base import Float32, Form, Matrix, Stored, row_blocks, take_rows
from edgekv.weights.bitsandbytes import BitsAndBytes
from edgekv.weights.compressed_tensors import CompressedTensors
from edgekv.weights.gptq import GPTQ
from edgekv.weights.hub import HubFolder
from edgekv.weights.names import ROOTS, HubPlace, hub_place, layer_parts, shape, turning_first
from edgekv.weights.scheme import LinearScheme, QuantConfig
from edgekv.weights.tensors import FLOAT_NAMES, TensorFiles

SCHEMES: dict[str, Callable[[QuantConfig], LinearScheme]] = {
    "awq": AWQ.from_config,
    "gptq": GPTQ.from_config,
    "compressed-tensors": CompressedTensors.from_config,
    "bitsandbytes": BitsAndBytes.from_config,
    "auto-round": GPTQ.from_auto_round,
}
"""By quant_method."""

NORMS_LESS_ONE = ("gemma2", "gemma3_text")
"""Families whose norms are stored as their factors less one."""

_CONFIGS_APART = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where the fields lie if config.json has none, and the method that wrote that file."""


def _has_groups(compression: Any) -> bool:
    """Whether it says how layers are quantised: the first writers of compressed-tensors named it so."""
    return isinstance(compression, dict) and bool(compression.get("config_groups"))


@contextmanager
def _named(config: Path) -> Iterator[None]:
    """A refusal of what a config says names that file, which its reader does not know."""
    try:
        yield
    except ModelError as error:
        said = str(error).removeprefix("The config's ")
        raise type(error)(f"{config}: {said}") from None


class SafetensorsSource(HubFolder):
    """A folder with config.json and *.safetensors, one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config, generation = self._json("config.json"), self._json("generation_config.json", optional=True)
        with _named(folder / "config.json"):
            spec = spec_from_config(config, generation)
        ends = {number for number in self.turn_ends if number < spec.vocab_size}
        spec = replace(spec, eos_ids=tuple(sorted({*spec.eos_ids, *ends})))
        self.sampling = from_generation_config(generation)
        self._linear = self._scheme(config)
        self._tensors = TensorFiles(folder, self._shards())
        self._root = next((root for root in ROOTS if f"{root}.norm.weight" in self._tensors), "model")
        self.spec = self._with_head(spec, config.get("tie_word_embeddings") is None)
        self._refuse_unknown_norms()

    @property
    def files(self) -> list[str]:
        """The shards, in order of name; of a quantised model its configs too, which say how to read them."""
        configs = [self.folder / name for name in ("config.json", *_CONFIGS_APART)] if self.quantised else []
        return self._tensors.files + [str(path) for path in configs if path.exists()]

    @property
    def scheme(self) -> str:
        """The format of the quantised layers and the type of the others, or the number types, most frequent first."""
        if self._linear is None:
            return ", ".join(FLOAT_NAMES.get(kind, kind) for kind in self._tensors.dtypes())
        kind = self._tensors.dtype(f"{self._root}.norm.weight")
        return f"{self._linear.title}, {FLOAT_NAMES.get(kind, kind)}"

    @property
    def quantised(self) -> bool:
        """Whether the config names a quantisation."""
        return self._linear is not None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See WeightSource."""
        return [] if self._linear is None else self._linear.facts

    def stored(self, name: str) -> Stored:
        """See WeightSource."""
        place, quantised = self._place(name)
        own, whole = shape(self.spec, name), place.shape
        if quantised is not None:
            form = quantised.form(self._tensors, place.module, (whole[0], whole[1]))
            return Stored(str(form), (own[0], own[1]), form)
        kind = self._tensors.dtype(f"{place.module}.weight")
        return Stored(FLOAT_NAMES.get(kind, kind), (own[0], own[1]), Form("float"))

    def matrix(self, name: str) -> Matrix:
        """A weight [out, in]: the publisher's integers, or float32."""
        place, quantised = self._place(name)
        self._refuse_bias(name, place.module)
        rows, columns = place.shape
        if quantised is not None:
            matrix: Matrix = quantised.read(self._tensors, place.module, (rows, columns))
        else:
            matrix = self._tensors.finite(f"{place.module}.weight", (rows, columns))
        if place.rows is not None:
            matrix = take_rows(matrix, np.array(place.rows))
        order = turning_first(self.spec, name)
        return matrix if order is None else take_rows(matrix, order)

    def blocks(self, name: str) -> Iterator[Matrix]:
        """See WeightSource. Integers take a quarter of what floats do and come whole."""
        place, quantised = self._place(name)
        if quantised is not None or (self.spec.rope.channels and name.endswith((".q", ".k"))):
            yield self.matrix(name)
            return
        self._refuse_bias(name, place.module)
        first = 0 if place.rows is None else place.rows.start
        count = place.shape[0] if place.rows is None else len(place.rows)
        for part in row_blocks((count, place.shape[1])):
            rows = slice(first + part.start, first + part.stop)
            yield self._tensors.finite(f"{place.module}.weight", place.shape, rows=rows)

    def _place(self, name: str) -> tuple[HubPlace, LinearScheme | None]:
        """Where a matrix lies, and its format unless it is in floats."""
        place = hub_place(self.spec, name, self._root)
        if name == "embed" and self.spec.tied_embeddings and f"{place.module}.weight" not in self._tensors:
            place = hub_place(self.spec, "head", self._root)  # some writers keep the shared tensor under its other name
        quantised = self._linear is not None and self._linear.holds(self._tensors, place.module)
        return place, self._linear if quantised else None

    def vector(self, name: str) -> Float32:
        """A norm's factors or a bias, in float32."""
        base = name.removesuffix(".bias")
        tensor = f"{hub_place(self.spec, base, self._root).module}.{'weight' if base == name else 'bias'}"
        values = self._tensors.finite(tensor, shape(self.spec, name))
        return values + 1 if base == name and self.spec.family in NORMS_LESS_ONE else values

    def _shards(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        weight_map = self._json(index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise BadCheckpoint(f"{index} has no weight_map from tensors to files: download it again.")
        names = sorted(set(weight_map.values()))
        files = [self.folder / name for name in names]
        for name, file in zip(names, files, strict=True):
            if Path(name).name != name or name in ("", ".."):
                raise BadCheckpoint(f"{index} names a file outside its folder: {name!r}.")
            if not file.exists():
                raise BadCheckpoint(
                    f"{self.folder} lacks {name}, one of {len(names)} shards its index names: download it."
                )
        return files

    def _scheme(self, config: dict[str, Any]) -> LinearScheme | None:
        """The format that the config names, or an older writer's own file; None for a model in floats."""
        place, method = "config.json", None
        fields: Any = config.get("quantization_config")
        if fields is None and _has_groups(config.get("compression_config")):
            fields = config["compression_config"] | {"quant_method": "compressed-tensors"}
        if fields is None:
            place = next((name for name in _CONFIGS_APART if (self.folder / name).exists()), "")
            fields = self._json(place) if place else None
            method = _CONFIGS_APART.get(place)
        if fields is None:
            return None
        if not isinstance(fields, dict):
            raise BadCheckpoint(f"{self.folder / place}: quantization_config is {fields!r}, not a table of fields.")
        method = fields.get("quant_method", method)
        if method not in tuple(SCHEMES):
            raise UnsupportedModel(
                f"{self.folder / place}: quant_method is {method!r}; edgekv reads {', '.join(SCHEMES)}."
            )
        if method == "compressed-tensors" and fields.get("kv_cache_scheme") and not fields.get("config_groups"):
            return None  # of the KV cache alone, with scales beside float weights (kv/interchange.py)
        with _named(self.folder / place):
            return SCHEMES[method](fields)

    def _refuse_unknown_norms(self) -> None:
        """A norm that the family does not have would change the arithmetic (a Llama with norms on Q and K)."""
        known = {f"{self._root}.norm.weight"}
        for layer in range(self.spec.num_layers):
            parts = [part for part in layer_parts(self.spec) if part.endswith("norm")]
            known |= {f"{hub_place(self.spec, f'{layer}.{part}', self._root).module}.weight" for part in parts}
        for name in self._tensors.names:
            if name.startswith(f"{self._root}.") and name.endswith("norm.weight") and name not in known:
                raise UnsupportedModel(
                    f"{self._tensors.place(name)} is a norm that edgekv does not run in {self.spec.family}."
                )

    def _with_head(self, spec: ModelSpec, unsaid: bool) -> ModelSpec:
        """The spec with `tied_embeddings` as the tensors have it.

        A quantised head is a head of its own whatever the config says; a float copy of the embedding under the head's
        name, which many writers add, is not. A config that says nothing means what is there.
        """
        head = hub_place(spec, "head", self._root).module
        if self._linear is not None and self._linear.holds(self._tensors, head):
            return replace(spec, tied_embeddings=False)
        return replace(spec, tied_embeddings=True) if unsaid and f"{head}.weight" not in self._tensors else spec

    def _refuse_bias(self, name: str, module: str) -> None:
        """Some writers give every layer a bias of zeros; any other where the family has none would be lost."""
        bias = f"{module}.bias"
        known = name.rpartition(".")[2] in self.spec.biased
        if not known and bias in self._tensors and self._tensors.floats(bias).any():
            raise UnsupportedModel(
                f"{self._tensors.place(bias)} is not zero, and edgekv runs {self.spec.family} without that bias."
            )
