"""Scales that travel: to onnxruntime-genai and vLLM, and back.

    genai   JSON, {"qmax": q, "scales": {"k_scales": [...], "v_scales": [...]}}: one list of K D numbers a layer (per
            channel) or one number (per tensor), with q = 128, 8 or 448 for INT8, INT4 and FP8; `layer_ids` may name the
            layers, and the whole may lie under the graph's name ("model"). Its builder multiplies each scale by q over
            the q of the dtype that it builds, so a file with the q of its own dtype is taken as it stands.
    vLLM    tensors of an HF checkpoint, FP8 (E4M3) only: `model.layers.N.self_attn.k_scale` and `v_scale`, float32,
            [1] (per tensor) or [K, 1, 1] (per head), x ~ code * scale; and in config.json a `quantization_config` of
            compressed-tensors whose `kv_cache_scheme` says which, without which vLLM does not look for them.

Read from: onnxruntime-genai 0.18 models/builders/base.py (make_kv_cache_scale_initializers), compressed-tensors 0.20
quantization/lifecycle/initialize.py, vLLM's CompressedTensorsKVCacheMethod and docs/features/quantization/
quantized_kvcache.md.

A scale is a threshold over the largest code, so another dtype has the same thresholds over another code. A coarser
granularity takes the largest threshold it covers; a finer one cannot be had. The envelope that edgekv calibrates bounds
a key at every position, so its thresholds suit a server with a longer context, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import InvalidOption, ScalesError
from edgekv.files import atomic_file
from edgekv.kv.quant import LIMIT, coarsen
from edgekv.kv.scales import KVScales, Provenance
from edgekv.kv.spec import GRANULARITIES, Granularity, KVDtype
from edgekv.model.spec import ModelSpec

Float32 = npt.NDArray[np.float32]

GENAI_QMAX: dict[KVDtype, float] = {"int8": 128.0, "int4": 8.0, "fp8": 448.0}
"""The divisors that onnxruntime-genai's builder calibrates against; edgekv's own (kv.quant.LIMIT) are a code less."""

VLLM_STRATEGIES: dict[Granularity, str] = {"tensor": "tensor", "head": "attn_head"}
VLLM_SHARD = "model-kv-scales.safetensors"


def retarget(scales: KVScales, dtype: KVDtype, granularity: Granularity) -> KVScales:
    """The same thresholds for another dtype, as fine or coarser.

    Raises:
        InvalidOption: a finer granularity was asked for.
    """
    if GRANULARITIES.index(granularity) < GRANULARITIES.index(scales.granularity):
        raise InvalidOption(
            f"Scales per {scales.granularity} cannot be made finer (per {granularity}): calibrate with "
            f"--granularity {granularity}."
        )
    scales, factor = scales.without_centre(), np.float32(LIMIT[scales.dtype] / LIMIT[dtype])
    k, v = (coarsen(array * factor if dtype != scales.dtype else array, granularity) for array in (scales.k, scales.v))
    return replace(scales, k=k, v=v, dtype=dtype, granularity=granularity)


def to_genai(scales: KVScales) -> dict[str, Any]:
    """What onnxruntime-genai's builder reads as `kv_cache_scale_file`, for <dtype>_per_channel or _per_tensor.

    Raises:
        InvalidOption: scales per head, which it does not know.
    """
    if scales.granularity == "head":
        raise InvalidOption("onnxruntime-genai has scales per channel or per tensor: export with --granularity tensor.")
    scales = scales.without_centre()
    flat = [part.reshape(len(part), -1) for part in (scales.k, scales.v)]  # [L, K D]
    k, v = ((part[:, :1] if scales.granularity == "tensor" else part).tolist() for part in flat)
    return {"qmax": GENAI_QMAX[scales.dtype], "scales": {"k_scales": k, "v_scales": v}}


def from_genai(
    data: Any, spec: ModelSpec, dtype: KVDtype, fingerprint: str, source: str, section: str = "model"
) -> KVScales:
    """Scales out of such a file, as its builder would use them for `dtype`.

    Raises:
        ScalesError: it is not such a file, or does not fit the model.
    """
    try:
        data = data.get(section, data)
        lists = [data["scales"][name] for name in ("k_scales", "v_scales")]
        factor = float(data.get("qmax") or GENAI_QMAX[dtype]) / GENAI_QMAX[dtype]
        order = np.argsort(data.get("layer_ids") or range(len(lists[0])))
        parts = [_stack(values, order, spec) * np.float32(factor) for values in lists]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ScalesError(f"{source} holds no scales as onnxruntime-genai reads them ({error}).") from None
    granularity: Granularity = "tensor" if all(np.size(row) == 1 for values in lists for row in values) else "channel"
    return _imported(parts, dtype, granularity, fingerprint, source)


def to_vllm(scales: KVScales, granularity: Granularity) -> dict[str, Float32]:
    """FP8 scales by the name of their tensor, float32, [1] (per tensor) or [K, 1, 1] (per head).

    Raises:
        InvalidOption: a granularity that vLLM does not read, or one finer than the scales'.
    """
    if granularity not in VLLM_STRATEGIES:
        raise InvalidOption("vLLM reads scales per tensor or per head: export with --granularity tensor or head.")
    fp8 = retarget(scales, "fp8", granularity)
    shape = (1,) if granularity == "tensor" else (fp8.k.shape[1], 1, 1)
    return {
        f"model.layers.{layer}.self_attn.{part}_scale": np.ascontiguousarray(
            values[layer, : np.prod(shape), 0].reshape(shape)
        )
        for part, values in (("k", fp8.k), ("v", fp8.v))
        for layer in range(len(values))
    }


def from_vllm(tensors: Mapping[str, Float32], spec: ModelSpec, fingerprint: str, source: str) -> KVScales:
    """FP8 scales out of a checkpoint's tensors, under the names of llm-compressor, of vLLM itself and of ModelOpt.

    Raises:
        ScalesError: one is missing, or of a shape that is neither per tensor nor per head.
    """
    parts, sizes = [], set()
    for part in "kv":
        rows = []
        for layer in range(spec.num_layers):
            found = _vllm_tensor(tensors, layer, part, source)
            if found.size not in (1, spec.num_kv_heads):
                raise ScalesError(
                    f"{source}: the {part} scale of layer {layer} has {found.size} numbers; this model needs 1 or "
                    f"{spec.num_kv_heads}, one a KV head."
                )
            sizes.add(found.size)
            shape = (spec.num_kv_heads, spec.head_dim)
            rows.append(np.broadcast_to(found.astype(np.float32).reshape(-1, 1), shape))
        parts.append(np.stack(rows))
    return _imported(parts, "fp8", "tensor" if sizes == {1} else "head", fingerprint, source)


def add_to_checkpoint(folder: Path, scales: KVScales, granularity: Granularity) -> Path:
    """Write scales into a folder of safetensors so that vLLM finds them: a shard, its index entries, config.json.

    Raises:
        InvalidOption: it is no such folder, or quantised in a way whose loader does not look for scales.
        StorageError: a file could not be written.
    """
    from safetensors.numpy import save_file

    config = _read_json(folder / "config.json")
    quantization = config.get("quantization_config") or {"quant_method": "compressed-tensors", "format": "dense"}
    if quantization.get("quant_method") != "compressed-tensors":
        raise InvalidOption(
            f"{folder} is quantised by {quantization.get('quant_method')}: vLLM looks for KV scales in unquantised "
            "checkpoints and those of compressed-tensors."
        )
    tensors = to_vllm(scales, granularity)
    with atomic_file(folder / VLLM_SHARD) as part:
        save_file(tensors, part)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _read_json(index)
        listed["weight_map"] = listed.get("weight_map", {}) | dict.fromkeys(tensors, VLLM_SHARD)
        _write_json(index, listed)
    scheme = {"num_bits": 8, "type": "float", "strategy": VLLM_STRATEGIES[granularity], "dynamic": False}
    config["quantization_config"] = {"config_groups": {}, "ignore": []} | quantization | {
        "kv_cache_scheme": scheme | {"symmetric": True}
    }  # fmt: skip
    _write_json(folder / "config.json", config)
    return folder / VLLM_SHARD


def _stack(values: Any, order: npt.NDArray[np.intp], spec: ModelSpec) -> Float32:
    """One list a layer -> [L, K, D], layers in the model's order."""
    if len(values) != spec.num_layers or len(order) != spec.num_layers:
        raise ValueError(f"{len(values)} layers, the model has {spec.num_layers}")
    shape = (spec.num_kv_heads, spec.head_dim)
    rows = [np.asarray(values[index], np.float32).reshape(-1) for index in order]
    return np.stack([np.broadcast_to(row, shape) if row.size == 1 else row.reshape(shape) for row in rows])


def _vllm_tensor(tensors: Mapping[str, Float32], layer: int, part: str, source: str) -> Float32:
    start = f"model.layers.{layer}.self_attn"
    names = (f"{start}.{part}_scale", f"{start}.attn.{part}_scale", f"{start}.{part}_proj.{part}_scale")
    for name in (*names, f"{start}.kv_scale"):  # the last: one for both, in old checkpoints
        if name in tensors:
            return np.asarray(tensors[name])
    raise ScalesError(f"{source} has no {part} scale for layer {layer} (looked for {names[0]}).")


def _imported(
    parts: list[Float32], dtype: KVDtype, granularity: Granularity, fingerprint: str, source: str
) -> KVScales:
    for name, values in zip("kv", parts, strict=True):
        bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            raise ScalesError(f"{source}: a {name} scale of layer {bad[0][0]} is not a positive number.")
    k, v = (np.ascontiguousarray(values, np.float32) for values in parts)
    return KVScales(k, v, dtype, granularity, fingerprint, Provenance("imported", 1.0, 0, source))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidOption(f"{path} cannot be read ({error}): name a folder of safetensors with its config.") from None
    if not isinstance(data, dict):
        raise InvalidOption(f"{path} does not hold an object.")
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with atomic_file(path) as part:
        part.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
