"""OpenTelemetry: one span ``llm_request`` for each request, a child of the caller's span.

Needs the extra ``headrace-server[otel]``. Attributes follow the conventions for generative AI
(opentelemetry.io/docs/specs/semconv/gen-ai), with further latencies under ``gen_ai.latency``. Spans
wait in a bounded queue for a thread of the exporter's; when that is full, or the collector is down,
they are dropped and counted, and serving goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.output import PoolingRequestOutput, RequestOutput, StepTimes
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
QUEUE_SIZE = 2048
"""Spans that may wait for the exporter."""
EXPORT_TIMEOUT = 5.0
"""Seconds that one export may take."""
FLUSH_TIMEOUT = 2.0
"""Seconds for the last spans, when the server stops."""


class SpanCounts:
    """Counts of spans that were sent and lost; read by the metrics."""

    def __init__(self) -> None:
        self.ended = 0
        self.exported = 0
        self.failed = 0
        """Taken by the exporter and not delivered."""


class Tracing:
    """Makes spans; a :class:`~headrace_server.observability.instrumentation.Watcher`.

    Args:
        model: named in spans.
        endpoint: URL of a collector (http/protobuf).
        exporter: in place of the endpoint's, for tests.

    Raises:
        MissingDependency: OpenTelemetry is not installed.
        ConfigError: the environment asks for another protocol.
    """

    every_output = False

    def __init__(
        self,
        model: ServedModel,
        endpoint: str,
        exporter: SpanExporter | None = None,
    ) -> None:
        self.counts = SpanCounts()
        self._model = model
        self._provider = _provider(exporter or _otlp(endpoint), self.counts)
        self._tracer = self._provider.get_tracer("headrace")

    def begin(self, prompt: Prompt, params: SamplingParams, request_id: str) -> _TracedRequest:
        from opentelemetry.trace import SpanKind

        # Its parent is what the request's headers named; see :class:`TraceHeaders`.
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "chat" if _is_chat(prompt) else "text_completion",
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": self._model.name,
                "gen_ai.response.model": self._model.name,
                "gen_ai.request.id": request_id,
                "gen_ai.request.n": params.n,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                **_given("gen_ai.request.max_tokens", params.max_tokens),
            },
        )
        return _TracedRequest(span, self.counts)

    def begin_pooling(self, task: str, request_id: str) -> _TracedPooling:
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            attributes={
                # The conventions have one name, for the task that most servers have.
                "gen_ai.operation.name": "embeddings" if task == "embed" else task,
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": self._model.name,
                "gen_ai.response.model": self._model.name,
                "gen_ai.request.id": request_id,
            },
        )
        return _TracedPooling(span, self.counts)

    def flush(self, seconds: float = FLUSH_TIMEOUT) -> None:
        """Send what waits, for at most so long. Blocks."""
        self._bounded(self._provider.force_flush, seconds)

    def shutdown(self) -> None:
        """Send what waits, for a moment, and end. Blocks for at most :data:`FLUSH_TIMEOUT`."""
        self._bounded(self._provider.shutdown, FLUSH_TIMEOUT)

    def _bounded(self, work: Callable[[], object], seconds: float) -> None:
        # In a thread of its own: the library waits for a collector longer than it is told to.
        thread = threading.Thread(target=work, name="headrace-traces-flush", daemon=True)
        thread.start()
        thread.join(seconds)


class _TracedRequest:
    """One request's span."""

    def __init__(self, span: Span, counts: SpanCounts) -> None:
        self._span = span
        self._counts = counts
        self._start = time.monotonic()
        self._reasons: dict[int, str] = {}
        self._prompt_tokens = 0

    def saw(self, output: RequestOutput) -> None:
        self._prompt_tokens = len(output.prompt_token_ids)
        for part in output.outputs:
            if part.finish_reason is not None:
                self._reasons[part.index] = part.finish_reason
        if output.finished:
            self._describe(output)

    def ended(self, error: BaseException | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        if error is not None:
            # The class only: the text may hold what a client sent.
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        elif not self._reasons:
            span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
        span.set_attribute("gen_ai.usage.input_tokens", self._prompt_tokens)
        span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._start)
        self._counts.ended += 1
        span.end()

    def _describe(self, output: RequestOutput) -> None:
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        span, times = self._span, output.metrics
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", output.num_cached_tokens)
        if times is None:
            return
        span.set_attribute("gen_ai.usage.output_tokens", times.num_generation_tokens)
        if times.step_times is not None:
            _describe_steps(span, times.step_times)
        begin = times.queued_ts or self._start
        if not times.first_token_ts:
            return
        for name, seconds in (
            ("time_in_queue", times.scheduled_ts - begin),
            ("time_to_first_token", times.first_token_ts - begin),
            ("time_in_model_prefill", times.first_token_ts - times.scheduled_ts),
            ("time_in_model_decode", times.last_token_ts - times.first_token_ts),
            ("time_in_model_inference", times.last_token_ts - times.scheduled_ts),
        ):
            span.set_attribute(f"gen_ai.latency.{name}", max(0.0, seconds))


class _TracedPooling:
    """The span of one pooling request, or of the pairs of one call."""

    def __init__(self, span: Span, counts: SpanCounts) -> None:
        self._span = span
        self._counts = counts
        self._start = time.monotonic()

    def ended(
        self, outputs: Sequence[PoolingRequestOutput[Any]], error: BaseException | None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        for name, value in (
            ("input_tokens", sum(len(output.prompt_token_ids) for output in outputs)),
            ("cache_read.input_tokens", sum(output.num_cached_tokens for output in outputs)),
        ):
            span.set_attribute(f"gen_ai.usage.{name}", value)
        span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._start)
        self._counts.ended += 1
        span.end()


def _describe_steps(span: Span, times: StepTimes) -> None:
    """With ``--collect-detailed-traces``: what it collects."""
    for name, seconds in (
        ("time_in_scheduler", times.scheduler),
        ("time_in_model_forward", times.forward),
        ("time_in_model_execute", times.execute),
    ):
        if seconds is not None:
            span.set_attribute(f"gen_ai.latency.{name}", seconds)


class TraceHeaders:
    """ASGI middleware: ``traceparent`` and ``tracestate`` become the context of what the request
    does. Without tracing, the first such header is answered with a warning in the log."""

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = () if scope["type"] != "http" else scope["headers"]
        found = {
            name.decode(): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        if found and not self._enabled and not self._warned:
            self._warned = True
            logger.warning(
                "a request came with trace headers, but tracing is off; see --otlp-traces-endpoint"
            )
        if not found or not self._enabled:
            await self._app(scope, receive, send)
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(found))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


def _provider(exporter: SpanExporter, counts: SpanCounts) -> TracerProvider:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": "headrace"}), shutdown_on_exit=False
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            _counting(exporter, counts), max_queue_size=QUEUE_SIZE, schedule_delay_millis=1000
        )
    )
    return provider


def check_exporter(environ: Mapping[str, str] = os.environ) -> type[SpanExporter]:
    """The class that sends spans, with nothing made of it yet.

    Raises:
        MissingDependency: OpenTelemetry is not installed.
        ConfigError: the environment asks for another protocol.
    """
    for variable in PROTOCOL_VARIABLES:
        wanted = environ.get(variable)
        if wanted is not None and wanted != "http/protobuf":
            raise ConfigError(
                f"{variable} = {wanted!r}: must be 'http/protobuf'; others are not spoken here",
                field="otlp_traces_endpoint",
            )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider  # noqa: F401 - needed, too
    except ImportError as error:
        raise _missing(error) from error
    return OTLPSpanExporter


def _otlp(endpoint: str) -> SpanExporter:
    exporter: Any = check_exporter()
    made: SpanExporter = exporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)
    return made


def _counting(exporter: SpanExporter, counts: SpanCounts) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        """Passes on, and counts what came of it. Called by the exporter's thread."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:
                logger.warning("traces could not be exported: %s", type(error).__name__)
                result = SpanExportResult.FAILURE
            if result is SpanExportResult.SUCCESS:
                counts.exported += len(spans)
            else:
                counts.failed += len(spans)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Counting()


def _missing(error: ImportError) -> MissingDependency:
    return MissingDependency(
        error.name or "opentelemetry",
        needed_for="--otlp-traces-endpoint",
        install="pip install 'headrace-server[otel]'",
    )


def _is_chat(prompt: Prompt) -> bool:
    from headrace_core.request import ChatPrompt

    return isinstance(prompt, ChatPrompt)


def _given(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}
