"""After a run gave numbers that are not finite: which layer they came from.

The failing tokens are run once more, from an empty float cache, through a copy of the graph that also returns the
residual stream after every layer. Weights are mapped and not packed, so this takes little memory; it is slow, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.engines.rope import rope_inputs, rope_tables, settled_ropes
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec


def first_bad_layer(model: ConvertedModel, tokens: Sequence[int]) -> int | None:
    """The first layer after which a hidden state is not finite; None if these tokens alone do not show it."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    from edgekv.engines.onnx import adapt
    from edgekv.engines.onnx.opening import load_graph

    (graph, folder), spec = load_graph(model), model.spec
    adapt.set_cache(graph, "float", "channel")
    names = [f"{layer + 1}.attn_hidden" for layer in range(spec.num_layers)]
    if not {names[0]} & {name for node in graph.graph.node for name in node.output}:
        names = [node.output[0] for node in adapt.attention_nodes(graph)]  # of another maker's graph
    graph.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for layer, hidden in enumerate(session.run(names, _feeds(spec, tokens))):
        if not np.isfinite(hidden).all():
            return layer
    return None


def _feeds(spec: ModelSpec, tokens: Sequence[int]) -> dict[str, Any]:
    count = len(tokens)
    tables: dict[str, Any] = {}
    for index, rope in enumerate(settled_ropes(spec, count)):
        tables |= dict(zip(rope_inputs(index), rope_tables(rope, spec.head_dim, 0, count), strict=True))
    cache = np.zeros((1, spec.num_kv_heads, count, spec.head_dim), np.float32)
    past = {f"past_{part}.{layer}": cache for part in "kv" for layer in range(spec.num_layers)}
    places = {
        "ids": np.asarray([tokens], np.int64),
        "rows": np.zeros(0, np.int64),
        "seqlens_k": np.array([count - 1], np.int32),
        "total": np.array(count, np.int32),
    }
    return past | tables | places
