"""Attention alone: a graph of one attention node a layer and nothing else, to be timed beside a read of its cache.

Every node has a cache of its own, full of random codes, so that one run touches as much memory as the attention of one
token does in the model. The same graph runs with either operator (adapt.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper

from edgekv.engines.onnx import adapt, native
from edgekv.engines.onnx.binding import CACHE_DTYPES, Array, HostCache, gqa_row_items, ring_dtype
from edgekv.engines.onnx.ring import RingCache
from edgekv.engines.rope import rope_inputs, rope_tables, settled_ropes
from edgekv.errors import UnsupportedModel
from edgekv.kv.rows import code_items, pack
from edgekv.kv.spec import OWN_OPERATOR_ONLY, ROW_FACTORS, KVSpec
from edgekv.model.spec import ModelSpec

Run = Callable[[], object]

_SCALE = 0.02  # of random codes: scores of a few units


def decode_runs(spec: ModelSpec, kv: KVSpec, threads: int) -> dict[str, Run]:
    """What to time, all over caches that hold C tokens with the last one just arriving: "read" reads the cache's bytes,
    "native" and "gqa", where the operator has such a cache, compute the attention of one token in all layers.
    """
    runs: dict[str, Run] = {}
    rows: Sequence[npt.NDArray[Any]] = ()
    if native.refusal(spec, kv, "cpu") is None:
        runs["native"], rows = _native(spec, kv, threads)
    if kv.dtype not in (*OWN_OPERATOR_ONLY, "fp8"):
        runs["gqa"], rows = _gqa(spec, kv, threads)
    if not runs:
        raise UnsupportedModel(f"No operator here has a {kv.dtype.upper()} cache: use --kv-dtype int8.")
    return {"read": _reading(rows, threads)} | runs


def output_of(spec: ModelSpec, kv: KVSpec, operator: str) -> npt.NDArray[np.float32]:
    """What one run computes, [L, 1, 1, H D], over caches with the same random rows: to compare the operators."""
    run, _ = (_native if operator == "native" else _gqa)(spec, kv, 1)
    return np.asarray(run())


def _native(spec: ModelSpec, kv: KVSpec, threads: int) -> tuple[Run, Sequence[npt.NDArray[Any]]]:
    model = _graph(spec, kv)
    adapt.set_native_attention(model, spec, kv.dtype)
    cache = RingCache(spec, kv)
    parts = [rows for layer in cache.layers for rows in layer.parts.values()]
    state = np.array([kv.capacity - 1, 0, 0, kv.capacity], np.int64)
    feeds: dict[str, npt.NDArray[Any]] = {"state": state}
    for index, rope in enumerate(settled_ropes(spec, kv.capacity)):
        if index in spec.rope_layers:
            tables = rope_tables(rope, spec.head_dim, kv.capacity - 1, 1)
            feeds[f"angles.{index}"] = np.stack([*tables, *tables])
    if kv.dtype != "float":
        scales = np.full((2, spec.num_kv_heads, spec.head_dim), _SCALE, np.float32)
        feeds |= {f"scales.{layer}": scales for layer in range(spec.num_layers)}
    return _bound(model, spec, kv, threads, cache, feeds), parts


def _gqa(spec: ModelSpec, kv: KVSpec, threads: int) -> tuple[Run, Sequence[npt.NDArray[Any]]]:
    cache = HostCache(spec, kv)
    parts = [rows for part in "kv" for rows in cache.layers(part)]
    feeds: dict[str, npt.NDArray[Any]] = {
        "seqlens_k": np.array([kv.capacity - 1], np.int32),
        "total": np.array(kv.capacity, np.int32),
    }
    for index, rope in enumerate(settled_ropes(spec, kv.capacity)):
        tables = rope_tables(rope, spec.head_dim, 0, kv.capacity)
        feeds |= dict(zip(rope_inputs(index), tables, strict=True))
    if kv.dtype != "float":
        scales = np.full((1, spec.num_kv_heads, 1, spec.head_dim), _SCALE, np.float32)
        feeds |= {f"{part}_scale.{layer}": scales for part in "kv" for layer in range(spec.num_layers)}
    return _bound(_graph(spec, kv), spec, kv, threads, cache, feeds), parts


def _bound(
    model: onnx.ModelProto,
    spec: ModelSpec,
    kv: KVSpec,
    threads: int,
    cache: HostCache | RingCache,
    feeds: dict[str, npt.NDArray[Any]],
) -> Run:
    """A session with everything bound; calling the result runs it once."""
    random = np.random.default_rng(0)
    own = isinstance(cache, RingCache)
    rows = {part: _random_rows(spec, kv, part, random, own=own) for part in "kv"}
    for layer in range(spec.num_layers):
        for part in "kv":
            cache.write(part, layer, 0, rows[part])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if any(node.domain == adapt.NATIVE_DOMAIN for node in model.graph.node):
        options.register_custom_ops_library(str(native.library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    io = session.io_binding()
    cache.bind(io)
    feeds = feeds | {"qkv": random.standard_normal((1, 1, spec.qkv_rows)).astype(np.float32)}
    outputs = np.zeros((spec.num_layers, 1, 1, spec.num_heads * spec.head_dim), np.float32)
    for name, array in feeds.items():
        io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for layer, output in enumerate(outputs):
        io.bind_output(f"attention.{layer}", "cpu", 0, np.float32, output.shape, output.ctypes.data)

    def run(owned: object = (cache, feeds)) -> object:  # bound by pointer: they live as long as this does
        session.run_with_iobinding(io)
        return outputs

    return run


def _random_rows(spec: ModelSpec, kv: KVSpec, part: str, random: np.random.Generator, *, own: bool) -> Array:
    """Rows of C tokens as the operator holds them, [K, C, row]."""
    items = code_items(spec.head_dim, kv.dtype, part) if own else gqa_row_items(spec, kv.dtype)
    codes = random.integers(-100, 101, (spec.num_kv_heads, kv.capacity, items))
    held = ring_dtype(kv.dtype) if own else np.dtype(CACHE_DTYPES[kv.dtype])
    rows = (codes * _SCALE if kv.dtype == "float" else codes).astype(held)
    if kv.dtype == "fp8":
        rows = rows % 64 + codes.astype(np.uint8) // 128 * 128  # numbers of at most 1.9 and either sign
    if own and kv.dtype in ROW_FACTORS:
        return pack(rows, np.ones((*rows.shape[:2], 1), np.float32))
    return rows


def _graph(spec: ModelSpec, kv: KVSpec) -> onnx.ModelProto:
    """One GroupQueryAttention a layer, all of them over the same packed QKV, with this kind of cache."""
    shape = [1, spec.num_kv_heads, "C", spec.head_dim]
    inputs = [
        helper.make_tensor_value_info("qkv", TensorProto.FLOAT, [1, "T", spec.qkv_rows]),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
    ]
    for index in range(len(spec.ropes)):
        for name in rope_inputs(index):
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["C", spec.head_dim // 2]))
    outputs, nodes = [], []
    sizes = {"num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads, "do_rotary": 1}
    for layer, rope in enumerate(spec.rope_layers):
        past, present = ([f"{when}_{part}.{layer}" for part in "kv"] for when in ("past", "present"))
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in past]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in present]
        outputs.append(helper.make_tensor_value_info(f"attention.{layer}", TensorProto.FLOAT, [1, "T", "HD"]))
        names = ["qkv", "", "", *past, "seqlens_k", "total", *rope_inputs(max(rope, 0))]
        made = [f"attention.{layer}", *present]
        nodes.append(helper.make_node("GroupQueryAttention", names, made, domain="com.microsoft", **sizes))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "attention", inputs, outputs), opset_imports=opsets, ir_version=10
    )
    adapt.set_cache(model, kv.dtype, kv.granularity)
    return model


def _reading(rows: Sequence[npt.NDArray[Any]], threads: int) -> Run:
    """Every byte of the arrays once, on so many threads; numpy lets go of Python's lock meanwhile."""
    words = [array.reshape(-1).view(np.int64) for array in rows]
    shares = [words[number::threads] for number in range(threads)]
    pool = ThreadPoolExecutor(threads)

    def read(share: Sequence[npt.NDArray[np.int64]]) -> int:
        return sum(int(np.bitwise_or.reduce(array)) for array in share)

    return lambda: list(pool.map(read, shares))
