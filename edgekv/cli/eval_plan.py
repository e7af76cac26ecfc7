"""The memory of an evaluation: engines at once, each with its own weights and cache, planned before any is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgekv.errors import MemoryBudgetError
from edgekv.evaluate.losses import STEP
from edgekv.evaluate.settings import REFERENCE, Setting, has_reference
from edgekv.kv.plan import CAPACITY_STEP, make_plan
from edgekv.kv.spec import MIN_CAPACITY, KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.options import LoadOptions, budget, footprint_of, plan_for, plan_request
from edgekv.units import format_bytes


def planned(model: ConvertedModel, load: LoadOptions, settings: Sequence[Setting], *, against_float: bool) -> KVSpec:
    """The cache that the options ask for, with as many tokens as fit the budget in all caches of a run together.

    Raises:
        MemoryBudgetError: they do not fit. InvalidOption: a setting cannot be, as in `edgekv.kv.plan.make_plan`.
    """
    base = plan_for(model, load).kv
    lanes = [*settings, *([REFERENCE] if has_reference(settings, against_float=against_float) else [])]
    limit = budget(load)
    total = together_bytes(model, load, base, lanes)
    while total > limit and load.context is None and base.capacity > MIN_CAPACITY:
        smaller = max(base.capacity - max(base.capacity // 8, CAPACITY_STEP), MIN_CAPACITY)
        base = plan_for(model, replace(load, context=smaller)).kv
        total = together_bytes(model, load, base, lanes)
    if total > limit:
        raise MemoryBudgetError(
            f"The {len(lanes)} caches of this run ({', '.join(lane.name for lane in lanes)}), each with an engine of "
            f"its own, need {format_bytes(total)} at {base.capacity} tokens, {format_bytes(total - limit)} more than "
            f"the budget of {format_bytes(limit)}: give more --memory, a smaller --context, or fewer --setting."
        )
    return base


def together_bytes(model: ConvertedModel, load: LoadOptions, base: KVSpec, lanes: Sequence[Setting]) -> int:
    """What all engines take: each its plan but for what the process has once, and the logits of a step."""
    once, total = 0, 0
    for lane in lanes:
        kv = lane.kv(base)
        options = replace(
            load, kv_dtype=kv.dtype, granularity=kv.granularity, context=kv.capacity, scales=lane.scales or load.scales
        )
        request = replace(plan_request(model.spec, options, model), sinks=kv.sinks, stride=kv.stride)
        total += make_plan(model.spec, footprint_of(model, options), request, None).total_bytes - request.runtime_bytes
        once = max(once, request.runtime_bytes)
    copies = len(lanes) + 2  # what each engine gave last, and two that are compared
    return once + total + copies * STEP * 4 * model.spec.vocab_size
