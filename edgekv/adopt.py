"""Another maker's ONNX graph -> a model directory that runs it where it lies.

The directory holds edgekv.json, the tokenizer's files and, later, the cache's scales: a few MB at most. The graph and
its weights are read in place whenever the model is loaded, and adapted in memory (engines/onnx/foreign.py); no file of
the user's folder is written or copied. Before anything is written the adapted graph has to give the maker's logits
(engines/onnx/foreign_check.py).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgekv.engines.measured_rope import rope_of_tables
from edgekv.engines.onnx.foreign import Adapted, Geometry, adapt_foreign
from edgekv.engines.onnx.foreign_check import check_adapted
from edgekv.errors import BadCheckpoint, EdgeKVError, UnsupportedModel
from edgekv.files import atomic_directory, sha256_file
from edgekv.model.converted import (
    TEMPLATE,
    TOKENIZER,
    ConvertedModel,
    Description,
    file_state,
    open_converted,
    write_description,
)
from edgekv.model.families import eos_ids
from edgekv.model.fields import token_ids
from edgekv.model.foreign import GENAI_CONFIG, ForeignFolder
from edgekv.model.recommended import from_generation_config
from edgekv.model.rope_config import rope_from_config
from edgekv.model.spec import AttentionSpec, ModelSpec, RopeSpec
from edgekv.weights.base import NO_TOKENIZER, TokenizerFiles
from edgekv.weights.hub import HubFolder

Progress = Callable[[str, int, int | None], None]


def adopt(
    foreign: ForeignFolder, out: Path, *, name: str, progress: Progress = lambda what, done, total: None
) -> ConvertedModel:
    """Make the model directory `out` for a graph that stays where it is; scales that still fit are kept.

    Raises:
        BadCheckpoint, UnsupportedModel: the graph or a file beside it cannot be used.
        StorageError: the directory cannot be written.
    """
    beside = HubFolder(foreign.root)
    texts = NO_TOKENIZER if beside.missing_tokenizer else beside.tokenizer()
    progress("graph", 0, 3)
    adapted, spec = recognise(foreign)
    progress("compare with the maker's", 1, 3)
    check_adapted(foreign.graph, adapted)
    progress("hash", 2, 3)
    description = _describe(foreign, adapted, spec, texts, name)
    with atomic_directory(out) as folder:
        if texts.tokenizer_json:
            (folder / TOKENIZER).write_text(texts.tokenizer_json, "utf-8")
        if texts.chat_template:
            (folder / TEMPLATE).write_text(texts.chat_template, "utf-8")
        write_description(folder, description)
        for path in _fitting_scales(out, description):
            shutil.copyfile(path, folder / path.name)
    progress("done", 3, 3)
    return open_converted(out)


def recognise(foreign: ForeignFolder) -> tuple[Adapted, ModelSpec]:
    """The adapted graph and the model it is of; its logits are not compared yet.

    Raises:
        BadCheckpoint, UnsupportedModel: as `adopt`.
    """
    adapted = _adapt(foreign)
    return adapted, _spec(foreign, adapted)


def _adapt(foreign: ForeignFolder) -> Adapted:
    """The adapted graph; a refusal says what else can be done."""
    try:
        return adapt_foreign(foreign.graph)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise BadCheckpoint(f"{foreign.graph} contradicts itself ({error}): download it again.") from None
    except UnsupportedModel as error:
        source = foreign.root if foreign.convertible else "FOLDER"
        what = "" if foreign.convertible else " on a folder with the model's float weights (safetensors)"
        raise UnsupportedModel(f"{error} Use `edgekv convert {source} OUT`{what} instead.") from None


def _spec(foreign: ForeignFolder, adapted: Adapted) -> ModelSpec:
    """The model's geometry, from the graph; context, family and end-of-text ids from the configs beside it."""
    geometry, config, genai = adapted.geometry, foreign.config, foreign.genai
    _check_config(foreign, geometry)
    context = genai.get("context_length", config.get("max_position_embeddings", len(adapted.tables[0][0])))
    family = config.get("model_type", genai.get("type", "unknown"))
    if not isinstance(context, int) or not isinstance(family, str):
        raise BadCheckpoint(f"The configs in {foreign.root} give {context!r} as context and {family!r} as family.")
    places = (config, foreign.generation, genai)
    rope, *local = [rope_of_tables(cos, sin, _config_ropes(config, geometry.head_dim)) for cos, sin in adapted.tables]
    windows = tuple(window if window < context or local else 0 for window in geometry.windows)
    return ModelSpec(
        family=family,
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        ffn_size=geometry.ffn_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=geometry.vocab_size,
        max_context=context,
        rope=rope,
        local_rope=local[0] if local else None,
        attention=AttentionSpec(softcap=geometry.softcap, windows=windows if any(windows) else ()),
        tied_embeddings=geometry.tied,
        bos_id=next((number for place in places for number in token_ids(place, "bos_token_id")), None),
        eos_ids=tuple(sorted({*eos_ids(*places), *_turn_ends(foreign, geometry.vocab_size)})),
    )


def _turn_ends(foreign: ForeignFolder, vocab_size: int) -> Iterator[int]:
    """What the chat template ends turns with."""
    return (number for number in HubFolder(foreign.root).turn_ends if number < vocab_size)


def _config_ropes(config: Mapping[str, Any], head_dim: int) -> Iterator[RopeSpec]:
    """The config's rotary embedding, if it tells of one that edgekv knows."""
    try:
        if "rope_theta" in config or "rope_parameters" in config:
            yield rope_from_config(config, head_dim)
    except EdgeKVError:
        return


def _check_config(foreign: ForeignFolder, geometry: Geometry) -> None:
    """What a config says of the sizes must be what the graph has."""
    decoder = foreign.genai.get("decoder", {})
    told = {
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "hidden_size": geometry.hidden_size,
        "head_dim": geometry.head_dim,
        "head_size": geometry.head_dim,
    }
    for name, config in (("config.json", foreign.config), (GENAI_CONFIG, decoder)):
        for field, found in told.items():
            if config.get(field, found) not in (found, None):
                raise BadCheckpoint(
                    f"{foreign.root / name} says {field} {config[field]!r}, but {foreign.graph.name} has {found}: they "
                    "are not of the same model."
                )


def _describe(
    foreign: ForeignFolder, adapted: Adapted, spec: ModelSpec, texts: TokenizerFiles, name: str
) -> Description:
    files = [foreign.graph.parent / file for file in adapted.files]
    hashes = "\n".join(map(sha256_file, files))
    return Description(
        name=name,
        spec=spec,
        source_scheme=f"ONNX by {adapted.producer}",
        scheme=adapted.scheme,
        source_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        weight_bytes=adapted.weight_bytes,
        bos_token=texts.bos_token,
        eos_token=texts.eos_token,
        add_bos=texts.add_bos,
        tokenizer=bool(texts.tokenizer_json),
        sampling=from_generation_config(foreign.generation),
        graph=str(foreign.graph),
        graph_files={file.name: file_state(file) for file in files},
    )


def _fitting_scales(folder: Path, description: Description) -> list[Path]:
    """The scales of an earlier directory for the same numbers: a file that was only touched needs no calibration."""
    from edgekv.kv.scales import read_scales

    found = []
    for path in sorted(folder.glob("kv_scales*.safetensors")):
        try:
            fits = read_scales(path).fingerprint == description.fingerprint
        except EdgeKVError:
            fits = False
        found += [path] if fits else []
    return found
