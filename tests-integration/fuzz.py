"""Requests made by schemathesis from the server's own OpenAPI document.

``python tests-integration/fuzz.py --requests 10000`` starts a server on the simulated device, sends
that many requests over all operations, right ones and wrong ones in turn, and reports every answer
that is a 5xx, slow, or tells what is none of a client's business; and whether the server still lives.
``--mutants 200000`` sends bodies that are nearly right as well, at some hundred a second, and ``--raw``
connections that are hardly HTTP.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from malformed import Answer, Client, exchange, mutations
from mutated import SERVER as WITH_TOOLS
from mutated import mutants
from schemathesis.generation import GenerationMode
from servers import serving
from tqdm import tqdm

SERVER = (
    "--device", "sim", "--sim-step-ms", "0", "--sim-token-us", "0", "--max-model-len", "128",
    "--max-num-seqs", "64", "--disable-uvicorn-access-log",
)  # fmt: skip


class Fuzz:
    """What was sent, and what was wrong with the answers."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        self._address = urlsplit(url)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.problems: list[str] = []
        self.slowest = {"answered": 0.0, "refused": 0.0}
        with urllib.request.urlopen(url + "/openapi.json", timeout=30) as answer:
            self.document: dict[str, Any] = json.load(answer)
        self._schema = schemathesis.openapi.from_dict(self.document)

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())

    def run(self, num_requests: int, number: int = 0, log: Callable[[str], None] = print) -> None:
        """Send at least so many, the same for the same ``number``. Most go where bodies are read."""
        operations = [result.ok() for result in self._schema.get_all_operations()]
        while (missing := num_requests - self.num_requests) > 0:
            self._run_all(operations, missing, number, log)
            number += 1000
            operations = [operation for operation in operations if operation.body]

    def _run_all(
        self, operations: list[Any], num_requests: int, number: int, log: Callable[[str], None]
    ) -> None:
        weights = [10 if operation.body else 1 for operation in operations]
        for operation, weight in zip(operations, weights, strict=True):
            each = max(2, -(-num_requests * weight // (2 * sum(weights))))
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                begin, before = time.monotonic(), self.num_requests
                self._run_one(operation, mode, each, number)
                spent = time.monotonic() - begin
                sent = self.num_requests - before
                log(f"{operation.label} {mode.value}: {sent} requests in {spent:.1f} s")

    def _run_one(self, operation: Any, mode: GenerationMode, count: int, number: int) -> None:
        try:
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(number)
            @settings(
                max_examples=count, database=None, deadline=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=strategy)
            def send(case: Any) -> None:
                self.send(case)

            send()
        except (schemathesis.errors.SchemathesisError, Unsatisfiable) as error:
            # An operation that takes nothing cannot be called wrongly.
            if mode is GenerationMode.POSITIVE:
                self.problems.append(f"{operation.label}: no requests: {error}")

    def send(self, case: Any) -> None:
        """Send one case and judge its answer; one that was slow is asked again, for the machine may
        have been busy with something else."""
        method, path, body, headers = _wire(case)
        answer = self._client.send(method, path, body, headers)
        if answer.seconds > 1.0:
            answer = self._client.send(method, path, body, headers)
        self.note(f"{method} {case.path}", path.encode() + body, answer)

    def run_mutants(self, count: int, number: int = 0) -> None:
        """Send bodies that are nearly right."""
        for path, body in tqdm(mutants(count, number), "nearly right", count, mininterval=10):
            answer = self._client.post(path, body)
            if answer.seconds > 1.0:
                answer = self._client.post(path, body)
            self.note(f"POST {path}", body, answer)

    def run_raw(self, url: str, count: int, number: int = 0) -> None:
        """Send connections that are not, or hardly, HTTP."""
        for data in tqdm(mutations(count, number), "damaged", count, mininterval=10):
            answer = exchange(url, data)
            if answer.seconds > 1.0:
                answer = exchange(url, data)
            self.note("raw", data, answer)

    def note(self, label: str, sent: bytes, answer: Answer) -> None:
        """Count an answer and judge it."""
        self.statuses[label, answer.status] += 1
        kind = "refused" if answer.status >= 400 else "answered"
        self.slowest[kind] = max(self.slowest[kind], answer.seconds)
        problem = answer.problem(sent)
        if problem:
            self.problems.append(f"{label}: {problem}; sent {sent[:500]!r}")


def _wire(case: Any) -> tuple[str, str, bytes, dict[str, str]]:
    """A case as method, path with query, body, headers."""
    import requests

    words = case.as_transport_kwargs(base_url="http://server")
    prepared = requests.Request(**_known(words)).prepare()
    body = prepared.body or b""
    headers = {k: v for k, v in prepared.headers.items() if k.lower() != "content-length"}
    headers = {k: v.decode("latin-1") if isinstance(v, bytes) else v for k, v in headers.items()}
    path = prepared.url.removeprefix("http://server") or "/"
    return prepared.method, path, body.encode() if isinstance(body, str) else body, headers


def _known(words: dict[str, Any]) -> dict[str, Any]:
    names = ("method", "url", "headers", "files", "data", "json", "params", "cookies")
    return {name: words[name] for name in names if name in words}


def _report(fuzz: Fuzz, alive: bool) -> bool:
    """Print what a run came to; True if nothing was wrong."""
    totals: Counter[int] = Counter()
    for (_, status), number in fuzz.statuses.items():
        totals[status] += number
    print(f"{fuzz.num_requests} requests: {dict(sorted(totals.items()))}")
    answered, refused = fuzz.slowest["answered"], fuzz.slowest["refused"]
    print(f"slowest: answered in {answered:.2f} s, refused in {refused:.2f} s; "
          f"server {'lives' if alive else 'is gone'}")  # fmt: skip
    for problem in fuzz.problems[:30]:
        print(f"wrong: {problem}")
    print(f"{len(fuzz.problems)} answers were wrong")
    return alive and not fuzz.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--mutants", type=int, default=0, help="bodies that are nearly right, besides"
    )
    parser.add_argument("--raw", type=int, default=0, help="damaged connections, besides")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fine = True
    for words, count in ((SERVER, args.requests), (WITH_TOOLS, args.mutants + args.raw)):
        if not count:
            continue
        with serving(*words) as server:
            fuzz = Fuzz(server.url)
            if words is SERVER:
                fuzz.run(args.requests, args.seed)
            else:
                fuzz.run_mutants(args.mutants, args.seed)
                fuzz.run_raw(server.url, args.raw, args.seed)
            alive = server.process.poll() is None and server.status("/health") == 200
            fine = _report(fuzz, alive) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
