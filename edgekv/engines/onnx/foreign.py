"""Another maker's decoder with GroupQueryAttention -> the graph that edgekv's engines bind (build.py), in memory.

    theirs                                   ours
    input_ids [B, N]                         ids [1, T]
    attention_mask, position_ids             gone: their subgraphs only led to the next two
    GroupQueryAttention's inputs 5, 6        seqlens_k, total
    RoPE tables, initializers                cos, sin: inputs; a RotaryEmbedding before attention moves into it. Layers
                                             with a window may have another pair (Gemma 3): cos.1, sin.1
    past_key_values.i.key, present.i.key     past_k.i, present_k.i, float32, whatever they were (adapt.set_cache)
    query, key, value apart                  packed by a Concat, as the native operator wants them
    float16 around attention                 cast to float32 before it and back after it
    logits of all or of the last token       `rows` are chosen before the output head; `check` sums what enters it

Weights stay in the user's files (graphfile.py). What a graph asks for and edgekv does not run is refused by the name of
the node: sinks, an attention bias, interleaved or partial rotation, anything that still reads the mask once attention
does not. Windows and a soft cap are GroupQueryAttention's own attributes and stay what they are.

The RoPE must be known beyond the table's end, because positions go on when tokens leave: engines/measured_rope.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekv.engines.onnx.fuse import fuse_attention
from edgekv.engines.onnx.graphfile import read_graph, tensor_bytes
from edgekv.engines.onnx.surgery import LINEAR, Array, GraphEdit, attribute, linear_shapes, without_bias
from edgekv.engines.rope import rope_inputs
from edgekv.errors import BadCheckpoint, UnsupportedModel

_COS, _SIN = 7, 8  # inputs of GroupQueryAttention
_REFUSED_INPUTS = {10: "an attention bias", 11: "attention sinks"}
_KNOWN_ATTRIBUTES = {
    "num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "local_window_size", "softcap",
    "sliding_window_cache", "smooth_softmax", "k_quant_type", "v_quant_type", "kv_cache_bit_width", "qk_output",
}  # fmt: skip
_AFTER_HEAD = ("Add", "Mul", "Div", "Cast", "Tanh")
_OURS = {"ids", "rows", "seqlens_k", "total", "cos", "sin", "cos.1", "sin.1", "check", "head_in"}
_Tables = tuple[Array, ...]
_FLOATS = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True)
class Geometry:
    """What a graph says about its model; the rest stands in configs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    tied: bool  # embedding and head read the same bytes
    softcap: float = 0.0  # of the scores; 0: none
    windows: tuple[int, ...] = ()  # one a layer, 0: none; () is all 0


@dataclass(frozen=True)
class Adapted:
    """The graph as edgekv runs it, with a float32 cache, and what was found out about it."""

    model: onnx.ModelProto
    geometry: Geometry
    tables: tuple[_Tables, ...]  # the maker's RoPE tables, cos and sin [rows, D/2]; as ModelSpec.ropes
    producer: str  # such as "onnxruntime-genai 0.18.0"
    changes: tuple[str, ...]  # what had to be done to it, for people
    scheme: str  # how the weights are held, such as "int4/32, float32"
    folder: Path  # that the places of external data are relative to
    files: tuple[str, ...]  # that hold the graph and its weights, in the graph's folder
    weight_bytes: int


@dataclass(frozen=True)
class _Attention:
    """One attention node, as it was found."""

    node: onnx.NodeProto
    query: str
    key: str  # empty: query, key and value are packed
    value: str
    cos: str
    sin: str


def adapt_foreign(path: Path) -> Adapted:
    """Read another maker's graph and make it ours.

    Raises:
        BadCheckpoint: a file is damaged or missing, or the graph contradicts itself.
        UnsupportedModel: something in it that edgekv does not run; the message names it.
    """
    read = read_graph(path)
    graph = GraphEdit(read.model, path, read.folder)
    producer = f"{graph.model.producer_name} {graph.model.producer_version.split('+')[0]}".strip()
    _free_names(graph)
    layers = _attentions(graph)
    changes = _changes(read.model, layers)
    geometry = _geometry(graph, layers)
    tables, ropes = _ropes(graph, layers, geometry)
    half = tables[0][0].dtype == np.float16
    for index, layer in enumerate(layers):
        _rewire(graph, index, layer, geometry, rope=ropes[index], half=half)
    _choose_rows(graph)
    _declare(graph, geometry, ropes=len(tables))
    return Adapted(
        graph.model,
        geometry,
        tuple((np.asarray(cos, np.float32), np.asarray(sin, np.float32)) for cos, sin in tables),
        producer or "an unnamed tool",
        changes,
        _scheme(graph),
        read.folder,
        read.files,
        sum(map(tensor_bytes, graph.model.graph.initializer)),
    )


def _free_names(graph: GraphEdit) -> None:
    """Their values that bear our names get others."""
    values = {*graph.producers, *graph.tensors, *(value.name for value in graph.model.graph.input)}
    graph.rename({name: f"{name}.theirs" for name in _OURS & values})


def _attentions(graph: GraphEdit) -> list[_Attention]:
    if not graph.of_kind("GroupQueryAttention"):
        fuse_attention(graph)
    return [_attention(graph, node) for node in graph.of_kind("GroupQueryAttention")]


def _attention(graph: GraphEdit, node: onnx.NodeProto) -> _Attention:
    _refuse_features(graph, node)
    names = [*node.input, *[""] * (12 - len(node.input))]
    if attribute(node, "do_rotary", 0):
        return _Attention(node, names[0], names[1], names[2], names[_COS], names[_SIN])
    rotations = [_rotation(graph, node, name) for name in names[:2]]
    if rotations[0].input[2:4] != rotations[1].input[2:4]:
        raise UnsupportedModel(f"{_place(graph, node)} rotates queries and keys by different tables.")
    cos, sin = rotations[0].input[2:4]
    return _Attention(node, rotations[0].input[0], rotations[1].input[0], names[2], cos, sin)


def _refuse_features(graph: GraphEdit, node: onnx.NodeProto) -> None:
    names = [*node.input, *[""] * (12 - len(node.input))]
    found = [what for place, what in _REFUSED_INPUTS.items() if names[place]]
    found += [f"{a.name}" for a in node.attribute if a.name not in _KNOWN_ATTRIBUTES]
    found += [f"{name}" for name in ("smooth_softmax", "qk_output") if attribute(node, name, 0) > 0]
    if attribute(node, "rotary_interleaved", 0):
        found.append("interleaved rotation")
    if found:
        raise UnsupportedModel(f"{_place(graph, node)} has {', '.join(found)}, which edgekv does not run.")


def _rotation(graph: GraphEdit, node: onnx.NodeProto, name: str) -> onnx.NodeProto:
    """The RotaryEmbedding that makes an attention node's query or key."""
    made = graph.producer(name, "RotaryEmbedding")
    if made is None or attribute(made, "interleaved", 0) or attribute(made, "rotary_embedding_dim", 0):
        raise UnsupportedModel(
            f"{_place(graph, node)} does not rotate its whole queries and keys in halves, which edgekv needs."
        )
    return made


def _place(graph: GraphEdit, node: onnx.NodeProto) -> str:
    return f"{graph.path}: {node.op_type} {node.name}".rstrip()


def _changes(theirs: onnx.ModelProto, layers: list[_Attention]) -> tuple[str, ...]:
    """What `adapt_foreign` does to a graph, in words."""
    inputs = {value.name: value.type.tensor_type.elem_type for value in theirs.graph.input}
    cache = inputs.get(layers[0].node.input[3], TensorProto.FLOAT)
    fused = all(node.op_type != "GroupQueryAttention" for node in theirs.graph.node)
    possible = {
        "attention in plain operators fused into GroupQueryAttention": fused,
        "query, key and value packed": bool(layers[0].key),
        "RotaryEmbedding moved into attention": not attribute(layers[0].node, "do_rotary", 0),
        "float16 cast to float32 around attention": cache == TensorProto.FLOAT16,
        "its quantised cache replaced": cache not in _FLOATS,
        "RoPE tables and cache made inputs": True,
    }
    return tuple(words for words, done in possible.items() if done)


# ---- what the graph says ---------------------------------------------------------------------------------------------


def _geometry(graph: GraphEdit, layers: list[_Attention]) -> Geometry:
    heads, kv_heads = (_same(graph, layers, name) for name in ("num_heads", "kv_num_heads"))
    head_dim = 2 * _table(graph, layers[0].cos).shape[1]
    _check_heads(graph, layers, heads, kv_heads, head_dim)
    hidden, vocab, tied = _sizes(graph, layers)
    windows = tuple(max(0, attribute(layer.node, "local_window_size", -1)) for layer in layers)
    return Geometry(
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_size=max(shape[1] for shape in linear_shapes(graph).values()),
        vocab_size=vocab,
        tied=tied,
        softcap=_same(graph, layers, "softcap", least=0.0),
        windows=windows if any(windows) else (),
    )


def _same(graph: GraphEdit, layers: list[_Attention], name: str, least: float = 1) -> Any:
    values = {attribute(layer.node, name, 0) for layer in layers}
    if len(values) != 1 or min(values) < least:
        raise UnsupportedModel(f"{graph.path}: {name} is {sorted(values)} in its layers; edgekv needs one number.")
    return values.pop()


def _ropes(graph: GraphEdit, layers: list[_Attention], geometry: Geometry) -> tuple[list[_Tables], list[int]]:
    """The different pairs of RoPE tables, and which each layer has: all the first, or the second where a window is."""
    stored = {names: tuple(map(partial(_table, graph), names)) for names in {(each.cos, each.sin) for each in layers}}
    found: list[_Tables] = []
    which = []
    for layer in layers:
        pair = stored[layer.cos, layer.sin]
        known = [index for index, other in enumerate(found) if all(map(np.array_equal, pair, other))]
        found += [] if known else [pair]
        which += known or [len(found) - 1]
    slides = [int(window > 0) for window in geometry.windows]
    if len(found) == 2 and [1 - index for index in which] == slides:
        return found[::-1], slides
    if len(found) > 1 and which != slides:
        raise UnsupportedModel(
            f"{graph.path} rotates by {len(found)} different tables in its layers; edgekv runs a second one only where "
            "there is a window."
        )
    return found, which


def _table(graph: GraphEdit, name: str) -> Array:
    """A RoPE table, [rows, D/2]."""
    table = graph.constant(name)
    if table is None or table.ndim != 2 or len(table) < 2:
        raise UnsupportedModel(
            f"{graph.path}: its RoPE table {name!r} is not a stored table, so it cannot be moved on."
        )
    if table.dtype not in (np.float32, np.float16):
        raise UnsupportedModel(f"{graph.path} computes in {table.dtype}; edgekv runs float32 and float16 graphs.")
    return table


def _check_heads(graph: GraphEdit, layers: list[_Attention], heads: int, kv_heads: int, head_dim: int) -> None:
    """The widths of the projections and of the cache must be those of the heads."""
    inputs = {value.name: value for value in graph.model.graph.input}
    shapes = linear_shapes(graph)
    for layer in layers:
        packed = (heads + 2 * kv_heads) * head_dim
        widths = [(layer.query, heads * head_dim), (layer.key, kv_heads * head_dim), (layer.value, kv_heads * head_dim)]
        for name, width in widths if layer.key else [(layer.query, packed)]:
            made = shapes.get(without_bias(graph, name), (width, 0))[0]
            if made != width:
                raise BadCheckpoint(
                    f"{_place(graph, layer.node)}: {name} has {made} columns, but {heads} query and {kv_heads} "
                    f"key-value heads of {head_dim} need {width}."
                )
        for name in layer.node.input[3:5]:
            if name not in inputs:
                raise UnsupportedModel(f"{_place(graph, layer.node)}: its cache {name!r} is no input of the graph.")
            dims = inputs[name].type.tensor_type.shape.dim
            if len(dims) != 4 or dims[1].dim_value not in (0, kv_heads):
                raise BadCheckpoint(f"{graph.path}: the cache {name} is not one of {kv_heads} key-value heads.")


def _sizes(graph: GraphEdit, layers: list[_Attention]) -> tuple[int, int, bool]:
    """Hidden size, vocabulary, and whether the head reads the embedding's bytes."""
    head, shapes = _head(graph), linear_shapes(graph)
    if head is not None and head.output[0] in shapes:
        vocab, hidden = shapes[head.output[0]]
        return hidden, vocab, len(graph.readers[head.input[1]]) > 1
    logits = next(v.type.tensor_type for v in graph.model.graph.output if v.name == _logits(graph))
    vocab = logits.shape.dim[-1].dim_value if logits.shape.dim else 0
    hidden = shapes.get(without_bias(graph, layers[0].query), (0, 0))[1]
    if not vocab or not hidden:
        raise UnsupportedModel(f"{graph.path}: neither its output head nor its first projection is a stored matrix.")
    return hidden, vocab, False


def _scheme(graph: GraphEdit) -> str:
    """How the linear layers are held: bits / block or the number type."""
    kinds = set()
    for node in graph.nodes:
        if node.op_type == "MatMulNBits":
            kinds.add(f"int{attribute(node, 'bits', 4)}/{attribute(node, 'block_size', 32)}")
        elif node.op_type == "MatMulBnb4":
            kinds.add(f"bnb4/{attribute(node, 'block_size', 64)}")
        elif node.op_type in ("MatMul", "Gemm") and node.input[1] in graph.tensors:
            kinds.add(_FLOATS.get(graph.tensors[node.input[1]].data_type, "other"))
    return ", ".join(sorted(kinds))


# ---- rewiring --------------------------------------------------------------------------------------------------------


def _rewire(graph: GraphEdit, index: int, layer: _Attention, geometry: Geometry, *, rope: int, half: bool) -> None:
    """Put in place of an attention node one that reads our inputs and packed float32, and nothing else."""
    node, packed, attended = layer.node, layer.query, layer.node.output[0]
    graph.remove(node)
    if layer.key:
        packed = graph.add("Concat", [layer.query, layer.key, layer.value], [f"{index}.qkv"], axis=-1)
    if half:
        packed = graph.add("Cast", [packed], [f"{index}.qkv.float"], to=TensorProto.FLOAT)
        graph.add("Cast", [f"{index}.attention"], [attended], to=TensorProto.FLOAT16)
        attended = f"{index}.attention"
    graph.add(
        "GroupQueryAttention",
        [packed, "", "", f"past_k.{index}", f"past_v.{index}", "seqlens_k", "total", *rope_inputs(rope)],
        [attended, f"present_k.{index}", f"present_v.{index}"],
        domain="com.microsoft",
        num_heads=geometry.num_heads,
        kv_num_heads=geometry.num_kv_heads,
        do_rotary=1,
        **_special(node, index, geometry),
    )


def _special(node: onnx.NodeProto, index: int, geometry: Geometry) -> dict[str, Any]:
    """The attributes of a layer's attention that are not at their defaults."""
    scale = float(attribute(node, "scale", 0.0))
    usual = not scale or abs(scale * geometry.head_dim**0.5 - 1) < 1e-6
    window = geometry.windows[index] if geometry.windows else 0
    found = {"scale": 0.0 if usual else scale, "softcap": geometry.softcap, "local_window_size": window}
    return {name: value for name, value in found.items() if value}


def _logits(graph: GraphEdit) -> str:
    names = [value.name for value in graph.model.graph.output]
    others = [name for name in names if not name.startswith("present")]
    if "logits" in names or len(others) == 1:
        return "logits" if "logits" in names else others[0]
    raise UnsupportedModel(f"{graph.path} has no output called logits, only {', '.join(names)[:200]}.")


def _head(graph: GraphEdit) -> onnx.NodeProto | None:
    """The multiplication that makes the logits, looking through what is done to them afterwards."""
    name = _logits(graph)
    while (node := graph.producers.get(name)) is not None and node.op_type in _AFTER_HEAD:
        inner = [each for each in node.input if graph.constant(each) is None]
        if len(inner) != 1:
            return None
        name = inner[0]
    return graph.producer(name, *LINEAR)


def _choose_rows(graph: GraphEdit) -> None:
    """Gather `rows` before the output head, in place of a choice of the last token if there is one.

    Where the head is not known, all logits are computed and theirs are gathered. A cast of float32 to float32 is taken
    out by ONNX Runtime.
    """
    head, logits = _head(graph), _logits(graph)
    states = logits if head is None else _before_choice(graph, head.input[0])
    chosen = graph.add("Gather", [states, "rows"], ["head_in"], axis=1)
    if head is not None:
        head.input[0], chosen = chosen, logits
    graph.rename({logits: "logits.theirs"})
    floats = [
        graph.add("Cast", ["logits.theirs" if name == logits else name], [new], to=TensorProto.FLOAT)
        for name, new in ((states, "states.float"), (chosen, "logits"))
    ]
    graph.add("ReduceSum", floats[:1], ["check"], keepdims=1)


def _before_choice(graph: GraphEdit, name: str) -> str:
    """The hidden states of all tokens, where `name` is those of the last one: Unsqueeze(Gather(hidden, -1))."""
    unsqueezed = graph.producer(name, "Unsqueeze")
    chosen = None if unsqueezed is None else graph.producer(unsqueezed.input[0], "Gather")
    if chosen is None:
        return name
    index = graph.constant(chosen.input[1])
    if attribute(chosen, "axis", 0) != 1 or index is None or index.shape != () or index != -1:
        raise UnsupportedModel(f"{_place(graph, chosen)} chooses tokens before the output head in an unknown way.")
    return str(chosen.input[0])


def _declare(graph: GraphEdit, geometry: Geometry, *, ropes: int) -> None:
    """Our inputs and outputs in place of theirs."""
    ids = _ids(graph)
    integers = graph.inputs()[ids].elem_type
    proto, half = graph.model.graph, geometry.head_dim // 2
    del proto.input[:], proto.output[:]
    graph.rename({ids: "ids" if integers == TensorProto.INT64 else "ids.short"})
    if integers != TensorProto.INT64:
        graph.add("Cast", ["ids"], ["ids.short"], to=integers)
    cache = [1, geometry.num_kv_heads, "C", geometry.head_dim]
    layers = range(geometry.num_layers)
    inputs: list[tuple[str, int, list[Any]]] = [
        ("ids", TensorProto.INT64, [1, "T"]),
        ("rows", TensorProto.INT64, ["R"]),
        ("seqlens_k", TensorProto.INT32, [1]),
        ("total", TensorProto.INT32, []),
        *((name, TensorProto.FLOAT, ["C", half]) for rope in range(ropes) for name in rope_inputs(rope)),
        *((f"past_{part}.{layer}", TensorProto.FLOAT, cache) for layer in layers for part in "kv"),
    ]
    outputs: list[tuple[str, int, list[Any]]] = [
        *((f"present_{part}.{layer}", TensorProto.FLOAT, cache) for layer in layers for part in "kv"),
        ("check", TensorProto.FLOAT, [1, 1, 1]),
        ("logits", TensorProto.FLOAT, [1, "R", geometry.vocab_size]),
    ]
    proto.input.extend(helper.make_tensor_value_info(*each) for each in inputs)
    proto.output.extend(helper.make_tensor_value_info(*each) for each in outputs)
    graph.commit()


def _ids(graph: GraphEdit) -> str:
    inputs = graph.inputs()
    if "input_ids" not in inputs:
        raise UnsupportedModel(
            f"{graph.path} reads {', '.join(inputs)[:200]} and no input_ids: edgekv runs graphs that embed the tokens."
        )
    return "input_ids"
