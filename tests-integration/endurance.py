"""Long runs and crowds, every answer checked: what ``docs/requirements.toml`` calls L2, L3, L4, F4 and F14.

``python tests-integration/endurance.py RUN`` does one of them at full size and prints its figures:

========= ============================================================================================
equal     32 requests at once of the demo model for half an hour; each equals its solo run bit for bit
burst     1,280 requests within a second; each gets 200 or 429
soak      100,000 mixed requests on the simulated device; memory over time, blocks at the end
readers   100 streams read at 10 bytes a second, of text and then with log-probabilities; what each
          costs, and what others notice
crowd     1,000 half-open connections; what others notice
========= ============================================================================================

``--scale 0.01`` makes any of them a hundredth as large. The tests run them small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servers import PATIENCE, RunningServer, children_of, serving
from soak import Stream, quantile, run_stream, watch_livez

from headrace_testing.waiting import wait_until

QUIET = ("--disable-uvicorn-access-log",)
SIM = ("--device", "sim", "--sim-step-ms", "1", "--sim-token-us", "0", *QUIET)
READ = (
    "--device", "sim", "--sim-step-ms", "10", "--sim-token-us", "0", "--max-num-seqs", "256", *QUIET
)  # fmt: skip
"""For slow readers: tokens come no faster than they can be written for all of them at once, so that
what is measured is what waits for a reader, not what waits for the event loop."""
BURST = ("--device", "sim", "--sim-step-ms", "10", "--sim-token-us", "0", "--max-num-seqs", "64",
         "--max-queued-requests", "256", *QUIET)  # fmt: skip
"""For bursts: requests end more slowly than they come, so that some have to be refused."""
FEWEST_TOKENS = 50
"""Tokens of a stream that fit into the buffers between the engine and its reader, at least."""
MIB = 2**20


@dataclass
class Answer:
    """An HTTP answer, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def post(
    url: str,
    path: str,
    body: Any,
    *,
    headers: str = "",
    sent: Callable[[], None] = lambda: None,
) -> Answer:
    """One request on a connection of its own.

    Args:
        sent: called once the request is written.
    """
    address = urlsplit(url)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"{headers}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        sent()
        async with asyncio.timeout(600):
            return _parsed(await reader.read())
    finally:
        writer.close()


def _parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Answer(int(status.split()[1]) if status else 0, headers, body)


def resident(pid: int) -> int:
    """Bytes of memory that a process and its children hold."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, children_of(pid)))


def blocks_are_free(server: RunningServer) -> bool:
    """Nothing runs, nothing waits, and the cache's pool is whole."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(server.metric(name) for name in names)


@contextmanager
def livez_watched(url: str) -> Iterator[list[float]]:
    """Seconds that ``/livez`` took, ten times a second, while the block runs in an event loop."""
    found: list[float] = []
    watching = asyncio.get_running_loop().create_task(watch_livez(url, found))
    try:
        yield found
    finally:
        if watching.done():
            watching.result()
        watching.cancel()


# L2: the same tokens, whatever else runs

_WORDS = (
    "What",
    "is",
    "the",
    "sum",
    "of",
    "seven",
    "and",
    "nineteen?",
    "Hello,",
    "who",
    "are",
    "you",
)


def equal_bodies(count: int) -> list[dict[str, Any]]:
    """Requests that differ in length, sampling and number of tokens; each has one answer only."""
    rng = random.Random(2)
    return [
        {
            "prompt": " ".join(rng.choices(_WORDS, k=rng.randint(1, 60))),
            "max_tokens": rng.randint(4, 48),
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.3)),
            "top_p": rng.choice((1.0, 0.9)),
            "frequency_penalty": rng.choice((0.0, 0.5)),
            "seed": number,
            "logprobs": 2,
            "return_token_ids": True,
        }
        for number in range(count)
    ]


def _comparable(answer: Answer) -> Any:
    """The parts that must be equal bit for bit: tokens, text, log-probabilities, the reason of the end."""
    if answer.status != 200:
        return f"status {answer.status}: {answer.body[:200]!r}"
    [choice] = answer.json()["choices"]
    return {k: choice[k] for k in ("text", "token_ids", "logprobs", "finish_reason")}


@dataclass
class Equal:
    """Results of a run of equal answers."""

    seconds: float
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def describe(self) -> str:
        return (
            f"{self.num_answers} answers in {self.seconds:.0f} s, {len(self.wrong)} unlike solo"
            + "".join(f"\n{line}" for line in self.wrong[:5])
        )


async def run_equal(url: str, seconds: float, *, at_once: int = 32, kinds: int = 64) -> Equal:
    """Ask each request alone, then all of them at once again and again."""
    bodies = equal_bodies(kinds)
    alone = [_comparable(await post(url, "/v1/completions", body)) for body in bodies]
    begin = time.monotonic()
    found = Equal(seconds)

    async def keep_asking(first: int) -> None:
        rng = random.Random(first)
        while time.monotonic() - begin < seconds:
            number = rng.randrange(kinds)
            answer = _comparable(await post(url, "/v1/completions", bodies[number]))
            found.num_answers += 1
            if answer != alone[number]:
                found.wrong.append(f"request {number}: {str(answer)[:150]}")

    await asyncio.gather(*(keep_asking(number) for number in range(at_once)))
    return found


# L3: a burst

KEPT_MOST, KEPT_SECONDS = 50e6, 60.0
"""Bytes that a server may keep of a burst's memory, so many seconds after it."""


@dataclass
class Burst:
    """Results of a burst."""

    statuses: Counter[int]
    unhelpful: int
    """Refusals without a ``Retry-After``."""
    livez: list[float]
    sent_in: float
    """Seconds until the last request was sent."""

    def describe(self) -> str:
        p99 = quantile(self.livez, 0.99) * 1000
        return (
            f"{dict(self.statuses)} sent within {self.sent_in:.2f} s, {self.unhelpful} refused "
            f"without Retry-After; livez p99 {p99:.0f} ms of {len(self.livez)} looks"
        )


async def run_burst(url: str, number: int) -> Burst:
    """So many requests as fast as they can be sent."""
    begin = time.monotonic()
    sent: list[float] = []

    async def one(seed: int) -> Answer:
        body = {"prompt": "burst", "max_tokens": 50, "seed": seed}
        return await post(
            url, "/v1/completions", body, sent=lambda: sent.append(time.monotonic() - begin)
        )

    with livez_watched(url) as livez:
        answers = await asyncio.gather(*(one(seed) for seed in range(number)))
    refused = [answer for answer in answers if answer.status == 429]
    unhelpful = sum("retry-after" not in answer.headers for answer in refused)
    return Burst(Counter(answer.status for answer in answers), unhelpful, livez, max(sent))


# L4: a long run of mixed requests

_LOOKS = 200
"""Times that memory is measured in a soak."""
KINDS = ("whole", "stream", "chat", "leave", "wrong", "unknown", "slow", "many")


@dataclass
class Soak:
    """Results of a soak."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(kind, status) -> how often."""
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, bytes)."""
    waits: list[float] = field(default_factory=list)
    """Seconds of each request of the kind ``whole``, in order."""
    seconds: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.counts.total()

    def growth(self) -> tuple[float, float]:
        """(MiB, MiB a minute) after the first third, which warms up; by least squares."""
        kept = self.memory[len(self.memory) // 3 :]
        if len(kept) < 3:
            return 0.0, 0.0
        times, sizes = zip(*kept, strict=True)
        slope = statistics.linear_regression(times, sizes).slope
        return (sizes[-1] - sizes[0]) / MIB, slope * 60 / MIB

    def slowing(self) -> float:
        """Median wait of the last tenth, as a multiple of the first tenth after the warm-up."""
        tenth = max(1, len(self.waits) // 10)
        return statistics.median(self.waits[-tenth:]) / statistics.median(
            self.waits[tenth : 2 * tenth]
        )

    def describe(self) -> str:
        kinds: Counter[str] = Counter()
        for (kind, status), count in self.counts.items():
            kinds[f"{kind} {status}"] += count
        grown, slope = self.growth()
        return (
            f"{self.num_requests} requests in {self.seconds:.0f} s, {len(self.wrong)} wrong\n"
            f"{dict(sorted(kinds.items()))}\n"
            f"memory after warm-up: {grown:+.1f} MiB, {slope:+.2f} MiB a minute; now "
            f"{self.memory[-1][1] / MIB:.0f} MiB\n"
            f"last tenth as slow as the first: {self.slowing():.2f}"
            + "".join(f"\n{line}" for line in self.wrong[:10])
        )


async def run_soak(server: RunningServer, number: int, *, at_once: int = 32) -> Soak:
    """So many requests of all kinds in a mixed order, so many at once."""
    found = Soak()
    numbers = iter(range(1, number + 1))
    every = max(1, number // _LOOKS)
    begin = time.monotonic()

    async def worker() -> None:
        for seed in numbers:
            kind = KINDS[seed * 7919 % 8]
            before = time.monotonic()
            status, problem = await _SOAK[kind](server.url, seed)
            found.counts[kind, status] += 1
            if problem:
                found.wrong.append(f"{kind} {seed}: {problem}")
            if kind == "whole":
                found.waits.append(time.monotonic() - before)
            if seed % every == 0:
                size = await asyncio.to_thread(resident, server.process.pid)
                found.memory.append((time.monotonic() - begin, size))

    await asyncio.gather(*(worker() for _ in range(at_once)))
    found.seconds = time.monotonic() - begin
    return found


async def _whole(url: str, seed: int) -> tuple[int, str]:
    body = {"prompt": "once " * (seed % 50 + 1), "max_tokens": seed % 30 + 1, "seed": seed}
    answer = await post(url, "/v1/completions", body)
    if answer.status != 200:
        return answer.status, f"status {answer.status}: {answer.body[:100]!r}"
    wanted, given = seed % 30 + 1, answer.json()["usage"]["completion_tokens"]
    return 200, "" if given == wanted else f"{given} tokens of {wanted}"


async def _stream(url: str, seed: int) -> tuple[int, str]:
    stream = Stream(seed, seed % 40 + 2)
    await run_stream(url, stream, keep=False)
    return stream.status, stream.wrong


async def _chat(url: str, seed: int) -> tuple[int, str]:
    turns = [{"role": "user", "content": f"turn {seed} " * (seed % 9 + 1)}]
    body = {"messages": turns, "max_tokens": 12, "seed": seed, "logprobs": seed % 2 == 0}
    answer = await post(url, "/v1/chat/completions", body)
    return answer.status, "" if answer.status == 200 else f"{answer.body[:100]!r}"


async def _leave(url: str, seed: int) -> tuple[int, str]:
    """A client that goes at once, or when it has seen some bytes of its stream."""
    async with _reading_little(url, seed, 1000) as reader:
        for _ in range(seed % 11):
            await reader.read(100)
    return 0, ""


async def _wrong(url: str, seed: int) -> tuple[int, str]:
    bodies: Sequence[Any] = (
        {"prompt": 3.5}, {"prompt": "x", "max_tokens": -seed}, {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "model": f"none-{seed}"}, {"prompt": [[seed] * 5000]}, [seed],
        {"prompt": "x", "stop": [f"s{seed}"] * 5000}, {"prompt": [10**9 + seed]},
    )  # fmt: skip
    answer = await post(url, "/v1/completions", bodies[seed % len(bodies)])
    told = 400 <= answer.status < 500 and b'"error"' in answer.body
    return answer.status, "" if told else f"status {answer.status}: {answer.body[:100]!r}"


async def _unknown(url: str, seed: int) -> tuple[int, str]:
    """New names everywhere: of fields, users, routes, headers."""
    body = {"prompt": "x", "max_tokens": 1, f"field_{seed}": seed, "user": f"user-{seed}"}
    answer = await post(url, "/v1/completions", body, headers=f"X-Request-Id: id-{seed}\r\n")
    await post(url, f"/v1/nowhere-{seed}", body)
    return answer.status, "" if answer.status == 200 else f"{answer.body[:100]!r}"


async def _slow(url: str, seed: int) -> tuple[int, str]:
    """A reader that looks away while other requests are answered."""
    async with _reading_little(url, seed, 200) as reader:
        await reader.read(100)
        for _ in range(seed % 5):
            await post(url, "/v1/completions", {"prompt": "x", "max_tokens": 10, "seed": seed})
        data = await reader.read(-1)
    ended = b"data: [DONE]" in data
    return 200, "" if ended else f"200 tokens wanted, ended with {data[-80:]!r}"


@asynccontextmanager
async def _reading_little(url: str, seed: int, wanted: int) -> AsyncIterator[asyncio.StreamReader]:
    """A stream of so many tokens, read by hand on a connection that buffers 1 KiB."""
    address = urlsplit(url)
    body = json.dumps({"prompt": "x", "max_tokens": wanted, "seed": seed, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
        writer.write(body)
        yield reader
    finally:
        writer.close()


async def _many(url: str, seed: int) -> tuple[int, str]:
    """Several prompts and completions in one request."""
    body = {"prompt": ["a", "b " * (seed % 20 + 1)], "n": 2, "max_tokens": 3, "seed": seed}
    answer = await post(url, "/v1/completions", body)
    given = len(answer.json()["choices"]) if answer.status == 200 else 0
    return answer.status, "" if given == 4 else f"status {answer.status}, {given} choices"


_SOAK = {
    "whole": _whole, "stream": _stream, "chat": _chat, "leave": _leave, "wrong": _wrong,
    "unknown": _unknown, "slow": _slow, "many": _many,
}  # fmt: skip


# F4 and F14: what a crowd costs


@dataclass
class Crowd:
    """Cost of a crowd for the server, and for the streams of others."""

    number: int
    bytes_each: float
    slower: float
    """Time of others' streams, as a multiple of that without the crowd (medians)."""
    wrong: list[str]

    def describe(self) -> str:
        return (
            f"{self.number} of them: {self.bytes_each / 1024:.1f} KiB each, others take "
            f"{self.slower:.2f} times as long, {len(self.wrong)} of these wrong"
        )


async def _others(url: str, rounds: int) -> tuple[float, list[str]]:
    """(median seconds of a stream of 100 tokens, ten at once, what was wrong)."""
    times, wrong = [], []
    for number in range(rounds):
        streams = [Stream(number * 10 + i, 100) for i in range(10)]
        before = time.monotonic()
        await asyncio.gather(*(run_stream(url, stream, keep=False) for stream in streams))
        times.append(time.monotonic() - before)
        wrong += [stream.wrong for stream in streams if stream.wrong]
    return statistics.median(times), wrong


async def run_readers(
    server: RunningServer, number: int, seconds: float, *, logprobs: bool = False, rounds: int = 5
) -> Crowd:
    """Streams that are long, of which 10 bytes are read each second or so: once for each time that
    others' streams of a second are measured.

    Args:
        seconds: so long at least.
        rounds: times that others' streams are measured, before and at least among.
    """
    plain, wrong = await _others(server.url, rounds)
    before, produced = resident(server.process.pid), server.metric("generation_tokens_total")
    readers = [_slow_reader(server.url, seed, logprobs) for seed in range(number)]

    def are_behind() -> bool:
        """None of them runs or waits to: all have been given as much as is kept for them."""
        enough = server.metric("generation_tokens_total") >= produced + number * FEWEST_TOKENS
        return enough and blocks_are_free(server)

    until = time.monotonic() + seconds
    # Until they are behind they cost steps, as any request does; from then on they are only slow.
    await asyncio.to_thread(wait_until, are_behind)
    times: list[float] = []
    while len(times) < rounds or time.monotonic() < until:
        for reader in readers:
            with suppress(BlockingIOError):
                reader.recv(10)
        took, more = await _others(server.url, 1)
        times.append(took)
        wrong += more
    grown = resident(server.process.pid) - before
    for reader in readers:
        reader.close()
    return Crowd(number, grown / number, statistics.median(times) / plain, wrong)


def _slow_reader(url: str, seed: int, logprobs: bool) -> socket.socket:
    """A connection that has asked for a long stream and has read nothing of it."""
    address = urlsplit(url)
    body = json.dumps({
        "prompt": "slow", "max_tokens": 1900, "seed": seed, "stream": True,
        **({"logprobs": 5, "return_token_ids": True} if logprobs else {}),
    }).encode()  # fmt: skip
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    client.setblocking(False)
    return client


async def run_half_open(server: RunningServer, number: int) -> Crowd:
    """Connections that have sent half a head, or nothing."""
    plain, wrong = await _others(server.url, 5)
    before = resident(server.process.pid)
    address = urlsplit(server.url)
    clients = []
    for index in range(number):
        client = socket.create_connection((address.hostname, address.port), PATIENCE)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: "[: 60 * (index % 2)])
        clients.append(client)
    among, more = await _others(server.url, 5)
    grown = resident(server.process.pid) - before
    for client in clients:
        client.close()
    return Crowd(number, grown / number, among / plain, wrong + more)


# The command


def _run(name: str, scale: float) -> tuple[str, bool]:
    """(result, whether it is as promised)."""
    if name == "equal":
        with serving("--max-num-seqs", "32", *QUIET) as server:
            equal = asyncio.run(run_equal(server.url, 1800 * scale))
            return equal.describe(), not equal.wrong and server.stop() == 0
    if name == "burst":
        with serving(*BURST) as server:
            return _burst(server, max(1, int(1280 * scale)))
    if name == "soak":
        with serving(*SIM, "--max-num-seqs", "64") as server:
            soaked = asyncio.run(run_soak(server, int(100_000 * scale)))
            wait_until(lambda: blocks_are_free(server), what="blocks are not free at idle")
            _, slope = soaked.growth()
            fine = not soaked.wrong and slope < 1.0 and soaked.slowing() < 1.10
            return soaked.describe(), fine and server.stop() == 0
    with serving(*(READ if name == "readers" else (*SIM, "--max-num-seqs", "256"))) as server:
        if name == "readers":
            asyncio.run(run_readers(server, int(100 * scale), 3.0))  # what is made once
            number, seconds = int(100 * scale), 30 * scale
            crowds = [
                asyncio.run(run_readers(server, number, seconds, logprobs=logprobs))
                for logprobs in (False, True)
            ]
            fine = all(not crowd.wrong and crowd.bytes_each <= 64 * 1024 for crowd in crowds)
            return "\n".join(crowd.describe() for crowd in crowds), fine
        crowd = asyncio.run(run_half_open(server, int(1000 * scale)))
        return crowd.describe(), not crowd.wrong


def _burst(server: RunningServer, number: int) -> tuple[str, bool]:
    before = resident(server.process.pid)
    burst = asyncio.run(run_burst(server.url, number))
    wait_until(lambda: blocks_are_free(server), what="work goes on")
    begin = time.monotonic()
    while (grown := resident(server.process.pid) - before) > KEPT_MOST:
        if time.monotonic() - begin > KEPT_SECONDS:
            break
        time.sleep(0.1)
    fine = (
        set(burst.statuses) <= {200, 429}
        and not burst.unhelpful
        and quantile(burst.livez, 0.99) < 1.0
        and grown <= KEPT_MOST
    )
    waited = f"{grown / 1e6:+.1f} MB after {time.monotonic() - begin:.1f} s"
    return f"{burst.describe()}; memory {waited}", fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=("equal", "burst", "soak", "readers", "crowd"))
    parser.add_argument("--scale", type=float, default=1.0, metavar="SHARE")
    args = parser.parse_args()
    text, fine = _run(args.run, args.scale)
    print(f"{text}\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("as promised" if fine else "NOT as promised")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
