"""The project's own product with 4-bit and 8-bit weights (edgekv/native/matmul.h) in the place of MatMulNBits.

All matrices of a graph are packed into one block of memory, in the order in which they are used, when a session is
opened; the nodes say where theirs begins. That block is the only copy: ONNX Runtime, which would pack one of its own,
is given no other, and the file is read a matrix at a time. Scales are held in 16 bits where that loses nothing, as
with every scale that comes from a GGUF, AWQ or GPTQ file.

Gate and up projections whose product is gated by SiLU or GELU become one node that also does that.

MatMulNBits stays where it is not at accuracy level 4, or has float zero points, an order of its inputs, 2-bit codes, or
weights that are not constants.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.engines.onnx import native
from edgekv.engines.onnx.adapt import NATIVE_DOMAIN
from edgekv.engines.onnx.graphfile import tensor_array
from edgekv.engines.onnx.native import PACKED_WEIGHTS
from edgekv.engines.onnx.surgery import attribute

Array = np.ndarray[Any, Any]
_LINE = 64  # bytes; native/matmul.h
_PANEL = 16  # outputs; native/matmul.h
_GATES = {"QuickGelu": 1, "FastGelu": 2}
_SCALES, _ZEROS, _ORDER, _BIAS = 2, 3, 4, 5  # input positions in MatMulNBits


class _Packing(ctypes.Structure):
    """native/matmul.h's struct Packing."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int),
        ("group", ctypes.c_int64),
        ("zeros", ctypes.c_bool),
        ("half", ctypes.c_bool),
    )


class _Unpacked(ctypes.Structure):
    """native/matmul.h's struct Unpacked."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("zeros", ctypes.c_void_p))


@dataclass(frozen=True)
class _Matrix:
    """The weights of one MatMulNBits."""

    packing: _Packing
    size: int  # bytes when packed
    codes: onnx.TensorProto
    scales: Array
    zeros: onnx.TensorProto | None

    @property
    def panel_bytes(self) -> int:
        """Of 16 outputs."""
        return self.size // -(-int(self.packing.outputs) // _PANEL)

    def pack(self, folder: Path, step: int, out: Array) -> None:
        """Write its panels, `step` panels apart, from the beginning of `out` on."""
        codes = np.ascontiguousarray(tensor_array(self.codes, folder))
        zeros = None if self.zeros is None else np.ascontiguousarray(tensor_array(self.zeros, folder))
        parts = (codes, np.ascontiguousarray(self.scales), zeros)
        source = _Unpacked(*(None if part is None else part.ctypes.data for part in parts))
        target = ctypes.c_void_p(out.ctypes.data)
        native.functions().edgekv_pack(ctypes.byref(self.packing), ctypes.byref(source), ctypes.c_int64(step), target)


@dataclass(frozen=True)
class _Product:
    """A node that is to be: one matrix, or gate and up."""

    matrices: tuple[_Matrix, ...]
    inputs: tuple[str, str]  # x and the bias, "" for none
    output: str
    name: str
    gate: int = 0

    @property
    def size(self) -> int:
        """Bytes of all its matrices."""
        return sum(matrix.size for matrix in self.matrices)

    def node(self, offset: int) -> onnx.NodeProto:
        """The node, with its weights at this place."""
        packing, (x, bias) = self.matrices[0].packing, self.inputs
        return helper.make_node(
            "PackedMatMul",
            [x, PACKED_WEIGHTS, bias] if bias else [x, PACKED_WEIGHTS],
            [self.output],
            name=self.name,
            domain=NATIVE_DOMAIN,
            N=packing.outputs * len(self.matrices),
            K=packing.inputs,
            bits=packing.bits,
            block_size=packing.group,
            zero_points=int(packing.zeros),
            half=int(packing.half),
            offset=offset,
            gate=self.gate,
        )

    def pack(self, folder: Path, out: Array) -> None:
        """Pack its matrices, panels in turn."""
        count = len(self.matrices)
        for index, matrix in enumerate(self.matrices):
            matrix.pack(folder, count, out[index * matrix.panel_bytes :])


def set_packed_matmul(model: onnx.ModelProto, folder: Path, threads: int = 0) -> Array | None:
    """Replace the products that can be, in place; returns what PACKED_WEIGHTS has to hold, or None if there are none.

    Args:
        folder: what the places of the model's external data are relative to.
        threads: that pack; 0 for one a core.
    """
    products = _products(model, folder)
    if not products:
        return None
    offsets = [0]
    for product in products.values():
        offsets.append(-(-(offsets[-1] + product.size) // _LINE) * _LINE)
    memory = _large_memory(offsets[-1])
    with ThreadPoolExecutor(threads or None) as pool:
        for done in [
            pool.submit(product.pack, folder, memory[offset:])
            for product, offset in zip(products.values(), offsets[:-1], strict=True)
        ]:
            done.result()
    nodes = {output: product.node(offset) for (output, product), offset in zip(products.items(), offsets, strict=False)}
    _replace(model, nodes)
    _declare(model, memory.nbytes)
    return memory


def _large_memory(size: int) -> Array:
    """Zeros from a page's beginning on, in large pages where the system has them: all is read for every token."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _products(model: onnx.ModelProto, folder: Path) -> dict[str, _Product]:
    """What replaces the nodes that make these outputs, in the graph's order."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[str, _Product] = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits" and (matrix := _matrix(node, tensors, folder)) is not None:
            bias = node.input[_BIAS] if len(node.input) > _BIAS else ""
            found[node.output[0]] = _Product((matrix,), (node.input[0], bias), node.output[0], node.name)
    return _gated(model, found)


def _matrix(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], folder: Path) -> _Matrix | None:
    """The node's weights, if the operator can take them."""
    names = [*node.input[1:], "", "", "", ""][:5]
    codes, scales, zeros = (tensors.get(name) for name in names[:3])
    if attribute(node, "accuracy_level", 0) != 4 or codes is None or scales is None or names[_ORDER - 1]:
        return None
    if scales.data_type != TensorProto.FLOAT or (names[2] and (zeros is None or zeros.data_type != TensorProto.UINT8)):
        return None
    values = np.asarray(tensor_array(scales, folder))
    packing = _Packing(
        attribute(node, "N", 0),
        attribute(node, "K", 0),
        attribute(node, "bits", 4),
        attribute(node, "block_size", 0),
        zeros is not None,
        _fits_half(values),
    )
    size = native.functions().edgekv_packed_bytes(ctypes.byref(packing))
    return _Matrix(packing, size, codes, values, zeros) if size else None


def _fits_half(scales: Array) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))


def _gated(model: onnx.ModelProto, products: dict[str, _Product]) -> dict[str, _Product]:
    """The same, gate and up made one where act(gate) * up is all that they are read for."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    activations = {node.output[0]: node for node in model.graph.node if _gate_of(node)}
    joined = dict(products)
    for node in model.graph.node:
        pair = _pair(node, activations, products, readers)
        if pair is not None:
            gate, up, act = pair
            del joined[gate.output]
            matrices = (*gate.matrices, *up.matrices)
            # In the place of the later one; both are ready when the first could have been.
            joined[up.output] = _Product(matrices, gate.inputs, node.output[0], node.name, _gate_of(act))
    return joined


def _gate_of(node: onnx.NodeProto) -> int:
    """The operator's number for this activation; 0 if it is none that it has."""
    if node.op_type == "QuickGelu" and attribute(node, "alpha", 1.702) != 1.0:
        return 0
    if node.op_type == "FastGelu" and len(node.input) > 1 and node.input[1]:
        return 0
    return _GATES.get(node.op_type, 0)


def _pair(
    node: onnx.NodeProto,
    activations: dict[str, onnx.NodeProto],
    products: dict[str, _Product],
    readers: dict[str, list[onnx.NodeProto]],
) -> tuple[_Product, _Product, onnx.NodeProto] | None:
    """Gate, up and the activation, if this node multiplies act(gate) by up and nothing else reads them."""
    if node.op_type != "Mul":
        return None
    for gated, straight in (node.input, node.input[::-1]):
        act = activations.get(gated)
        gate, up = products.get(act.input[0]) if act is not None else None, products.get(straight)
        if act is None or gate is None or up is None:
            continue
        alone = all(len(readers.get(name, ())) == 1 for name in (gated, straight, gate.output))
        if alone and gate.inputs == up.inputs and not gate.inputs[1] and _alike(gate, up):
            return gate, up, act
    return None


def _alike(gate: _Product, up: _Product) -> bool:
    first, second = (bytes(product.matrices[0].packing) for product in (gate, up))
    return first == second and gate.matrices[0].packing.outputs % _PANEL == 0


def _replace(model: onnx.ModelProto, made: dict[str, onnx.NodeProto]) -> None:
    """Put the new nodes in, and leave out what they make unneeded: nodes first, then initializers."""
    nodes = [made.get(node.output[0], node) for node in model.graph.node]
    whole = {name for node in made.values() for name in node.output}
    nodes = [node for node in nodes if node.domain == NATIVE_DOMAIN or not whole & set(node.output)]
    kept = _needed(nodes, {value.name for value in model.graph.output})
    read = {name for node in kept for name in node.input}
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in read]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    initializers = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend(copies)
    model.graph.initializer.extend(initializers)


def _needed(nodes: Sequence[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes that something reads, in their order (which is topological)."""
    return list(_backwards(nodes, set(outputs)))[::-1]


def _backwards(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> Iterator[onnx.NodeProto]:
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted |= set(node.input) - {""}
            yield node


def _declare(model: onnx.ModelProto, size: int) -> None:
    """The block as an input: an initializer would have to lie in a file, or inside the graph."""
    model.graph.input.append(helper.make_tensor_value_info(PACKED_WEIGHTS, TensorProto.UINT8, [size]))
    if not any(opset.domain == NATIVE_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))
