"""edgekv's own matmul with weights of 4, 5, 6 and 8 bits (edgekv/native/matmul.h) in the place of MatMulNBits.

All matrices of a graph are packed into one block of memory, in the order in which they are used, when a session is
opened; the nodes say where theirs begins. That block is the only copy: ONNX Runtime, which would pack one of its own,
is given no other, and the file is read a matrix at a time. Scales are held in 16 bits where that loses nothing, as
with every scale that comes from a GGUF, AWQ or GPTQ file. Codes of 8 bits that lie close to their zero point are held
in 4, 5 or 6: those of Q5_0 and Q6_K, for which MatMulNBits has no narrower form. A product of the sums of the input's
blocks that is added to it (build.py, a shift) becomes the minima of one matrix.

What surrounds a product becomes part of it where nothing else reads what lies between: gate and up projections and
their SiLU or GELU are one node, the residual stream is added by the product that is added to it, and an RMS norm is
computed by the products that read it. Each of these was a node of its own, and with few tokens most of a small node is
waking threads.

An embedding that is the output head, too, is looked up in the packed head: its rows are not mapped a second time.

MatMulNBits stays where it is not at accuracy level 4, or has float zero points, an order of its inputs, 2-bit codes, or
weights that are not constants.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.engines.memory import large_memory, line_starts
from edgekv.engines.onnx import native
from edgekv.engines.onnx.adapt import NATIVE_DOMAIN
from edgekv.engines.onnx.graphfile import external_place, tensor_array
from edgekv.engines.onnx.native import PACKED_WEIGHTS
from edgekv.engines.onnx.surgery import attribute
from edgekv.weights.base import fits_half

Array = np.ndarray[Any, Any]
_PANEL = 16  # outputs; native/matmul.h
_PART = 256  # panels that are packed at once
_SCANNED = 1 << 20  # bytes of codes that are looked at at once
_GATES = {"QuickGelu": 1, "FastGelu": 2}
_ORDER, _BIAS = 4, 5  # input positions in MatMulNBits


class _Packing(ctypes.Structure):
    """native/matmul.h's struct Packing."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int),
        ("group", ctypes.c_int64),
        ("zeros", ctypes.c_bool),
        ("half", ctypes.c_bool),
        ("minima", ctypes.c_bool),
    )


class _Unpacked(ctypes.Structure):
    """native/matmul.h's struct Unpacked."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("bits", ctypes.c_int),
        ("base", ctypes.c_int),
    )


_Place: TypeAlias = str | tuple[str, int, int]
"""A tensor's external data by file, offset and length, or its name where it has none."""


@dataclass(frozen=True)
class _Matrix:
    """The weights of one MatMulNBits."""

    packing: _Packing
    size: int  # bytes when packed
    bits: int  # of the codes in the file
    codes: onnx.TensorProto
    scales: Array
    zeros: onnx.TensorProto | None
    read: tuple[_Place, ...]  # where codes, scales and zero points come from
    shift: onnx.TensorProto | None = None  # [groups, N]

    def minima(self, folder: Path) -> Array | None:
        """[N, groups]: what the lowest code stands for."""
        if self.shift is None:
            return None
        middle = np.float32(1 << (self.packing.bits - 1))
        return np.ascontiguousarray(tensor_array(self.shift, folder).T - middle * self.scales)

    @property
    def attributes(self) -> dict[str, int]:
        """How it is packed, as the operators take it."""
        packing = self.packing
        return {
            "N": packing.outputs,
            "K": packing.inputs,
            "bits": packing.bits,
            "block_size": packing.group,
            "zero_points": int(packing.zeros),
            "half": int(packing.half),
            "minima": int(packing.minima),
        }

    @property
    def panels(self) -> int:
        """Of 16 outputs."""
        return -(-int(self.packing.outputs) // _PANEL)

    def parts(self, folder: Path, step: int, out: Array) -> Iterator[Callable[[], None]]:
        """What writes its panels from the beginning of `out` on, `step` panels apart, some thousand outputs a call."""
        for first in range(0, self.panels, _PART):
            yield partial(self._pack, folder, step, out, first, min(first + _PART, self.panels))

    def _pack(self, folder: Path, step: int, out: Array, first: int, last: int) -> None:
        codes = np.ascontiguousarray(tensor_array(self.codes, folder))
        zeros = None if self.zeros is None else np.ascontiguousarray(tensor_array(self.zeros, folder))
        parts = (codes, np.ascontiguousarray(self.scales), zeros, self.minima(folder))
        places = (None if part is None else part.ctypes.data for part in parts)
        source = _Unpacked(*places, self.bits, _base(self.bits, self.packing.bits))
        numbers, target = map(ctypes.c_int64, (first, last, step)), ctypes.c_void_p(out.ctypes.data)
        native.functions().edgekv_pack(ctypes.byref(self.packing), ctypes.byref(source), *numbers, target)


@dataclass(frozen=True)
class _Product:
    """A node that is to be: one matrix, or gate and up, and what is done before and after."""

    matrices: tuple[_Matrix, ...]
    x: str
    output: str
    name: str
    bias: str = ""
    gate: int = 0
    residual: str = ""  # added to the output
    gain: str = ""  # of the norm that x goes through first
    epsilon: float = 0.0

    @property
    def input(self) -> list[str]:
        """What it reads, in the operator's order, PACKED_WEIGHTS second."""
        names = [self.x, PACKED_WEIGHTS, self.bias, self.residual, self.gain]
        while not names[-1]:
            names.pop()
        return names

    @property
    def size(self) -> int:
        """Bytes of all its matrices."""
        return sum(matrix.size for matrix in self.matrices)

    def node(self, offset: int) -> onnx.NodeProto:
        """The node, with its weights at this place."""
        matrix = self.matrices[0].attributes | {"N": self.matrices[0].packing.outputs * len(self.matrices)}
        return helper.make_node(
            "PackedMatMul",
            self.input,
            [self.output],
            name=self.name,
            domain=NATIVE_DOMAIN,
            offset=offset,
            gate=self.gate,
            epsilon=self.epsilon,
            **matrix,
        )

    def parts(self, folder: Path, out: Array) -> Iterator[Callable[[], None]]:
        """What packs its matrices, panels in turn."""
        for index, matrix in enumerate(self.matrices):
            yield from matrix.parts(folder, len(self.matrices), out[index * (matrix.size // matrix.panels) :])


Step: TypeAlias = onnx.NodeProto | _Product
_AnyStep = TypeVar("_AnyStep", bound=Step)


def set_packed_matmul(model: onnx.ModelProto, folder: Path, threads: int = 0) -> Array | None:
    """Replace the products that can be, in place; returns what PACKED_WEIGHTS has to hold, or None if there are none.

    Args:
        folder: what the places of the model's external data are relative to.
        threads: that pack; 0 for one a core.
    """
    steps = _with_products(model, folder)
    if not any(isinstance(step, _Product) for step in steps):
        return None
    outputs = {value.name for value in model.graph.output}
    steps = _with_shifts(steps, outputs, {tensor.name: tensor for tensor in model.graph.initializer}, folder)
    for absorbed in (_with_gates, _with_sums, _with_norms):
        steps = absorbed(steps, outputs)
    products = [step for step in steps if isinstance(step, _Product)]
    ends = line_starts(product.size for product in products)
    memory, packed = large_memory(ends[-1]), list(zip(products, ends[:-1], strict=True))
    with ThreadPoolExecutor(threads or None) as pool:
        waiting = [pool.submit(part) for product, offset in packed for part in product.parts(folder, memory[offset:])]
        for each in waiting:
            each.result()
    offsets = iter(ends)
    nodes = [step.node(next(offsets)) if isinstance(step, _Product) else step for step in steps]
    _set_nodes(model, _with_lookups(nodes, packed, model.graph), memory.nbytes)
    return memory


def _with_products(model: onnx.ModelProto, folder: Path) -> list[Step]:
    """The graph's nodes in order, products in the place of MatMulNBits."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return [_product(node, tensors, folder) or node for node in model.graph.node]


def _product(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], folder: Path) -> _Product | None:
    matrix = _matrix(node, tensors, folder) if node.op_type == "MatMulNBits" else None
    bias = node.input[_BIAS] if len(node.input) > _BIAS else ""
    return None if matrix is None else _Product((matrix,), node.input[0], node.output[0], node.name, bias)


def _matrix(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], folder: Path) -> _Matrix | None:
    """The node's weights, if the operator can take them."""
    names = [*node.input[1:], "", "", "", ""][:5]
    codes, scales, zeros = (tensors.get(name) for name in names[:3])
    if attribute(node, "accuracy_level", 0) != 4 or codes is None or scales is None or names[_ORDER - 1]:
        return None
    if scales.data_type != TensorProto.FLOAT or (names[2] and (zeros is None or zeros.data_type != TensorProto.UINT8)):
        return None
    values = np.asarray(tensor_array(scales, folder))
    group, stored = attribute(node, "block_size", 0), attribute(node, "bits", 4)
    bits = stored if stored != 8 or zeros is not None else _narrowest(tensor_array(codes, folder), group)
    numbers = (attribute(node, "N", 0), attribute(node, "K", 0), bits, group)
    packing = _Packing(*numbers, zeros is not None, fits_half(values))
    size = _packed_bytes(packing)
    if not size or not _whole(packing, stored, codes, scales, zeros):
        return None
    read = tuple(_place(tensors.get(name)) for name in names[:3])
    return _Matrix(packing, size, stored, codes, values, zeros, read)


def _whole(
    packing: _Packing, stored: int, codes: onnx.TensorProto, scales: onnx.TensorProto, zeros: onnx.TensorProto | None
) -> bool:
    """Whether the tensors have as many numbers as the node says: what packs them reads no sizes."""
    groups = -(-packing.inputs // packing.group)
    sizes = (groups * packing.group * stored // 8, groups, -(-groups * stored // 8))
    parts = zip((codes, scales, zeros), sizes, strict=True)
    return all(part is None or math.prod(part.dims) == packing.outputs * size for part, size in parts)


def _place(tensor: onnx.TensorProto | None) -> _Place:
    if tensor is None or tensor.data_location != TensorProto.EXTERNAL:
        return "" if tensor is None else tensor.name
    return external_place(tensor)


def _packed_bytes(packing: _Packing) -> int:
    """What a matrix takes; 0 where the operator cannot take it."""
    size = ctypes.c_int64(0)
    native.functions().edgekv_packed_bytes(ctypes.byref(packing), ctypes.byref(size))
    return int(size.value)


def _base(stored: int, bits: int) -> int:
    """What codes of `stored` bits lose where they are held in fewer, so that the middle stays the middle."""
    return (1 << (stored - 1)) - (1 << (bits - 1))


def _narrowest(codes: Array, group: int) -> int:
    """The fewest bits that hold all these codes of 8 bits around 128; the operator has no groups of 16 in 5."""
    flat, bits = codes.reshape(-1), 4
    for start in range(0, flat.size, _SCANNED):
        part = flat[start : start + _SCANNED]
        low, high = int(part.min()), int(part.max())
        while not _base(8, bits) <= low <= high < _base(8, bits) + (1 << bits):
            bits = {4: 5 if group > 16 else 6, 5: 6}.get(bits, 8)
        if bits == 8:
            break
    return bits


class _Uses:
    """Who makes and who reads each value."""

    def __init__(self, steps: Sequence[Step], outputs: set[str]) -> None:
        self.makers: dict[str, Step] = {}
        self.readers: dict[str, list[Step]] = defaultdict(list)
        self.outputs = outputs
        for step in steps:
            self.makers |= dict.fromkeys(_outputs(step), step)
            for name in step.input:
                self.readers[name].append(step)

    def product(self, name: str) -> _Product | None:
        """The product that makes this value."""
        made = self.makers.get(name)
        return made if isinstance(made, _Product) else None

    def node(self, name: str, kind: str) -> onnx.NodeProto | None:
        """The node of this kind that makes this value."""
        made = self.makers.get(name)
        return made if made is not None and not isinstance(made, _Product) and made.op_type == kind else None

    def alone(self, name: str) -> bool:
        """Whether just one node reads it."""
        return len(self.readers[name]) == 1 and name not in self.outputs

    def only_products(self, name: str) -> bool:
        """Whether it is the x of products, none of which norms it already, and is read by nothing else."""
        readers = self.readers[name]
        fits = all(isinstance(reader, _Product) and reader.x == name and not reader.gain for reader in readers)
        return bool(readers) and fits and name not in self.outputs


def _outputs(step: Step) -> list[str]:
    return [step.output] if isinstance(step, _Product) else [name for name in step.output if name]


Changes: TypeAlias = dict[int, list[Step]]
"""What takes the place of a step, by the step's id()."""


def _exchanged(steps: Sequence[Step], changes: Changes) -> list[Step]:
    return [new for step in steps for new in changes.get(id(step), [step])]


Tensors: TypeAlias = dict[str, onnx.TensorProto]


def _with_shifts(steps: list[Step], outputs: set[str], tensors: Tensors, folder: Path) -> list[Step]:
    """Products of the sums of the input's blocks made part of the product that they are added to."""
    uses, changes = _Uses(steps, outputs), Changes()
    for step in steps:
        found = _product_and_shift(step, uses, tensors)
        if found is not None:
            product, shift = found
            matrix = _shifted(product.matrices[0], tensors.get(shift.input[1]), folder)
            if matrix is not None:
                whole = replace(product, matrices=(matrix,), output=_outputs(step)[0])
                changes |= {id(product): [], id(shift): [], id(step): [whole]}
    return _without_unread(_exchanged(steps, changes), outputs)


def _product_and_shift(step: Step, uses: _Uses, tensors: Tensors) -> tuple[_Product, onnx.NodeProto] | None:
    """The product and the node that makes what is added to it, if this step is their sum."""
    if isinstance(step, _Product) or step.op_type != "Add":
        return None
    for straight, added in (tuple(step.input), tuple(step.input)[::-1]):
        product, shift = uses.product(straight), uses.node(added, "MatMul")
        if product is None or shift is None or not uses.alone(straight) or not uses.alone(added):
            continue
        if _sums_blocks_of(product, uses.node(shift.input[0], "ReduceSum"), uses, tensors):
            return product, shift
    return None


def _sums_blocks_of(product: _Product, total: onnx.NodeProto | None, uses: _Uses, tensors: Tensors) -> bool:
    """Whether this node sums the blocks of what the product reads: [1, T, groups, group] over the last axis."""
    if total is None or attribute(total, "keepdims", 1):
        return False
    blocks, packing = uses.node(total.input[0], "Reshape"), product.matrices[0].packing
    if blocks is None or blocks.input[0] != product.x:
        return False
    shape, axes = (_integers(tensors.get(name)) for name in (blocks.input[1], *total.input[1:2]))
    return shape == [1, -1, packing.inputs // packing.group, packing.group] and axes == [3]


def _integers(tensor: onnx.TensorProto | None) -> list[int]:
    inside = tensor is not None and tensor.data_location != TensorProto.EXTERNAL
    return onnx.numpy_helper.to_array(tensor).tolist() if tensor is not None and inside else []


def _shifted(matrix: _Matrix, shift: onnx.TensorProto | None, folder: Path) -> _Matrix | None:
    """The matrix with minima; None where the operator cannot have them."""
    packing = _Packing.from_buffer_copy(matrix.packing)
    groups = packing.inputs // packing.group
    if shift is None or list(shift.dims) != [groups, packing.outputs] or packing.zeros:
        return None
    whole = replace(matrix, packing=packing, shift=shift)
    minima = whole.minima(folder)
    packing.minima, packing.half = True, packing.half and minima is not None and fits_half(minima)
    size = _packed_bytes(packing)
    return replace(whole, size=size) if size else None


def _without_unread(steps: list[_AnyStep], outputs: set[str]) -> list[_AnyStep]:
    """Without the sums and the other forms of tensors that nothing reads any more."""
    for kind in ("ReduceSum", "Reshape"):
        read = {name for step in steps for name in step.input} | outputs
        steps = [
            step
            for step in steps
            if isinstance(step, _Product) or step.op_type != kind or any(name in read for name in step.output)
        ]
    return steps


def _with_gates(steps: list[Step], outputs: set[str]) -> list[Step]:
    """Gate and up made one product where act(gate) * up is all that they are read for."""
    uses, changes = _Uses(steps, outputs), Changes()
    for step in steps:
        found = _gate_and_up(step, uses)
        if found is not None:
            gate, up, act = found
            both = replace(gate, matrices=gate.matrices + up.matrices, gate=_gate_of(act), output=_outputs(step)[0])
            changes |= {id(gate): [], id(up): [], id(act): [], id(step): [both]}
    return _exchanged(steps, changes)


def _gate_and_up(step: Step, uses: _Uses) -> tuple[_Product, _Product, onnx.NodeProto] | None:
    """Gate, up and the activation that this step multiplies, if nothing else reads them."""
    if isinstance(step, _Product) or step.op_type != "Mul":
        return None
    for gated, straight in (tuple(step.input), tuple(step.input)[::-1]):
        act, up = uses.makers.get(gated), uses.product(straight)
        if act is None or isinstance(act, _Product) or not _gate_of(act) or up is None:
            continue
        gate = uses.product(act.input[0])
        if gate is not None and all(map(uses.alone, (gated, straight, gate.output))) and _alike(gate, up):
            return gate, up, act
    return None


def _gate_of(node: onnx.NodeProto) -> int:
    """The operator's number for this activation; 0 if it is none that it has."""
    if node.op_type == "QuickGelu" and attribute(node, "alpha", 1.702) != 1.0:
        return 0
    if node.op_type == "FastGelu" and len(node.input) > 1 and node.input[1]:
        return 0
    return _GATES.get(node.op_type, 0)


def _alike(gate: _Product, up: _Product) -> bool:
    first, second = (bytes(product.matrices[0].packing) for product in (gate, up))
    same = gate.x == up.x and first == second and not gate.bias and not up.bias
    return same and gate.matrices[0].packing.outputs % _PANEL == 0


def _with_sums(steps: list[Step], outputs: set[str]) -> list[Step]:
    """The residual stream added to by the product that makes what is added; what is left of the node is a norm."""
    uses, changes = _Uses(steps, outputs), Changes()
    for step in steps:
        found = _product_and_other(step, uses)
        if found is not None and not isinstance(step, _Product):
            product, other = found
            total = step.output[3] if len(step.output) > 3 and step.output[3] else f"{step.output[0]}.sum"
            changes[id(product)] = []
            changes[id(step)] = [replace(product, residual=other, output=total), _norm_of(step, total)]
    return _exchanged(steps, changes)


def _product_and_other(step: Step, uses: _Uses) -> tuple[_Product, str] | None:
    """The product that makes one of the two terms of this sum and norm, for nothing else, and the other term."""
    if isinstance(step, _Product) or step.op_type != "SkipSimplifiedLayerNormalization":
        return None
    if len(step.input) > 3 and step.input[3]:  # a bias of its own
        return None
    for delta, other in (tuple(step.input[:2]), tuple(step.input[:2])[::-1]):
        product = uses.product(delta)
        if product is not None and uses.alone(delta) and delta != other and not product.gate:
            return product, other
    return None


def _norm_of(node: onnx.NodeProto, x: str) -> onnx.NodeProto:
    return helper.make_node(
        "SimplifiedLayerNormalization",
        [x, node.input[2]],
        [node.output[0]],
        name=node.name,
        axis=-1,
        epsilon=attribute(node, "epsilon", 1e-12),
        stash_type=1,
    )


def _with_norms(steps: list[Step], outputs: set[str]) -> list[Step]:
    """RMS norms computed by the products that read them, if nothing else does."""
    uses, changes = _Uses(steps, outputs), Changes()
    for step in steps:
        if isinstance(step, _Product) or step.op_type != "SimplifiedLayerNormalization":
            continue
        x, gain, normed = step.input[0], step.input[1], step.output[0]
        if attribute(step, "axis", -1) != -1 or len(_outputs(step)) > 1 or not uses.only_products(normed):
            continue
        epsilon = attribute(step, "epsilon", 1e-5)
        changes[id(step)] = []
        for reader in uses.readers[normed]:
            assert isinstance(reader, _Product)
            changes[id(reader)] = [replace(reader, x=x, gain=gain, epsilon=epsilon)]
    return _exchanged(steps, changes)


def _with_lookups(
    nodes: Sequence[onnx.NodeProto], packed: Sequence[tuple[_Product, int]], graph: onnx.GraphProto
) -> list[onnx.NodeProto]:
    """Rows looked up in a packed matrix where they are looked up in the same numbers not packed.

    Args:
        packed: products, and where their weights begin.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {node.output[0]: tensors[node.input[0]] for node in nodes if _reshapes(node, tensors)}
    ids = {value.name for value in graph.input if value.type.tensor_type.elem_type == TensorProto.INT64}
    changed = [
        _lookup(node, packed, tensors) or node
        if node.op_type == "GatherBlockQuantized" and node.input[1] in ids
        else node
        for node in nodes
    ]
    return _without_unread(changed, {value.name for value in graph.output})


def _reshapes(node: onnx.NodeProto, tensors: Tensors) -> bool:
    return node.op_type == "Reshape" and node.input[0] in tensors


def _lookup(node: onnx.NodeProto, packed: Sequence[tuple[_Product, int]], tensors: Tensors) -> onnx.NodeProto | None:
    codes, ids, scales, zeros = [*node.input, ""][:4]
    read = tuple(_place(tensors.get(name)) for name in (codes, scales, zeros))
    for product, offset in packed:
        matrix = product.matrices[0]
        if read == matrix.read and not product.gate and matrix.shift is None and _has_rows_of(node, matrix):
            attributes = matrix.attributes | {"offset": offset}
            return helper.make_node(
                "PackedRows", [ids, PACKED_WEIGHTS], node.output, name=node.name, domain=NATIVE_DOMAIN, **attributes
            )
    return None


def _has_rows_of(node: onnx.NodeProto, matrix: _Matrix) -> bool:
    """Whether its codes are rows of so many bits in such groups as the matrix has."""
    layout = attribute(node, "bits", 4), attribute(node, "block_size", 128)
    axes = attribute(node, "gather_axis", 0), attribute(node, "quantize_axis", 1)
    return bool(layout == (matrix.bits, matrix.packing.group) and axes in ((0, 1), (0, -1)))


def _set_nodes(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], size: int) -> None:
    """Put the nodes in, leave out initializers that none reads, and declare the weights.

    These are an input: an initializer would have to lie in a file, or inside the graph."""
    read = {name for node in nodes for name in node.input}
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in read]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    initializers = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend(copies)
    model.graph.initializer.extend(initializers)
    model.graph.input.append(helper.make_tensor_value_info(PACKED_WEIGHTS, TensorProto.UINT8, [size]))
    if not any(opset.domain == NATIVE_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))
