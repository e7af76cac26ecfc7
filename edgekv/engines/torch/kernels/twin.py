"""The kernels in plain torch: slow, obvious, and the oracle of the Triton ones.

Scales never touch a row: those of the keys are folded into the query, those of the values into the output.

    score(t, j) = sum_d (q[t, d] * k_scale[d]) * code_k[j, d]      out[t, d] = v_scale[d] * sum_j p[t, j] * code_v[j, d]

nor do centres: that of the keys becomes a second sum in the scores, that of the values is added to the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgekv.engines.torch.cache import LayerRows, Place, Turns
from edgekv.kv.spec import TURN_STEP

_FP8_MAX = 448.0

captured = False
"""Places are Python integers here: a graph would keep those of its capture."""


def store(keys: Tensor, values: Tensor, rows: LayerRows, place: Place) -> None:
    """See Kernels.store."""
    slots = place.slots(place.past, place.past + keys.shape[1])
    for new, stored, scale in ((keys, rows.keys, rows.k_scale), (values, rows.values, rows.v_scale)):
        codes = encode(new.float(), scale, stored.dtype)
        if stored.dtype == torch.float8_e4m3fn:  # no indexing with this type
            codes, stored = codes.view(torch.uint8), stored.view(torch.uint8)
        stored[:, slots] = codes


def encode(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows [K, T, D] float32 as stored: kv/quant.py's numerics. scale: [K, D]."""
    if scale is not None:
        rows = rows / scale[:, None]
    if dtype == torch.int8:
        rows = rows.round().clamp(-127, 127)
    elif dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-_FP8_MAX, _FP8_MAX)
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
    kv_heads = len(rows.keys)
    length = place.past + count
    first = 0 if window is None else max(0, place.past - window + 1)
    pinned = max(0, min(place.pinned, length) - first)
    keys, values = (_read(stored, place, first, length) for stored in (rows.keys, rows.values))  # [K, n, D]
    scores = _scores(_grouped(queries, kv_heads, rows.k_scale), keys)  # [K, H/K T, n]
    if pinned and place.evicted:
        scores[..., :pinned] = _scores(_grouped(pinned_queries, kv_heads, rows.k_scale), keys[:, :pinned])
    if rows.k_centre is not None and rows.turns is not None:
        across = _against_centre(_grouped(pinned_queries, kv_heads, None), rows.k_centre)
        scores += _scores(across, _angles(rows.turns, length)[first:])
    scores = scores.mul_(scaling).view(heads, count, length - first)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + _mask(first, place.past, count, window, scores.device)
    weights = scores.softmax(-1).view(kv_heads, -1, length - first)
    mixed = weights @ values  # [K, H/K T, D]
    if rows.v_scale is not None:
        mixed = mixed * rows.v_scale[:, None]
    if rows.v_centre is not None:
        mixed = mixed + rows.v_centre[:, None]
    return mixed.view(heads, count, size)


def _read(stored: Tensor, place: Place, start: int, stop: int) -> Tensor:
    """Rows in places start .. stop-1, [K, n, D] float32, without their scales."""
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
