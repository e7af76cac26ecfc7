"""ModelSpec + weights -> an ONNX graph of the family's decoder, with a float cache, and its external data file.

One layer is: norm, packed QKV (MatMulNBits), GroupQueryAttention (RoPE, cache append and attention in one operator),
output projection, residual + norm (one operator), gate, up, SiLU, down. Choices, with the reason:

* RoPE tables are graph inputs, so that an eviction re-makes them (kv/window.py).
* `rows` picks the positions whose logits are wanted before the output head runs: one for decoding, all for evaluation,
  none for a chunk of prefill in the middle. A head over every prompt token would double the cost of prefill.
* SiLU is QuickGelu with alpha 1: one operator instead of two. FastGelu is the tanh approximation of GELU.
* What a family adds (model/spec.py) costs a node only where it says something. Query and key norms work on the packed
  row seen as heads, [T, H + 2 K, D]: split, normed, joined, so that attention gets one packed input in every family.
  GroupQueryAttention has the scale, softcap and window of a layer itself (a window W is the W newest slots, itself
  included, as in transformers), and turns nothing with do_rotary 0. Logits are scaled before the head, on E numbers.
* Embedding and head of a tied model are one block of bytes in the data file, read by GatherBlockQuantized and
  MatMulNBits, whose 8-bit and 4-bit layouts agree.

What the linear layers become is told in linear.py. Operators: com.microsoft domain of ONNX Runtime's contrib operators,
opset 21.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.engines.onnx.graph import DataFile, Graph
from edgekv.engines.onnx.linear import (
    Linear,
    joined_layers,
    linear_layer,
    matmul,
    store,
    take_order,
    without_order,
    write_rows,
)
from edgekv.engines.rope import rope_inputs
from edgekv.errors import UnsupportedModel
from edgekv.model.spec import ModelSpec
from edgekv.weights.base import BlockWeight, Float32, Held, Order, SplitWeight, WeightSource

OPSET = 21
IR_VERSION = 10


class Matrices(Protocol):
    """Gives linear layers by name, as they are to be held."""

    def __call__(self, name: str) -> Held: ...
    def blocks(self, name: str) -> Iterator[Held]:
        """The same matrix in blocks of rows."""


def build(
    source: WeightSource, matrix: Matrices, data_path: Path, *, accuracy_level: int = 4
) -> Iterator[tuple[str, onnx.ModelProto | None]]:
    """Write the data file and the graph, yielding (what was done, None) after each part and the model last.

    Args:
        source: norms, biases and the spec.
        matrix: gives a linear layer by name, as it is to be held.
        data_path: the external data file to write; it must not exist.

    Raises:
        UnsupportedModel: a width that the operators cannot take. BadCheckpoint: a number that is not finite.
    """
    spec = source.spec
    _check_operators(spec)
    graph = Graph(spec, DataFile(data_path), accuracy_level)
    _declare_inputs(graph)
    hidden, tied = _embedding(graph, matrix)
    yield "embedding", None
    normed = _norm(graph, hidden, "0.attn_norm", source.vector("0.attn_norm"), "0.attn_in")
    for layer in range(spec.num_layers):
        normed, hidden = _layer(graph, source, matrix, layer, normed, hidden)
        yield f"layer {layer}", None
    _head(graph, matrix, normed, tied)
    yield "head", None
    body = helper.make_graph(graph.nodes, "edgekv", graph.inputs, graph.outputs, graph.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    yield "graph", helper.make_model(body, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgekv")


def _check_operators(spec: ModelSpec) -> None:
    for name, width in (("hidden size", spec.hidden_size), ("feed-forward size", spec.ffn_size)):
        if width % 16:
            raise UnsupportedModel(f"The model's {name} is {width}; MatMulNBits needs a multiple of 16.")
    if spec.head_dim % 8:
        raise UnsupportedModel(f"The model's head size is {spec.head_dim}; GroupQueryAttention needs a multiple of 8.")


def _declare_inputs(graph: Graph) -> None:
    half = graph.spec.head_dim // 2
    graph.input("ids", TensorProto.INT64, [1, "T"])
    graph.input("rows", TensorProto.INT64, ["R"])
    graph.input("seqlens_k", TensorProto.INT32, [1])  # total - 1
    graph.input("total", TensorProto.INT32, [])
    for index in range(len(graph.spec.ropes)):
        for name in rope_inputs(index):
            graph.input(name, TensorProto.FLOAT, ["C", half])


def _embedding(graph: Graph, matrix: Matrices) -> tuple[str, Linear]:
    """The first hidden state, and the same bytes as an output head."""
    hidden, tied = _looked_up(graph, matrix)
    return _times(graph, hidden, graph.spec.multipliers.embedding, "hidden.scaled"), tied


def _looked_up(graph: Graph, matrix: Matrices) -> tuple[str, Linear]:
    codes, tied = write_rows(graph, "embed", matrix.blocks("embed"))
    flat = (codes.shape[0], math.prod(codes.shape[1:]))
    names = [graph.external("embed.codes", flat, TensorProto.UINT8, codes.place), "ids", *tied.names[1:]]
    graph.node(
        "GatherBlockQuantized",
        names,
        ["hidden.halves" if tied.repeat else "hidden"],
        bits=tied.attributes["bits"],
        block_size=tied.attributes["block_size"],
        gather_axis=0,
        quantize_axis=1,
    )
    if tied.repeat:
        halves = ["hidden.high", "hidden.low"]
        graph.node("Split", ["hidden.halves"], halves, axis=-1, num_outputs=2)
        graph.node("Add", halves, ["hidden"])
    if graph.spec.tied_embeddings:
        graph.external("head.codes", codes.shape, TensorProto.UINT8, codes.place)
    return "hidden", replace(tied, names=["head.codes", *tied.names[1:]])


def _layer(
    graph: Graph, source: WeightSource, matrix: Matrices, layer: int, normed: str, hidden: str
) -> tuple[str, str]:
    """One decoder layer; returns the next layer's normed input and the residual stream."""
    spec = graph.spec
    bias = {part: source.vector(f"{layer}.{part}.bias") for part in spec.biased}
    qkv_bias = np.concatenate([bias[part] for part in "qkv"]) if spec.qkv_bias else None
    packed = joined_layers(graph, f"{layer}.qkv", {part: matrix(f"{layer}.{part}") for part in "qkv"}, normed, qkv_bias)
    if spec.attention.qk_norm:
        packed = _normed_heads(graph, source, layer, packed)
    attended = _attention(graph, layer, packed)
    projected = linear_layer(graph, f"{layer}.o", matrix(f"{layer}.o"), attended, bias.get("o"))
    added = _addend(graph, source, f"{layer}.post_attn", projected)
    normed, hidden = _add_norm(graph, f"{layer}.ffn", added, hidden, source.vector(f"{layer}.ffn_norm"))
    down = _addend(graph, source, f"{layer}.post_ffn", _feed_forward(graph, matrix, layer, normed, bias))
    last = layer + 1 == spec.num_layers
    gain = source.vector("norm") if last else source.vector(f"{layer + 1}.attn_norm")
    return _add_norm(graph, f"{layer + 1}.attn", down, hidden, gain)


def _feed_forward(graph: Graph, matrix: Matrices, layer: int, normed: str, bias: dict[str, Float32]) -> str:
    linear, order = without_order(store(graph, f"{layer}.down", matrix(f"{layer}.down"), bias.get("down")))
    gate, up = (
        _hidden_layer(graph, f"{layer}.{part}", matrix, order, normed, bias.get(part)) for part in ("gate", "up")
    )
    if graph.spec.block.activation == "silu":
        gated = graph.node("QuickGelu", [gate], [f"{layer}.silu"], alpha=1.0)
    else:
        gated = graph.node("FastGelu", [gate], [f"{layer}.gelu"])
    product = graph.node("Mul", [gated, up], [f"{layer}.gated"])
    return matmul(graph, linear, product, f"{layer}.down.out")


def _hidden_layer(graph: Graph, name: str, matrix: Matrices, order: Order | None, x: str, bias: Float32 | None) -> str:
    """Gate or up, with its outputs in the order in which `down` wants its input; None: as they are."""
    if bias is not None and order is not None:
        bias = np.asarray(bias[order])
    return linear_layer(graph, name, take_order(matrix(name), order), x, bias)


def _addend(graph: Graph, source: WeightSource, name: str, delta: str) -> str:
    """What a sublayer adds to the residual stream: its result, normed and scaled where the family does that."""
    if graph.spec.block.post_norms:
        delta = _norm(graph, delta, f"{name}_norm", source.vector(f"{name}_norm"), f"{name}_normed")
    return _times(graph, delta, graph.spec.multipliers.residual, f"{name}_scaled")


def _times(graph: Graph, x: str, factor: float, output: str) -> str:
    """x times a constant; x itself where that is 1."""
    if factor == 1:
        return x
    return graph.node("Mul", [x, graph.constant(f"{output}.factor", np.array(factor, np.float32))], [output])


def _normed_heads(graph: Graph, source: WeightSource, layer: int, packed: str) -> str:
    """The packed row with every query and key head normed, before it is turned."""
    spec, name = graph.spec, f"{layer}.heads"
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    shapes = {"apart": [1, -1, heads + 2 * kv_heads, size], "together": [1, -1, spec.qkv_rows]}
    shape = {key: graph.constant(f"{name}.{key}", np.array(sizes, np.int64)) for key, sizes in shapes.items()}
    split = graph.constant(f"{name}.split", np.array([heads, kv_heads, kv_heads], np.int64))
    apart = graph.node("Reshape", [packed, shape["apart"]], [f"{name}.all"])  # [1, T, H + 2 K, D]
    graph.node("Split", [apart, split], [f"{name}.q", f"{name}.k", f"{name}.v"], axis=2)
    normed = [
        _norm(graph, f"{name}.{part}", f"{layer}.{part}_norm", source.vector(f"{layer}.{part}_norm"), f"{name}.{part}n")
        for part in "qk"
    ]
    joined = graph.node("Concat", [*normed, f"{name}.v"], [f"{name}.joined"], axis=2)
    return graph.node("Reshape", [joined, shape["together"]], [f"{name}.packed"])


def _attention(graph: Graph, layer: int, packed: str) -> str:
    spec, rope = graph.spec, graph.spec.rope_layers[layer]
    special: dict[str, Any] = {
        "scale": spec.attention.scale,
        "softcap": spec.attention.softcap,
        "local_window_size": spec.windows[layer],
    }
    shape = [1, spec.num_kv_heads, "C", spec.head_dim]
    past = [graph.input(f"past_{part}.{layer}", TensorProto.FLOAT, shape) for part in "kv"]
    present = [graph.output(f"present_{part}.{layer}", TensorProto.FLOAT, shape) for part in "kv"]
    return graph.node(
        "GroupQueryAttention",
        [packed, "", "", *past, "seqlens_k", "total", *(rope_inputs(rope) if rope >= 0 else ())],
        [f"{layer}.attention", *present],
        num_heads=spec.num_heads,
        kv_num_heads=spec.num_kv_heads,
        do_rotary=int(rope >= 0),
        **{name: value for name, value in special.items() if value},
    )


def _norm(graph: Graph, x: str, gain_name: str, gain: np.ndarray[Any, Any], output: str) -> str:
    """RMS norm over the last axis."""
    return graph.node(
        "SimplifiedLayerNormalization",
        [x, graph.constant(gain_name, gain)],
        [output],
        axis=-1,
        epsilon=graph.spec.rms_eps,
        stash_type=1,
    )


def _add_norm(graph: Graph, name: str, delta: str, hidden: str, gain: np.ndarray[Any, Any]) -> tuple[str, str]:
    """hidden += delta, then RMS norm: returns (normed, hidden)."""
    gain_name = graph.constant(f"{name}_norm", gain)
    outputs = [f"{name}_in", "", "", f"{name}_hidden"]
    graph.node("SkipSimplifiedLayerNormalization", [delta, hidden, gain_name], outputs, epsilon=graph.spec.rms_eps)
    return outputs[0], outputs[3]


def _head(graph: Graph, matrix: Matrices, normed: str, tied: Linear) -> None:
    graph.node("ReduceSum", [normed], ["check"], keepdims=1)  # not finite if any hidden state is not
    graph.output("check", TensorProto.FLOAT, [1, 1, 1])
    factors = graph.spec.multipliers
    chosen = graph.node("Gather", [normed, "rows"], ["head_in"], axis=1)
    chosen = _times(graph, chosen, factors.logits / (factors.logit_softcap or 1.0), "head_in.scaled")
    linear = tied if graph.spec.tied_embeddings else _own_head(graph, matrix.blocks("head"))
    if factors.logit_softcap:
        bounded = graph.node("Tanh", [matmul(graph, linear, chosen, "logits.raw")], ["logits.bounded"])
        _times(graph, bounded, factors.logit_softcap, "logits")
    else:
        matmul(graph, linear, chosen, "logits")
    graph.output("logits", TensorProto.FLOAT, [1, "R", graph.spec.vocab_size])


def _own_head(graph: Graph, blocks: Iterator[Held]) -> Linear:
    first = next(blocks)
    if not isinstance(first, BlockWeight | SplitWeight):
        return store(graph, "head", first)
    codes, linear = write_rows(graph, "head", chain([first], blocks))
    graph.external("head.codes", codes.shape, codes.kind, codes.place)
    return linear
