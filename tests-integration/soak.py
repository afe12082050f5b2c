"""Many streams at once on the simulated device, every token checked.

``python tests-integration/soak.py --streams 200 --seconds 60`` starts a server, keeps that many
streams open, each followed by the next, and reports: events per second, wrong tokens, failures, how
long ``/livez`` took meanwhile, and by how much tokens came later than the device made them.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from servers import serving

from headrace import demo
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.tokenizer import load_tokenizer
from headrace_engine.sim.tokens import expected_tokens

VOCAB_SIZE, EOS = 1408, (2, 0)
"""Of the demo model, whose tokenizer the simulated device borrows."""


@dataclass
class Stream:
    """One streamed completion, as its client saw it."""

    seed: int
    wanted: int
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Seconds, one per event with tokens."""
    events: list[bytes] = field(default_factory=list)
    """Events without tokens: errors, the end."""
    text: str = ""
    by_text: bool = False
    """Ask for no token ids, and check the text instead: the way that costs a server least."""
    status: int = 0
    sent: float = 0.0

    @property
    def wrong(self) -> str:
        """What is wrong with it; empty: nothing."""
        expected = expected_tokens(self.seed, self.wanted, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        if self.status != 200:
            return f"status {self.status}"
        if self.by_text:
            if self.text != _text_of(expected):
                return f"{len(self.text)} characters that are not the expected ones"
        elif self.token_ids != expected:
            same = next(
                (i for i, (a, b) in enumerate(zip(self.token_ids, expected)) if a != b),
                min(len(self.token_ids), len(expected)),
            )
            return f"{len(self.token_ids)} of {len(expected)} tokens, the first {same} right"
        if self.events != [b"[DONE]"]:
            return f"ended with {self.events[-2:]!r}"
        return ""


@dataclass
class Report:
    """What a soak came to."""

    seconds: float
    streams: list[Stream]
    livez: list[float]
    """Seconds that each look took."""
    step_seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        return [f"seed {s.seed}: {s.wrong}" for s in self.streams if s.wrong]

    @property
    def num_events(self) -> int:
        return sum(len(s.arrivals) for s in self.streams)

    @property
    def num_tokens(self) -> int:
        return sum(s.wanted if s.by_text else len(s.token_ids) for s in self.streams)

    @property
    def events_per_second(self) -> float:
        return self.num_events / self.seconds

    @property
    def _tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def gaps(self) -> list[float]:
        """Seconds between neighbouring events of a stream, beyond what a step takes."""
        return sorted(
            max(0.0, b - a - self.step_seconds)
            for s in self.streams
            for a, b in zip(s.arrivals, s.arrivals[1:])
        )

    def describe(self) -> str:
        """For people."""
        firsts = [s.arrivals[0] - s.sent for s in self.streams if s.arrivals]
        rate, tokens = self.events_per_second, self.num_tokens / self.seconds
        lines = [
            f"{len(self.streams)} streams in {self.seconds:.1f} s, {len(self.wrong)} wrong",
            f"{rate:.0f} events/s, {tokens:.0f} tokens/s",
            f"livez ({len(self.livez)} looks): {_table(self.livez)}",
            f"first token: {_table(firsts)}",
            f"delay beyond a step: {_table(self.gaps())}",
        ]
        return "\n".join(lines + self.wrong[:10])


def quantile(values: list[float], share: float) -> float:
    """The smallest value that the given share is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _table(values: list[float]) -> str:
    found = {
        "p50": quantile(values, 0.5),
        "p99": quantile(values, 0.99),
        "worst": max(values or [0]),
    }
    return ", ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())


async def run_stream(
    url: str, stream: Stream, *, headers: str = "", prompt: str = "on and on", keep: bool = True
) -> None:
    """Read one stream to its end. ``keep``: note arrival times."""
    address = urlsplit(url)
    body = json.dumps({
        "prompt": prompt, "max_tokens": stream.wanted, "stream": True, "seed": stream.seed,
        "return_token_ids": not stream.by_text,
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    stream.sent = time.monotonic()
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n{headers}"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        async with asyncio.timeout(600):
            await _read(reader, stream, keep)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, stream: Stream, keep: bool) -> None:
    status = await reader.readline()
    stream.status = int(status.split()[1]) if status else -1
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue  # heads, chunk sizes, blank lines
        data = line[6:].strip()
        choices = _choices_of(data)
        if choices is None:
            stream.events.append(data)
            continue
        for choice in choices:
            stream.token_ids += choice.token_ids or ()
            stream.text += choice.text
        if keep and choices:
            stream.arrivals.append(time.monotonic())


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Chunk)


def _choices_of(data: bytes) -> list[_Choice] | None:
    """A chunk's choices; None: the event is something else."""
    try:
        return _decoder.decode(data).choices
    except msgspec.DecodeError:
        return None


@functools.cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


def _text_of(token_ids: list[int]) -> str:
    return _tokenizer().decode(token_ids, skip_special_tokens=True)


async def watch_livez(url: str, found: list[float]) -> None:
    """Ask ``/livez`` ten times a second until cancelled."""
    address = urlsplit(url)
    while True:
        begin = time.monotonic()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise AssertionError(f"/livez answered {answer[:40]!r}")
        found.append(time.monotonic() - begin)
        await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - begin)))


async def soak(
    url: str, num_streams: int, seconds: float, tokens: int, *, by_text: bool = False
) -> Report:
    """Keep streams open for so long; those that are open then are read to their ends.

    They begin one after the other, over a second or two, and differ in length by up to a quarter, so
    that they do not end and begin in step with each other for the whole time.
    """
    done: list[Stream] = []
    livez: list[float] = []
    begin = time.monotonic()

    async def keep_going(number: int, seeds: Iterator[int]) -> None:
        await asyncio.sleep(0.01 * number)
        while time.monotonic() - begin < seconds:
            seed = next(seeds)
            stream = Stream(seed, tokens - seed * 37 % (tokens // 4), by_text=by_text)
            done.append(stream)
            await run_stream(url, stream)

    watching = asyncio.create_task(watch_livez(url, livez))
    seeds = iter(range(1, 1 << 40))
    await asyncio.gather(*(keep_going(number, seeds) for number in range(num_streams)))
    spent = time.monotonic() - begin
    if watching.done():
        watching.result()
    watching.cancel()
    return Report(spent, done, livez)


def cpu_seconds(pid: int) -> float:
    """What a process has computed since it began, its ended children included (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--engine-process", action="store_true")
    parser.add_argument("--by-text", action="store_true", help="ask for no token ids")
    args = parser.parse_args()
    words = ["--device", "sim", "--sim-step-ms", str(args.step_ms), "--sim-token-us", "0"]
    words += ["--max-num-seqs", str(args.streams), "--disable-uvicorn-access-log"]
    words += ["--engine-process"] * args.engine_process
    with serving(*words) as server:
        report = asyncio.run(
            soak(server.url, args.streams, args.seconds, args.tokens, by_text=args.by_text)
        )
        report.step_seconds = args.step_ms / 1000
        print(report.describe())
        share = cpu_seconds(server.process.pid) / report.seconds
        own = time.process_time() / report.seconds
        print(
            f"cores used: server {share:.2f}, this client {own:.2f}; load average "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        status = server.stop()
    print(f"exit status {status}")
    return 1 if report.wrong or status else 0


if __name__ == "__main__":
    sys.exit(main())
