"""The kernels in Triton: rows are read as they are stored, once for all query heads that share them.

    store     one program a KV head and block of new tokens: quantise, write into the ring
    attend    one program a KV head, block of query rows and part of the places. A row is one query head of one token,
              so all H/K heads of a KV head share each load. Decoding (one token) splits the places over many programs
              (Flash-Decoding), reading a prompt does not; online softmax (Dao et al., arXiv 2205.14135) either way.
              After evictions pinned places are gone through first, with queries of their own, and the window then
    combine   joins the parts

Scales never touch a row: those of the keys go into the query, those of the values into the output, to which also the
values' centre is added. A query times such scales overflows float16 easily (K channels of some models reach 200,
onnxruntime PR 32515), so each row of queries is divided by a power of two, which is exact, and its scores are
multiplied by it again in float32.

FP8 is taken apart in integers, so that it works on devices whose hardware does not know it: the bits of an E4M3 number
moved into a float16 make that number times 2**-8, subnormals included.

The three integers that change from token to token (past, evicted, pinned) are read from the device, so a captured
decode step serves any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgekv.engines.torch.cache import LayerRows, Place
from edgekv.engines.torch.kernels.twin import against_centre

_MIN_ROWS = 16  # the least that a matrix unit multiplies
_MAX_SPLITS = 64
_LEAST_SHARE = 128  # places of a split
_PROGRAMS = 256  # that decoding aims at: a few for each multiprocessor

_FLOAT, _INT8, _FP8 = 0, 1, 2
_KINDS = {torch.int8: _INT8, torch.float8_e4m3fn: _FP8}


@dataclass(frozen=True)
class Tile:
    """What a program of `_attend` holds at once: query rows against places, shared out over warps."""

    rows: int
    places: int
    warps: int
    stages: int = 2  # loads under way; a third takes shared memory that consumer cards do not have

    @classmethod
    def of(cls, size: int, query_rows: int, *, wide: bool) -> Tile:
        """The largest that stays in registers and in the 99 KiB of shared memory of a consumer card.

        Args:
            size: D. query_rows: of a KV head. wide: some products are of float32 (a centre, or a float32 cache).
        """
        large = triton.next_power_of_2(size) > 128
        most = (32 if large else 64) // (2 if wide else 1)
        rows = min(most, max(_MIN_ROWS, triton.next_power_of_2(query_rows)))
        return cls(rows, 32 if large and wide else 64, 4 if rows == _MIN_ROWS and not wide else 8)


class TritonKernels:
    """See `Kernels`. Owns the memory that the parts of a decode step are put into.

    Args:
        heads: H. kv_heads: K. size: D. capacity: C.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, capacity: int, device: torch.device) -> None:
        wanted = max(1, min(_MAX_SPLITS, _PROGRAMS // kv_heads, capacity // _LEAST_SHARE))
        self._splits = 1 << (wanted.bit_length() - 1)  # a power of two
        self._parts = torch.empty((heads, self._splits, size), device=device)
        self._tops = torch.empty((heads, self._splits, 2), device=device)  # largest score, sum of exponentials

    def store(self, keys: Tensor, values: Tensor, rows: LayerRows, place: Place) -> None:
        """See Kernels.store."""
        heads, count, size = keys.shape
        block = min(16, triton.next_power_of_2(count))
        for new, stored, scale in ((keys, rows.keys, rows.k_scale), (values, rows.values, rows.v_scale)):
            _store[(heads, triton.cdiv(count, block))](
                new.contiguous(),
                _plain(stored),
                new if scale is None else scale,
                place.state,
                count,
                rows.keys.shape[1],
                SIZE=size,
                WIDTH=triton.next_power_of_2(size),
                BLOCK=block,
                KIND=_KINDS.get(stored.dtype, _FLOAT),
            )

    def attend(
        self,
        queries: Tensor,
        pinned_queries: Tensor,
        rows: LayerRows,
        place: Place,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See Kernels.attend."""
        heads, count, size = queries.shape
        kv_heads = len(rows.keys)
        group = heads // kv_heads
        splits = self._splits if count == 1 else 1
        exact = rows.keys.dtype == torch.float32
        tile = Tile.of(size, group * count, wide=exact or rows.turns is not None)
        out = torch.empty((heads, count, size), device=queries.device)
        scaled, moved = rows.k_scale is not None, rows.v_centre is not None
        v_scale, v_centre = rows.v_scale if scaled else queries, rows.v_centre if moved else queries
        common: dict[str, Any] = {
            "SIZE": size,
            "WIDTH": triton.next_power_of_2(size),
            "GROUP": group,
            "SPLITS": splits,
            "SCALED": scaled,
            "VALUES_CENTRED": moved,
        }
        across = queries if rows.k_centre is None else against_centre(pinned_queries, rows.k_centre)
        grid = (triton.cdiv(group * count, tile.rows), kv_heads, splits)
        _attend[grid](
            queries.contiguous(),
            pinned_queries.contiguous(),
            across.contiguous(),
            queries if rows.turns is None else rows.turns,
            _plain(rows.keys),
            _plain(rows.values),
            rows.k_scale if scaled else queries,
            v_scale,
            v_centre,
            place.state,
            out,
            self._parts,
            self._tops,
            count,
            rows.keys.shape[1],
            scaling,
            softcap or 0.0,
            ROWS=tile.rows,
            PLACES=tile.places,
            WINDOW=window or 0,
            SOFTCAP=softcap is not None,
            KIND=_KINDS.get(rows.keys.dtype, _FLOAT),
            CENTRED=rows.turns is not None,
            HALF=not exact,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **common,
        )
        if splits > 1:
            _combine[(heads,)](self._parts, self._tops, v_scale, v_centre, out, **common)
        return out


def _plain(stored: Tensor) -> Tensor:
    """FP8 goes into a kernel as its bytes."""
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


@triton.jit
def _slot(place, evicted, pinned, capacity):
    """The slot of a place: cache.Place.slots. The window wraps round once at most: one remainder serves all places."""
    slot = place + evicted % (capacity - pinned)
    return tl.where(place < pinned, place, tl.where(slot < capacity, slot, slot - (capacity - pinned)))


@triton.jit
def _round(x):
    """To the nearest integer, ties to even, for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _encode_fp8(x):
    """float32 within +-448 -> the bits of the nearest E4M3 number, ties to even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _round(size * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | tl.where(x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def _decode_fp8(code):
    """The bits of an E4M3 number -> float16."""
    wide = code.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _store(
    new, stored, scale, state, count, capacity,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    slot = _slot(tl.load(state) + token, tl.load(state + 1), tl.load(state + 2), capacity)
    there = (token[:, None] < count) & (channel[None] < SIZE)
    x = tl.load(new + (head * count + token[:, None]) * SIZE + channel[None], mask=there, other=0.0).to(tl.float32)
    if KIND != 0:
        step = tl.load(scale + head * SIZE + channel, mask=channel < SIZE, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(step[None], (BLOCK, WIDTH)))
    target = stored + (head * capacity + slot[:, None]) * SIZE + channel[None]
    if KIND == 1:
        tl.store(target, _round(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8), mask=there)
    elif KIND == 2:
        tl.store(target, _encode_fp8(tl.minimum(tl.maximum(x, -448.0), 448.0)), mask=there)
    else:
        tl.store(target, x.to(stored.dtype.element_ty), mask=there)


@triton.jit
def _queries(pointer, offsets, there, step, HALF: tl.constexpr):
    """Query rows times `step`, [ROWS, WIDTH], and the power of two [ROWS] that each is divided by."""
    q = tl.load(pointer + offsets, mask=there, other=0.0).to(tl.float32) * step
    bits = tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-30)
    q = q / power[:, None]
    return q.to(tl.float16) if HALF else q, power


@triton.jit
def _tile(stored, offsets, there, KIND: tl.constexpr, HALF: tl.constexpr):
    """Rows as they are multiplied: float16, or float32 from a float32 cache."""
    if KIND == 0:
        x = tl.load(stored + offsets, mask=there, other=0.0)
    else:
        x = tl.load(stored + offsets, mask=there, other=0)
    if KIND == 2:
        return _decode_fp8(x)
    return x.to(tl.float16) if HALF else x


@triton.jit
def _attend(
    queries, pinned_queries, across, turns, keys, values, k_scale, v_scale, v_centre, state, out, parts, tops,
    count, capacity, scaling, cap,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    CENTRED: tl.constexpr, VALUES_CENTRED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past, evicted, pinned = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    channel = tl.arange(0, WIDTH)
    row = block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    own = past + token  # the place of each row's token
    query_head = head * GROUP + row % GROUP
    there = (row[:, None] < GROUP * count) & (channel[None] < SIZE)
    offsets = (query_head[:, None] * count + token[:, None]) * SIZE + channel[None]

    last = past + tl.minimum((block * ROWS + ROWS - 1) // GROUP, count - 1)
    first = past * 0
    if WINDOW > 0:
        first = tl.maximum(past + block * ROWS // GROUP - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, SPLITS), PLACES) * PLACES
    start = first + split * share
    stop = tl.minimum(start + share, last + 1)
    border = tl.where(evicted > 0, tl.minimum(tl.maximum(pinned, start), stop), start)  # of pinned places and others

    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    if CENTRED:
        q_across = tl.load(across + offsets, mask=there, other=0.0) * scaling
    for part in tl.static_range(2):
        step = tl.full((ROWS, WIDTH), scaling, tl.float32)
        if SCALED:
            step = step * tl.load(k_scale + head * SIZE + channel, mask=channel < SIZE, other=0.0)[None]
        q, power = _queries(pinned_queries if part == 0 else queries, offsets, there, step, HALF)
        end = border if part == 0 else stop
        for begin in range(start if part == 0 else border, end, PLACES):
            place = begin + tl.arange(0, PLACES)
            slot = _slot(place, evicted, pinned, capacity)
            base = (head * capacity + slot) * SIZE
            inside = place < end
            k = _tile(keys, base[None] + channel[:, None], inside[None] & (channel[:, None] < SIZE), KIND, HALF)
            scores = tl.dot(q, k, input_precision="ieee") * power[:, None]
            if CENTRED:  # as exact as float32: constants may be a hundred times what is left of a key
                turned = channel[:, None] + place[None] * SIZE
                turn = tl.load(turns + turned, mask=inside[None] & (channel[:, None] < SIZE), other=0.0)
                scores += tl.dot(q_across, turn, input_precision="tf32x3")
            if SOFTCAP:
                scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
            seen = inside[None] & (place[None] <= own[:, None])
            if WINDOW > 0:
                seen = seen & (own[:, None] - place[None] < WINDOW)
            scores = tl.where(seen, scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(weights, axis=1)
            v = _tile(values, base[:, None] + channel[None], inside[:, None] & (channel[None] < SIZE), KIND, HALF)
            weights = weights.to(tl.float16) if HALF else weights
            mixed = mixed * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
            top = higher

    if SPLITS > 1:  # one token: its rows are heads
        line = query_head * SPLITS + split
        tl.store(parts + line[:, None] * SIZE + channel[None], mixed, mask=there)
        tl.store(tops + line * 2, top, mask=row < GROUP)
        tl.store(tops + line * 2 + 1, total, mask=row < GROUP)
    else:
        if SCALED:
            mixed = mixed * tl.load(v_scale + head * SIZE + channel, mask=channel < SIZE, other=0.0)[None]
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        if VALUES_CENTRED:
            mixed += tl.load(v_centre + head * SIZE + channel, mask=channel < SIZE, other=0.0)[None]
        tl.store(out + offsets, mixed, mask=there)


@triton.jit
def _combine(
    parts, tops, v_scale, v_centre, out,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr,
    VALUES_CENTRED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    line = head * SPLITS + tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    top, total = tl.load(tops + line * 2), tl.load(tops + line * 2 + 1)
    weight = tl.exp(top - tl.max(top, axis=0))
    mask = channel[None] < SIZE
    part = tl.load(parts + line[:, None] * SIZE + channel[None], mask=mask & (line[:, None] >= 0), other=0.0)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    if SCALED:
        mixed = mixed * tl.load(v_scale + head // GROUP * SIZE + channel, mask=channel < SIZE, other=0.0)
    if VALUES_CENTRED:
        mixed += tl.load(v_centre + head // GROUP * SIZE + channel, mask=channel < SIZE, other=0.0)
    tl.store(out + head * SIZE + channel, mixed, mask=channel < SIZE)
