"""edgekv's own matmul with packed weights: beside MatMulNBits, a float64 twin in C++, and in the engine.

Tolerances. Both operators round inputs to 8 bits in the same way where groups are of 16 or 32, and differ in the order
of float32 sums: 2e-6 of the largest output (measured 4e-7). Where groups are larger MatMulNBits rounds by group, and
the project's own by 32, which is compared with a float64 model of just that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conftest import TinyModels
from helpers import native as builder
from helpers.checkpoints import VOCAB
from helpers.published import GPTQ, Published
from onnx import TensorProto, helper, numpy_helper

from edgekv.convert import convert
from edgekv.engines.onnx import native, packed
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.onnx.options import OnnxOptions
from edgekv.engines.onnx.packed import set_packed_matmul
from edgekv.engines.onnx.surgery import attribute
from edgekv.errors import UnsupportedModel
from edgekv.kv.spec import KVSpec

TOLERANCE = 2e-6

pytestmark = pytest.mark.usefixtures("native_library")


@dataclass(frozen=True)
class Layer:
    """A linear layer of random weights."""

    rows: int  # N
    columns: int  # K
    bits: int
    group: int
    zeros: bool = True
    half: bool = True  # scales that are float16 numbers
    bias: bool = False
    span: int = 256  # of codes of 8 bits, around 128
    shift: bool = False  # each block has a float that is added

    def tensors(self, seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
        """As MatMulNBits takes them."""
        rng, groups = np.random.default_rng(seed), -(-self.columns // self.group)
        scales = (0.001 + 0.01 * rng.random((self.rows, groups))).astype(np.float16 if self.half else np.float32)
        made = {
            "codes": rng.integers(0, 256, (self.rows, groups, self.group * self.bits // 8), np.uint8),
            "scales": scales.astype(np.float32),
        }
        if self.span < 256:
            made["codes"] = made["codes"] % np.uint8(self.span) + np.uint8(128 - self.span // 2)
        if self.zeros:
            made["zeros"] = rng.integers(0, 256, (self.rows, -(-groups * self.bits // 8)), np.uint8)
        if self.shift:
            minima = (0.2 * rng.random((self.rows, groups)) - 0.15).astype(np.float16).astype(np.float32)
            made["shift"] = np.ascontiguousarray((minima + self.middle * made["scales"]).T)
            made["shape"], made["axis"] = np.array([1, -1, groups, self.group]), np.array([3])
        if self.bias:
            made["bias"] = rng.standard_normal(self.rows, np.float32)
        return made

    @property
    def middle(self) -> np.float32:
        """The zero point, in the bits that the codes have."""
        return np.float32(1 << (self.bits - 1) if self.span == 256 else self.span // 2)

    def weights(self, seed: int) -> Any:
        """[N, K] in float64, of a layer without zero points."""
        made = self.tensors(seed)
        codes = made["codes"].astype(np.float64)
        if self.bits == 4:
            codes = np.stack([codes % 16, codes // 16], -1).reshape(self.rows, -1, self.group)
        blocks = (codes - (1 << (self.bits - 1))) * made["scales"][..., None]
        return (blocks + made["shift"].T[..., None]).reshape(self.rows, -1)

    def shifted(self, name: str, output: str, x: str = "x") -> list[onnx.NodeProto]:
        """Its MatMulNBits, and what its shifts add, as build.py writes it."""
        return [
            self.node(name, f"{output}.product", x),
            helper.make_node("Reshape", [x, f"{name}.shape"], [f"{output}.blocks"]),
            helper.make_node("ReduceSum", [f"{output}.blocks", f"{name}.axis"], [f"{output}.sums"], keepdims=0),
            helper.make_node("MatMul", [f"{output}.sums", f"{name}.shift"], [f"{output}.shift"]),
            helper.make_node("Add", [f"{output}.product", f"{output}.shift"], [output]),
        ]

    def node(self, name: str, output: str, x: str = "x", **attributes: Any) -> onnx.NodeProto:
        """Its MatMulNBits."""
        parts = [f"{name}.zeros" if self.zeros else "", *(["", f"{name}.bias"] if self.bias else [])]
        inputs = [x, f"{name}.codes", f"{name}.scales", *(parts if any(parts) else [])]
        layout = {"N": self.rows, "K": self.columns, "bits": self.bits, "block_size": self.group}
        attributes = layout | {"accuracy_level": 4} | attributes
        return helper.make_node("MatMulNBits", inputs, [output], name=output, domain="com.microsoft", **attributes)


def make_graph(nodes: list[onnx.NodeProto], layers: dict[str, Layer], outputs: int) -> onnx.ModelProto:
    """A graph from x to y."""
    columns = next(iter(layers.values())).columns
    tensors = [
        numpy_helper.from_array(array, f"{name}.{part}")
        for seed, (name, layer) in enumerate(layers.items())
        for part, array in layer.tensors(seed).items()
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", columns])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "T", outputs])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "products", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, **inputs: Any) -> Any:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library()))
    return ort.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


def both_ways(model: onnx.ModelProto, x: Any) -> tuple[Any, Any]:
    """What MatMulNBits gives, and what the packed product gives."""
    usual = run(model, x=x)
    weights = set_packed_matmul(model, Path())
    assert weights is not None
    return usual, run(model, x=x, **{native.PACKED_WEIGHTS: weights})


def inputs(tokens: int, columns: int) -> Any:
    return np.random.default_rng(5).standard_normal((1, tokens, columns), np.float32)


def error(got: Any, want: Any) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("tokens", [1, 3, 29])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(96, 64, 4, 32),
        Layer(70, 576, 4, 32, zeros=False, bias=True),
        Layer(64, 208, 4, 16, half=False),
        Layer(33, 100, 8, 32, bias=True),
        Layer(48, 64, 8, 16, zeros=False, half=False),
    ],
    ids=repr,
)
def test_equals_matmulnbits(layer: Layer, tokens: int) -> None:
    model = make_graph([layer.node("a", "y")], {"a": layer}, layer.rows)
    usual, own = both_ways(model, inputs(tokens, layer.columns))
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul"]
    assert error(own, usual) < TOLERANCE


@pytest.mark.parametrize(
    ("span", "group", "bits"),
    [(16, 16, 4), (16, 32, 4), (32, 32, 5), (32, 16, 6), (64, 16, 6), (64, 32, 6), (128, 32, 8)],
)
@pytest.mark.parametrize("tokens", [1, 30])
def test_codes_near_their_zero_point_take_fewer_bits(
    span: int, group: int, bits: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(70, 208, 8, group, zeros=False, span=span)
    model, x = make_graph([layer.node("a", "y")], {"a": layer}, layer.rows), inputs(tokens, layer.columns)
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    usual, own = both_ways(model, x)
    assert attribute(model.graph.node[0], "bits", 0) == bits
    assert error(own, usual) < TOLERANCE * 256 / span  # MatMulNBits takes 128 from sums of whole bytes, in float32
    monkeypatch.setattr(packed, "_narrowest", lambda codes, group: 8)
    np.testing.assert_array_equal(own, both_ways(whole, x)[1])


@pytest.mark.parametrize("group", [64, 128])
def test_large_groups_round_inputs_by_32(group: int) -> None:
    layer, x = Layer(48, 320, 8, group, zeros=False), inputs(5, 320)
    _, own = both_ways(make_graph([layer.node("a", "y")], {"a": layer}, 48), x)
    tensors, groups = layer.tensors(0), -(-320 // group)
    codes = tensors["codes"].reshape(48, groups, group).astype(np.float64) - 128
    weights = (codes * tensors["scales"].reshape(48, groups, 1)).reshape(48, -1)[:, :320]
    assert error(own[0], rounded(x) @ weights.T) < TOLERANCE


def rounded(x: Any) -> Any:
    """[1, T, K] -> [T, K]: inputs in float64 as the operator takes them, bytes with a scale for every 32."""
    blocks = x.reshape(x.shape[1], -1, 32)
    limits = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / limits))
    return (codes * (limits / np.float32(127)).astype(np.float64)).reshape(x.shape[1:])


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize(("bits", "span", "packed_bits"), [(4, 256, 4), (8, 32, 5), (8, 64, 6), (8, 256, 8)])
def test_shifts_become_minima(bits: int, span: int, packed_bits: int, tokens: int) -> None:
    """Against float64. The graph in ONNX Runtime differs by what rounding the inputs does to what is added."""
    layer, x = Layer(70, 320, bits, 32, zeros=False, span=span, shift=True), inputs(tokens, 320)
    model = make_graph(layer.shifted("a", "y"), {"a": layer}, 70)
    usual, own = both_ways(model, x)
    (node,) = model.graph.node
    assert [attribute(node, name, 0) for name in ("bits", "minima", "half")] == [packed_bits, 1, 1]
    wanted = rounded(x) @ layer.weights(0).T
    assert error(own[0], wanted) < TOLERANCE * 256 / span
    assert error(usual[0], x[0] @ layer.weights(0).T) < 2e-2


def test_gate_and_up_with_minima_become_one_node() -> None:
    layer = Layer(64, 96, 4, 32, zeros=False, shift=True)
    nodes = [
        *layer.shifted("gate", "g"),
        *layer.shifted("up", "u"),
        helper.make_node("QuickGelu", ["g"], ["a"], domain="com.microsoft", alpha=1.0),
        helper.make_node("Mul", ["a", "u"], ["y"]),
    ]
    model, x = make_graph(nodes, {"gate": layer, "up": layer}, 64), inputs(14, 96)
    _, own = both_ways(model, x)
    gate, up = (rounded(x) @ layer.weights(seed).T for seed in range(2))
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul"]
    assert error(own[0], gate / (1 + np.exp(-gate)) * up) < 1e-5


@pytest.mark.parametrize(
    ("place", "name"), [(1, "x.other"), (2, "a.axis2"), (3, "a.shift2")], ids=["other sums", "another axis", "shape"]
)
def test_what_only_looks_like_a_shift_stays(place: int, name: str) -> None:
    """Sums of another input, over another axis, or a matrix that is no constant."""
    layer = Layer(96, 96, 4, 32, zeros=False, shift=True)
    nodes = layer.shifted("a", "y")
    nodes[place].input[0 if place == 1 else 1] = name
    nodes.insert(0, helper.make_node("Neg", ["x"], ["x.other"]))
    nodes.insert(0, helper.make_node("Neg", ["a.shift"], ["a.shift2"]))
    model = make_graph(nodes, {"a": layer}, 96)
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "a.axis2"))
    usual, own = both_ways(model, inputs(3, 96))
    assert "MatMul" in [node.op_type for node in model.graph.node]
    assert error(own, usual) < TOLERANCE


@pytest.mark.parametrize(("activation", "attributes"), [("QuickGelu", {"alpha": 1.0}), ("FastGelu", {})])
def test_gate_and_up_become_one_node(activation: str, attributes: dict[str, Any]) -> None:
    layer = Layer(64, 96, 4, 32)
    nodes = [
        layer.node("gate", "g"),
        layer.node("up", "u"),
        helper.make_node(activation, ["g"], ["a"], domain="com.microsoft", **attributes),
        helper.make_node("Mul", ["a", "u"], ["y"]),
    ]
    model = make_graph(nodes, {"gate": layer, "up": layer}, 64)
    usual, own = both_ways(model, inputs(14, 96))
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul"]
    assert error(own, usual) < 1e-5  # the activations are approximations; measured 1.2e-6


def test_gate_stays_apart_where_something_else_reads_it() -> None:
    layer = Layer(64, 96, 4, 32)
    nodes = [
        layer.node("gate", "g"),
        layer.node("up", "u"),
        helper.make_node("QuickGelu", ["g"], ["a"], domain="com.microsoft", alpha=1.0),
        helper.make_node("Mul", ["a", "u"], ["m"]),
        helper.make_node("Add", ["m", "g"], ["y"]),
    ]
    model = make_graph(nodes, {"gate": layer, "up": layer}, 64)
    usual, own = both_ways(model, inputs(2, 96))
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul", "PackedMatMul", "QuickGelu", "Mul", "Add"]
    assert error(own, usual) < 1e-5


def block(read_twice: bool) -> tuple[onnx.ModelProto, Any]:
    """Norm, product, sum and norm, product: what surrounds attention and feed-forward. `read_twice`: the second norm's
    result is an output, too."""
    layer, columns = Layer(96, 96, 4, 32), 96
    skip = ["b", "x", "gain"], ["n2" if not read_twice else "y", "", "", "sum"]
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "gain"], ["n1"], axis=-1, epsilon=1e-5, stash_type=1),
        layer.node("first", "b", x="n1"),
        helper.make_node("SkipSimplifiedLayerNormalization", *skip, domain="com.microsoft", epsilon=1e-5),
        layer.node("second", "z" if read_twice else "y", x="y" if read_twice else "n2"),
    ]
    model = make_graph(nodes, {"first": layer, "second": layer}, columns)
    gain = 1 + 0.1 * np.random.default_rng(8).standard_normal(columns, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(gain, "gain"))
    return model, inputs(17, columns)


def test_norms_and_sums_become_part_of_products() -> None:
    model, x = block(read_twice=False)
    usual, own = both_ways(model, x)
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul", "PackedMatMul"]
    assert error(own, usual) < 2e-2  # the norm's last bits may round an input to its neighbour


def test_a_norm_that_something_else_reads_stays() -> None:
    model, x = block(read_twice=True)
    usual, own = both_ways(model, x)
    assert [node.op_type for node in model.graph.node] == [
        "PackedMatMul",
        "SimplifiedLayerNormalization",
        "PackedMatMul",
    ]
    assert error(own, usual) < 2e-2


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.attribute.remove(next(a for a in node.attribute if a.name == "accuracy_level")),
        lambda node: node.input.append("order"),
        lambda node: node.input.__setitem__(1, "x"),
    ],
    ids=["float inputs", "an order of its own", "weights that change"],
)
def test_other_products_stay(change: Callable[[onnx.NodeProto], Any]) -> None:
    layer = Layer(64, 96, 4, 32)
    model = make_graph([layer.node("a", "y")], {"a": layer}, 64)
    change(model.graph.node[0])
    before = model.SerializeToString()
    assert set_packed_matmul(model, Path()) is None
    assert model.SerializeToString() == before


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_tensors_that_are_too_short_stay_with_onnx_runtime(part: str) -> None:
    """What packs them reads as many numbers as the node says."""
    layer = Layer(64, 96, 4, 32)
    model = make_graph([layer.node("a", "y")], {"a": layer}, 64)
    for tensor in model.graph.initializer:
        if tensor.name == f"a.{part}":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:16], tensor.name))
    assert set_packed_matmul(model, Path()) is None


def test_no_rows_give_no_rows() -> None:
    layer = Layer(64, 96, 4, 32)
    usual, own = both_ways(make_graph([layer.node("a", "y")], {"a": layer}, 64), inputs(0, 96))
    assert own.shape == usual.shape == (1, 0, 64)


def test_weights_that_are_too_short_are_refused() -> None:
    layer = Layer(64, 96, 4, 32)
    model = make_graph([layer.node("a", "y")], {"a": layer}, 64)
    weights = set_packed_matmul(model, Path())
    assert weights is not None
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "bytes"
    with pytest.raises(Exception, match="do not reach as far"):
        run(model, x=inputs(1, 96), **{native.PACKED_WEIGHTS: weights[:-64]})


def lookup_graph(layer: Layer, *, reshaped: bool = False, own_codes: bool = False) -> onnx.ModelProto:
    """From ids and x to rows of an embedding and the product with it as the output head.

    Args:
        reshaped: both read one tensor, which the lookup takes through a Reshape; else two tensors over the same bytes.
        own_codes: the lookup has numbers of its own.
    """
    head = make_graph([layer.node("a", "y")], {"a": layer}, layer.rows)
    arrays = layer.tensors(0)
    flat = arrays["codes"].reshape(layer.rows, -1)
    shape = numpy_helper.from_array(np.array(flat.shape), "flat")
    codes = numpy_helper.from_array(flat ^ 1 if own_codes else flat, "own")
    head.graph.initializer.append(shape if reshaped else codes)
    names = ["flat.codes" if reshaped else "own", "ids", "a.scales", *["a.zeros"] * layer.zeros]
    numbers = {"bits": layer.bits, "block_size": layer.group, "gather_axis": 0, "quantize_axis": 1}
    gather = helper.make_node("GatherBlockQuantized", names, ["rows"], domain="com.microsoft", **numbers)
    head.graph.node.append(gather)
    if reshaped:
        head.graph.node.insert(0, helper.make_node("Reshape", ["a.codes", "flat"], ["flat.codes"]))
    head.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "I"]))
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, [1, "I", layer.columns])
    head.graph.output.insert(0, rows)
    return head


LOOKUPS = [
    Layer(70, 64, 8, 32, zeros=False),
    Layer(96, 576, 8, 32, half=False),
    Layer(33, 96, 4, 32),
    Layer(48, 64, 4, 16, zeros=False),
    Layer(64, 96, 8, 32, zeros=False, span=32),
    Layer(64, 256, 8, 128, zeros=False, span=64),
]


@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize("layer", LOOKUPS, ids=repr)
def test_an_embedding_is_looked_up_in_the_packed_head(layer: Layer, count: int) -> None:
    """One copy for both, and the same numbers to the last bit."""
    model = lookup_graph(layer, reshaped=True)
    ids = np.random.default_rng(2).integers(0, layer.rows, (1, count))
    usual = run(model, x=inputs(1, layer.columns), ids=ids)
    weights = set_packed_matmul(model, Path())
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul", "PackedRows"]
    assert not model.graph.initializer
    own = run(model, x=inputs(1, layer.columns), ids=ids, **{native.PACKED_WEIGHTS: weights})
    assert np.array_equal(own, usual)


@pytest.mark.parametrize("own_codes", [False, True])
def test_a_lookup_in_another_tensor_stays(own_codes: bool) -> None:
    """A tensor inside of the graph is known by its name alone."""
    model = lookup_graph(LOOKUPS[0], own_codes=own_codes)
    set_packed_matmul(model, Path())
    assert [node.op_type for node in model.graph.node] == ["PackedMatMul", "GatherBlockQuantized"]


@pytest.mark.parametrize("wrong", [-1, 70])
def test_ids_beyond_the_matrix_are_refused(wrong: int) -> None:
    model = lookup_graph(LOOKUPS[0], reshaped=True)
    weights = set_packed_matmul(model, Path())
    with pytest.raises(Exception, match="an id is not within the matrix"):
        run(model, x=inputs(1, 64), ids=np.array([[3, wrong]]), **{native.PACKED_WEIGHTS: weights})


@pytest.mark.parametrize("name", ["llama", "qwen2", "one-layer", "qwen2-fp16"])
def test_tied_models_map_no_embedding(tiny_models: TinyModels, name: str) -> None:
    """In their files embedding and head are two tensors over the same bytes."""
    model = tiny_models.converted(name)
    graph = onnx.load(model.graph, load_external_data=False)
    assert set_packed_matmul(graph, model.folder) is not None
    kinds = {node.op_type for node in graph.graph.node}
    assert ("PackedRows" in kinds) == model.spec.tied_embeddings
    assert ("GatherBlockQuantized" in kinds) != model.spec.tied_embeddings


def test_one_copy_serves_embedding_and_head(
    tmp_path: Path, open_onnx: Callable[..., OnnxEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held as a sum of two, in a whole model: not a bit differs from the lookup in the file."""
    Published("tied", GPTQ(32), tiny={"tie_word_embeddings": True}).write(tmp_path / "source")
    model = convert(tmp_path / "source", tmp_path / "model").model
    assert "int8+8/" in model.description.scheme
    ids = np.random.default_rng(4).integers(3, VOCAB, 40).tolist()
    kinds, logits = [], []
    for lookups in (packed._with_lookups, lambda nodes, *_: list(nodes)):
        monkeypatch.setattr(packed, "_with_lookups", lookups)
        graph = onnx.load(model.graph, load_external_data=False)
        assert set_packed_matmul(graph, model.folder) is not None
        kinds.append({node.op_type for node in graph.graph.node} & {"PackedRows", "GatherBlockQuantized"})
        logits.append(open_onnx(model, KVSpec(64, "float"), level=4, matmul="native").forward(ids, all_logits=True))
    assert kinds == [{"PackedRows"}, {"GatherBlockQuantized"}]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_same_logits_in_the_engine(
    tiny_models: TinyModels, open_onnx: Callable[..., OnnxEngine], name: str
) -> None:
    """Both products in whole models. A last bit may round an input to its neighbour: measured 4e-3 at most."""
    model, kv = tiny_models.converted(name), KVSpec(64, "float")
    ids = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    own, usual = (open_onnx(model, kv, level=4, matmul=kind) for kind in ("native", "onnxruntime"))
    logits = [engine.forward(ids, all_logits=True) for engine in (own, usual)]
    assert error(*logits) < 2e-2


def test_what_cannot_be_is_refused(tiny_models: TinyModels, open_onnx: Callable[..., OnnxEngine]) -> None:
    with pytest.raises(UnsupportedModel, match="rounded to 8 bits"):
        open_onnx(tiny_models.converted("llama"), KVSpec(64, "float"), level=1, matmul="native")


def test_without_the_library_matmulnbits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: Path("nowhere"))
    reason = native.matmul_refusal()
    assert reason is not None
    assert "not built" in reason
    assert OnnxOptions().matmul == "auto"


def test_random_products_against_a_float64_twin(tmp_path: Path) -> None:
    """The C++ test program: random shapes on each instruction set that this machine has."""
    builder.run_program(tmp_path, "test_matmul", rounds=100, seed=77)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing_in_products(tmp_path: Path, sanitizers: str) -> None:
    builder.run_program(tmp_path, "test_matmul", rounds=60, seed=5, sanitizers=sanitizers)
