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

Factors of rows (kv/rows.py) multiply scores, and the weights w of the softmax before these meet codes of values. Such
products w f may be too small for float16, or too large: f is anything from 2**-64 to 2**64. So log f is added to the
score, which makes w f what the exponential gives, at most 1 in each row of queries, and the sum of w that of w f / f.

What keys lack without their centre is a second product, of queries times the centre (twin.py's _against_centre) with
angles of places. A table of all places would be 4 D bytes a place, twice an INT8 cache's rows. Instead that product is
turned to the first place of a tile (one row of `Turns.starts`) and meet the same table of offsets in every tile.
Bytes that a program reads for its share of n places at D = 128, and, compiled for compute capability 8.6, the shared
memory and what each thread spills (decoding with 8 query heads a KV head; reading 128 tokens with 4):

                               rows     angles             n = 128   n = 512   decoding      reading
    table of all places        2 n D    4 n D              96 KiB    384 KiB   70 KiB, 0 B   92 KiB, 24 B
    turned to a tile's start   2 n D    n D / 16 + 256 D   65 KiB    164 KiB   57 KiB, 0 B   65 KiB, 0 B

(heads of 256 spilled 64 bytes, then none; with the factors of rows, which came later, reading spills 8 bytes, heads of
256 up to 24). Constants may be a hundred times what is left of a key, so the product must be as exact as float32: both
sides are split into two float16, and three of the four products are taken. At D = 128 they miss the largest score by
4e-7 of it, as do float32 and tf32x3. With tf32x3 the table, which is split before the loop, took 105 KiB of shared
memory.

FP8 is taken apart in integers, so that it works on devices whose hardware does not know it: the bits of an E4M3 number
moved into a float16 make that number times 2**-8, subnormals included.

The three integers that change from token to token (past, evicted, pinned) are read from the device, so a captured
decode step serves any of them. What a layer does not have (scales, factors, centres) is None, and compiled away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgekv.engines.torch.cache import LayerRows, Place
from edgekv.kv.rows import LARGEST_FACTOR, LEAST_FACTOR
from edgekv.kv.spec import TURN_REACH, TURN_STEP

_MIN_ROWS = 16  # the least that a matrix unit multiplies
_MAX_SPLITS = 64
_LEAST_SHARE = 128  # places of a split
_PROGRAMS = 256  # that decoding aims at: a few for each multiprocessor
_LEAST_FACTOR, _LARGEST_FACTOR = tl.constexpr(float(LEAST_FACTOR)), tl.constexpr(float(LARGEST_FACTOR))


@dataclass(frozen=True)
class Tile:
    """What a program of `_attend` holds at once: query rows against places, shared out over warps."""

    rows: int
    places: int
    warps: int
    stages: int = 2  # loads under way; a third takes shared memory that consumer cards do not have

    @classmethod
    def of(cls, size: int, query_rows: int, *, floats: bool, centred: bool) -> Tile:
        """The largest that stays in registers and in the 99 KiB of shared memory of a consumer card.

        Args:
            size: D. query_rows: of a KV head. floats: a float32 cache, which no matrix unit multiplies, so that whole
                rows lie in registers. centred: keys held less a centre. The products of both take twice the room.
        """
        large, wide = triton.next_power_of_2(size) > 128, floats or centred
        most = (32 if large else 64) // (2 if wide else 1)
        rows = min(most, max(_MIN_ROWS, triton.next_power_of_2(query_rows)))
        halved = (large and wide) or (floats and size > 64)
        return cls(rows, TURN_REACH // 2 if halved else TURN_REACH, 4 if rows == _MIN_ROWS and not wide else 8)


class TritonKernels:
    """See `Kernels`. Owns the memory that the parts of a decode step are put into.

    Args:
        heads: H. kv_heads: K. size: D. capacity: C.
    """

    captured = True

    def __init__(self, heads: int, kv_heads: int, size: int, capacity: int, device: torch.device) -> None:
        wanted = max(1, min(_MAX_SPLITS, _PROGRAMS // kv_heads, capacity // _LEAST_SHARE))
        self._splits = 1 << (wanted.bit_length() - 1)  # a power of two
        self._parts = torch.empty((heads, self._splits, size), device=device)
        self._tops = torch.empty((heads, self._splits, 2), device=device)  # largest score, sum of exponentials

    def store(self, keys: Tensor, values: Tensor, rows: LayerRows, place: Place) -> None:
        """See Kernels.store."""
        heads, count, size = keys.shape
        block = min(16, triton.next_power_of_2(count))
        for new, part in ((keys, rows.keys), (values, rows.values)):
            _store[(heads, triton.cdiv(count, block))](
                new.contiguous(),
                _plain(part.stored),
                part.scale,
                part.factors,
                place.state,
                count,
                SIZE=size,
                WIDTH=triton.next_power_of_2(size),
                BLOCK=block,
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
        kv_heads = len(rows.keys.stored)
        group = heads // kv_heads
        splits = self._splits if count == 1 else 1
        floats, centred = rows.keys.stored.dtype == torch.float32, rows.keys.centre is not None
        tile = Tile.of(size, group * count, floats=floats, centred=centred)
        out = torch.empty((heads, count, size), device=queries.device)
        common: dict[str, Any] = {
            "SIZE": size, "WIDTH": max(32, triton.next_power_of_2(size)), "GROUP": group, "SPLITS": splits,
        }  # fmt: skip
        grid = (triton.cdiv(group * count, tile.rows), kv_heads, splits)
        _attend[grid](
            queries.contiguous(),
            pinned_queries.contiguous(),
            rows.keys.centre,
            None if rows.turns is None else rows.turns.starts,
            None if rows.turns is None else rows.turns.within,
            _plain(rows.keys.stored),
            _plain(rows.values.stored),
            rows.keys.scale,
            rows.values.scale,
            rows.keys.factors,
            rows.values.factors,
            rows.values.centre,
            place.state,
            self._parts if splits > 1 else out,
            self._tops,
            count,
            scaling,
            ROWS=tile.rows,
            PLACES=tile.places,
            TURN=TURN_STEP,
            WINDOW=window or 0,
            SOFTCAP=softcap or 0.0,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **common,
        )
        if splits > 1:
            _combine[(heads,)](self._parts, self._tops, rows.values.scale, rows.values.centre, out, **common)
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
    new, stored, scale, factors, state, count,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    capacity = tl.load(state + 3)
    slot = _slot(tl.load(state) + token, tl.load(state + 1), tl.load(state + 2), capacity)
    there = (token[:, None] < count) & (channel[None] < SIZE)
    x = tl.load(new + (head * count + token[:, None]) * SIZE + channel[None], mask=there, other=0.0).to(tl.float32)
    if scale is not None:
        step = tl.load(scale + head * SIZE + channel, mask=channel < SIZE, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(step[None], (BLOCK, WIDTH)))
    if factors is not None:  # kv/rows.py: the least of 16 bits that keeps codes within 127
        largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
        least = tl.div_rn(largest, tl.full((BLOCK,), 127.0, tl.float32))
        least = tl.minimum(tl.maximum(least, _LEAST_FACTOR), _LARGEST_FACTOR)
        bits = (least.to(tl.int32, bitcast=True) + 0xFFFF) & 0x7FFF0000
        factor = bits.to(tl.float32, bitcast=True)
        tl.store(factors + head * capacity + slot, factor.to(tl.bfloat16), mask=token < count)
        x = tl.div_rn(x, tl.broadcast_to(factor[:, None], (BLOCK, WIDTH)))
    target = stored + head.to(tl.int64) * capacity * SIZE + slot[:, None] * SIZE + channel[None]
    if stored.dtype.element_ty == tl.int8:
        tl.store(target, _round(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8), mask=there)
    elif stored.dtype.element_ty == tl.uint8:
        tl.store(target, _encode_fp8(tl.minimum(tl.maximum(x, -448.0), 448.0)), mask=there)
    else:
        tl.store(target, x.to(stored.dtype.element_ty), mask=there)


@triton.jit
def _channels(vector, head, channel, SIZE: tl.constexpr):
    """A KV head's numbers, one a channel, of [K, D]: [1, WIDTH]."""
    return tl.load(vector + head * SIZE + channel, mask=channel < SIZE, other=0.0)[None]


@triton.jit
def _power(x):
    """The power of two below the largest of each row [ROWS, n], [ROWS, 1]."""
    bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits.to(tl.float32, bitcast=True), 1e-30)[:, None]


@triton.jit
def _queries(pointer, offsets, there, step, HALF: tl.constexpr):
    """Query rows times `step`, [ROWS, WIDTH], and the power of two [ROWS, 1] that each is divided by."""
    q = tl.load(pointer + offsets, mask=there, other=0.0).to(tl.float32) * step
    power = _power(q)
    q = q / power
    return q.to(tl.float16) if HALF else q, power


@triton.jit
def _split(x):
    """Two float16 that together have 22 bits of x: the second is 2**11 times what the first leaves."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def _exact_dot(x, high, low):
    """x times a matrix that is split, nearly as exact as float32: the product of both second halves is left out."""
    x_high, x_low = _split(x)
    return tl.dot(x_high, high) + tl.dot(x_low, high, tl.dot(x_high, low)) * (1 / 2048)


@triton.jit
def _tile(stored, offsets, there):
    """Rows as they are multiplied: float16, or float32 from a float32 cache."""
    x = tl.load(stored + offsets, mask=there, other=0)
    if stored.dtype.element_ty == tl.uint8:
        return _decode_fp8(x)
    return x if stored.dtype.element_ty == tl.float32 else x.to(tl.float16)


@triton.jit
def _outputs(mixed, total, v_scale, v_centre, head, channel, SIZE: tl.constexpr):
    """Weighted sums of codes [rows, WIDTH] and the weights' sums [rows, 1] -> means of the values themselves."""
    mixed = mixed / tl.maximum(total, 1e-30)
    if v_scale is not None:
        mixed = mixed * _channels(v_scale, head, channel, SIZE)
    if v_centre is not None:
        mixed = mixed + _channels(v_centre, head, channel, SIZE)
    return mixed


@triton.jit
def _against_centre(queries, centre, head, offsets, there, pair, SIZE: tl.constexpr):
    """twin.py's function of this name, both halves, [ROWS, WIDTH/2] each."""
    low = tl.load(queries + offsets, mask=there, other=0.0)
    high = tl.load(queries + offsets + SIZE // 2, mask=there, other=0.0)
    c_low = tl.load(centre + head * SIZE + pair, mask=pair < SIZE // 2, other=0.0)[None]
    c_high = tl.load(centre + head * SIZE + SIZE // 2 + pair, mask=pair < SIZE // 2, other=0.0)[None]
    return low * c_low + high * c_high, high * c_low - low * c_high


@triton.jit
def _angles(table, places, pair, SIZE: tl.constexpr):
    """cos and sin of the angles of some places from a table of `Turns`; places and pair: broadcastable."""
    row, there = table + places * SIZE + pair, (pair < SIZE // 2) & (places >= 0)
    return tl.load(row, mask=there, other=0.0), tl.load(row + SIZE // 2, mask=there, other=0.0)


@triton.jit
def _attend(
    queries, pinned_queries, k_centre, starts, within, keys, values, k_scale, v_scale, k_factors, v_factors, v_centre,
    state, out, tops, count, scaling,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PLACES: tl.constexpr, TURN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = keys.dtype.element_ty != tl.float32
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past, evicted, pinned, capacity = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    channel = tl.arange(0, WIDTH)
    row = block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    own = past + token  # the place of each row's token
    line = (head * GROUP + row % GROUP) * count + token
    real = row < GROUP * count
    there = real[:, None] & (channel[None] < SIZE)
    offsets = line[:, None] * SIZE + channel[None]
    before = head.to(tl.int64) * capacity * SIZE  # of all heads together there may be more than 32 bits count
    keys += before
    values += before

    last = past + tl.minimum((block * ROWS + ROWS - 1) // GROUP, count - 1)
    first = past * 0
    if WINDOW > 0:
        first = tl.maximum(past + block * ROWS // GROUP - WINDOW + 1, 0) // PLACES * PLACES
    share = tl.cdiv(tl.cdiv(last + 1 - first, SPLITS), PLACES) * PLACES
    start = first + split * share  # a multiple of PLACES, as every tile's
    stop = tl.minimum(start + share, last + 1)
    border = tl.where(evicted > 0, tl.minimum(tl.maximum(pinned, start), stop), start)  # of pinned places and others

    step = tl.full((1, WIDTH), scaling, tl.float32)
    if k_scale is not None:
        step = step * _channels(k_scale, head, channel, SIZE)
    if k_centre is not None:
        pair = tl.arange(0, WIDTH // 2)
        halves, there_too = line[:, None] * SIZE + pair[None], real[:, None] & (pair[None] < SIZE // 2)
        by_cos, by_sin = _against_centre(pinned_queries, k_centre, head, halves, there_too, pair, SIZE)
        unit = _power(tl.abs(by_cos) + tl.abs(by_sin))
        by_cos, by_sin = by_cos / unit, by_sin / unit
        unit *= scaling
        near_cos, near_sin = _angles(within, tl.arange(0, PLACES)[None], pair[:, None], SIZE)
        cos_high, cos_low = _split(near_cos)
        sin_high, sin_low = _split(near_sin)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in tl.static_range(2):
        q, power = _queries(pinned_queries if part == 0 else queries, offsets, there, step, HALF)
        low = start if part == 0 else border
        end = border if part == 0 else stop
        for begin in range(low // PLACES * PLACES, end, PLACES):
            place = begin + tl.arange(0, PLACES)
            slot = _slot(place, evicted, pinned, capacity)
            base = slot * SIZE
            inside = (place >= low) & (place < end)
            k = _tile(keys, base[None] + channel[:, None], inside[None] & (channel[:, None] < SIZE))
            scores = tl.dot(q, k, input_precision="ieee") * power
            if k_factors is not None:
                scores *= tl.load(k_factors + head * capacity + slot, mask=inside, other=0.0).to(tl.float32)[None]
            if k_centre is not None:  # as exact as float32: constants may be a hundred times what is left of a key
                cos, sin = _angles(starts, begin // TURN, pair[None], SIZE)
                scores += unit * _exact_dot(by_cos * cos + by_sin * sin, cos_high, cos_low)
                scores += unit * _exact_dot(by_sin * cos - by_cos * sin, sin_high, sin_low)
            if SOFTCAP > 0:
                scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
            seen = inside[None] & (place[None] <= own[:, None])
            if WINDOW > 0:
                seen = seen & (own[:, None] - place[None] < WINDOW)
            scores = tl.where(seen, scores, -1e30)
            if v_factors is not None:
                factor = tl.load(v_factors + head * capacity + slot, mask=inside, other=1.0).to(tl.float32)[None]
                scores += tl.log(factor)
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(weights if v_factors is None else weights * (1 / factor), axis=1)
            v = _tile(values, base[:, None] + channel[None], inside[:, None] & (channel[None] < SIZE))
            weights = weights.to(tl.float16) if HALF else weights
            mixed = mixed * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
            top = higher

    if SPLITS > 1:  # one token: its rows are heads
        line = line * SPLITS + split
        tl.store(out + line[:, None] * SIZE + channel[None], mixed, mask=there)
        tl.store(tops + line * 2, top, mask=real)
        tl.store(tops + line * 2 + 1, total, mask=real)
    else:
        tl.store(out + offsets, _outputs(mixed, total[:, None], v_scale, v_centre, head, channel, SIZE), mask=there)


@triton.jit
def _combine(
    parts, tops, v_scale, v_centre, out,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    line = head * SPLITS + tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    top, total = tl.load(tops + line * 2), tl.load(tops + line * 2 + 1)
    weight = tl.exp(top - tl.max(top, axis=0))
    mask = channel[None] < SIZE
    part = tl.load(parts + line[:, None] * SIZE + channel[None], mask=mask & (line[:, None] >= 0), other=0.0)
    mixed, total = tl.sum(part * weight[:, None], axis=0)[None], tl.sum(total * weight, axis=0)
    whole = _outputs(mixed, total, v_scale, v_centre, head // GROUP, channel, SIZE)
    tl.store(out + head * SIZE + channel[None], whole, mask=mask)
