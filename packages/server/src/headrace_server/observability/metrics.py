"""Prometheus metrics: one registry per application, nothing global.

Counters and gauges of the engine are read from :meth:`EngineClient.stats` at scrape time; latency
and length histograms are filled from each request's last output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_core.engine import EngineClient, EngineStats
from headrace_core.errors import EngineDead, QueueFull, RequestError
from headrace_core.output import FINISH_REASONS, PoolingRequestOutput, RequestOutput
from headrace_core.pooling import POOLING_TASKS
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_server.observability import metric_families as families

ENGINE_INDEX = "0"
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0,
    3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_BYTES = tuple(float(10**e) for e in range(2, 9))
MAX_KEPT_LATENCIES = 4096
"""Latencies between tokens that are kept for a scrape that does not come."""
STATS_TIMEOUT = 2.0
"""Longest wait for the engine's numbers, in seconds: a scrape must not hang with a stuck engine."""
_LABELS = ("model_name", "engine")
_TRANSFER = (
    ("queried_tokens", "Tokens of prompts that were looked up in the KV connector."),
    ("hit_tokens", "Tokens of prompts that were found there."),
    ("loaded_blocks", "Blocks that came from it."),
    ("loaded_bytes", "Bytes of these."),
    ("failed_blocks", "Blocks that it no longer had, or that were damaged."),
    ("saved_blocks", "Blocks that were offered to it."),
    ("saved_bytes", "Bytes of these."),
)
_LabelValues = tuple[str, str]
"""Values of :data:`_LABELS`."""
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Values of the label ``sleep_state``, by level; vLLM's words."""


class _EngineCollector(Collector):
    """The last snapshot of the engine as metric families."""

    def __init__(self, prefix: str, model: ServedModel) -> None:
        self._prefix = prefix
        self._model_name = model.name
        self._max_loras = model.max_loras
        self.stats = EngineStats()
        self.healthy = True
        self.paused = False

    def collect(self) -> Iterator[Metric]:
        """Families with the numbers of one engine, or with those of each of several."""
        families: dict[str, Metric] = {}
        for index, stats in enumerate(self.stats.by_engine or [self.stats]):
            for family in self._families((self._model_name, str(index)), stats):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._scale()

    def _scale(self) -> Iterator[Metric]:
        """Numbers of the server's engines together."""
        for name, text, value in (
            ("num_engines", "Data-parallel engines of the server.", len(self.stats.by_engine) or 1),
            ("engines_scaling", "1 while engines come or go (POST /scale_elastic_ep).",
             bool(self.stats.scaling_to)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=_LABELS)
            gauge.add_metric((self._model_name, ENGINE_INDEX), float(value))
            yield gauge

    def _is_healthy(self, stats: EngineStats) -> bool:
        """Health of one engine. Where one of several has ended, the others are well."""
        one_ended = any(each.ended for each in self.stats.by_engine)
        return not stats.ended and (self.healthy or one_ended)

    def _families(self, values: _LabelValues, stats: EngineStats) -> Iterator[Metric]:
        gauges = (
            ("num_requests_running", "Requests that the engine runs.", stats.num_requests_running),
            ("num_requests_waiting", "Requests that wait for the engine.",
             stats.num_requests_waiting),
            ("num_requests_suspended", "Requests that wait for their reader.",
             stats.num_requests_suspended),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", stats.kv_cache_usage),
            ("engine_healthy", "1 while the engine makes progress, as for GET /health.",
             self._is_healthy(stats)),
            ("engine_paused", "1 between POST /pause and POST /resume.", self.paused),
        )  # fmt: skip
        counters = (
            ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Requests put back to waiting for memory.", stats.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.",
             stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("spec_decode_num_drafts", "Runs of guessed tokens that were checked.",
             stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Guessed tokens that were checked.",
             stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.",
             sum(stats.num_accepted_per_position)),
        )  # fmt: skip
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=_LABELS)
            gauge.add_metric(values, float(value))
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(self._prefix + name, text, labels=_LABELS)
            counter.add_metric(values, float(value))
            yield counter
        yield self._accepted(values, stats)
        yield self._sleep_state(values, stats)
        yield self._weights_info(values, stats)
        info = GaugeMetricFamily(
            self._prefix + "cache_config_info",
            "The KV cache's shape, in labels.",
            labels=(*_LABELS, "block_size", "num_blocks"),
        )
        info.add_metric((*values, str(stats.block_size), str(stats.num_blocks)), 1.0)
        yield info
        if self._max_loras:
            yield from self._adapters(values, stats)
        yield from self._transfer(values, stats)

    def _adapters(self, values: _LabelValues, stats: EngineStats) -> Iterator[Metric]:
        """Requests by their adapters' names."""
        kinds = (("running", stats.running_loras), ("waiting", stats.waiting_loras))
        info = GaugeMetricFamily(
            self._prefix + "lora_requests_info",
            "Adapters of requests, in labels; the value is the time.",
            labels=(*_LABELS, "max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        running, waiting = (",".join(sorted(counts)) for _, counts in kinds)
        info.add_metric((*values, str(self._max_loras), waiting, running), time.time())
        yield info
        for kind, counts in kinds:
            gauge = GaugeMetricFamily(
                f"{self._prefix}lora_requests_{kind}",
                f"Requests that are {kind}, by their adapter.",
                labels=(*_LABELS, "lora_name"),
            )
            for name in sorted(counts):
                gauge.add_metric((*values, name), float(counts[name]))
            yield gauge

    def _transfer(self, values: _LabelValues, stats: EngineStats) -> Iterator[Metric]:
        """Blocks between the cache and a KV connector, if there is one."""
        for name, text in _TRANSFER:
            if name in stats.kv_transfer:
                counter = CounterMetricFamily(
                    f"{self._prefix}kv_offload_{name}", text, labels=_LABELS
                )
                counter.add_metric(values, float(stats.kv_transfer[name]))
                yield counter

    def _accepted(self, values: _LabelValues, stats: EngineStats) -> Metric:
        """Right guesses, one number for each place in a run."""
        accepted = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place in the run.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.num_accepted_per_position):
            accepted.add_metric((*values, str(position)), float(count))
        return accepted

    def _weights_info(self, values: _LabelValues, stats: EngineStats) -> Metric:
        info = GaugeMetricFamily(
            self._prefix + "weights_info",
            "The version of the weights that compute, in a label.",
            labels=(*_LABELS, "weights_version"),
        )
        info.add_metric((*values, stats.weights_version), 1.0)
        return info

    def _sleep_state(self, values: _LabelValues, stats: EngineStats) -> Metric:
        """1 for the state that the engine has, 0 for the others."""
        gauge = GaugeMetricFamily(
            self._prefix + "engine_sleep_state",
            "1 for the engine's state: awake, weights_offloaded (sleep level 1), discard_all (level 2).",
            labels=(*_LABELS, "sleep_state"),
        )
        for level, state in enumerate(SLEEP_STATES):
            gauge.add_metric((*values, state), float(stats.sleep_level == level))
        return gauge


@dataclass(slots=True)
class RequestTimer:
    """When a request came in and when its last tokens came out, on the monotonic clock."""

    start: float
    last: float = 0.0


class HttpTraffic:
    """Counts that all models share: HTTP requests, and the process.

    Args:
        prefix: beginning of every name (``headrace:``).
    """

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        ProcessCollector(registry=self.registry)
        self.unknown_fields = Counter(
            prefix + "unknown_request_fields",
            "Request unknown fields of requests.",
            registry=self.registry,
        )
        self._http()

    def _http(self) -> None:
        names = ("method", "handler")
        self.http_requests = Counter(
            self._prefix + "http_requests", "HTTP requests by status.", (*names, "status"),
            registry=self.registry,
        )  # fmt: skip
        self.http_duration = Histogram(
            self._prefix + "http_request_duration_seconds", "HTTP requests, to the last byte.",
            names, registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self.http_request_size = Histogram(
            self._prefix + "http_request_size_bytes", "Bodies of HTTP requests.", names,
            registry=self.registry, buckets=_BYTES,
        )  # fmt: skip
        self.http_response_size = Histogram(
            self._prefix + "http_response_size_bytes", "Bodies of HTTP responses.", names,
            registry=self.registry, buckets=_BYTES,
        )  # fmt: skip

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge without labels, read when it is scraped."""
        Gauge(self._prefix + name, text, registry=self.registry).set_function(read)


class Metrics:
    """Counts of one model.

    Args:
        prefix: beginning of every name (``headrace:``).
        model: its first served name is the label ``model_name``.
        registry: holds what else is exposed with it; None: nothing.
    """

    def __init__(
        self, prefix: str, model: ServedModel, registry: CollectorRegistry | None = None
    ) -> None:
        self.registry = registry or CollectorRegistry()
        """Registry of this process's counts; the engine's own figures come beside it."""
        self._prefix = prefix
        self._labels = (model.name, ENGINE_INDEX)
        self._engine = _EngineCollector(prefix, model)
        seconds = self._seconds_histograms()
        (self._ttft, self._itl, self._per_token, self._e2e, self._queue, self._prefill,
         self._decode, self._inference) = seconds  # fmt: skip
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._generated = self._histogram(
            "request_generation_tokens", "Generated tokens, all completions.", _TOKENS
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest completion.", _TOKENS
        )
        self._n = self._histogram("request_params_n", "Completions asked for.", _COUNTS)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens asked for.", _TOKENS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens computed, prefix-cache hits left out.",
            _TOKENS,
        )
        self._step = self._histogram("iteration_tokens_total", "Tokens per engine step.", _TOKENS)
        self._success = Counter(
            prefix + "request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in FINISH_REASONS:  # so that a rate is right from the first on
            self._success.labels(*self._labels, reason)
        self._pooling(model)
        self._latencies: list[float] = []
        """Between tokens, in seconds; not yet in the histogram."""

    def _pooling(self, model: ServedModel) -> None:
        """Counters of what is pooled, zero for each task of the model."""
        tasks = (*_LABELS, "task")
        self._pooled = Counter(
            self._prefix + "pooling_requests", "Prompts and pairs that were pooled.", tasks,
            registry=self.registry,
        )  # fmt: skip
        self._pooled_tokens = Counter(
            self._prefix + "pooling_prompt_tokens", "Tokens of these.", tasks,
            registry=self.registry,
        )  # fmt: skip
        for task in set(model.tasks) & set(POOLING_TASKS):
            self._pooled.labels(*self._labels, task)
            self._pooled_tokens.labels(*self._labels, task)

    def _seconds_histograms(self) -> list[Histogram]:
        rows = (
            ("time_to_first_token_seconds", "Arrival to first token."),
            ("inter_token_latency_seconds", "Between tokens; a mean if several arrive at once."),
            ("request_time_per_output_token_seconds", "First to last token, per further token."),
            ("e2e_request_latency_seconds", "Arrival to end."),
            ("request_queue_time_seconds", "Waiting to be scheduled."),
            ("request_prefill_time_seconds", "Scheduled to first token."),
            ("request_decode_time_seconds", "First to last token."),
            ("request_inference_time_seconds", "Scheduled to last token."),
        )
        return [self._histogram(name, text, _SECONDS) for name, text in rows]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            self._prefix + name, text, _LABELS, registry=self.registry, buckets=buckets
        )
        child: Histogram = family.labels(*self._labels)
        return child

    def timer(self) -> RequestTimer:
        """Start the clock of a request."""
        return RequestTimer(time.monotonic())

    def saw_tokens(self, timer: RequestTimer, num_tokens: int) -> None:
        """Tokens of a streamed request arrived."""
        now = time.monotonic()
        if timer.last and num_tokens:
            self._latencies.append((now - timer.last) / num_tokens)
            if len(self._latencies) >= MAX_KEPT_LATENCIES:
                self._observe_latencies()
        if num_tokens:
            timer.last = now

    def _observe_latencies(self) -> None:
        """Into the histogram: at scrape time, as an observation costs much beside a token."""
        latencies, self._latencies = self._latencies, []
        for seconds in latencies:
            self._itl.observe(seconds)

    def finished(
        self,
        output: RequestOutput,
        params: SamplingParams,
        timer: RequestTimer,
        num_tokens: dict[int, int],
        reasons: dict[int, str],
    ) -> None:
        """A request ended.

        Args:
            output: its last output.
            num_tokens, reasons: by completion index, over the whole request.
        """
        total = sum(num_tokens.values())
        self._prompt.observe(len(output.prompt_token_ids))
        self._computed.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        self._generated.observe(total)
        self._longest.observe(max(num_tokens.values(), default=0))
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._e2e.observe(time.monotonic() - timer.start)
        for reason in reasons.values():
            self._success.labels(*self._labels, reason).inc()
        self._observe_times(output, timer, max(num_tokens.values(), default=0))

    def _observe_times(self, output: RequestOutput, timer: RequestTimer, longest: int) -> None:
        times = output.metrics
        if times is None or not times.first_token_ts:
            return
        start = times.queued_ts or timer.start
        self._ttft.observe(max(0.0, times.first_token_ts - timer.start))
        self._queue.observe(max(0.0, times.scheduled_ts - start))
        self._prefill.observe(max(0.0, times.first_token_ts - times.scheduled_ts))
        self._inference.observe(max(0.0, times.last_token_ts - times.scheduled_ts))
        decode = max(0.0, times.last_token_ts - times.first_token_ts)
        self._decode.observe(decode)
        if longest > 1:
            self._per_token.observe(decode / (longest - 1))
            if not timer.last:
                self._itl.observe(decode / (longest - 1))

    def pooled(
        self, task: str, outputs: Sequence[PoolingRequestOutput[Any]], timer: RequestTimer
    ) -> None:
        """A call of a pooling task ended, with a result for each prompt or pair."""
        labels = (*self._labels, task)
        for output in outputs:
            tokens = len(output.prompt_token_ids)
            self._prompt.observe(tokens)
            self._computed.observe(tokens - output.num_cached_tokens)
            self._pooled_tokens.labels(*labels).inc(tokens)
        self._pooled.labels(*labels).inc(len(outputs))
        self._success.labels(*self._labels, "stop").inc(len(outputs))
        self._e2e.observe(time.monotonic() - timer.start)

    def unfinished(self, reason: str, num_completions: int) -> None:
        """Completions ended without a last output: their client left, or they failed."""
        self._success.labels(*self._labels, reason).inc(num_completions)

    def own_families(self) -> list[Any]:
        """Counts of this process, as plain data for its peers."""
        self._observe_latencies()
        return families.as_data(self.registry.collect())

    async def expose(self, engine: EngineClient, others: Sequence[Any] = ()) -> bytes:
        """All metrics in Prometheus' text format, with a fresh snapshot of the engine; the last
        one if the engine gives none in time.

        Args:
            others: :meth:`own_families` of the server's other HTTP processes; added up.
        """
        return generate_latest(families.FixedMetrics(await self.collect(engine, others)))

    async def collect(self, engine: EngineClient, others: Sequence[Any] = ()) -> list[Metric]:
        """The families of :meth:`expose`."""
        self._engine.healthy = await is_healthy(engine)
        stats = None
        if engine.dead_error is None:
            stats = await fresh_stats(engine, drain=True)
            self._engine.paused = await engine.is_paused()
        return self.snapshot(stats, others)

    def snapshot(self, stats: EngineStats | None, others: Sequence[Any] = ()) -> list[Metric]:
        """All metrics, with a snapshot of the engine.

        Args:
            stats: taken with ``drain=True``; None: the last one holds.
            others: as :meth:`expose`.
        """
        if stats is not None:
            for tokens in stats.step_tokens:
                self._step.observe(tokens)
            self._engine.stats = stats
        self._observe_latencies()
        own = self.registry.collect()
        counted = families.added(own, others) if others else own
        return [*self._engine.collect(), *counted]

    def add_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter without labels, read when it is scraped; must not fall."""
        self.registry.register(_ReadCounter(self._prefix + name, text, read))


class UnfinishedRequests:
    """A :class:`~headrace_server.observability.instrumentation.Watcher` that counts what no route
    hears the end of, and whatever is pooled."""

    every_output = False

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def begin(self, prompt: Prompt, params: SamplingParams, request_id: str) -> _Unfinished:
        return _Unfinished(self._metrics, params.n)

    def begin_pooling(self, task: str, request_id: str) -> _Pooled:
        return _Pooled(self._metrics, task)


class _Unfinished:
    """One request."""

    def __init__(self, metrics: Metrics, num_completions: int) -> None:
        self._metrics = metrics
        self._left = num_completions

    def saw(self, output: RequestOutput) -> None:
        if output.finished:
            self._left = 0

    def ended(self, error: BaseException | None) -> None:
        if self._left and not isinstance(error, (RequestError, QueueFull)):
            is_ours = error is not None and not isinstance(error, asyncio.CancelledError)
            self._metrics.unfinished("error" if is_ours else "abort", self._left)


class _Pooled:
    """One call of a pooling task."""

    def __init__(self, metrics: Metrics, task: str) -> None:
        self._metrics = metrics
        self._task = task
        self._timer = metrics.timer()

    def ended(
        self, outputs: Sequence[PoolingRequestOutput[Any]], error: BaseException | None
    ) -> None:
        if error is None:
            self._metrics.pooled(self._task, outputs, self._timer)
        else:
            _Unfinished(self._metrics, 1).ended(error)


class _ReadCounter(Collector):
    """A counter that somebody else counts."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


async def fresh_stats(engine: EngineClient, *, drain: bool = False) -> EngineStats | None:
    """A snapshot; None if the engine is dead, or busy with one step for too long."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT):
            return await engine.stats(drain=drain)
    except (TimeoutError, EngineDead):
        return None


class HealthProbe(Protocol):
    """An engine that can be asked for its health."""

    async def check_health(self) -> None: ...


async def is_healthy(engine: HealthProbe) -> bool:
    """Health of the engine, as ``GET /health`` tells it."""
    try:
        await engine.check_health()
    except EngineDead:
        return False
    return True
