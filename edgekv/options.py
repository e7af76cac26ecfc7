"""LoadOptions: how a model is loaded, and the plan that follows from it. Light: nothing here loads a tensor library."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from edgekv import device as hardware
from edgekv.about import about
from edgekv.calibrate.observe import can_centre
from edgekv.calibrate.thresholds import MAX_PAIRS
from edgekv.device import Device
from edgekv.engines import EngineName, choose
from edgekv.engines.onnx import native
from edgekv.errors import InvalidOption, ScalesError
from edgekv.kv.plan import (
    PACKED_RUNTIME_BYTES,
    RUNTIME_BYTES,
    TORCH_RUNTIME_BYTES,
    Footprint,
    Plan,
    PlanRequest,
    make_plan,
)
from edgekv.kv.scales import read_scales, scales_name
from edgekv.kv.spec import FLOATS, MEAN_FREE, MIN_CAPACITY, Granularity, KVDtype, KVSpec
from edgekv.model.catalog import home as cache_home
from edgekv.model.converted import ConvertedModel
from edgekv.model.spec import ModelSpec
from edgekv.text.precheck import OVERFLOWS, Overflow
from edgekv.units import MIB, parse_bytes

_MOST_THREADS = 64
"""That may be asked for on any machine; thousands keep it busy with nothing but themselves."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. The defaults live here and nowhere else.

    Raises:
        InvalidOption: a number is none, or negative, or there is no such policy; the rest is refused where it is used.
    """

    memory: str | int | None = about("Budget of the whole process, e.g. 2GiB. Default: free memory less a reserve.")
    context: int | None = about("Capacity of the cache in tokens. Default: what fits, at most the model's own.")
    kv_dtype: KVDtype = about("How the cache is stored.", default="int8")
    granularity: Granularity = about("What shares one scale.", default="channel")
    sinks: int | None = about("Least number of tokens that are never evicted. Default: 4.")
    stride: int | None = about("Tokens that leave at once. Default: an eighth of the capacity.")
    overflow: Overflow = about("What happens when a prompt does not fit.", default="error")
    scales: str | os.PathLike[str] | None = about("KV scales file. Default: the one in the model's folder.")
    device: Device = about("Where it runs.", default="cpu")
    engine: EngineName = about("What computes: onnx, or torch (an extra). Default: what serves best.", default="auto")
    threads: int = about("CPU threads; 0 is one a core.", default=0)
    home: str | os.PathLike[str] | None = about("Cache folder. Default: EDGEKV_HOME, or the user's cache folder.")

    def __post_init__(self) -> None:
        for name in ("context", "sinks", "stride", "threads"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise InvalidOption(f"{name} is {value!r}; it must be a whole number, and not negative.")
        most = max(_MOST_THREADS, os.cpu_count() or 1)
        if self.threads > most:
            raise InvalidOption(f"threads is {self.threads}; it must be at most {most}: one a core serves best.")
        if self.overflow not in OVERFLOWS:
            raise InvalidOption(f"Unknown overflow policy {self.overflow!r}: choose {' or '.join(OVERFLOWS)}.")


def home_of(options: LoadOptions) -> Path:
    """The cache folder. An empty name is none, as that of EDGEKV_HOME: it would be the current folder."""
    return cache_home(Path(options.home) if options.home else None)


def plan_for(model: ConvertedModel, options: LoadOptions, *, server: bool = False) -> Plan:
    """The memory plan of a converted model under these options. server: with what `edgekv serve` takes beside.

    Raises:
        MemoryBudgetError, InvalidOption: see `edgekv.kv.plan.make_plan`.
    """
    footprint = footprint_of(model, options)
    request = plan_request(model.spec, options, model, server=server)
    return make_plan(model.spec, footprint, request, budget(options))


def footprint_of(model: ConvertedModel, options: LoadOptions) -> Footprint:
    """What the weights of a converted model take in the engine that serves these options."""
    if choose(options.engine, options.device, options.kv_dtype).name == "torch":
        return Footprint.in_torch(model.spec, model.description.weight_bytes, options.device)
    packed = model.description.packed_bytes if _own_product(options.device) else 0
    footprint = Footprint.of(model.spec, packed or model.description.weight_bytes, model.description.scheme)
    in_registers = options.device == "cpu" and native.table_refusal() is None
    return replace(footprint, unpacked_bytes=0) if in_registers else footprint


def plan_request(
    spec: ModelSpec, options: LoadOptions, model: ConvertedModel | None = None, *, server: bool = False
) -> PlanRequest:
    """The part of the options that the plan is about. model: if there is more of it than a config; server: with what
    `edgekv serve` takes beside."""
    torch = choose(options.engine, options.device, options.kv_dtype).name == "torch"
    pairs, values = _centres(spec, options, model)
    return PlanRequest(
        options.kv_dtype,
        options.granularity,
        options.context,
        options.sinks,
        options.stride,
        packed=not torch and _own_product(options.device),
        torch=torch,
        server=server,
        runtime_bytes=TORCH_RUNTIME_BYTES if torch else _onnx_runtime_bytes(options.device),
        native=not torch and native.refusal(spec, KVSpec(MIN_CAPACITY, options.kv_dtype), options.device) is None,
        centre_pairs=pairs,
        value_centres=values,
    )


def _centres(spec: ModelSpec, options: LoadOptions, model: ConvertedModel | None) -> tuple[int, bool]:
    """Pairs of channels of which keys are held less a constant, and whether values are: what the scales say or, as long
    as there are none, what calibrating is expected to find."""
    if options.kv_dtype in FLOATS:
        return 0, False
    if model is not None:
        own = model.folder / scales_name(options.kv_dtype, options.granularity)
        try:
            scales = read_scales(own if options.scales is None else Path(options.scales))
            return len(scales.centre_pairs), scales.v_centre is not None
        except ScalesError:
            pass  # they are still to be made; or whoever needs them says what is wrong
    values = options.kv_dtype == "fp8"
    if not can_centre(spec):
        return 0, values
    return spec.head_dim // 2 if options.kv_dtype in MEAN_FREE else MAX_PAIRS * spec.qkv_bias, values


def _own_product(device: str) -> bool:
    """Whether edgekv's own matmul multiplies by the weights."""
    return device == "cpu" and native.matmul_refusal() is None


def _onnx_runtime_bytes(device: str) -> int:
    return PACKED_RUNTIME_BYTES if _own_product(device) else RUNTIME_BYTES


def budget(options: LoadOptions) -> int:
    """Bytes the process may use: as given, or what is free less a reserve."""
    if options.memory is not None:
        size = parse_bytes(options.memory)
        if size < MIB and str(options.memory).isdigit():
            raise InvalidOption(f"A memory of {size} bytes holds no model: did you mean {size}MiB?")
        return size
    free = hardware.free_memory(options.device)
    return free - hardware.reserve(free)
