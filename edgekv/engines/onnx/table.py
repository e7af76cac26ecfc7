"""edgekv's own matmul with bitsandbytes' codes (edgekv/native/table.h) in the place of MatMulBnb4.

The codes stay in their file: they are unpacked in registers as they are read, where MatMulBnb4 writes the whole matrix
in float32 at every call. The sums are of float32 numbers in both, and agree to rounding.

MatMulBnb4 stays where a row is no whole number of blocks of 32 or more, and where float16 is around it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.engines.onnx.adapt import NATIVE_DOMAIN
from edgekv.engines.onnx.surgery import attribute
from edgekv.weights.base import BNB_TABLES

QUANT_TYPES = {"fp4": 0, "nf4": 1}
"""ONNX Runtime's numbers of the tables, MatMulBnb4's attribute quant_type."""

_ABSMAX = 2  # input position in MatMulBnb4


def set_table_matmul(model: onnx.ModelProto) -> bool:
    """Replace the products that can be, in place; whether there were any."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "MatMulBnb4" and _can_be(node, tensors)]
    kinds = {_replace(node) for node in nodes}
    for kind in sorted(kinds):
        table = np.array(BNB_TABLES[kind], np.float32)
        model.graph.initializer.append(numpy_helper.from_array(table, _table_name(kind)))
    if kinds and not any(opset.domain == NATIVE_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))
    return bool(kinds)


def _can_be(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> bool:
    block, absmax = attribute(node, "block_size", 0), tensors.get(node.input[_ABSMAX])
    whole = block >= 32 and block % 32 == 0 and attribute(node, "K", 0) % block == 0
    return whole and absmax is not None and absmax.data_type == TensorProto.FLOAT


def _replace(node: onnx.NodeProto) -> str:
    """Returns which table the node needs."""
    kind = next(kind for kind, number in QUANT_TYPES.items() if number == attribute(node, "quant_type", 1))
    sizes = {name: attribute(node, name, 0) for name in ("N", "K", "block_size")}
    inputs = [*node.input, _table_name(kind)]
    node.CopyFrom(
        helper.make_node("TableMatMul", inputs, list(node.output), name=node.name, domain=NATIVE_DOMAIN, **sizes)
    )
    return kind


def _table_name(kind: str) -> str:
    return f"{kind}.table"
