"""Lower bound of a decode step's time: bytes over bandwidth.

What is read from memory and what ranks exchange is counted; arithmetic, the start of kernels, sampling and
the rest of the server are not, so real steps are slower. Exchanges wait for what is computed before them,
so their times add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.planning.devices import Devices
from headrace.planning.layouts import Layout
from headrace.planning.memory import Workload, request_bytes
from headrace.planning.parallelism import STREAMS_BETWEEN_STAGES
from headrace.planning.rank_model import Stage


class Traffic(NamedTuple):
    """What ranks of one engine exchange for each token. Bytes."""

    reduced: int
    """That is summed over ranks."""
    reductions: int
    """Sums in a step."""
    reduced_per_layer: int
    """Of the layer with the most."""
    gathered: int
    """Logits that are brought together."""
    sent: int
    """That each rank sends by a ring: for sums 2 (N - 1) / N of them, for logits half of that; and of rows
    that engines with shared experts exchange."""
    handed_on: int
    """Hidden states between stages, and from the last to the first."""

    def step_bytes(self, tokens: int) -> int:
        """Bytes that a rank sends, and stages hand on, in a step of so many tokens."""
        return tokens * (self.sent + self.handed_on)


class Bound(NamedTuple):
    """The best that a layout can do. Seconds, and tokens a second of all requests together."""

    step_seconds: float
    """Between two tokens of a request."""
    exchange_seconds: float
    """Part of it in which ranks exchange; 0 without a link's speed."""
    tokens_per_second: float


def traffic_of(stages: Sequence[Stage], layout: Layout, hidden_bytes: int) -> Traffic:
    """Traffic of an engine.

    Args:
        hidden_bytes: of a token's hidden state.
    """
    reduced, ranks = sum(stage.reduced for stage in stages), layout.tensor
    gathered = sum(stage.gathered for stage in stages)
    layers = max(1, sum(stage.layers for stage in stages))
    return Traffic(
        reduced,
        sum(stage.reductions for stage in stages),
        -(-reduced // layers),
        gathered,
        (ranks - 1) * (2 * reduced + gathered) // ranks
        + sum(_met_bytes(stage, layout) for stage in stages),
        _borders(layout) * STREAMS_BETWEEN_STAGES * hidden_bytes,
    )


def bound_of(
    stages: Sequence[Stage],
    layout: Layout,
    devices: Devices,
    workload: Workload,
    hidden_bytes: int,
    beside: int = 1,
) -> Bound:
    """Bound of a layout. Each engine has its share of the requests, and each of the steps that run at once
    its share of these.

    Args:
        beside: steps that run at once, on different stages.
    """
    requests = -(-workload.concurrency // layout.data)
    batch = -(-requests // beside)
    hidden = 0.0
    if devices.link and layout.pipeline > 1:
        handed_on = batch * STREAMS_BETWEEN_STAGES * hidden_bytes
        hidden = handed_on / devices.link + devices.latency
    times, exchanges = [], []
    for stage in stages:
        cache = batch * request_bytes(stage.specs, workload.context)
        reads = stage.step_reads(batch, layout.sharing_engines)
        reading = (reads + cache) / devices.bandwidth
        exchanges.append(_exchange(stage, layout, devices, batch) + hidden)
        times.append(reading + exchanges[-1])
    running = -(-requests // batch)
    step = max(sum(times), running * max(times))
    return Bound(step, sum(exchanges), workload.concurrency / step)


def _borders(layout: Layout) -> int:
    """Times that a step's hidden states are handed on: from each stage to the next, and back to the first."""
    return layout.pipeline if layout.pipeline > 1 else 0


def _exchange(stage: Stage, layout: Layout, devices: Devices, tokens: int) -> float:
    """Seconds of a stage's sums over ranks, of its logits, which every token of a step has, and of rows that
    engines exchange, there and back."""
    if not devices.link or layout.tensor * layout.sharing_engines == 1:
        return 0.0
    sent = (layout.tensor - 1) * (2 * stage.reduced + stage.gathered) * tokens / layout.tensor
    sent += tokens * _met_bytes(stage, layout)
    exchanges = stage.reductions + 2 * stage.meetings + (stage.gathered > 0)
    return sent / devices.link + exchanges * devices.latency


def _met_bytes(stage: Stage, layout: Layout) -> int:
    """Bytes that a rank sends for each token of its engine, where each of as many engines has as many: all
    rows go round a ring of W ranks, and sums come back; among an engine's ranks each then has a part."""
    ranks = layout.tensor * layout.sharing_engines
    rows = stage.met * layout.sharing_engines
    return 2 * (ranks - 1) * rows // ranks + (layout.tensor - 1) * stage.met // layout.tensor
