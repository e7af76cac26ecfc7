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
* Act-order (GPTQ, compressed-tensors) is a permutation of a layer's input columns. That of `down` is folded into the
  rows of `gate` and `up`, which is free. The inputs of the others cannot be permuted beforehand: the norm's output also
  feeds the residual stream's next norm, and attention mixes channels by head, which query heads share. They get a
  Gather; Q, K and V have the same order in practice (one Hessian) and share it.
* Q, K and V that cannot be packed (different orders, kinds, or blocks across two of them) run one by one and are joined
  by a Concat, which copies one row a token.
* bitsandbytes weights go to MatMulBnb4. It unpacks the whole matrix at each call: 1536x576 takes 0.25 to 0.46 ms where
  8-bit MatMulNBits takes 0.03, 8960x1536 takes 13 to 21 ms and 0.34 (2 cores, onnxruntime 1.32.0). table.py puts the
  project's own product in its place when a session is opened.
* A shift (BlockWeight) is a second product: the sums of the input's blocks times the shifts, [K/group, N]. In
  ONNX Runtime 3072x576 then takes 52 us a token, where 8 bits without a shift take 41 (2 cores). Its float zero points,
  which would say the same in one node, take 1500, as they unpack the whole matrix at every step, and have no 8 bits.
  The project's own product takes all of it as one (packed.py).
* A layer that the publisher left in float is a MatMul. An embedding or head left so is a SplitWeight: the two 8-bit
  matrices lie side by side, [V, 2 E]; the head's input is repeated, the embedding's two halves are added.
* accuracy_level is 4 (int8 activations inside MatMulNBits): level 0 runs at 1.6 tokens/s, level 1 five times slower.

Operators: com.microsoft domain of ONNX Runtime's contrib operators, opset 21.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.engines.onnx.table import QUANT_TYPES
from edgekv.engines.rope import rope_inputs
from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.spec import ModelSpec
from edgekv.weights.base import (
    BlockWeight,
    Bnb4Weight,
    Codes,
    Float32,
    Held,
    Matrix,
    Order,
    SplitWeight,
    WeightSource,
    file_bits,
    same_order,
    stack_bnb4,
    stack_rows,
    take_rows,
)

OPSET = 21
IR_VERSION = 10
_ALIGNMENT = 4096  # so that ONNX Runtime can map a tensor instead of copying it
_INLINE_BYTES = 4096  # smaller tensors stay inside the graph file

_STANDARD_DOMAIN = (
    "Add",
    "Concat",
    "Gather",
    "MatMul",
    "Mul",
    "ReduceSum",
    "Reshape",
    "SimplifiedLayerNormalization",
    "Split",
    "Tanh",
)  # the norm by ONNX Runtime's own convention


class Matrices(Protocol):
    """Gives linear layers by name, as they are to be held."""

    def __call__(self, name: str) -> Held: ...
    def blocks(self, name: str) -> Iterator[Held]:
        """The same matrix in blocks of rows."""


@dataclass
class DataFile:
    """The external data file being written: one tensor after another, aligned, never two in memory."""

    path: Path
    size: int = 0

    def append(self, array: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Write an array; returns its offset and size in bytes."""
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        raw = np.ascontiguousarray(array)
        with self.path.open("ab") as file:
            file.write(b"\0" * (offset - self.size))
            file.write(raw.data)  # not tofile(): that hides why a write failed
        self.size = offset + raw.nbytes
        return offset, raw.nbytes

    def reserve(self, nbytes: int) -> tuple[int, int]:
        """Make room for a tensor that `write` fills; returns its offset and size."""
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = offset + nbytes
        with self.path.open("ab") as file:
            file.truncate(self.size)
        return offset, nbytes

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> int:
        """Fill a part of what was reserved; returns the offset of what follows."""
        raw = np.ascontiguousarray(array)
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(raw.data)
        return offset + raw.nbytes


@dataclass
class _RowTensor:
    """A tensor that is written some rows at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: tuple[int, int]
    end: int  # of what was written

    @property
    def kind(self) -> int:
        """ONNX's number of its type."""
        return int(helper.np_dtype_to_tensor_dtype(self.dtype))

    @classmethod
    def reserve(cls, data: DataFile, rows: int, first: np.ndarray[Any, Any]) -> _RowTensor:
        """Room for `rows` rows like those of `first`."""
        place = data.reserve(rows * first[0].nbytes)
        return cls((rows, *first.shape[1:]), first.dtype, place, place[0])


@dataclass(frozen=True)
class _Linear:
    """A linear layer whose tensors are stored: the operator that multiplies by it, and what its input needs first."""

    kind: str
    names: list[str]
    attributes: dict[str, int]
    order: Order | None = None  # of the input's columns
    repeat: bool = False  # the input twice, side by side
    bias: str = ""  # added by an operator of its own
    shift: str = ""  # times the sums of the input's blocks it is added, too


@dataclass
class _Graph:
    """The graph being written."""

    spec: ModelSpec
    data: DataFile
    accuracy_level: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    ordered: dict[tuple[str, bytes], str] = field(default_factory=dict)  # input and order -> the Gather's output
    summed: dict[tuple[str, int], str] = field(default_factory=dict)  # input and group -> the sums of its blocks

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        domain = "" if kind in _STANDARD_DOMAIN else "com.microsoft"
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """Store a tensor."""
        _require_finite(name, array)
        if array.nbytes <= _INLINE_BYTES:
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        else:
            self.external(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype), self.data.append(array))
        return name

    def external(self, name: str, shape: tuple[int, ...], dtype: int, place: tuple[int, int]) -> str:
        tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self.data.path.name), ("offset", place[0]), ("length", place[1])):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def input(self, name: str, dtype: int, shape: list[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: list[Any]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name


def _require_finite(name: str, array: np.ndarray[Any, Any]) -> None:
    """What was read is finite, but a scale made of it may overflow; int8 activations would hide that later."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadCheckpoint(f"{name} is not finite: the checkpoint's numbers are too large for float32.")


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
    graph = _Graph(spec, DataFile(data_path), accuracy_level)
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


def _declare_inputs(graph: _Graph) -> None:
    half = graph.spec.head_dim // 2
    graph.input("ids", TensorProto.INT64, [1, "T"])
    graph.input("rows", TensorProto.INT64, ["R"])
    graph.input("seqlens_k", TensorProto.INT32, [1])  # total - 1
    graph.input("total", TensorProto.INT32, [])
    for index in range(len(graph.spec.ropes)):
        for name in rope_inputs(index):
            graph.input(name, TensorProto.FLOAT, ["C", half])


def _embedding(graph: _Graph, matrix: Matrices) -> tuple[str, _Linear]:
    """The first hidden state, and the same bytes as an output head."""
    hidden, tied = _looked_up(graph, matrix)
    return _times(graph, hidden, graph.spec.multipliers.embedding, "hidden.scaled"), tied


def _looked_up(graph: _Graph, matrix: Matrices) -> tuple[str, _Linear]:
    codes, tied = _write_rows(graph, "embed", matrix.blocks("embed"))
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


def _write_rows(graph: _Graph, name: str, blocks: Iterator[Held]) -> tuple[_RowTensor, _Linear]:
    """Write the embedding or the head, which comes in blocks of rows and is never in memory whole.

    Returns the tensor of its codes, still without a place in the graph, and the layer, whose first name is that.
    """
    tensors: dict[str, _RowTensor] = {}
    for block in blocks:
        repeat = isinstance(block, SplitWeight)
        weight = block.side_by_side() if isinstance(block, SplitWeight) else block
        assert isinstance(weight, BlockWeight)  # as every embedding is held
        layout, order = _nbits(graph, weight), weight.order
        _require_finite(f"{name}.scales", weight.scales)
        for part, array in (("codes", pack_codes(weight)), ("scales", weight.scales), ("zeros", pack_zeros(weight))):
            if array is not None:
                if part not in tensors:
                    tensors[part] = _RowTensor.reserve(graph.data, graph.spec.vocab_size, array)
                tensors[part].end = graph.data.write(tensors[part].end, array)
    codes = tensors.pop("codes")
    names = [graph.external(f"{name}.{part}", made.shape, made.kind, made.place) for part, made in tensors.items()]
    attributes = layout | {"N": graph.spec.vocab_size}
    return codes, _Linear("MatMulNBits", [f"{name}.codes", *names], attributes, order, repeat)


def _layer(
    graph: _Graph, source: WeightSource, matrix: Matrices, layer: int, normed: str, hidden: str
) -> tuple[str, str]:
    """One decoder layer; returns the next layer's normed input and the residual stream."""
    spec = graph.spec
    bias = {part: source.vector(f"{layer}.{part}.bias") for part in spec.biased}
    qkv_bias = np.concatenate([bias[part] for part in "qkv"]) if spec.qkv_bias else None
    packed = _joined(graph, f"{layer}.qkv", {part: matrix(f"{layer}.{part}") for part in "qkv"}, normed, qkv_bias)
    if spec.attention.qk_norm:
        packed = _normed_heads(graph, source, layer, packed)
    attended = _attention(graph, layer, packed)
    projected = _linear(graph, f"{layer}.o", matrix(f"{layer}.o"), attended, bias.get("o"))
    added = _addend(graph, source, f"{layer}.post_attn", projected)
    normed, hidden = _add_norm(graph, f"{layer}.ffn", added, hidden, source.vector(f"{layer}.ffn_norm"))
    down = _addend(graph, source, f"{layer}.post_ffn", _feed_forward(graph, matrix, layer, normed, bias))
    last = layer + 1 == spec.num_layers
    gain = source.vector("norm") if last else source.vector(f"{layer + 1}.attn_norm")
    return _add_norm(graph, f"{layer + 1}.attn", down, hidden, gain)


def _feed_forward(graph: _Graph, matrix: Matrices, layer: int, normed: str, bias: dict[str, Float32]) -> str:
    linear, order = _without_order(_store(graph, f"{layer}.down", matrix(f"{layer}.down"), bias.get("down")))
    gate, up = (
        _hidden_layer(graph, f"{layer}.{part}", matrix, order, normed, bias.get(part)) for part in ("gate", "up")
    )
    if graph.spec.block.activation == "silu":
        gated = graph.node("QuickGelu", [gate], [f"{layer}.silu"], alpha=1.0)
    else:
        gated = graph.node("FastGelu", [gate], [f"{layer}.gelu"])
    product = graph.node("Mul", [gated, up], [f"{layer}.gated"])
    return _matmul(graph, linear, product, f"{layer}.down.out")


def _hidden_layer(graph: _Graph, name: str, matrix: Matrices, order: Order | None, x: str, bias: Float32 | None) -> str:
    """Gate or up, with its outputs in the order in which `down` wants its input; None: as they are."""
    if bias is not None and order is not None:
        bias = np.asarray(bias[order])
    return _linear(graph, name, _take_rows(matrix(name), order), x, bias)


def _addend(graph: _Graph, source: WeightSource, name: str, delta: str) -> str:
    """What a sublayer adds to the residual stream: its result, normed and scaled where the family does that."""
    if graph.spec.block.post_norms:
        delta = _norm(graph, delta, f"{name}_norm", source.vector(f"{name}_norm"), f"{name}_normed")
    return _times(graph, delta, graph.spec.multipliers.residual, f"{name}_scaled")


def _times(graph: _Graph, x: str, factor: float, output: str) -> str:
    """x times a constant; x itself where that is 1."""
    if factor == 1:
        return x
    return graph.node("Mul", [x, graph.constant(f"{output}.factor", np.array(factor, np.float32))], [output])


def _normed_heads(graph: _Graph, source: WeightSource, layer: int, packed: str) -> str:
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


def _attention(graph: _Graph, layer: int, packed: str) -> str:
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


def _norm(graph: _Graph, x: str, gain_name: str, gain: np.ndarray[Any, Any], output: str) -> str:
    """RMS norm over the last axis."""
    return graph.node(
        "SimplifiedLayerNormalization",
        [x, graph.constant(gain_name, gain)],
        [output],
        axis=-1,
        epsilon=graph.spec.rms_eps,
        stash_type=1,
    )


def _add_norm(graph: _Graph, name: str, delta: str, hidden: str, gain: np.ndarray[Any, Any]) -> tuple[str, str]:
    """hidden += delta, then RMS norm: returns (normed, hidden)."""
    gain_name = graph.constant(f"{name}_norm", gain)
    outputs = [f"{name}_in", "", "", f"{name}_hidden"]
    graph.node("SkipSimplifiedLayerNormalization", [delta, hidden, gain_name], outputs, epsilon=graph.spec.rms_eps)
    return outputs[0], outputs[3]


def _head(graph: _Graph, matrix: Matrices, normed: str, tied: _Linear) -> None:
    graph.node("ReduceSum", [normed], ["check"], keepdims=1)  # not finite if any hidden state is not (case C13)
    graph.output("check", TensorProto.FLOAT, [1, 1, 1])
    factors = graph.spec.multipliers
    chosen = graph.node("Gather", [normed, "rows"], ["head_in"], axis=1)
    chosen = _times(graph, chosen, factors.logits / (factors.logit_softcap or 1.0), "head_in.scaled")
    linear = tied if graph.spec.tied_embeddings else _own_head(graph, matrix.blocks("head"))
    if factors.logit_softcap:
        bounded = graph.node("Tanh", [_matmul(graph, linear, chosen, "logits.raw")], ["logits.bounded"])
        _times(graph, bounded, factors.logit_softcap, "logits")
    else:
        _matmul(graph, linear, chosen, "logits")
    graph.output("logits", TensorProto.FLOAT, [1, "R", graph.spec.vocab_size])


def _own_head(graph: _Graph, blocks: Iterator[Held]) -> _Linear:
    first = next(blocks)
    if not isinstance(first, BlockWeight | SplitWeight):
        return _store(graph, "head", first)
    codes, linear = _write_rows(graph, "head", chain([first], blocks))
    graph.external("head.codes", codes.shape, codes.kind, codes.place)
    return linear


def _store(graph: _Graph, name: str, weight: Held, bias: Float32 | None = None) -> _Linear:
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
        return _Linear("MatMulBnb4", names, attributes, bias=bias_name)
    return _Linear("MatMul", [graph.constant(f"{name}.weight", weight.T)], {}, bias=bias_name)


def _store_blocks(graph: _Graph, name: str, weight: BlockWeight, bias: Float32 | None) -> _Linear:
    names = [graph.constant(f"{name}.codes", pack_codes(weight)), graph.constant(f"{name}.scales", weight.scales)]
    zeros = pack_zeros(weight)
    if zeros is not None:
        names.append(graph.constant(f"{name}.zeros", zeros))
    if bias is not None:
        names += [""] * (4 - len(names)) + [graph.constant(f"{name}.bias", bias)]
    shift = "" if weight.shift is None else graph.constant(f"{name}.shift", weight.shift.T)
    return _Linear("MatMulNBits", names, _nbits(graph, weight), weight.order, shift=shift)


def _nbits(graph: _Graph, weight: BlockWeight) -> dict[str, int]:
    rows, columns = weight.shape
    layout = {"N": rows, "K": columns, "bits": file_bits(weight.bits), "block_size": weight.group}
    return layout | {"accuracy_level": graph.accuracy_level}


def _without_order(linear: _Linear) -> tuple[_Linear, Order | None]:
    """The layer for an input that is already in its order, and that order."""
    return replace(linear, order=None), linear.order


def _take_rows(weight: Held, rows: Order | None) -> Held:
    """The layer with its outputs in another order; exact. None: as they are."""
    if rows is None:
        return weight
    if isinstance(weight, SplitWeight):
        return SplitWeight(weight.high.take_rows(rows), weight.low.take_rows(rows))
    return take_rows(weight, rows)


def _matmul(graph: _Graph, linear: _Linear, x: str, output: str) -> str:
    if linear.order is not None:
        x = _reorder(graph, x, linear.order)
    if linear.repeat:
        x = graph.node("Concat", [x, x], [f"{output}.in"], axis=-1)
    if not linear.bias and not linear.shift:
        return graph.node(linear.kind, [x, *linear.names], [output], **linear.attributes)
    product = graph.node(linear.kind, [x, *linear.names], [f"{output}.product"], **linear.attributes)
    return graph.node("Add", [product, _shifted(graph, linear, x, output) if linear.shift else linear.bias], [output])


def _shifted(graph: _Graph, linear: _Linear, x: str, output: str) -> str:
    """What the shifts of a layer's blocks add to its output; the sums are made once for all layers that read x."""
    group, columns = linear.attributes["block_size"], linear.attributes["K"]
    if (x, group) not in graph.summed:
        name = f"{x}.by{group}"
        shape = graph.constant(f"{name}.shape", np.array([1, -1, columns // group, group], np.int64))
        axis = graph.constant(f"{name}.axis", np.array([3], np.int64))
        blocks = graph.node("Reshape", [x, shape], [f"{name}.blocks"])
        graph.summed[x, group] = graph.node("ReduceSum", [blocks, axis], [name], keepdims=0)
    return graph.node("MatMul", [graph.summed[x, group], linear.shift], [f"{output}.shift"])


def _reorder(graph: _Graph, x: str, order: Order) -> str:
    """The columns of x in another order, made once for all layers that want the same."""
    key = (x, order.tobytes())
    if key not in graph.ordered:
        name = f"{x}.ordered{sum(source == x for source, _ in graph.ordered)}"
        indices = graph.constant(f"{name}.indices", order.astype(np.int64))
        graph.ordered[key] = graph.node("Gather", [x, indices], [name], axis=-1)
    return graph.ordered[key]


def _linear(graph: _Graph, name: str, weight: Held, x: str, bias: Float32 | None = None) -> str:
    return _matmul(graph, _store(graph, name, weight, bias), x, f"{name}.out")


def _joined(graph: _Graph, name: str, parts: dict[str, Held], x: str, bias: Float32 | None) -> str:
    """Layers with the same input, their outputs side by side: one operator where they can be packed."""
    packed = _packed(list(parts.values()))
    if packed is not None:
        return _linear(graph, name, packed, x, bias)
    outputs = [_linear(graph, f"{name}.{part}", weight, x) for part, weight in parts.items()]
    if bias is None:
        return graph.node("Concat", outputs, [f"{name}.out"], axis=-1)
    joined = graph.node("Concat", outputs, [f"{name}.product"], axis=-1)
    return graph.node("Add", [joined, graph.constant(f"{name}.bias", bias)], [f"{name}.out"])


def _packed(parts: list[Held]) -> Matrix | None:
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    tables = [part for part in parts if isinstance(part, Bnb4Weight)]
    floats = [part for part in parts if isinstance(part, np.ndarray)]
    if len(blocks) == len(parts):
        return stack_rows(blocks) if same_order(blocks) else None
    if len(tables) == len(parts):
        return stack_bnb4(tables)
    return np.concatenate(floats) if len(floats) == len(parts) else None
