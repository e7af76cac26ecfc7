"""Attention written out in plain operators, as optimum exports it -> GroupQueryAttention.

One layer, from its Softmax outwards; what is in brackets may be missing:

    q, k, v     Transpose(Reshape(projection), 0 2 1 3) [a norm between the two]
    rotation    x cos + Concat(-x[D/2:], x[:D/2]) sin
    cache       present = Concat(past, k or v) over the tokens; [Reshape(Expand(Unsqueeze)) repeats it for the queries]
    scores      Softmax([c] MatMul([c] q, [c] Transpose(k)) + mask)
    result      Reshape(Transpose(MatMul([Where(IsNaN)] probabilities, v), 0 2 1 3))

Nodes that only compute shapes are not looked at. What the mask and the angles are is not read off their nodes, which
differ between versions of the exporter, but seen: the parts of the graph that make them are run for many tokens at once
and for one token after many. The mask must be causal and nothing else (a window would show), the angles must be one
table for all layers. Anything else is refused; the whole is then checked against the maker's logits (foreign_check.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.engines.onnx.surgery import Array, GraphEdit, attribute, linear_shapes, without_bias
from edgekv.errors import EngineError, UnsupportedModel

TABLE_ROWS = 2048
"""Tokens for which the angles are computed."""

MASK_ROWS = 256
"""Tokens whose mask is looked at when nothing is cached."""

LONG_PAST = 40_000
"""Cached tokens before the one whose mask is looked at: longer than the windows that models are published with."""

_MASKED = -1e4  # what a mask adds is either 0 or less than this
_NUMBERS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}


@dataclass(frozen=True)
class _Layer:
    """One layer's attention: names of values, and the nodes that a single one takes the place of."""

    query: str  # [1, T, H D]
    key: str  # [1, T, K D]
    value: str
    past: tuple[str, str]
    replaced: tuple[onnx.NodeProto, onnx.NodeProto, onnx.NodeProto]  # that make the result and the two presents
    angles: frozenset[tuple[str, str]]  # cosine and sine of queries and keys
    mask: str
    scale: float


def fuse_attention(graph: GraphEdit) -> None:
    """Put GroupQueryAttention in place of every attention of a graph that has none.

    Raises:
        UnsupportedModel: it is written otherwise; the message names the first value that does not fit.
    """
    softmaxes = graph.of_kind("Softmax")
    if not softmaxes:
        kinds = sorted({node.op_type for node in graph.nodes if "ttention" in node.op_type})
        raise UnsupportedModel(
            f"{graph.path} has no GroupQueryAttention and no Softmax to fuse one from"
            f"{': its attention is ' + ', '.join(kinds) if kinds else ''}."
        )
    layers = [_match(graph, node) for node in softmaxes]
    numbers = graph.inputs()[layers[0].past[0]].elem_type
    if numbers not in _NUMBERS:
        raise UnsupportedModel(f"{graph.path}: its cache is neither float32 nor float16.")
    cos, sin = _prove(graph, layers)
    for name, table in (("fused.cos", cos), ("fused.sin", sin)):
        graph.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(table, _NUMBERS[numbers]), name)
    shapes = linear_shapes(graph)
    for layer in layers:
        _replace(graph, layer, shapes, 2 * cos.shape[1])


def _replace(graph: GraphEdit, layer: _Layer, shapes: dict[str, tuple[int, int]], head_dim: int) -> None:
    width = shapes.get(without_bias(graph, layer.query), (0, 0))[0]
    kv_heads = graph.inputs()[layer.past[0]].shape.dim[1].dim_value
    if not width or width % head_dim or not kv_heads:
        raise UnsupportedModel(f"{graph.path}: how many heads {layer.query} holds cannot be told.")
    outputs = [node.output[0] for node in layer.replaced]
    for node in layer.replaced:
        graph.remove(node)
    graph.add(
        "GroupQueryAttention",
        [layer.query, layer.key, layer.value, *layer.past, "", "", "fused.cos", "fused.sin"],
        outputs,
        domain="com.microsoft",
        num_heads=width // head_dim,
        kv_num_heads=kv_heads,
        do_rotary=1,
        scale=layer.scale,
    )
    opsets = {opset.domain for opset in graph.model.opset_import}
    if "com.microsoft" not in opsets:
        graph.model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


# ---- matching --------------------------------------------------------------------------------------------------------


def _match(graph: GraphEdit, softmax: onnx.NodeProto) -> _Layer:
    if attribute(softmax, "axis", -1) not in (-1, 3):
        raise _misfit(graph, softmax.output[0], "a softmax over the last axis")
    sum_of = _made_by(graph, softmax.input[0], "Add")
    scores, mask = sum_of.input
    if not graph.producer(_scaled(graph, scores)[0], "MatMul"):
        scores, mask = mask, scores
    product, scale = _scaled(graph, scores)
    multiply = _made_by(graph, product, "MatMul")
    query, by_query = _scaled(graph, multiply.input[0])
    turned, by_key = _scaled(graph, multiply.input[1])
    key_rows = _made_by(graph, turned, "Transpose", perm=[0, 1, 3, 2]).input[0]
    weighted, result = _result(graph, softmax)
    cached_key, cached_value = (_cached(graph, name) for name in (key_rows, weighted.input[1]))
    rotated_query, rotated_key = (_rotated(graph, name) for name in (query, cached_key.input[1]))
    return _Layer(
        query=_projection(graph, rotated_query[0]),
        key=_projection(graph, rotated_key[0]),
        value=_projection(graph, cached_value.input[1]),
        past=(cached_key.input[0], cached_value.input[0]),
        replaced=(result, cached_key, cached_value),
        angles=frozenset({rotated_query[1:], rotated_key[1:]}),
        mask=mask,
        scale=scale * by_query * by_key,
    )


def _misfit(graph: GraphEdit, name: str, wanted: str) -> UnsupportedModel:
    node = graph.producers.get(name)
    found = "an input" if node is None else node.op_type
    return UnsupportedModel(f"{graph.path}: its attention cannot be fused: {name} is {found}, expected {wanted}.")


def _made_by(graph: GraphEdit, name: str, kind: str, **attributes: Any) -> onnx.NodeProto:
    """The node of this kind and with these attributes that makes a value."""
    node = graph.producer(name, kind)
    if node is None or any(list(attribute(node, each, [])) != value for each, value in attributes.items()):
        raise _misfit(graph, name, kind)
    return node


def _scaled(graph: GraphEdit, name: str) -> tuple[str, float]:
    """A value without the constants that it is multiplied or divided by, and their product."""
    factor = 1.0
    while (node := graph.producer(name, "Mul", "Div")) is not None:
        constants = [graph.constant(each) for each in node.input]
        place = next((i for i, each in enumerate(constants) if each is not None and each.size == 1), None)
        if place is None or (node.op_type == "Div" and place == 0):
            break
        number = float(np.asarray(constants[place]).reshape(()))
        factor, name = factor / number if node.op_type == "Div" else factor * number, node.input[1 - place]
    return name, factor


def _result(graph: GraphEdit, softmax: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """The multiplication by the values, and the Reshape that makes the layer's result of it."""
    name = softmax.output[0]
    guards = [node for node in graph.readers[name] if node.op_type == "Where" and node.input[2] == name]
    if guards:
        _made_by(graph, guards[0].input[0], "IsNaN")
        name = guards[0].output[0]
    weighted = _only_reader(graph, name, "MatMul")
    turned = _only_reader(graph, weighted.output[0], "Transpose")
    if list(attribute(turned, "perm", [])) != [0, 2, 1, 3]:
        raise _misfit(graph, turned.output[0], "the heads moved behind the tokens")
    return weighted, _only_reader(graph, turned.output[0], "Reshape")


def _only_reader(graph: GraphEdit, name: str, kind: str) -> onnx.NodeProto:
    readers = [node for node in graph.readers[name] if node.op_type != "Shape"]
    if len(readers) != 1 or readers[0].op_type != kind:
        found = ", ".join(node.op_type for node in readers) or "nothing"
        raise UnsupportedModel(f"{graph.path}: its attention cannot be fused: {found} reads {name}, expected {kind}.")
    return readers[0]


def _cached(graph: GraphEdit, name: str) -> onnx.NodeProto:
    """The Concat of past and new rows behind keys or values, which may be repeated for the query heads."""
    if graph.producer(name, "Reshape"):
        expanded = _made_by(graph, graph.producers[name].input[0], "Expand")
        name = _made_by(graph, expanded.input[0], "Unsqueeze").input[0]
    joined = _made_by(graph, name, "Concat")
    outputs = {value.name for value in graph.model.graph.output}
    if attribute(joined, "axis", 0) not in (-2, 2) or joined.output[0] not in outputs or len(joined.input) != 2:
        raise _misfit(graph, name, "the cache with new rows at its end")
    if joined.input[0] not in graph.inputs():
        raise _misfit(graph, joined.input[0], "the cache as an input")
    return joined


def _rotated(graph: GraphEdit, name: str) -> tuple[str, str, str]:
    """What is rotated, and the names of cosine and sine."""
    plain, crossed = (_made_by(graph, each, "Mul") for each in _made_by(graph, name, "Add").input)
    if graph.producer(crossed.input[0], "Concat") is None:
        plain, crossed = crossed, plain
    halves = _made_by(graph, crossed.input[0], "Concat")
    second = _made_by(graph, _made_by(graph, halves.input[0], "Neg").input[0], "Slice")
    first = _made_by(graph, halves.input[1], "Slice")
    if attribute(halves, "axis", 0) not in (-1, 3) or {first.input[0], second.input[0]} != {plain.input[0]}:
        raise _misfit(graph, name, "a rotation in halves")
    return plain.input[0], plain.input[1], crossed.input[1]


def _projection(graph: GraphEdit, name: str) -> str:
    """Queries, keys or values [1, T, heads D], of which `name` are the heads [1, heads, T, D]."""
    heads = _made_by(graph, name, "Transpose", perm=[0, 2, 1, 3]).input[0]
    if (reshaped := graph.producer(heads, "Reshape")) is not None:
        return str(reshaped.input[0])
    flat = f"{heads}.flat"
    if flat not in graph.producers:  # normalised by head: put side by side again
        graph.tensors["fused.flat"] = numpy_helper.from_array(np.array([0, 0, -1]), "fused.flat")
        graph.add("Reshape", [heads, "fused.flat"], [flat])
    return flat


# ---- what is run to be seen ------------------------------------------------------------------------------------------


def _prove(graph: GraphEdit, layers: list[_Layer]) -> tuple[Array, Array]:
    """Cosine and sine [TABLE_ROWS, D/2] of all layers, once their masks have been seen to be causal."""
    masks = _Part(graph, {layer.mask for layer in layers})
    for mask in masks.run(MASK_ROWS, 0).values():
        _check_mask(graph, mask, np.tri(MASK_ROWS, dtype=bool))
    for mask in masks.run(1, LONG_PAST).values():
        _check_mask(graph, mask, np.ones((1, LONG_PAST + 1), bool))
    pairs = {pair for layer in layers for pair in layer.angles}
    seen = _Part(graph, {name for pair in pairs for name in pair}).run(TABLE_ROWS, 0)
    tables = [tuple(seen[name].reshape(TABLE_ROWS, -1) for name in pair) for pair in pairs]
    cos, sin = tables[0]
    half = cos.shape[1] // 2
    same = all(np.array_equal(a, cos) and np.array_equal(b, sin) for a, b in tables)
    if not same or not all(np.array_equal(each[:, :half], each[:, half:]) for each in (cos, sin)):
        raise UnsupportedModel(f"{graph.path}: its layers do not rotate by one table of angles in halves.")
    return cos[:, :half], sin[:, :half]


def _check_mask(graph: GraphEdit, mask: Array, allowed: Array) -> None:
    values = mask.reshape(mask.shape[-2:]) if prod(mask.shape[:-2]) == 1 else mask
    causal = values.shape == allowed.shape and np.array_equal(values == 0, allowed)
    if not causal or not (values[~allowed] < _MASKED).all():
        raise UnsupportedModel(f"{graph.path}: its attention cannot be fused: its mask is not plainly causal.")


class _Part:
    """The part of a graph that makes some values; they must not depend on the weights.

    Raises:
        EngineError: ONNX Runtime cannot run it.
    """

    def __init__(self, graph: GraphEdit, names: Iterable[str]) -> None:
        self._path, self._names = graph.path, sorted(names)
        model = onnx.ModelProto.FromString(graph.model.SerializeToString())
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._names)
        self._graph = GraphEdit(model, graph.path, graph.folder)
        self._graph.commit()
        read = {name for node in model.graph.node for name in node.input}
        for value in [value for value in model.graph.input if value.name not in read]:
            model.graph.input.remove(value)

    def run(self, count: int, past: int) -> dict[str, Array]:
        """The values for `count` tokens after `past` cached ones."""
        try:
            results = self._session.run(self._names, _feeds(self._graph, count, past))
        except Exception as error:  # ONNX Runtime raises a class of its own per status code
            raise EngineError(f"ONNX Runtime cannot run the angles or the mask of {self._path}: {error}") from error
        return dict(zip(self._names, results, strict=True))

    @cached_property
    def _session(self) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        folder = str(self._graph.folder)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return ort.InferenceSession(self._graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _feeds(graph: GraphEdit, count: int, past: int) -> dict[str, Array]:
    places = np.arange(past, past + count)[None]
    known = {"input_ids": np.zeros_like(places), "attention_mask": np.ones((1, past + count)), "position_ids": places}
    feeds = {}
    for name, kind in graph.inputs().items():
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        dims = [dim.dim_value for dim in kind.shape.dim]
        feeds[name] = known[name].astype(dtype) if name in known else np.zeros((1, dims[1], past, dims[3]), dtype)
    return feeds
