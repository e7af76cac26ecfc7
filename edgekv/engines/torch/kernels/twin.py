"""The kernels in plain torch: slow, obvious, and the oracle of the Triton ones.

Scales never touch a row: those of the keys are folded into the query, those of the values into the output. Nor do the
factors f of rows, which multiply scores and probabilities:

    score(t, j) = f_k[j] * sum_d (q[t, d] * k_scale[d]) * code_k[j, d]
    out[t, d] = v_scale[d] * sum_j (p[t, j] * f_v[j]) * code_v[j, d]

nor do centres: that of the keys becomes a second sum in the scores, that of the values is added to the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgekv.engines.torch.cache import LayerRows, Place, Turns
from edgekv.kv.quant import LIMIT
from edgekv.kv.rows import LARGEST_FACTOR, LEAST_FACTOR
from edgekv.kv.spec import TURN_STEP

captured = False
"""Places are Python integers here: a graph would keep those of its capture."""


def store(keys: Tensor, values: Tensor, rows: LayerRows, place: Place) -> None:
    """See Kernels.store."""
    slots = place.slots(place.past, place.past + keys.shape[1])
    for new, part in ((keys, rows.keys), (values, rows.values)):
        scaled, stored = new.float(), part.stored
        if part.scale is not None:
            scaled = scaled / part.scale[:, None]
        if part.factors is not None:
            factors = row_factors(scaled)
            part.factors[:, slots] = factors.bfloat16()
            scaled = scaled / factors[..., None]
        codes = encode(scaled, stored.dtype)
        if stored.dtype == torch.float8_e4m3fn:  # no indexing with this type
            codes, stored = codes.view(torch.uint8), stored.view(torch.uint8)
        stored[:, slots] = codes


def row_factors(rows: Tensor) -> Tensor:
    """kv/rows.py's function of this name: of rows [K, T, D] float32, [K, T] float32 that bfloat16 holds exactly."""
    sizes = rows.abs()
    largest = sizes.where(~sizes.isnan(), 0).amax(-1)
    least = (largest / LIMIT["int8"]).clamp(float(LEAST_FACTOR), float(LARGEST_FACTOR))
    return ((least.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def encode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [K, T, D] float32, scaled, as stored: kv/quant.py's numerics."""
    if dtype == torch.int8:
        rows = rows.round().clamp(-127, 127)
    elif dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-LIMIT["fp8"], LIMIT["fp8"])
    return rows.to(dtype)


def attend(
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
    length = place.past + count
    first = 0 if window is None else max(0, place.past - window + 1)
    pinned = max(0, min(place.pinned, length) - first)
    keys, values = (_read(part.stored, place, first, length) for part in (rows.keys, rows.values))  # [K, n, D]
    scores = _scores(_grouped(queries, kv_heads, rows.keys.scale), keys)  # [K, H/K T, n]
    if pinned and place.evicted:
        scores[..., :pinned] = _scores(_grouped(pinned_queries, kv_heads, rows.keys.scale), keys[:, :pinned])
    if rows.keys.factors is not None:
        scores *= _read(rows.keys.factors, place, first, length)[:, None]
    if rows.keys.centre is not None and rows.turns is not None:
        across = _against_centre(_grouped(pinned_queries, kv_heads, None), rows.keys.centre)
        scores += _scores(across, _angles(rows.turns, length)[first:])
    scores = scores.mul_(scaling).view(heads, count, length - first)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + _mask(first, place.past, count, window, scores.device)
    weights = scores.softmax(-1).view(kv_heads, -1, length - first)
    if rows.values.factors is not None:
        weights *= _read(rows.values.factors, place, first, length)[:, None]
    mixed = weights @ values  # [K, H/K T, D]
    if rows.values.scale is not None:
        mixed = mixed * rows.values.scale[:, None]
    if rows.values.centre is not None:
        mixed = mixed + rows.values.centre[:, None]
    return mixed.view(heads, count, size)


def _read(stored: Tensor, place: Place, start: int, stop: int) -> Tensor:
    """Rows in places start .. stop-1, [K, n, D] float32, without their scales; or their factors, [K, n]."""
    if not place.evicted:  # no row has wrapped round
        return stored[:, start:stop].float()
    slots = place.slots(start, stop)
    if stored.dtype == torch.float8_e4m3fn:
        return stored.view(torch.uint8)[:, slots].view(stored.dtype).float()
    return stored[:, slots].float()


def _grouped(queries: Tensor, kv_heads: int, scale: Tensor | None) -> Tensor:
    """[H, T, D] -> [K, H/K T, D], times the keys' scales."""
    grouped = queries.reshape(kv_heads, -1, queries.shape[-1])
    return grouped if scale is None else grouped * scale[:, None]


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return queries @ keys.transpose(-2, -1)


def _against_centre(queries: Tensor, centre: Tensor) -> Tensor:
    """What queries [K, H/K T, D] are multiplied by cosines (D/2) and by sines with to give their products with a centre
    [K, D] turned: q . R(a) c = cos a (q1 c1 + q2 c2) + sin a (q2 c1 - q1 c2) for each pair."""
    low, high = queries.chunk(2, dim=-1)
    c_low, c_high = centre[:, None].chunk(2, dim=-1)
    return torch.cat([low * c_low + high * c_high, high * c_low - low * c_high], dim=-1)


def _angles(turns: Turns, length: int) -> Tensor:
    """cos and sin of the first places, [length, D]: D/2 of the one, then of the other."""
    cos, sin = turns.starts[: -(-length // TURN_STEP), None].chunk(2, dim=-1)  # [starts, 1, D/2]
    near_cos, near_sin = turns.within[:TURN_STEP].chunk(2, dim=-1)
    table = torch.cat([cos * near_cos - sin * near_sin, sin * near_cos + cos * near_sin], dim=-1)
    return table.flatten(0, 1)[:length]


def _mask(first: int, past: int, count: int, window: int | None, device: torch.device) -> Tensor:
    """0 where token past + t sees place j, else -inf: [T, n]."""
    own = torch.arange(past, past + count, device=device)[:, None]
    places = torch.arange(first, past + count, device=device)[None]
    hidden = places > own
    if window is not None:
        hidden = hidden | (own - places >= window)
    return torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)
