"""The scales file: what is written comes back, and what does not fit or is damaged is refused (case C11)."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edgekv.errors import ScalesError
from edgekv.kv.scales import (
    DEFAULT_NAME,
    KVScales,
    Provenance,
    from_thresholds,
    read_scales,
    scales_name,
    write_scales,
)
from edgekv.kv.spec import GRANULARITIES, KV_DTYPES, scales_dtype
from edgekv.model.catalog import models_folder
from edgekv.model.spec import ModelSpec

SPEC = ModelSpec("llama", 2, 64, 128, 4, 2, 4, 512, 2048)
PROVENANCE = Provenance("envelope", 1.1, 4096, "seed prompts, «新»", 0.004, 0.005, 1e-6)


def scales(**changes: Any) -> KVScales:
    """Scales of SPEC's cache, each one different."""
    numbers = np.arange(1, 17, dtype=np.float32).reshape(2, 2, 4) / 127
    return replace(KVScales(numbers, numbers * 3, "int8", "channel", "0123456789abcdef", PROVENANCE), **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is in order."""
    write_scales(tmp_path / DEFAULT_NAME, scales())
    return tmp_path / DEFAULT_NAME


def rewrite(path: Path, k: Any = None, v: Any = None, **metadata: str | None) -> None:
    """Write the file again with other tensors or metadata, as some other tool would."""
    tensors = load_file(path)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"]
    header = {name: value for name, value in (header | metadata).items() if value is not None}
    if k is not None or v is not None:
        header.pop("sha256", None)
    save_file({"k": tensors["k"] if k is None else k, "v": tensors["v"] if v is None else v}, path, header)


def same(a: KVScales, b: KVScales) -> bool:
    """Equal but for the provenance."""
    names = ("dtype", "granularity", "fingerprint")
    numbers = np.array_equal(a.k, b.k) and np.array_equal(a.v, b.v)
    return numbers and all(getattr(a, name) == getattr(b, name) for name in names)


def test_roundtrip(path: Path) -> None:
    """Numbers to the last bit, and every word about them; the file appears whole."""
    found = read_scales(path)
    assert same(found, scales())
    assert found.provenance == PROVENANCE
    assert found.k.dtype == np.float32
    assert os.listdir(path.parent) == [DEFAULT_NAME]
    found.check(SPEC, "0123456789abcdef", "int8", "channel")


def test_names() -> None:
    """One file a dtype and granularity; the default has the plain name."""
    kinds = {scales_dtype(dtype) for dtype in KV_DTYPES}
    names = {scales_name(dtype, granularity) for dtype in KV_DTYPES for granularity in GRANULARITIES}
    assert len(names) == len(kinds) * len(GRANULARITIES)
    assert scales_name("k8v4", "head") == scales_name("int8", "head")
    assert scales_name("int8", "channel") == DEFAULT_NAME
    assert scales_name("fp8", "head") == "kv_scales.fp8-head.safetensors"


def test_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """case C11: no scale of 1.0 is assumed."""
    with pytest.raises(ScalesError, match=r"no KV scales at .*edgekv calibrate"):
        read_scales(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ({"fingerprint": "fedcba9876543210"}, "model 0123456789abcdef.*model fedcba9876543210"),
        ({"dtype": "fp8"}, "dtype int8.*dtype fp8"),
        ({"granularity": "head"}, "granularity channel.*granularity head"),
        ({"spec": replace(SPEC, num_layers=3)}, r"shape \(2, 2, 4\).*shape \(3, 2, 4\)"),
        ({"spec": replace(SPEC, num_kv_heads=1)}, "shape"),
        ({"spec": replace(SPEC, head_dim=8)}, "shape"),
    ],
)
def test_every_mismatch_is_refused(path: Path, wanted: dict[str, Any], what: str) -> None:
    """case C11: another model, dtype, granularity or geometry; both sides are named, and the way to fitting ones."""
    arguments = {"spec": SPEC, "fingerprint": "0123456789abcdef", "dtype": "int8", "granularity": "channel"} | wanted
    with pytest.raises(ScalesError, match=what) as caught:
        read_scales(path).check(**arguments)
    assert "edgekv calibrate" in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_no_scale_is_zero_negative_or_infinite(path: Path, name: str, value: float) -> None:
    """Refused with the place."""
    numbers = load_file(path)[name].copy()
    numbers[1, 0, 3] = value
    rewrite(path, **{name: numbers})
    with pytest.raises(ScalesError, match=f"the {name} scale of layer 1, head 0, channel 3 is not positive"):
        read_scales(path)


@pytest.mark.parametrize(
    "tensor",
    [np.ones((2, 2, 4), np.float64), np.ones((2, 2, 4), np.float16), np.ones((2, 8), np.float32),
     np.ones((2, 2, 2), np.float32), np.ones((1, 2, 4), np.float32), np.ones((2, 2, 4), np.int32)],
)  # fmt: skip
def test_wrong_type_or_shape(path: Path, tensor: Any) -> None:
    """float32 [layers, heads, size] for both, or nothing."""
    rewrite(path, v=tensor)
    with pytest.raises(ScalesError, match="must be float32"):
        read_scales(path)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"format_version": "2"}, "format version 1"),
        ({"format_version": None}, "format version 1"),
        ({"format": "kv-scales"}, "not a KV scales file"),
        ({"fingerprint": None}, "does not say what it scales"),
        ({"dtype": None}, "does not say what it scales"),
        ({"dtype": "int3"}, "int3"),
        ({"granularity": "layer"}, "layer"),
        ({"tokens": "many"}, "does not say what it scales"),
        ({"headroom": None}, "does not say what it scales"),
        ({"sha256": "0" * 64}, "damaged"),
    ],
)
def test_metadata_that_cannot_be_trusted(path: Path, metadata: dict[str, Any], match: str) -> None:
    """Unknown versions, missing words and unknown values are refused by name."""
    rewrite(path, **metadata)
    with pytest.raises(ScalesError, match=match):
        read_scales(path)


def test_a_file_without_a_hash_is_read(path: Path) -> None:
    """Files of the first version did not have one."""
    rewrite(path, sha256=None)
    assert same(read_scales(path), scales())


def centred(*names: str) -> KVScales:
    """Scales with these centres."""
    numbers = np.linspace(-3, 3, 16, dtype=np.float32).reshape(2, 2, 4)
    return scales(dtype="fp8", **dict.fromkeys(names, numbers))


@pytest.mark.parametrize(
    ("names", "version"), [((), "1"), (("k_centre",), "2"), (("v_centre",), "3"), (("k_centre", "v_centre"), "3")]
)
def test_centres_come_back_and_older_readers_are_told(tmp_path: Path, names: tuple[str, ...], version: str) -> None:
    """A reader of an older version asks for that version, and refuses a file with what it would leave out."""
    path = tmp_path / "s.safetensors"
    write_scales(path, centred(*names))
    found = read_scales(path)
    assert same(found, centred(*names))
    for name in ("k_centre", "v_centre"):
        assert np.array_equal(getattr(found, name), getattr(centred(*names), name))
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert metadata["format_version"] == version
    for other in {"1", "2", "3", "4"} - {version}:
        save_file(load_file(path), path, metadata | {"format_version": other})
        with pytest.raises(ScalesError, match=f"not a KV scales file of format version {version}"):
            read_scales(path)


@pytest.mark.parametrize("name", ["k_centre", "v_centre"])
def test_a_centre_is_finite_and_part_of_the_hash(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.safetensors"
    for number, match in ((np.nan, f"the {name} scale of layer 1, head 0, channel 3 is not finite"), (9, "damaged")):
        write_scales(path, centred("k_centre", "v_centre"))
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        tensors[name][1, 0, 3] = number
        save_file(tensors, path, metadata)
        with pytest.raises(ScalesError, match=match):
            read_scales(path)


def test_scales_for_whole_rows_reach_as_far() -> None:
    """Whatever is within the thresholds beside the centres is within them without; keys at any angle."""
    whole, given = centred("k_centre", "v_centre").without_centre(), centred("k_centre", "v_centre")
    assert whole.k_centre is None
    assert whole.v_centre is None
    assert given.k_centre is not None
    assert given.v_centre is not None
    assert np.allclose(448 * whole.v, 448 * given.v + np.abs(given.v_centre))
    norms = np.hypot(given.k_centre[..., :2], given.k_centre[..., 2:])
    assert np.allclose(448 * whole.k, 448 * given.k + np.concatenate([norms, norms], axis=-1))


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 8, b"GGUF" + bytes(100), struct.pack("<Q", 2) + b"{}"])
def test_not_a_safetensors_file(path: Path, content: bytes) -> None:
    """One sentence, whatever the file is."""
    path.write_bytes(content)
    with pytest.raises(ScalesError, match="edgekv calibrate"):
        read_scales(path)


def test_a_folder_is_no_scales_file(tmp_path: Path) -> None:
    """A path to a folder is refused like any other thing that is no file."""
    with pytest.raises(ScalesError):
        read_scales(tmp_path)


def test_every_truncation_is_refused(path: Path) -> None:
    """No proper beginning of the file is taken for the file."""
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ScalesError):
            read_scales(path)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_damaged_byte(path: Path, flip: int) -> None:
    """Each byte in turn, in header and data: refused, or the same scales for something that is not this model, or a
    difference in the words about them only. The numbers are never others."""
    raw, whole = path.read_bytes(), scales()
    outcomes = {"refused": 0, "another model": 0, "same numbers": 0}
    for index in range(len(raw)):
        damaged = bytearray(raw)
        damaged[index] ^= flip
        path.write_bytes(damaged)
        try:
            found = read_scales(path)
        except ScalesError:
            outcomes["refused"] += 1
            continue
        assert np.array_equal(found.k, whole.k), index
        assert np.array_equal(found.v, whole.v), index
        assert (found.dtype, found.granularity) == (whole.dtype, whole.granularity)
        if found.fingerprint == whole.fingerprint:
            outcomes["same numbers"] += 1
        else:
            outcomes["another model"] += 1
            with pytest.raises(ScalesError, match="model"):
                found.check(SPEC, whole.fingerprint, "int8", "channel")
    assert outcomes["refused"] > 128  # every byte of the 2 x 16 numbers, and most of the header
    assert outcomes["another model"] <= 16


# ---- from thresholds -------------------------------------------------------------------------------------------------


def test_scales_from_thresholds() -> None:
    """The largest code stands for the threshold; coarser granularities take the largest of what shares a scale."""
    k = np.array([[[1.27, 2.54], [12.7, 0.0]]], np.float32)
    channel = from_thresholds(k, k, "int8", "channel", "f", PROVENANCE)
    np.testing.assert_allclose(channel.k[0, 0], [0.01, 0.02], rtol=1e-6)
    assert channel.k[0, 1, 1] > 0  # a channel that was never used still gets a scale
    head = from_thresholds(k, k, "int8", "head", "f", PROVENANCE)
    np.testing.assert_allclose(head.k[0], [[0.02, 0.02], [0.1, 0.1]], rtol=1e-6)
    tensor = from_thresholds(k, k, "int8", "tensor", "f", PROVENANCE)
    np.testing.assert_allclose(tensor.v, 0.1, rtol=1e-6)
    fp8 = from_thresholds(k, k, "fp8", "channel", "f", PROVENANCE)
    np.testing.assert_allclose(fp8.k[0, 0], np.array([1.27, 2.54]) / 448, rtol=1e-6)


@pytest.mark.parametrize("path", sorted(models_folder().glob("*/kv_scales*.safetensors")), ids=lambda p: p.parent.name)
def test_shipped_scales_are_in_order(path: Path) -> None:
    """What the project ships can be read, and has the name of what it holds."""
    shipped = read_scales(path)
    assert path.name == scales_name(shipped.dtype, shipped.granularity)
    assert shipped.provenance.tokens >= 1000
