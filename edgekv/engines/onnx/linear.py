"""Linear layers in the graph: how a matrix is stored as it is held, and the nodes that multiply by it.

* Act-order (GPTQ, compressed-tensors) is a permutation of a layer's input columns. That of `down` is folded into the
  rows of `gate` and `up`, which is free. The inputs of the others cannot be permuted beforehand: the norm's output also
  feeds the residual stream's next norm, and attention mixes channels by head, which query heads share. They get a
  Gather; Q, K and V have the same order in practice (one Hessian) and share it.
* Q, K and V that cannot be packed (different orders, kinds, or blocks across two of them) run one by one and are joined
  by a Concat, which copies one row a token.
* bitsandbytes weights go to MatMulBnb4. It unpacks the whole matrix at each call: 1536x576 takes 0.25 to 0.46 ms where
  8-bit MatMulNBits takes 0.03, 8960x1536 takes 13 to 21 ms and 0.34 (2 cores, onnxruntime 1.32.0). table.py puts
  edgekv's own matmul in its place when a session is opened.
* A shift (BlockWeight) is a second product: the sums of the input's blocks times the shifts, [K/group, N]. In
  ONNX Runtime 3072x576 then takes 52 us a token, where 8 bits without a shift take 41 (2 cores). Its float zero points,
  which would say the same in one node, take 1500, as they unpack the whole matrix at every step, and have no 8 bits.
  edgekv's own matmul takes all of it as one (packed.py).
* A layer that the publisher left in float is a MatMul. An embedding or head left so is a SplitWeight: the two 8-bit
  matrices lie side by side, [V, 2 E]; the head's input is repeated, the embedding's two halves are added.
* accuracy_level is 4 (int8 activations inside MatMulNBits): level 0 runs at 1.6 tokens/s, level 1 five times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from edgekv.engines.onnx.graph import Graph, RowTensor, require_finite
from edgekv.engines.onnx.table import QUANT_TYPES
from edgekv.weights.base import (
    BlockWeight,
    Bnb4Weight,
    Codes,
    Float32,
    Held,
    Matrix,
    Order,
    SplitWeight,
    file_bits,
    same_order,
    stack_bnb4,
    stack_rows,
    take_rows,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer whose tensors are stored: the operator that multiplies by it, and what its input needs first."""

    kind: str
    names: list[str]
    attributes: dict[str, int]
    order: Order | None = None  # of the input's columns
    repeat: bool = False  # the input twice, side by side
    bias: str = ""  # added by an operator of its own
    shift: str = ""  # times the sums of the input's blocks it is added, too


def store(graph: Graph, name: str, weight: Held, bias: Float32 | None = None) -> Linear:
    """Write a layer's tensors."""
    if isinstance(weight, BlockWeight):
        return _store_blocks(graph, name, weight, bias)
    if isinstance(weight, SplitWeight):
        return replace(_store_blocks(graph, name, weight.side_by_side(), bias), repeat=True)
    bias_name = "" if bias is None else graph.constant(f"{name}.bias", bias)
    if isinstance(weight, Bnb4Weight):
        names = [graph.constant(f"{name}.codes", weight.packed), graph.constant(f"{name}.absmax", weight.absmax)]
        rows, columns = weight.shape
        attributes = {"N": rows, "K": columns, "block_size": weight.block, "quant_type": QUANT_TYPES[weight.kind]}
        return Linear("MatMulBnb4", names, attributes, bias=bias_name)
    return Linear("MatMul", [graph.constant(f"{name}.weight", weight.T)], {}, bias=bias_name)


def _store_blocks(graph: Graph, name: str, weight: BlockWeight, bias: Float32 | None) -> Linear:
    names = [graph.constant(f"{name}.codes", pack_codes(weight)), graph.constant(f"{name}.scales", weight.scales)]
    zeros = pack_zeros(weight)
    if zeros is not None:
        names.append(graph.constant(f"{name}.zeros", zeros))
    if bias is not None:
        names += [""] * (4 - len(names)) + [graph.constant(f"{name}.bias", bias)]
    shift = "" if weight.shift is None else graph.constant(f"{name}.shift", weight.shift.T)
    return Linear("MatMulNBits", names, _nbits(graph, weight), weight.order, shift=shift)


def write_rows(graph: Graph, name: str, blocks: Iterator[Held]) -> tuple[RowTensor, Linear]:
    """Write the embedding or the head, which comes in blocks of rows and is never in memory whole.

    Returns the tensor of its codes, still without a place in the graph, and the layer, whose first name is that.
    """
    tensors: dict[str, RowTensor] = {}
    for block in blocks:
        repeat = isinstance(block, SplitWeight)
        weight = block.side_by_side() if isinstance(block, SplitWeight) else block
        assert isinstance(weight, BlockWeight)  # as every embedding is held
        layout, order = _nbits(graph, weight), weight.order
        require_finite(f"{name}.scales", weight.scales)
        for part, array in (("codes", pack_codes(weight)), ("scales", weight.scales), ("zeros", pack_zeros(weight))):
            if array is not None:
                if part not in tensors:
                    tensors[part] = RowTensor.reserve(graph.data, graph.spec.vocab_size, array)
                tensors[part].end = graph.data.write(tensors[part].end, array)
    codes = tensors.pop("codes")
    names = [graph.external(f"{name}.{part}", made.shape, made.kind, made.place) for part, made in tensors.items()]
    attributes = layout | {"N": graph.spec.vocab_size}
    return codes, Linear("MatMulNBits", [f"{name}.codes", *names], attributes, order, repeat)


def _nbits(graph: Graph, weight: BlockWeight) -> dict[str, int]:
    rows, columns = weight.shape
    layout = {"N": rows, "K": columns, "bits": file_bits(weight.bits), "block_size": weight.group}
    return layout | {"accuracy_level": graph.accuracy_level}


def pack_codes(weight: BlockWeight) -> Codes:
    """[N, K] codes -> [N, K/group, group * bits / 8] bytes, low nibble first."""
    codes = weight.to_bits(file_bits(weight.bits)).codes.reshape(len(weight.codes), -1, weight.group)
    return codes if weight.bits > 4 else _pair(codes)


def pack_zeros(weight: BlockWeight) -> Codes | None:
    """[N, K/group] zero points -> bytes, two a byte in 4 bits, rows padded to whole bytes."""
    if weight.zeros is None or weight.bits > 4:
        return weight.to_bits(file_bits(weight.bits)).zeros
    return _pair(np.pad(weight.zeros, ((0, 0), (0, weight.zeros.shape[1] % 2))))


def _pair(codes: Codes) -> Codes:
    """Two codes of the last axis a byte, low nibble first."""
    return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4)), np.uint8)


def without_order(linear: Linear) -> tuple[Linear, Order | None]:
    """The layer for an input that is already in its order, and that order."""
    return replace(linear, order=None), linear.order


def take_order(weight: Held, rows: Order | None) -> Held:
    """The layer with its outputs in another order; exact. None: as they are."""
    if rows is None:
        return weight
    if isinstance(weight, SplitWeight):
        return SplitWeight(weight.high.take_rows(rows), weight.low.take_rows(rows))
    return take_rows(weight, rows)


def linear_layer(graph: Graph, name: str, weight: Held, x: str, bias: Float32 | None = None) -> str:
    return matmul(graph, store(graph, name, weight, bias), x, f"{name}.out")


def joined_layers(graph: Graph, name: str, parts: dict[str, Held], x: str, bias: Float32 | None) -> str:
    """Layers with the same input, their outputs side by side: one operator where they can be packed."""
    packed = _stacked(list(parts.values()))
    if packed is not None:
        return linear_layer(graph, name, packed, x, bias)
    outputs = [linear_layer(graph, f"{name}.{part}", weight, x) for part, weight in parts.items()]
    if bias is None:
        return graph.node("Concat", outputs, [f"{name}.out"], axis=-1)
    joined = graph.node("Concat", outputs, [f"{name}.product"], axis=-1)
    return graph.node("Add", [joined, graph.constant(f"{name}.bias", bias)], [f"{name}.out"])


def _stacked(parts: list[Held]) -> Matrix | None:
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    tables = [part for part in parts if isinstance(part, Bnb4Weight)]
    floats = [part for part in parts if isinstance(part, np.ndarray)]
    if len(blocks) == len(parts):
        return stack_rows(blocks) if same_order(blocks) else None
    if len(tables) == len(parts):
        return stack_bnb4(tables)
    return np.concatenate(floats) if len(floats) == len(parts) else None


def matmul(graph: Graph, linear: Linear, x: str, output: str) -> str:
    if linear.order is not None:
        x = _reorder(graph, x, linear.order)
    if linear.repeat:
        x = graph.node("Concat", [x, x], [f"{output}.in"], axis=-1)
    if not linear.bias and not linear.shift:
        return graph.node(linear.kind, [x, *linear.names], [output], **linear.attributes)
    product = graph.node(linear.kind, [x, *linear.names], [f"{output}.product"], **linear.attributes)
    return graph.node("Add", [product, _shifted(graph, linear, x, output) if linear.shift else linear.bias], [output])


def _shifted(graph: Graph, linear: Linear, x: str, output: str) -> str:
    """What the shifts of a layer's blocks add to its output; the sums are made once for all layers that read x."""
    group, columns = linear.attributes["block_size"], linear.attributes["K"]
    if (x, group) not in graph.summed:
        name = f"{x}.by{group}"
        shape = graph.constant(f"{name}.shape", np.array([1, -1, columns // group, group], np.int64))
        axis = graph.constant(f"{name}.axis", np.array([3], np.int64))
        blocks = graph.node("Reshape", [x, shape], [f"{name}.blocks"])
        graph.summed[x, group] = graph.node("ReduceSum", [blocks, axis], [name], keepdims=0)
    return graph.node("MatMul", [graph.summed[x, group], linear.shift], [f"{output}.shift"])


def _reorder(graph: Graph, x: str, order: Order) -> str:
    """The columns of x in another order, made once for all layers that want the same."""
    key = (x, order.tobytes())
    if key not in graph.ordered:
        name = f"{x}.ordered{sum(source == x for source, _ in graph.ordered)}"
        indices = graph.constant(f"{name}.indices", order.astype(np.int64))
        graph.ordered[key] = graph.node("Gather", [x, indices], [name], axis=-1)
    return graph.ordered[key]
