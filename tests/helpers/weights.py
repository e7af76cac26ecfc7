"""Weights read back out of a converted graph, as the numbers the operators' own documentation says they are.

The unpacking follows the description of com.microsoft.MatMulNBits and GatherBlockQuantized, not edgekv's packing: codes
low nibble first, zero points packed the same way, w = (code - zero) * scale. A MatMul of the sums of the input's blocks
that is added to a product adds its weight to every column of a block. What comes out loads into transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper


def dequantised_state_dict(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict of the transformers model that computes what the graph in `folder` says, in float32."""
    model = onnx.load(folder / "model.onnx")  # with its external data
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = {node.output[0]: node for node in model.graph.node}
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    past = {value.name: value for value in model.graph.input}
    size = past["cos"].type.tensor_type.shape.dim[1].dim_value * 2  # D
    state: dict[str, np.ndarray[Any, Any]] = {}
    embedding = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    state["model.embed_tokens.weight"] = _gather_table(embedding, stored)
    for layer, node in enumerate(attention):
        heads, kv_heads = _attribute(node, "num_heads"), _attribute(node, "kv_num_heads")
        base = f"model.layers.{layer}"
        ends = np.cumsum([heads * size, kv_heads * size])
        packed = nodes[node.input[0]]
        for part, rows in zip("qkv", np.split(_matrix(packed, stored, nodes), ends), strict=True):
            state[f"{base}.self_attn.{part}_proj.weight"] = rows
        product = nodes[packed.input[0]] if packed.op_type == "Add" else packed
        if len(product.input) > 5:
            for part, rows in zip("qkv", np.split(stored[product.input[5]], ends), strict=True):
                state[f"{base}.self_attn.{part}_proj.bias"] = rows
        for name, place in (("o", "self_attn.o"), ("gate", "mlp.gate"), ("up", "mlp.up"), ("down", "mlp.down")):
            state[f"{base}.{place}_proj.weight"] = _matrix(nodes[f"{layer}.{name}.out"], stored, nodes)
        state[f"{base}.input_layernorm.weight"] = stored[f"{layer}.attn_norm"]
        state[f"{base}.post_attention_layernorm.weight"] = stored[f"{layer}.ffn_norm"]
    state["model.norm.weight"] = stored[f"{len(attention)}.attn_norm"]
    state["lm_head.weight"] = _matrix(nodes["logits"], stored, nodes)
    return {name: torch.from_numpy(np.array(array, np.float32)) for name, array in state.items()}


def _matrix(
    node: onnx.NodeProto, stored: dict[str, np.ndarray[Any, Any]], nodes: dict[str, onnx.NodeProto]
) -> np.ndarray[Any, Any]:
    """[N, K] float32 of a MatMulNBits node: inputs A, B, scales, zero_points, g_idx, bias; or with a shift."""
    if node.op_type == "Add":
        product, shift = (nodes[name] for name in node.input)
        total = nodes[shift.input[0]]
        blocks = nodes[total.input[0]]
        group = int(stored[blocks.input[1]][-1])
        assert (shift.op_type, total.op_type, blocks.op_type) == ("MatMul", "ReduceSum", "Reshape")
        assert (blocks.input[0], stored[total.input[1]].tolist()) == (product.input[0], [3])
        return _matrix(product, stored, nodes) + stored[shift.input[1]].T.repeat(group, axis=1)
    assert node.op_type == "MatMulNBits"
    bits, group = _attribute(node, "bits"), _attribute(node, "block_size")
    rows, columns = _attribute(node, "N"), _attribute(node, "K")
    zeros = stored[node.input[3]] if len(node.input) > 3 and node.input[3] else None
    return _blocks(stored[node.input[1]], stored[node.input[2]], zeros, bits, group)[:rows, :columns]


def _gather_table(node: onnx.NodeProto, stored: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """[V, E] float32 of a GatherBlockQuantized node: inputs data, indices, scales, zero_points."""
    bits, group = _attribute(node, "bits"), _attribute(node, "block_size")
    zeros = stored[node.input[3]] if len(node.input) > 3 and node.input[3] else None
    return _blocks(stored[node.input[0]], stored[node.input[2]], zeros, bits, group)


def _blocks(
    codes: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    zeros: np.ndarray[Any, Any] | None,
    bits: int,
    group: int,
) -> np.ndarray[Any, Any]:
    rows = len(codes)
    scales = scales.reshape(rows, -1).astype(np.float32)
    numbers = _unpack(codes.reshape(rows, -1), bits).reshape(rows, -1, group)
    middle = np.full(scales.shape, 1 << (bits - 1), np.float32)
    points = middle if zeros is None else _unpack(zeros.reshape(rows, -1), bits)[:, : scales.shape[1]]
    return ((numbers - points[..., None]) * scales[..., None]).reshape(rows, -1).astype(np.float32)


def _unpack(raw: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    if bits == 8:
        return raw.astype(np.float32)
    wide = np.empty((*raw.shape, 2), np.float32)
    wide[..., 0], wide[..., 1] = raw & 0xF, raw >> 4
    return wide.reshape(len(raw), -1)


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == name)
