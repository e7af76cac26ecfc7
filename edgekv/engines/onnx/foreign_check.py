"""The proof that an adapted graph is still the maker's: both run the same tokens, and their logits must agree.

The maker's graph runs as it is, except that a quantised cache becomes a float one, so that codes do not blur the
comparison. Two float32 graphs agree to 1e-6; where activations are rounded to 8 bits (MatMulNBits, accuracy level 4) or
to float16, a rounding that falls otherwise is amplified by the layers: 2e-2 measured. A graph that was misunderstood is
off by the size of its logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgekv.engines.onnx.adapt import attention_nodes, drop_quantised_cache
from edgekv.engines.onnx.foreign import Adapted
from edgekv.engines.onnx.graphfile import read_graph
from edgekv.engines.onnx.surgery import Array
from edgekv.engines.rope import rope_inputs
from edgekv.errors import EngineError, UnsupportedModel

PROBE = 24
"""Tokens that both graphs run."""

TOLERANCE = 5e-2
"""Largest relative difference of the logits after one token."""

_NUMBERS = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16}


def check_adapted(path: Path, adapted: Adapted) -> float:
    """The largest relative difference of the logits.

    Raises:
        UnsupportedModel: it is too large. EngineError: ONNX Runtime cannot run the graph.
    """
    ids = np.random.default_rng(0).integers(0, adapted.geometry.vocab_size, (1, PROBE))
    found = _run(path, adapted, adapted.model, _our_feeds(adapted, ids))
    wanted = _run(path, adapted, *_theirs(path, adapted, ids))
    found = found[-len(wanted) :]  # theirs may be those of the last token alone
    difference = np.linalg.norm(found - wanted, axis=-1) / np.maximum(np.linalg.norm(wanted, axis=-1), 1e-30)
    if not difference.max() < TOLERANCE:  # also where it is not a number
        raise UnsupportedModel(
            f"{path} cannot be adapted: its logits and those of the adapted graph differ by {difference.max():.1%}, "
            f"where {TOLERANCE:.0%} is the most that rounding explains."
        )
    return float(difference.max())


def _our_feeds(adapted: Adapted, ids: Array) -> dict[str, Array]:
    geometry = adapted.geometry
    cache = np.zeros((1, geometry.num_kv_heads, PROBE, geometry.head_dim), np.float32)
    return (
        {
            "ids": ids,
            "rows": np.arange(PROBE),
            "seqlens_k": np.array([PROBE - 1], np.int32),
            "total": np.array(PROBE, np.int32),
        }
        | _our_tables(adapted)
        | {f"past_{part}.{layer}": cache for layer in range(geometry.num_layers) for part in "kv"}
    )


def _our_tables(adapted: Adapted) -> dict[str, Array]:
    return {
        name: table[:PROBE]
        for rope, pair in enumerate(adapted.tables)
        for name, table in zip(rope_inputs(rope), pair, strict=True)
    }


def _theirs(path: Path, adapted: Adapted, ids: Array) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The maker's graph with a float cache, and what it reads when nothing is cached."""
    model = read_graph(path).model
    drop_quantised_cache(model)
    _let_caches_grow(model)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(PROBE)[None]}
    cache = (1, adapted.geometry.num_kv_heads, 0, adapted.geometry.head_dim)
    given = {}
    for value in model.graph.input:
        dtype = value.type.tensor_type.elem_type
        if value.name in feeds:
            given[value.name] = feeds[value.name].astype(np.int32 if dtype == onnx.TensorProto.INT32 else np.int64)
        elif len(value.type.tensor_type.shape.dim) == 4 and dtype in _NUMBERS:
            given[value.name] = np.zeros(cache, _NUMBERS[dtype])
        else:
            raise UnsupportedModel(f"{path} reads {value.name}, which edgekv does not know how to give.")
    return model, given


def _let_caches_grow(model: onnx.ModelProto) -> None:
    """Layers whose operator itself drops what left the window (sliding_window_cache) need a cache of that size from the
    beginning; without that attribute they mask the same tokens in a cache that grows."""
    for node in attention_nodes(model):
        for attribute in [a for a in node.attribute if a.name == "sliding_window_cache"]:
            node.attribute.remove(attribute)


def _run(path: Path, adapted: Adapted, model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    """The logits [T, V] in float64, on one thread; the session is closed afterwards."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(adapted.folder))
    try:
        session: Any = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs() if not value.name.startswith("present")]
        logits = session.run(["logits"] if "logits" in names else names[:1], feeds)[0]
    except Exception as error:  # ONNX Runtime raises a class of its own per status code
        raise EngineError(f"ONNX Runtime cannot run {path}: {error}") from error
    return np.asarray(logits[0], np.float64)
