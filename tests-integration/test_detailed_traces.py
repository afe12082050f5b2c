"""What a request's steps took, from the worker to the collector, wherever the engine runs."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from servers import serving

NAMES = ("time_in_scheduler", "time_in_model_forward", "time_in_model_execute")


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    """A collector on loopback: its URL, and the bodies that came."""
    server: Any = HTTPServer(("127.0.0.1", 0), _Collector)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", server.bodies
    finally:
        server.shutdown()
        server.server_close()


def spans_of(bodies: list[bytes]) -> list[dict[str, float]]:
    """The numbers of each span, by attribute without ``gen_ai.latency``."""
    return [
        {a.key.removeprefix("gen_ai.latency."): a.value.double_value for a in span.attributes}
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ()),
        (("--collect-detailed-traces", "all"), NAMES),
        (("--engine-process", "--collect-detailed-traces", "model,worker"), NAMES),
    ],
    ids=["off", "in-process", "process"],
)
def test_what_steps_took(words: tuple[str, ...], names: tuple[str, ...]) -> None:
    with collecting() as (url, bodies):
        with serving("--otlp-traces-endpoint", url, *words) as server:
            for n, stream in ((1, False), (1, True), (3, False)):
                body = {"prompt": "Hello " * 40, "max_tokens": 20, "ignore_eos": True, "n": n,
                        "stream": stream}  # fmt: skip
                request = urllib.request.Request(
                    server.api + "/completions", json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )  # fmt: skip
                urllib.request.urlopen(request, timeout=60).read()
            server.stop()
        spans = spans_of(bodies)
    assert len(spans) == 3
    for span in spans:
        assert tuple(name for name in NAMES if name in span) == names
        if names:
            assert 0 < span["time_in_scheduler"] < span["e2e"]
            assert 0 < span["time_in_model_forward"] <= span["time_in_model_execute"]
            assert span["time_in_model_execute"] <= span["e2e"]
