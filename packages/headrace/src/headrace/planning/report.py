"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planning.advice import Advice, failure_of, figures
from headrace.planning.devices import Devices
from headrace.planning.plan import LayoutPlan, Planner
from headrace_engine.execution.memory import readable

_HEAD = (
    "layout", "weights", "cache", "activations", "needed", "a token exchanges", "a step", "tokens/s",
    "runs",
)  # fmt: skip


def report(
    planner: Planner, plans: Sequence[LayoutPlan], devices: Devices, advice: Advice, command: str
) -> str:
    """The whole plan.

    Args:
        command: that starts the recommended layout; empty: there is none.
    """
    info, (context, concurrency) = planner.resolved.info, planner.workload
    lines = [
        f"model      {info.name}: {info.architecture} in {info.dtype}",
        f"devices    {describe(devices)}",
        f"workload   {concurrency} requests at once, of up to {context} tokens each",
        "",
        *table([_HEAD, *(_row(plan) for plan in plans)]),
        "",
        *_footnotes(plans, devices),
    ]
    if advice.chosen is None:
        lines += ["", "recommended: none, as nothing fits"]
    else:
        name = advice.chosen.layout.flags() or "one rank"
        lines += ["", f"recommended: {name}", *(f"  - {reason}" for reason in advice.reasons)]
        lines += ["", command]
    return "\n".join(lines)


def describe(devices: Devices) -> str:
    """One line."""
    speed = figures(devices.bandwidth / 1e9)
    text = f"{devices.number} of {readable(devices.memory)} that reads {speed} GB/s"
    if devices.link:
        text += f", links of {figures(devices.link / 1e9)} GB/s"
    if devices.latency:
        text += f" and {figures(1e6 * devices.latency)} us"
    return text + (f" (this machine: {devices.machine})" if devices.machine else "")


def _row(plan: LayoutPlan) -> tuple[str, ...]:
    if not plan.memory:
        return (str(plan.layout), *[""] * (len(_HEAD) - 2), "no")
    most, bound, traffic = plan.fullest, plan.bound, plan.traffic
    assert bound is not None
    assert traffic is not None
    exchanged = traffic.step_bytes(1)
    return (
        str(plan.layout),
        readable(most.weights),
        readable(most.cache),
        readable(most.activations),
        readable(most.needed),
        readable(exchanged) if exchanged else "",
        _milliseconds(bound.step_seconds),
        figures(bound.tokens_per_second),
        "yes" if plan.runs else "no",
    )


def _milliseconds(seconds: float) -> str:
    number = 1000 * seconds
    return f"{number:.0f} ms" if number >= 100 else f"{number:.3g} ms"


def _footnotes(plans: Sequence[LayoutPlan], devices: Devices) -> list[str]:
    """Why layouts do not run, and what the columns mean."""
    alike: dict[str, list[str]] = {}
    for plan in plans:
        if not plan.runs:
            alike.setdefault(failure_of(plan), []).append(str(plan.layout))
    notes = [f"{'; '.join(names)}: {why}" for why, names in alike.items()]
    notes.append(
        "Bytes are of a rank, of the fullest stage; activations are the least. Times are bounds: what memory"
        + (" and links allow." if devices.link else " allows.")
    )
    return notes


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])),
            ]
        ).rstrip()
        for row in rows
    ]
