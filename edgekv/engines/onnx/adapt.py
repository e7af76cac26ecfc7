"""A graph with GroupQueryAttention -> the same graph with the cache we want.

Only node attributes and the types of the cache's inputs and outputs change; weights stay in their external file. The
scales become graph inputs (`k_scale.i`, `v_scale.i`), so that one graph serves every scales file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from edgekv.kv.rows import row_items
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import BITS, ROW_FACTORS, Granularity, KVDtype
from edgekv.model.spec import ModelSpec

_TENSOR_TYPES = {
    "int8": TensorProto.INT8,
    "k8v4": TensorProto.INT8,  # until set_native_attention, which alone has it
    "int4": TensorProto.UINT8,  # until set_native_attention
    "fp8": TensorProto.UINT8,  # the bits of E4M3; in set_native_attention's operator alone
    "fp16": TensorProto.FLOAT,  # until set_half_attention
    "float": TensorProto.FLOAT,
}
NATIVE_DOMAIN = "edgekv"
_KEY_SCALE = 12  # input position in GroupQueryAttention; the value scale is the next
_VALUE_CENTRE = 9  # input position in CachedAttention (native/op.cpp)
_QUANT_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


def set_cache(model: onnx.ModelProto, dtype: KVDtype, granularity: Granularity) -> None:
    """Give every attention node a cache of this dtype, in place, whatever it had before."""
    for value in [*model.graph.input, *model.graph.output]:
        if value.name.startswith(("past_", "present_")):
            _retype_cache(value, dtype)
    for layer, node in enumerate(attention_nodes(model)):
        _drop_scales(model, layer, node)
        if dtype not in ("float", "fp16"):
            _add_scales(model, layer, node, dtype, granularity)


def drop_quantised_cache(model: onnx.ModelProto) -> None:
    """Give another maker's graph a float32 cache, in place, where it has a quantised one."""
    graph = model.graph
    quantised = [node for node in attention_nodes(model) if len(node.input) > _KEY_SCALE]
    names = {name for node in quantised for name in (*node.input[3:5], *node.output[1:3])}
    for layer, node in enumerate(quantised):
        _drop_scales(model, layer, node)
    for value in [v for v in [*graph.input, *graph.output] if v.name in names]:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        value.type.tensor_type.shape.dim[3].dim_param = "D"
    stale = [value for value in graph.value_info if value.name in names]
    for value in stale:
        graph.value_info.remove(value)


def set_half_attention(model: onnx.ModelProto) -> None:
    """Compute attention in float16, in place, between casts: GroupQueryAttention on CUDA takes no float32.

    Call it after `set_cache`. A 16-bit cache is then the unquantised one.
    """
    for value in [*model.graph.input, *model.graph.output]:
        if value.name.startswith(("cos", "sin")) or (
            value.name.startswith(("past_", "present_")) and value.type.tensor_type.elem_type == TensorProto.FLOAT
        ):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            nodes.append(node)
            continue
        packed, attended = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{packed}.half", f"{attended}.half"
        nodes.append(_cast(packed, node.input[0], TensorProto.FLOAT16))
        nodes.append(node)
        nodes.append(_cast(node.output[0], attended, TensorProto.FLOAT))
    reordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(reordered)


@dataclass(frozen=True)
class Centred:
    """What a cache is held less a centre of (kv/scales.py)."""

    keys: Collection[int] = ()  # of these layers
    values: bool = False  # of all layers

    @classmethod
    def by(cls, scales: KVScales) -> Centred:
        """As these scales say."""
        return cls(scales.centred_layers, scales.v_centre is not None)


WHOLE = Centred()


def set_native_attention(model: onnx.ModelProto, spec: ModelSpec, dtype: KVDtype, centred: Centred = WHOLE) -> None:
    """Replace every GroupQueryAttention over packed QKV by edgekv's CachedAttention, in place, after `set_cache`.

    The cache stops being an output: the operator writes into its input. `state` (int64 [4 P]: cached before, evicted,
    pinned, capacity, of each part of a run that evictions divide) is an input that all layers share, `angles.i` ([4, T,
    D/2]: cos and sin at absolute positions, and less the evicted tokens) one that all layers with the rotary embedding
    `spec.ropes[i]` share; scales are one input a layer, [2, K, D]. Layers that hold keys less a centre
    (engines/onnx/centre.py) also have `centre.i`, [K, D], and the table that they share; those of values
    `value_centre.i`, [K, D]. Rows are as wide as kv/rows.py says.
    """
    for layer, node in enumerate(attention_nodes(model)):
        _widen_rows(model, node, spec.head_dim, dtype)
        _make_native(model, spec, layer, node, centred)
    _keep(model.graph.output, lambda name: not name.startswith("present_"))
    _keep(model.graph.input, lambda name: not name.startswith(("cos", "sin")))
    _add_input(model, "state", TensorProto.INT64, ["state_size"])
    for rope in sorted(set(spec.rope_layers) - {-1}):
        _add_input(model, f"angles.{rope}", TensorProto.FLOAT, [4, "T", "D/2"])
    if centred.keys:
        _add_input(model, "pairs", TensorProto.INT64, ["P"])
        coded = BITS[dtype][0] == 4
        turns = (TensorProto.INT8, ["slots", "2P"]) if coded else (TensorProto.FLOAT, [2, "P", "slots"])
        _add_input(model, "turns", *turns)
    model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))


def _make_native(model: onnx.ModelProto, spec: ModelSpec, layer: int, node: onnx.NodeProto, centred: Centred) -> None:
    """Turn one GroupQueryAttention into a CachedAttention, with the inputs that are the layer's own."""
    packed, keys, values, attended = node.input[0], node.input[3], node.input[4], node.output[0]
    quantised, rope = len(node.input) > _KEY_SCALE, spec.rope_layers[layer]
    _drop_scales(model, layer, node)
    inputs = [packed, keys, values, "state", "" if rope < 0 else f"angles.{rope}"]
    if quantised:
        inputs.append(f"scales.{layer}")
        _add_input(model, inputs[-1], TensorProto.FLOAT, [2, spec.num_kv_heads, "D"])
    if layer in centred.keys:
        inputs += [f"centre.{layer}", "pairs", "turns"]
        _add_input(model, f"centre.{layer}", TensorProto.FLOAT, [spec.num_kv_heads, "D"])
    if centred.values:
        inputs += [""] * (_VALUE_CENTRE - len(inputs)) + [f"value_centre.{layer}"]
        _add_input(model, inputs[-1], TensorProto.FLOAT, [spec.num_kv_heads, "D"])
    attributes = {
        "num_heads": spec.num_heads,
        "kv_num_heads": spec.num_kv_heads,
        "window": spec.windows[layer],
        "softcap": spec.attention.softcap,
        "scale": next((a.f for a in node.attribute if a.name == "scale"), spec.attention.scale),  # 0: 1 / sqrt(D)
    }
    named = {"name": node.name, "domain": NATIVE_DOMAIN}
    node.CopyFrom(helper.make_node("CachedAttention", inputs, [attended], **named, **attributes))


def _add_input(model: onnx.ModelProto, name: str, dtype: int, shape: list[int | str]) -> None:
    model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))


def _widen_rows(model: onnx.ModelProto, node: onnx.NodeProto, head_dim: int, dtype: KVDtype) -> None:
    """Give the rows of a node's cache as many items, and of the type, as the operator holds them in."""
    widths = {name: row_items(head_dim, dtype, part) for name, part in zip(node.input[3:5], "kv", strict=True)}
    for value in model.graph.input:
        if value.name in widths:
            value.type.tensor_type.shape.dim[3].dim_value = widths[value.name]
            if dtype in ROW_FACTORS:
                value.type.tensor_type.elem_type = TensorProto.INT8


def _keep(values: Any, wanted: Callable[[str], bool]) -> None:
    for value in [v for v in values if not wanted(v.name)]:
        values.remove(value)


def _cast(source: str, target: str, dtype: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}.cast", to=dtype)


def set_accuracy_level(model: onnx.ModelProto, level: int) -> None:
    """Set the accuracy_level of every MatMulNBits, in place: 4 is int8 activations, 1 is float32."""
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            for attribute in [a for a in node.attribute if a.name == "accuracy_level"]:
                node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute("accuracy_level", level))


def attention_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The attention nodes, first layer first."""
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def _drop_scales(model: onnx.ModelProto, layer: int, node: onnx.NodeProto) -> None:
    del node.input[_KEY_SCALE:]
    for attribute in [a for a in node.attribute if a.name in _QUANT_ATTRIBUTES]:
        node.attribute.remove(attribute)
    names = (f"k_scale.{layer}", f"v_scale.{layer}")
    for value in [i for i in model.graph.input if i.name in names]:
        model.graph.input.remove(value)


def _add_scales(
    model: onnx.ModelProto, layer: int, node: onnx.NodeProto, dtype: KVDtype, granularity: Granularity
) -> None:
    heads = next(a.i for a in node.attribute if a.name == "kv_num_heads")
    node.input.extend([""] * (_KEY_SCALE - len(node.input)))
    for part in "kv":
        name = f"{part}_scale.{layer}"
        _add_input(model, name, TensorProto.FLOAT, [1] if granularity == "tensor" else [1, heads, 1, "D"])
        node.input.append(name)
        quant_type = "PER_TENSOR" if granularity == "tensor" else "PER_CHANNEL"
        node.attribute.append(helper.make_attribute(f"{part}_quant_type", quant_type))
    node.attribute.append(helper.make_attribute("kv_cache_bit_width", BITS[dtype][0]))


def _retype_cache(value: onnx.ValueInfoProto, dtype: KVDtype) -> None:
    tensor = value.type.tensor_type
    row = tensor.shape.dim[3]
    head_dim = row.dim_value * (2 if tensor.elem_type == TensorProto.UINT8 else 1)
    tensor.elem_type = _TENSOR_TYPES[dtype]
    row.dim_value = head_dim // 2 if dtype == "int4" else head_dim
