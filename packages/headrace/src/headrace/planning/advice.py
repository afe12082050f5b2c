"""Which layout to take, why, and what would make a model fit that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.planning.devices import Devices
from headrace.planning.memory import Workload
from headrace.planning.plan import LayoutPlan, Planner
from headrace_core.errors import ConfigError, HeadraceError
from headrace_engine.config import EngineConfig
from headrace_engine.execution.memory import readable

EQUALS = 0.95
"""Layouts whose bound is this part of the best one's are as good: the simplest of them is taken."""
QUANTIZATIONS = ("int8", "int4_g32")
"""Proposed where a checkpoint in floats does not fit, the more exact one first."""
MOST_TIMES = 8
"""Most times the devices that are tried."""


class Advice(NamedTuple):
    """A recommendation, or what would make one possible."""

    chosen: LayoutPlan | None
    reasons: tuple[str, ...]
    """For the choice; without one, why there is none."""
    remedies: tuple[str, ...] = ()
    """What would make the model fit, each tried."""

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "recommended": None if self.chosen is None else self.chosen.layout._asdict(),
            "flags": None if self.chosen is None else self.chosen.layout.flags(),
            "kv_cache_memory_bytes": (self.chosen and self.chosen.cache_flag) or None,
            "reasons": list(self.reasons),
            "remedies": list(self.remedies),
        }


def advise(
    planner: Planner, plans: Sequence[LayoutPlan], devices: Devices, config: EngineConfig
) -> Advice:
    """Choose the layout with the most tokens a second, or say what is missing.

    Args:
        config: that the planner was made of.
    """
    running = [plan for plan in plans if plan.runs]
    if not running:
        return Advice(
            None, tuple(_failures(plans)), tuple(_remedies(planner, plans, devices, config))
        )
    chosen = best_of(running)
    return Advice(chosen, tuple(_reasons(chosen, running, plans, devices, planner.workload)))


def best_of(running: Sequence[LayoutPlan]) -> LayoutPlan:
    """The layout with the most tokens a second; of those that are nearly equal, the simplest."""
    best = max(_speed(plan) for plan in running)
    equals = [plan for plan in running if _speed(plan) >= EQUALS * best]
    return min(equals, key=_complexity)


def _speed(plan: LayoutPlan) -> float:
    return 0.0 if plan.bound is None else plan.bound.tokens_per_second


def _complexity(plan: LayoutPlan) -> tuple[int, float]:
    """Kinds of parallelism, then the time of a step."""
    tensor, pipeline, data, experts = plan.layout
    kinds = (tensor > 1) + (pipeline > 1) + (data > 1) + experts
    return kinds, 0.0 if plan.bound is None else plan.bound.step_seconds


def name_of(plan: LayoutPlan) -> str:
    """Its flags."""
    return plan.layout.flags() or "one rank"


def _reasons(
    chosen: LayoutPlan,
    running: Sequence[LayoutPlan],
    plans: Sequence[LayoutPlan],
    devices: Devices,
    workload: Workload,
) -> list[str]:
    bound, memory = chosen.bound, chosen.fullest
    assert bound is not None
    requests = f"{workload.concurrency} request{'s' if workload.concurrency > 1 else ''}"
    found = [f"at most {figures(bound.tokens_per_second)} tokens a second for {requests}"]
    others = [plan for plan in running if plan is not chosen]
    if not others:
        found[0] += "; no other layout of these devices runs" if len(plans) > 1 else ""
    else:
        next_best = max(others, key=_speed)
        found[0] += f"; {name_of(next_best)}: {figures(_speed(next_best))}"
    found.append(
        f"needs {readable(memory.needed)} of the {readable(memory.allowed)} that it may take of a device"
    )
    if bound.exchange_seconds:
        share = 100 * bound.exchange_seconds / bound.step_seconds
        found.append(f"its ranks exchange during {figures(share)} % of a step")
    elif devices.number > 1 and chosen.traffic and chosen.traffic.step_bytes(1):
        found.append("exchanges between ranks are not in the bound: --link tells their speed")
    if chosen.cache_flag:
        found.append(
            f"the cache needs --kv-cache-memory-bytes {chosen.cache_flag}: the engine would take less"
        )
    better = [
        plan for plan in plans if not plan.runs and plan.memory and _speed(plan) > _speed(chosen)
    ]
    for plan in sorted(better, key=_speed, reverse=True)[:2]:
        why = (
            f"needs {readable(plan.missing)} more for each device" if plan.missing else plan.refused
        )
        found.append(f"{name_of(plan)} could reach {figures(_speed(plan))}, but {why}")
    return found


def nearest(plans: Sequence[LayoutPlan]) -> LayoutPlan:
    """The layout that lacks the least, of those that the engine does not refuse, if there are any."""
    possible = [plan for plan in plans if plan.memory and not plan.refused] or plans
    return min(possible, key=lambda plan: plan.missing)


def _failures(plans: Sequence[LayoutPlan]) -> list[str]:
    return [f"{name_of(plan)}: {failure_of(plan)}" for plan in plans]


def failure_of(plan: LayoutPlan) -> str:
    """Why a layout does not run; empty: it does."""
    if plan.missing and plan.refused:
        return (
            f"needs {readable(plan.missing)} more for each device, and is refused: {plan.refused}"
        )
    return f"needs {readable(plan.missing)} more for each device" if plan.missing else plan.refused


def _remedies(
    planner: Planner, plans: Sequence[LayoutPlan], devices: Devices, config: EngineConfig
) -> list[str]:
    """What was tried and fits."""
    possible = [plan for plan in plans if plan.memory and not plan.refused]
    found = []
    if more := _other_devices(planner, devices, fewer=not possible):
        found.append(more)
    if fewer := _fewer_bits(planner, devices, config):
        found.append(fewer)
    if possible:
        found += _less_work(planner, nearest(possible), devices)
    return found


def _other_devices(planner: Planner, devices: Devices, *, fewer: bool) -> str:
    """Another number of them.

    Args:
        fewer: try fewer ones, too, which may divide the model where these do not.
    """
    less = range(devices.number - 1, 0, -1) if fewer else ()
    most = MOST_TIMES * devices.number
    doubled = {devices.number * 2**power for power in range(1, 4)}
    powers = {2**power for power in range(most.bit_length())}
    more = sorted(n for n in doubled | powers if devices.number < n <= most)
    for count in (*less, *more):
        others = devices._replace(number=count)
        try:
            running = [plan for plan in planner.layouts(others) if plan.runs]
        except ConfigError:  # they do not divide so
            continue
        if running:
            flags = best_of(running).layout.flags()
            one = f"{count} such device{'s' if count > 1 else ''}"
            return f"{one} with {flags}" if flags else one
    return ""


def _fewer_bits(planner: Planner, devices: Devices, config: EngineConfig) -> str:
    from headrace_models.quantization import quant_method_name

    own = planner.resolved
    if quant_method_name(own.info, own.config.model.quantization) != "none":
        return ""
    for name in QUANTIZATIONS:
        model = dataclasses.replace(config.model, quantization=name)
        try:
            other = Planner(dataclasses.replace(config, model=model), planner.workload.concurrency)
            running = [plan for plan in other.layouts(devices) if plan.runs]
        except HeadraceError:  # the model is not rounded so
            continue
        if running:
            flags = best_of(running).layout.flags()
            return f"--quantization {name}" + (f" with {flags}" if flags else "")
    return ""


def _less_work(planner: Planner, closest: LayoutPlan, devices: Devices) -> list[str]:
    """Fewer requests, or shorter ones, with the layout that lacks the least."""
    context, concurrency = planner.workload
    where = f" with {closest.layout.flags()}" if closest.layout.flags() else ""

    def fits(workload: Workload) -> bool:
        return planner.plan(closest.layout, devices, workload).runs

    found = []
    if requests := largest(concurrency, lambda count: fits(Workload(context, count))):
        found.append(f"--concurrency {requests}{where}")
    if tokens := largest(context, lambda count: fits(Workload(count, concurrency))):
        found.append(f"--context {tokens}{where}")
    return found


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits, where smaller ones always do; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def figures(number: float) -> str:
    """Two significant figures: a bound is not better."""
    return f"{float(f'{number:.2g}'):g}"
