"""The scales file: with which scale each channel of the cache is quantised, and for which model.

Symmetric and static, x ~ code * scale. The file is safetensors with two float32 tensors, k and v, each [L, K, D],
whatever the granularity (a coarser one repeats values), and text metadata that says what it scales and how it came
about. A file that does not match the model, the dtype or the granularity is refused; scale 1.0 is never
assumed.

A third tensor, k_centre, is there for models whose keys carry large constants (the K bias of Qwen2): what is taken out
of a key before it is rotated, zero but for a few pairs of channels. A fourth, v_centre, is taken out of values: the
weights of attention sum to 1, so adding it to what comes out puts it back exactly. FP8 has both, of all channels, INT4
that of keys.
Scales are then of what is left. An engine that keeps keys and values whole takes `without_centre()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from edgekv.errors import ScalesError
from edgekv.files import atomic_file
from edgekv.kv.quant import LIMIT, Float32, coarsen, pair_norms
from edgekv.kv.spec import Granularity, KVDtype, scales_dtype
from edgekv.model.spec import ModelSpec

FORMAT_VERSION = "1"
CENTRED_VERSION = "2"  # with a k_centre, which an older reader would leave out of the scores
VALUE_CENTRED_VERSION = "3"  # with a v_centre, and maybe a k_centre
REQUIRED = ("k", "v")
TENSORS = (*REQUIRED, "k_centre", "v_centre")  # in the order of the hash
DEFAULT_NAME = "kv_scales.safetensors"
"""The file in a model's folder for INT8 per channel; others carry their dtype and granularity in the name."""


@dataclass(frozen=True)
class Provenance:
    """How the scales came about; shown by `edgekv info`, never used in arithmetic."""

    method: str  # envelope, percentile or mse
    headroom: float  # the factor on the thresholds
    tokens: int  # how many tokens were observed
    corpus: str  # a short name of the text
    k_error: float = 0.0  # relative root-mean-square error on the observed keys
    v_error: float = 0.0
    saturated: float = 0.0  # share of observed values beyond the largest code


@dataclass(frozen=True)
class KVScales:
    """Scales of one model's cache in one dtype and granularity."""

    k: Float32  # [L, K, D]
    v: Float32  # [L, K, D]
    dtype: KVDtype
    granularity: Granularity
    fingerprint: str  # of the model, as its edgekv.json says it
    provenance: Provenance
    k_centre: Float32 | None = None  # [L, K, D], or None: nothing is taken out
    v_centre: Float32 | None = None  # the same of values

    @property
    def centre_pairs(self) -> npt.NDArray[np.int64]:
        """The RoPE pairs p (channels p and p + D/2) of which something is taken out in some layer."""
        if self.k_centre is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(pair_norms(self.k_centre).any(axis=(0, 1))).astype(np.int64)

    @property
    def centred_layers(self) -> tuple[int, ...]:
        """The layers in whose keys something is taken out."""
        return tuple(layer for layer in range(len(self.k)) if self.centre_of(layer) is not None)

    def centre_of(self, layer: int) -> Float32 | None:
        """What is taken out of a layer's keys, [K, D]; None: nothing."""
        return None if self.k_centre is None or not self.k_centre[layer].any() else self.k_centre[layer]

    def without_centre(self) -> KVScales:
        """Scales for keys and values that are kept whole: wide enough for the centres, that of keys at any position.
        Codes made with the one do not mean the same with the other."""
        k, v = self.k, self.v
        if self.k_centre is not None:
            norms = pair_norms(self.k_centre)
            k = self._widened(k, np.concatenate([norms, norms], axis=-1))
        if self.v_centre is not None:
            v = self._widened(v, np.abs(self.v_centre))
        return replace(self, k=k, v=v, k_centre=None, v_centre=None)

    def _widened(self, scales: Float32, sizes: Float32) -> Float32:
        """Scales for numbers that are larger by so much at most, all [L, K, D]."""
        return coarsen((scales + sizes / LIMIT[self.dtype]).astype(np.float32), self.granularity)

    def check(self, spec: ModelSpec, fingerprint: str, dtype: KVDtype, granularity: Granularity) -> None:
        """Make sure that these scales are for this model and a cache of this dtype.

        Raises:
            ScalesError: they are not; the message says what differs.
        """
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        for what, found, wanted in (
            ("model", self.fingerprint, fingerprint),
            ("dtype", self.dtype, scales_dtype(dtype)),
            ("granularity", self.granularity, granularity),
            ("shape", self.k.shape, shape),
            ("shape", self.v.shape, shape),
        ):
            if found != wanted:
                raise ScalesError(
                    f"These KV scales are for {what} {found}, but this cache needs {what} {wanted}: "
                    f"make fitting ones with `edgekv calibrate`."
                )


def scales_name(dtype: KVDtype, granularity: Granularity) -> str:
    """The file name in a model's folder; one file serves caches of several dtypes that take the same scales."""
    dtype = scales_dtype(dtype)
    return (
        DEFAULT_NAME if (dtype, granularity) == ("int8", "channel") else f"kv_scales.{dtype}-{granularity}.safetensors"
    )


def from_thresholds(
    k: Float32, v: Float32, dtype: KVDtype, granularity: Granularity, fingerprint: str, provenance: Provenance
) -> KVScales:
    """Scales from the magnitudes [L, K, D] that the largest code should stand for. Dead channels get the smallest."""
    tiny = np.float32(1e-6)
    scales = [(np.maximum(coarsen(t, granularity), tiny) / LIMIT[dtype]).astype(np.float32) for t in (k, v)]
    return KVScales(scales[0], scales[1], dtype, granularity, fingerprint, provenance)


def write_scales(path: Path, scales: KVScales) -> None:
    """Write the file, atomically."""
    from safetensors.numpy import save_file

    provenance = {name: str(value) for name, value in vars(scales.provenance).items()}
    tensors = {name: array for name in TENSORS if (array := getattr(scales, name)) is not None}
    metadata = {
        "format": "edgekv-kv-scales",
        "format_version": _version(tensors),
        "fingerprint": scales.fingerprint,
        "dtype": scales.dtype,
        "granularity": scales.granularity,
        "divisor": str(LIMIT[scales.dtype]),
        "sha256": _digest(tensors),
        **provenance,
    }
    with atomic_file(path) as part:
        save_file(tensors, part, metadata)


def read_scales(path: Path) -> KVScales:
    """Read a scales file.

    Raises:
        ScalesError: it is missing, damaged, of an unknown version, or holds something that is no scale.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ScalesError(f"There are no KV scales at {path}: make them with `edgekv calibrate`.")
    try:
        with safe_open(path, framework="np") as file:
            metadata, found = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in TENSORS if name in found or name in REQUIRED}
    except (SafetensorError, OSError, TypeError) as error:
        raise ScalesError(
            f"{path} is not a whole scales file ({error}): make it again with `edgekv calibrate`."
        ) from None
    version = _version(tensors)
    if metadata.get("format") != "edgekv-kv-scales" or metadata.get("format_version") != version:
        raise ScalesError(f"{path} is not a KV scales file of format version {version}.")
    _check_values(path, tensors)
    if metadata.get("sha256", _digest(tensors)) != _digest(tensors):
        raise ScalesError(f"{path} is damaged (its hash does not fit): make it again with `edgekv calibrate`.")
    try:
        return _from_metadata(tensors, metadata)
    except (KeyError, ValueError) as error:
        raise ScalesError(
            f"{path} does not say what it scales ({error}): make it again with `edgekv calibrate`."
        ) from None


def _version(tensors: Collection[str]) -> str:
    """Of a file with these tensors."""
    if "v_centre" in tensors:
        return VALUE_CENTRED_VERSION
    return CENTRED_VERSION if "k_centre" in tensors else FORMAT_VERSION


def _digest(tensors: dict[str, Float32]) -> str:
    """The SHA-256 of the numbers; a file without one is accepted, one with another is not."""
    return hashlib.sha256(b"".join(array.tobytes() for array in tensors.values())).hexdigest()


def _check_values(path: Path, tensors: dict[str, Float32]) -> None:
    for name, array in tensors.items():
        if array.ndim != 3 or array.dtype != np.float32 or array.shape != tensors["k"].shape:
            raise ScalesError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}; it must be float32 [layers, heads, size]."
            )
        bad = np.argwhere(~(np.isfinite(array) & ((array > 0) | (name not in REQUIRED))))
        if len(bad):
            layer, head, channel = (int(i) for i in bad[0])
            wanted = "positive" if name in REQUIRED else "finite"
            raise ScalesError(
                f"{path}: the {name} scale of layer {layer}, head {head}, channel {channel} is not {wanted}."
            )


def _from_metadata(tensors: dict[str, Float32], metadata: dict[str, str]) -> KVScales:
    dtype, granularity = metadata["dtype"], metadata["granularity"]
    if dtype not in get_args(KVDtype) or granularity not in get_args(Granularity):
        raise ValueError(f"dtype {dtype}, granularity {granularity}")
    provenance = Provenance(
        method=metadata["method"],
        headroom=float(metadata["headroom"]),
        tokens=int(metadata["tokens"]),
        corpus=metadata["corpus"],
        k_error=float(metadata["k_error"]),
        v_error=float(metadata["v_error"]),
        saturated=float(metadata["saturated"]),
    )
    return KVScales(
        tensors["k"],
        tensors["v"],
        dtype,  # type: ignore[arg-type]
        granularity,  # type: ignore[arg-type]
        metadata["fingerprint"],
        provenance,
        tensors.get("k_centre"),
        tensors.get("v_centre"),
    )
