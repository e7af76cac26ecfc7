"""edgekv's own matmul with bitsandbytes' codes, against MatMulBnb4 and in the engine.

Both sum products of float32 numbers, in another order: 2e-6 of the largest output (measured 3e-7).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers.published import Bnb, Published
from onnx import TensorProto, helper, numpy_helper

from edgekv.convert import convert
from edgekv.engines.onnx import native
from edgekv.engines.onnx.engine import open_engine
from edgekv.engines.onnx.options import OnnxOptions
from edgekv.engines.onnx.table import QUANT_TYPES, set_table_matmul
from edgekv.kv.spec import KVSpec

TOLERANCE = 2e-6

pytestmark = pytest.mark.usefixtures("native_library")


def product(rows: int, columns: int, block: int, kind: str) -> onnx.ModelProto:
    """A graph with one MatMulBnb4 of random codes."""
    rng = np.random.default_rng(rows)
    tensors = {
        "codes": rng.integers(0, 256, rows * columns // 2, np.uint8),
        "absmax": rng.random(-(-rows * columns // block), np.float32),
    }
    sizes = {"N": rows, "K": columns, "block_size": block, "quant_type": QUANT_TYPES[kind]}
    node = helper.make_node("MatMulBnb4", ["x", *tensors], ["y"], domain="com.microsoft", **sizes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", columns])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "T", rows])
    made = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "product", [x], [y], made)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, x: Any) -> Any:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library()))
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize(
    ("rows", "columns", "block", "kind"),
    [(576, 1536, 64, "nf4"), (131, 256, 64, "fp4"), (7, 96, 32, "nf4"), (33, 512, 256, "fp4"), (1, 64, 64, "nf4")],
)
def test_equals_the_usual_product(
    monkeypatch: pytest.MonkeyPatch, instructions: str, rows: int, columns: int, block: int, kind: str
) -> None:
    """Of one row, of fewer than a tile and of several tiles; matrices that are no whole number of tiles."""
    usual = product(rows, columns, block, kind)
    own = onnx.ModelProto.FromString(usual.SerializeToString())
    assert set_table_matmul(own)
    assert [node.op_type for node in own.graph.node] == ["TableMatMul"]
    monkeypatch.setenv("EDGEKV_NATIVE_ISA", instructions)
    for tokens in (1, 2, 3, 7, 45):
        x = np.random.default_rng(tokens).standard_normal((1, tokens, columns), np.float32)
        found, wanted = run(own, x), run(usual, x)
        assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize(("columns", "block"), [(96, 64), (64, 16)])
def test_what_stays(columns: int, block: int) -> None:
    """Blocks that go over the end of a row, or are too small."""
    model = product(8, columns, block, "nf4")
    assert not set_table_matmul(model)
    assert [node.op_type for node in model.graph.node] == ["MatMulBnb4"]


def test_in_the_engine(tmp_path: Path) -> None:
    """A checkpoint of bitsandbytes runs with either product, at every accuracy level, and gives the same logits."""
    Published("bnb", Bnb(double=True)).write(tmp_path / "source")
    model, ids = convert(tmp_path / "source", tmp_path / "model").model, list(range(5, 45))
    found = []
    for matmul in ("auto", "onnxruntime"):
        options = OnnxOptions(threads=1, accuracy_level=1, matmul=matmul)  # type: ignore[arg-type]
        engine = open_engine(model, KVSpec(64, "float"), None, options)
        found.append(engine.forward(ids, all_logits=True))
        engine.close()
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[1]).max()
