"""The memory plan: every byte a line with its formula, and the largest cache that fits a budget.

    cache            2 L K C D x bits / 8           (keys and values. In edgekv's own operator and in the torch engine
                                                    an INT8 row has D + 2 bytes; in the operator one of 4 bits D/2 + 2,
                                                    and layers with a window may have a ring of R slots:
                                                    KVSpec.ring_slots)
    key centres      4 L K D + 8 P C                where keys are held less their centre (kv/scales.py): that, and cos
                                                    and sin of P pairs of channels at each slot (2 P C in INT4); in the
                                                    torch engine those of D/2 pairs at C/32 + 64 slots (cache.Turns)
    value centres    4 L K D                        where values are (FP8)
    RoPE tables      N x 2 x 4 C D/2 + 24 C D/2      where rows move: N pairs of tables, the angles they are made from
    RoPE angles      N x 4 x 4 T D/2                where the cache is a ring: of one prefill chunk of T tokens
    weights          what the file holds; the runtime keeps one packed copy and drops the file's pages. Edgekv's own
                     matmul keeps them in the bits that they have, 5 and 6 among them
    embedding        ONNX Runtime maps a tied embedding, to read it by row, and packs a copy for the head (of both
                     matrices where it is held as a sum of two); edgekv's own matmul has one copy for both
    unpacked codes   those of bitsandbytes, which MatMulBnb4 unpacks one matrix at a time
    workspace        4 T (8 E + 3 F + qkv)           activations of one prefill chunk of T tokens
    logits           4 V
    runtime          Python, ONNX Runtime and the session, measured
    server, schemas  only for `edgekv serve`: its packages, and 1.14 KiB a token of the vocabulary for answers that must
                     follow a schema

Predicted and measured peak agree within 5 % (tests/parity/test_memory.py). The file works from a config alone and
loads no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgekv.errors import InvalidOption, MemoryBudgetError, UnsupportedModel
from edgekv.kv.spec import (
    BITS,
    DEFAULT_SINKS,
    FACTOR_BYTES,
    FLOATS,
    MIN_CAPACITY,
    OWN_OPERATOR_ONLY,
    PREFILL_CHUNK,
    ROW_FACTORS,
    TURN_REACH,
    TURN_STEP,
    Granularity,
    KVDtype,
    KVSpec,
)
from edgekv.model.spec import ModelSpec
from edgekv.units import MIB, format_bytes

CAPACITY_STEP = 64

RUNTIME_BYTES = 148 * MIB
"""Python with edgekv's packages (66 MiB) and an ONNX Runtime session apart from its weights, once most of a vocabulary
has been looked up: the peak of the default model less the plan's other lines, on Linux x86-64 with onnxruntime 1.32.0.
2026-11-30, AVX-512: 143 MiB after 2048 tokens of English prose, 157 MiB after as many ids from the whole vocabulary
(float 156), 152 and 158 MiB at 8192. A day before, on another machine with AVX-512: 133 and 144 MiB; with AVX2 alone:
157 MiB. The figure lies between, within 5 % of a whole process on each."""

PACKED_RUNTIME_BYTES = 133 * MIB
"""The same where edgekv's own matmul takes the place of MatMulNBits (engines/onnx/packed.py), the weights
counted as that packs them. Measured 2026-12-01 with AVX-512 on the default model at 2048 slots, whatever the text: 124
to 142 MiB. The 18 are pages of ONNX Runtime's and other libraries: Linux maps more of them around each one that is
touched where its cache has the file in large pieces, as after they were written (ext4, 6.18), and fewer where it has
read it page by page. The figure lies between."""

SERVER_BYTES = 14 * MIB
"""starlette, uvicorn and what they import. Measured 2026-11-30: the peak of `edgekv serve` on the default model at 2048
slots, 364 MiB after answers from most of the vocabulary, less the other lines."""

SCHEMA_BYTES_A_TOKEN = 1170
"""llguidance's own form of the vocabulary and its parsers. Measured in the same run: 55 to 60 MiB for 49,152 tokens
when the first answer had to follow a schema; nothing more for the second."""

TORCH_RUNTIME_BYTES = 710 * MIB
"""Python, torch, transformers (244 MiB when imported), the pages of the source that have been read, and the largest
matrices while they are unpacked. Measured 2026-11-29 on the default model: its peak, 1236 MiB, less the other lines.
The CUDA context and captured graph of a GPU are still to be measured."""


@dataclass(frozen=True)
class Footprint:
    """What a model's weights take, known exactly from a converted model or estimated from a config."""

    weight_bytes: int
    tied_bytes: int  # the part of weight_bytes that a tied embedding makes ONNX Runtime hold twice
    exact: bool
    unpacked_bytes: int = 0  # the largest matrix in float32, where the runtime unpacks codes at every step

    @classmethod
    def of(cls, spec: ModelSpec, weight_bytes: int, scheme: str = "", *, exact: bool = True) -> Footprint:
        """Of a model whose data file has `weight_bytes`, held as `scheme` says (holding.py); exact: it is there."""
        digits = 2 if "int8+8/" in scheme else 1
        tied = digits * spec.vocab_size * spec.hidden_size if spec.tied_embeddings else 0
        largest = 4 * spec.hidden_size * max(spec.ffn_size, spec.qkv_rows)
        return cls(
            weight_bytes, tied, exact=exact, unpacked_bytes=largest if "nf4/" in scheme or "fp4/" in scheme else 0
        )

    @classmethod
    def estimate(cls, spec: ModelSpec, bits: int = 4, group: int = 32) -> Footprint:
        """From the geometry: 4-bit layers with a float32 scale and zero point a block, embedding and head in 8 bits."""
        per_layer = spec.hidden_size * (spec.qkv_rows + spec.num_heads * spec.head_dim + 3 * spec.ffn_size)
        layers = spec.num_layers * per_layer * (bits / 8 + 4 / group + bits / 8 / group)
        embedding = spec.vocab_size * spec.hidden_size * (1 + 4 / 32)
        total = int(layers + embedding * (1 if spec.tied_embeddings else 2))
        return cls.of(spec, total, exact=False)

    @classmethod
    def in_torch(cls, spec: ModelSpec, weight_bytes: int, device: str) -> Footprint:
        """Of the torch engine: float32 throughout on a CPU; on CUDA packed, with embedding and head in 16 bits."""
        embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
        if device != "cpu":
            return cls(weight_bytes + embeddings, 0, exact=False)
        per_layer = spec.hidden_size * (spec.qkv_rows + spec.num_heads * spec.head_dim + 3 * spec.ffn_size)
        return cls(4 * (spec.num_layers * per_layer + embeddings), 0, exact=True)


@dataclass(frozen=True)
class PlanRequest:
    """What the user asks for. `context` None means: as much as fits."""

    dtype: KVDtype = "int8"
    granularity: Granularity = "channel"
    context: int | None = None
    sinks: int | None = None
    stride: int | None = None
    chunk: int = PREFILL_CHUNK  # tokens of one prefill run
    native: bool = False  # for edgekv's own operator: a ring (engines/onnx/ring.py)
    runtime_bytes: int = RUNTIME_BYTES
    packed: bool = False  # with edgekv's own matmul (engines/onnx/packed.py)
    torch: bool = False  # planned for the torch engine
    centre_pairs: int = 0  # pairs of channels of which keys are held less a constant (kv/scales.py)
    value_centres: bool = False  # whether values are
    server: bool = False  # with what `edgekv serve` takes beside

    @property
    def factors(self) -> bool:
        """Whether the engine gives rows factors of their own, of the dtypes that have them."""
        return self.native or self.torch

    @property
    def runs(self) -> bool:
        """Whether there is an operator here that holds such a cache."""
        if self.torch:
            return min(BITS[self.dtype]) >= 8
        return self.native or self.dtype not in OWN_OPERATOR_ONLY

    def __post_init__(self) -> None:
        KVSpec(MIN_CAPACITY, self.dtype, self.granularity, sinks=0)  # refuses what is no dtype or granularity


@dataclass(frozen=True)
class PlanLine:
    """One item of the plan."""

    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True)
class Plan:
    """What a loaded model takes, and out of what."""

    spec: ModelSpec
    kv: KVSpec
    lines: tuple[PlanLine, ...]
    budget_bytes: int | None  # None: no limit was given
    row_factors: bool = False  # rows have a factor of their own beside the scales (kv/rows.py)

    @property
    def total_bytes(self) -> int:
        """The sum of all lines: the predicted peak."""
        return sum(line.size_bytes for line in self.lines)

    @property
    def cache_bytes(self) -> int:
        """Keys and values."""
        return sum(line.size_bytes for line in self.lines if line.name.startswith(("cache (", "cache, ")))

    @property
    def numbers(self) -> str:
        """How numbers of the cache are held, in words."""
        if self.kv.dtype in FLOATS:
            return self.kv.dtype
        factors = " and a factor per row" if self.row_factors else ""
        return f"{self.kv.dtype} with scales per {self.kv.granularity}{factors}"

    @property
    def fits(self) -> bool:
        """Whether the plan is within the budget."""
        return self.budget_bytes is None or self.total_bytes <= self.budget_bytes


def cache_bytes(spec: ModelSpec, dtype: KVDtype, tokens: int, *, factors: bool = False) -> int:
    """Keys and values of so many tokens in every layer: 2 L K C D x bits / 8, and the factors of their rows."""
    return slot_bytes(spec, dtype, factors) * spec.num_layers * tokens


def slot_bytes(spec: ModelSpec, dtype: KVDtype, factors: bool) -> int:
    """Keys and values of one token in one layer: 2 K D x bits / 8, and the factors of its rows."""
    numbers = spec.head_dim * sum(BITS[dtype]) // 8
    return spec.num_kv_heads * (numbers + 2 * row_extra_bytes(dtype, factors))


def row_extra_bytes(dtype: KVDtype, factors: bool) -> int:
    """Bytes of a row beside its D numbers. factors: whether the engine gives rows any where the dtype has them."""
    return FACTOR_BYTES if dtype in ROW_FACTORS and (factors or dtype in OWN_OPERATOR_ONLY) else 0


def pair_bytes(dtype: KVDtype) -> int:
    """Bytes of a pair's cos and sin at a slot, where keys are held less their centre."""
    return 2 if BITS[dtype][0] == 4 else 8


def layer_slots(spec: ModelSpec, kv: KVSpec, request: PlanRequest) -> tuple[int, ...]:
    """Slots of each layer's cache."""
    if not request.native:
        return (kv.capacity,) * spec.num_layers
    return tuple(kv.ring_slots(window, request.chunk) for window in spec.windows)


def make_plan(spec: ModelSpec, footprint: Footprint, request: PlanRequest, budget_bytes: int | None) -> Plan:
    """Fit the cache to the budget.

    Raises:
        MemoryBudgetError: not even the smallest useful cache fits, or not the context asked for; says what would help.
        InvalidOption: an impossible context, or more sinks than fit.
        UnsupportedModel: the model's own context is too short for any cache.
    """
    if spec.max_context < MIN_CAPACITY:
        raise UnsupportedModel(
            f"The model's own context is {spec.max_context} tokens; at least {MIN_CAPACITY} are needed to chat."
        )
    if request.context is not None:
        if request.context > spec.max_context:
            raise InvalidOption(
                f"A context of {request.context} tokens is more than the model's own: "
                f"ask for at most {spec.max_context}."
            )
        capacity = request.context
    else:
        capacity = largest_capacity(spec, footprint, request, budget_bytes)
    plan = _plan(spec, footprint, request, capacity, budget_bytes)
    if not plan.fits:
        raise MemoryBudgetError(_refusal(plan, footprint, request))
    return plan


def largest_capacity(spec: ModelSpec, footprint: Footprint, request: PlanRequest, budget_bytes: int | None) -> int:
    """The largest multiple of 64 that fits, at most the model's own context; at least the smallest useful one."""
    most = max(spec.max_context // CAPACITY_STEP, 1) * CAPACITY_STEP
    if budget_bytes is None:
        return most
    step = _step_bytes(spec, footprint, request)
    capacity = most  # downwards, because the total falls where a layer's own ring becomes possible
    while capacity > MIN_CAPACITY and (excess := _total(spec, footprint, request, capacity) - budget_bytes) > 0:
        capacity -= -(-excess // step) * CAPACITY_STEP  # no step saves more
    return max(capacity, MIN_CAPACITY)


def _step_bytes(spec: ModelSpec, footprint: Footprint, request: PlanRequest) -> int:
    """What CAPACITY_STEP more tokens take where every layer has a slot for each."""
    whole = replace(request, native=False)
    rows = slot_bytes(spec, request.dtype, request.factors) - slot_bytes(spec, request.dtype, whole.factors)
    totals = [_total(spec, footprint, whole, MIN_CAPACITY + more) for more in (0, CAPACITY_STEP)]
    centres = pair_bytes(request.dtype) * request.centre_pairs
    return totals[1] - totals[0] + (rows * spec.num_layers + centres) * CAPACITY_STEP


def tokens_that_fit(spec: ModelSpec, footprint: Footprint, request: PlanRequest, budget_bytes: int) -> int:
    """The largest capacity with the request's dtype, whatever its context, sinks and stride; 0 if none fits."""
    free = replace(request, context=None, sinks=None, stride=None)
    try:
        return make_plan(spec, footprint, free, budget_bytes).kv.capacity
    except MemoryBudgetError:
        return 0


def _plan(spec: ModelSpec, footprint: Footprint, request: PlanRequest, capacity: int, budget_bytes: int | None) -> Plan:
    sinks = DEFAULT_SINKS if request.sinks is None else request.sinks
    kv = KVSpec(capacity, request.dtype, request.granularity, sinks, request.stride or 0)
    factors = row_extra_bytes(kv.dtype, request.factors) > 0
    return Plan(spec, kv, _lines(spec, footprint, request, kv), budget_bytes, factors)


def _total(spec: ModelSpec, footprint: Footprint, request: PlanRequest, capacity: int) -> int:
    """Of a cache of any capacity, even one that the request's own sinks and stride do not fit."""
    stride = min(request.stride or 0, capacity - capacity // 4)
    kv = KVSpec(capacity, request.dtype, request.granularity, sinks=0, stride=stride)
    return sum(line.size_bytes for line in _lines(spec, footprint, request, kv))


def _cache_lines(spec: ModelSpec, request: PlanRequest, kv: KVSpec) -> tuple[PlanLine, ...]:
    """The cache, and apart from it the layers that hold only a window."""
    slots = layer_slots(spec, kv, request)
    size = slot_bytes(spec, kv.dtype, request.factors)
    lines = []
    for count in sorted(set(slots), reverse=True):
        whole, layers = count == kv.capacity, slots.count(count)
        name = f"cache ({kv.dtype})" if whole else "cache, own rings"
        numbers = f"{layers} x {spec.num_kv_heads} x {count}"
        formula = _cache_formula(spec, request, "L K C" if whole else "L K R", numbers)
        lines.append(PlanLine(name, size * layers * count, formula))
    return tuple(lines)


def _cache_formula(spec: ModelSpec, request: PlanRequest, rows: str, numbers: str) -> str:
    """How the size of so many rows of keys and of values comes about; numbers: `rows` with its letters filled in."""
    dim, extra = spec.head_dim, row_extra_bytes(request.dtype, request.factors)
    k, v = BITS[request.dtype]
    if k != v:
        return f"{rows} (D + D/{k // v} + {2 * extra}) = {numbers} x {dim + dim * v // k + 2 * extra} of {k} bits"
    extra = extra * 8 // k  # in numbers of so many bits
    row, items = (f"(D + {extra})", dim + extra) if extra else ("D", dim)
    return f"2 {rows} {row} = 2 x {numbers} x {items} of {k} bits"


def _lines(spec: ModelSpec, footprint: Footprint, request: PlanRequest, kv: KVSpec) -> tuple[PlanLine, ...]:
    lines = (
        *_weight_lines(spec, footprint, request),
        *_cache_lines(spec, request, kv),
        *_torch_lines(spec, request, kv),
        *_scale_lines(spec, kv),
        *_centre_lines(spec, request, kv),
        _rope_line(spec, request, kv),
        *_run_lines(spec, request),
    )
    return tuple(line for line in (*lines, *_server_lines(spec, request)) if line.size_bytes)


def _scale_lines(spec: ModelSpec, kv: KVSpec) -> list[PlanLine]:
    if kv.dtype in FLOATS:
        return []
    return [PlanLine("cache scales", 8 * spec.num_layers * spec.num_kv_heads * spec.head_dim, "2 L K D x 4 bytes")]


def _server_lines(spec: ModelSpec, request: PlanRequest) -> list[PlanLine]:
    if not request.server:
        return []
    schemas = SCHEMA_BYTES_A_TOKEN * spec.vocab_size
    return [
        PlanLine("server", SERVER_BYTES, "starlette, uvicorn (measured)"),
        PlanLine("schemas", schemas, f"V x {SCHEMA_BYTES_A_TOKEN} bytes, once an answer must follow one"),
    ]


def _weight_lines(spec: ModelSpec, footprint: Footprint, request: PlanRequest) -> tuple[PlanLine, ...]:
    how = "float32, or packed on CUDA" if request.torch else "packed by the runtime"
    return (
        PlanLine("weights", footprint.weight_bytes, how + ("" if footprint.exact else " (estimated)")),
        _tied_line(spec, footprint, request),
        PlanLine("unpacked codes", footprint.unpacked_bytes, "the largest matrix, E max(F, qkv) x 4 bytes"),
    )


def _centre_lines(spec: ModelSpec, request: PlanRequest, kv: KVSpec) -> list[PlanLine]:
    """What puts back what keys and values are held without. Rows that move are held whole."""
    if not (request.native or request.torch):
        return []
    channels, lines = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim, []
    if request.centre_pairs:
        pairs = spec.head_dim // 2 if request.torch else request.centre_pairs
        slots, shown = kv.capacity, "C"
        if request.torch:
            slots, shown = -(-kv.capacity // TURN_STEP) + TURN_REACH, f"(C/{TURN_STEP} + {TURN_REACH})"
        size = pair_bytes(request.dtype)
        formula = f"L K D x 4 bytes + {shown} x {pairs} pairs x {size} bytes"
        lines.append(PlanLine("key centres", channels + size * pairs * slots, formula))
    if request.value_centres:
        lines.append(PlanLine("value centres", channels, "L K D x 4 bytes"))
    return lines


def _rope_line(spec: ModelSpec, request: PlanRequest, kv: KVSpec) -> PlanLine:
    """A ring is read with the angles of one run's tokens; rows that move, with tables of all positions."""
    half, count = spec.head_dim // 2, len(spec.ropes)
    if request.native or request.torch:
        return PlanLine(
            "RoPE angles", 16 * count * request.chunk * half, f"{request.chunk} tokens x {4 * count} D/2 x 4 bytes"
        )
    formula = f"C D/2 x ({2 * count} x 4 bytes + 3 x 8 while they are made)"
    return PlanLine("RoPE tables", (8 * count + 24) * kv.capacity * half, formula)


def _run_lines(spec: ModelSpec, request: PlanRequest) -> tuple[PlanLine, ...]:
    """What a run of the model takes, and the process itself."""
    workspace = 4 * request.chunk * (8 * spec.hidden_size + 3 * spec.ffn_size + spec.qkv_rows)
    packages = "torch, transformers" if request.torch else "ONNX Runtime, session"
    return (
        PlanLine("logits", 4 * spec.vocab_size, "V x 4 bytes"),
        PlanLine("prefill workspace", workspace, f"{request.chunk} tokens x (8 E + 3 F + qkv) x 4 bytes"),
        PlanLine("runtime", request.runtime_bytes, f"Python, {packages} (measured)"),
    )


def _tied_line(spec: ModelSpec, footprint: Footprint, request: PlanRequest) -> PlanLine:
    digits = "2 " * (footprint.tied_bytes > spec.vocab_size * spec.hidden_size)
    numbers = f"{digits.replace(' ', ' x ')}{spec.vocab_size} x {spec.hidden_size}"
    size = 0 if request.packed else footprint.tied_bytes
    return PlanLine("tied embedding", size, f"{digits}V E = {numbers}, mapped for lookup")


def _torch_lines(spec: ModelSpec, request: PlanRequest, kv: KVSpec) -> list[PlanLine]:
    """What attention in plain torch needs beside the cache: scores, and one layer's rows as floats."""
    if not request.torch:
        return []
    scores = 3 * 4 * request.chunk * spec.num_heads * kv.capacity
    rows = 2 * 4 * spec.num_kv_heads * kv.capacity * spec.head_dim
    return [PlanLine("attention", scores + rows, f"C x ({request.chunk} tokens x H x 3 + 2 K D) x 4 bytes")]


def _refusal(plan: Plan, footprint: Footprint, request: PlanRequest) -> str:
    table = "; ".join(f"{line.name} {format_bytes(line.size_bytes)}" for line in plan.lines)
    budget = plan.budget_bytes or 0
    remedies = [f"give at least --memory {-(-plan.total_bytes // MIB)}MiB"]
    fitting = largest_capacity(plan.spec, footprint, request, budget)
    if _works(plan, footprint, request, fitting):
        remedies.insert(0, f"use --context {fitting}")
    smaller_cache = replace(request, dtype="int8")
    if max(BITS[request.dtype]) > 8 and _works(plan, footprint, smaller_cache, plan.kv.capacity):
        remedies.append("use --kv-dtype int8")
    return (
        f"A cache of {plan.kv.capacity} tokens needs {format_bytes(plan.total_bytes)}, "
        f"{format_bytes(plan.total_bytes - budget)} more than the budget of {format_bytes(budget)} ({table}): "
        f"{', '.join(remedies)}, use a smaller model, or close other programs."
    )


def _works(plan: Plan, footprint: Footprint, request: PlanRequest, capacity: int) -> bool:
    """Whether this request with this capacity would be accepted."""
    try:
        return _plan(plan.spec, footprint, request, capacity, plan.budget_bytes).fits
    except InvalidOption:  # the sinks or the stride asked for do not fit so small a cache
        return False
