"""A closed-loop streaming client of any OpenAI server: ``online.py URL --concurrency 8``.

Prompts are token ids; raw HTTP over asyncio, so that the client costs little beside the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field

import workloads

REQUESTS = {1: 4, 8: 16, 32: 48}


@dataclass
class Record:
    """What one request saw, in seconds from its start."""

    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    chunk_times: list[float] = field(default_factory=list)


async def one_request(url: str, model: str, request: workloads.Request) -> Record:
    """Stream one completion."""
    parts = urllib.parse.urlsplit(url)
    body = json.dumps(
        {
            "model": model, "prompt": request.prompt, "max_tokens": request.num_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = (
        f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    record, start = Record(), time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head.encode() + body)
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                record.num_tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                record.last = time.perf_counter() - start
                record.first = record.first or record.last
    finally:
        writer.close()
    if record.num_tokens != request.num_tokens:
        raise RuntimeError(f"{record.num_tokens} tokens came, {request.num_tokens} were asked for")
    return record


async def closed_loop(
    url: str, model: str, requests: list[workloads.Request], concurrency: int
) -> tuple[list[Record], float]:
    """All requests, never more than ``concurrency`` at once; returns records and the wall time."""
    gate = asyncio.Semaphore(concurrency)

    async def run(request: workloads.Request) -> Record:
        async with gate:
            return await one_request(url, model, request)

    start = time.perf_counter()
    records = await asyncio.gather(*map(run, requests))
    return list(records), time.perf_counter() - start


def measure(
    url: str, concurrency: int, salt: int, *, scale: float = 1.0, high: int = workloads.HIGH_ID
) -> dict[str, float]:
    """One run at one concurrency."""
    with urllib.request.urlopen(url + "/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    draw = random.Random(concurrency)
    requests = [
        workloads.Request(
            workloads.prompt(
                round(draw.uniform(192, 320) * scale), salt, concurrency, i, high=high
            ),
            max(2, round(draw.uniform(48, 80) * scale)),
        )
        for i in range(REQUESTS.get(concurrency, 2 * concurrency))
    ]
    records, wall = asyncio.run(closed_loop(url, model, requests, concurrency))
    per_token = [(r.last - r.first) / (r.num_tokens - 1) for r in records]
    return {
        "output_tok_s": sum(r.num_tokens for r in records) / wall,
        "ttft_p50_ms": 1e3 * statistics.median(r.first for r in records),
        "tpot_p50_ms": 1e3 * statistics.median(per_token),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="with the version, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.url, arguments.concurrency, time.time_ns())))
