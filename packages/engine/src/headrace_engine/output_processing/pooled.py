"""One pooling request between its prompt and its result: it has a single output."""

from __future__ import annotations

from headrace_core.output import PoolingOutput, PoolingRequestOutput, RequestMetrics, StepTimes
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput
from headrace_engine.output_processing.versions_seen import VersionsSeen

PooledOutput = PoolingRequestOutput[PoolingOutput]
"""``outputs.data`` is a :class:`~headrace_core.arrays.PackedArray`."""


class PooledState:
    """A request of a pooling model, under way as
    :class:`~headrace_engine.output_processing.output.StreamState` is.

    Args:
        request: as taken in, with one core request.
    """

    def __init__(self, request: PreparedRequest) -> None:
        self.request = request
        self.error: BaseException | None = None
        """Set if the request failed."""
        self.num_waiting = 1
        """1 while the core has said nothing of it."""
        self.finished = False
        self.exhausted = False
        """True if the result was taken."""
        self._output: PooledOutput | None = None
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.weights_versions = VersionsSeen()

    @property
    def ready(self) -> bool:
        """True if there is an update to take: the result, or that there will be none."""
        return self.finished and not self.exhausted

    @property
    def unfinished_core_ids(self) -> list[str]:
        """The core request, if it must be aborted when the request ends now."""
        return [] if self.finished else [core.request_id for core in self.request.core_requests]

    def update(self, output: CoreOutput, timestamp: float, weights_version: str = "") -> bool:
        """Take in what the core said; never ends a request by itself, so False."""
        self.num_waiting = 0
        if output.finish_reason is None or self.finished:
            return False
        self.finished = True
        metrics = self._metrics
        metrics.queued_ts, metrics.scheduled_ts = output.queued_ts, output.scheduled_ts
        metrics.first_token_ts = metrics.last_token_ts = timestamp
        metrics.num_preemptions = output.num_preemptions
        if output.pooled is not None:
            self.weights_versions.see(weights_version)
            self._output = PoolingRequestOutput(
                self.request.request_id,
                PoolingOutput(output.pooled),
                self.request.prompt_token_ids,
                output.num_cached_tokens,
                metrics=metrics,
                weights_versions=self.weights_versions.all,
            )
        return False

    def add_step(self, times: StepTimes) -> None:
        """A step took so long, of which the request was part; before its output."""
        if not self.finished:
            metrics = self._metrics
            metrics.step_times = metrics.step_times.plus(times) if metrics.step_times else times

    def end(self, finish_reason: str) -> None:
        """End it from outside, without a result."""
        self.finished = True
        self.num_waiting = 0

    def take(self) -> PooledOutput | None:
        """The result, once; None: it is not there yet, or the request failed or was aborted."""
        if not self.ready:
            return None
        self.exhausted = True
        return self._output
