"""Servers behind a router whose processes are killed at random moments, and what their clients are told.

``python tests-integration/chaos.py --minutes 10`` starts ``headrace serve -dp 2`` and ``... -tp 2`` of the
bundled model behind ``headrace route``, asks greedy requests whose answers are known, streamed and
whole, and kills (SIGKILL) engines, ranks and servers meanwhile; a server that ends is started again on its
port. ``--sim`` has the simulated device, which starts sooner, and a second server of one process.

Each request must be answered once, with the right text, or be failed: by an error status, or by an event in
its stream after a right beginning, within ``--limit`` seconds of a kill. At the end everything must be well
again, nothing may be in flight, and no process, file or segment of shared memory may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forks import Process, start
from servers import PATIENCE, START_SECONDS, RunningServer, free_port, running
from tqdm import tqdm

from headrace.bench.http import Client, HttpError
from headrace_engine.clients import child
from headrace_engine.multiproc import rank_process
from headrace_engine.sim.tokens import expected_tokens
from headrace_testing.waiting import wait_until

MODEL = "headrace-demo"
TOKENS = 48
"""Of the longest answer."""
SIM = ("--device", "sim", "--sim-step-ms", "5")
REAL = (
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    "256",
    "--num-gpu-blocks-override",
    "256",
)
VOCAB_SIZE, EOS = 1408, (2, 0)
"""Of the bundled model, whose tokenizer the simulated device borrows."""
PATIENT = 0.98
"""Chance to wait another half second for servers that come back, before more is killed."""
MISSED = (child.__name__, rank_process.__name__)
"""Modules of engines and ranks, which a server misses; helpers of libraries may end unnoticed."""
MOST_FALLS, FALLS_SECONDS = 3, 65.0
"""Kills of a server's engines: more within a minute, and the server replaces them no more."""


@dataclass(frozen=True)
class Question:
    """A request whose answer is known."""

    number: int
    wanted: int
    """Tokens of the answer."""
    streamed: bool

    def body(self) -> bytes:
        return json.dumps({
            "model": MODEL, "prompt": f"{self.number} and {self.number + 1} make", "seed": self.number,
            "temperature": 0, "ignore_eos": True, "max_tokens": self.wanted, "stream": self.streamed,
            "return_token_ids": True,
        }).encode()  # fmt: skip


@dataclass
class Answers:
    """What became of all requests."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds from the last kill to the latest failure that it explains."""


class Clients:
    """Clients that ask all the time, and judge what they get.

    Args:
        url: of the router.
        known: the longest answer to each number.
        limit: seconds from a kill within which its requests must be failed.
        seed: of the questions.
    """

    def __init__(self, url: str, known: Sequence[Sequence[int]], limit: float, seed: int) -> None:
        self.answers = Answers()
        self.last_kill = float("-inf")
        """``time.monotonic``."""
        self.last_killed = "nothing"
        self.stopping = False
        self._client = Client(url, timeout=PATIENCE)
        self._known = known
        self._limit = limit
        self._random = random.Random(seed)

    async def ask_on(self) -> None:
        """Ask one question after the other until :attr:`stopping`."""
        while not self.stopping:
            wanted, streamed = self._random.randint(1, TOKENS), self._random.random() < 0.7
            number = self._random.randrange(len(self._known))
            end = await self.ask(Question(number, wanted, streamed))
            if end.startswith("refused"):
                await asyncio.sleep(0.2)  # nobody is there: do not ask thousands of times a second

    async def ask(self, question: Question) -> str:
        """Ask once; how it ended."""
        try:
            answer = await self._client.post("/v1/completions", question.body())
            end = self._judged(question, answer.status, answer.body)
        except (HttpError, ValueError, KeyError, IndexError) as error:
            end = f"wrong: {error!r}"
        if end.startswith("wrong"):
            self.answers.wrong.append(f"{question}: {end}")
            end = "wrong"
        elif end != "whole":
            since = time.monotonic() - self.last_kill
            if end == "told":
                self.answers.slowest = max(self.answers.slowest, since)
            if end == "told" and since > self._limit:
                late = f"told {since:.1f} s after the kill of {self.last_killed}"
                self.answers.wrong.append(f"{question}: {late}")
        self.answers.ends[end] += 1
        return end

    def _judged(self, question: Question, status: int, body: bytes) -> str:
        right = list(self._known[question.number][: question.wanted])
        if status != 200:
            message = json.loads(body)["error"]["message"]
            return (
                f"refused {status}" if status in (500, 502, 503) else f"wrong: {status} {message}"
            )
        if not question.streamed:
            tokens = json.loads(body)["choices"][0]["token_ids"]
            return "whole" if tokens == right else f"wrong: {tokens}"
        events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        if events[-1:] != [b"[DONE]"] or events.count(b"[DONE]") != 1:
            return f"wrong: a stream without one end: {events[-2:]}"
        chunks = [json.loads(event) for event in events[:-1]]
        failed = [chunk for chunk in chunks if "error" in chunk]
        choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
        tokens = [token for choice in choices for token in choice["token_ids"] or ()]
        if failed:
            as_it_should = failed == chunks[-1:] and tokens == right[: len(tokens)]
            return "told" if as_it_should else f"wrong: {tokens}, then {failed}"
        is_whole = tokens == right and choices[-1]["finish_reason"] == "length"
        return "whole" if is_whole else f"wrong: {tokens}"

    def close(self) -> None:
        self._client.close()


class Fleet:
    """Servers on ports of their own, started again whenever they have ended.

    Args:
        commands: words after ``headrace serve`` for each.
        ports: one for each.
        environment: of all processes.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], ports: Sequence[int], environment: dict[str, str]
    ) -> None:
        self._commands, self._environment = commands, environment
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.processes: list[Process | None] = [None] * len(commands)
        self.num_starts = 0
        self._falls: list[list[float]] = [[] for _ in commands]
        self._unnoticed: list[tuple[Process, int, bool]] = []
        """Servers with a process of theirs that was killed, and whether they replace such a one."""
        self.log: list[str] = []

    def keep_up(self) -> None:
        """Start what does not run."""
        for index, process in enumerate(self.processes):
            if process is None or process.poll() is not None:
                port = self.urls[index].rpartition(":")[2]
                words = ("serve", *self._commands[index], "--port", port)
                process = start(*words, environment=self._environment, stderr=subprocess.STDOUT)
                threading.Thread(target=self._read, args=(index, process), daemon=True).start()
                self.processes[index] = process
                self.num_starts += 1

    def _read(self, index: int, process: Process) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(f"{index + 1}: {line}")

    def kill_one(self, chosen: random.Random) -> str:
        """Kill a process, or nothing where none is there; says which."""
        index = chosen.randrange(len(self.processes))
        process = self.processes[index]
        if process is None or process.poll() is not None:
            return ""
        inner = children(process.pid)
        if not inner or chosen.random() < 0.25:
            process.kill()
            return f"server {index + 1}"
        now = time.monotonic()
        recent = [at for at in self._falls[index] if now - at < FALLS_SECONDS]
        if len(recent) >= MOST_FALLS:
            return ""
        self._falls[index] = [*recent, now]
        pid = chosen.choice(inner)
        is_missed = any(module in command_line(pid) for module in MISSED)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        if is_missed:
            self._unnoticed.append((process, pid, "-dp" in self._commands[index]))
        return f"process {pid} of server {index + 1}"

    def has_noticed(self) -> bool:
        """True if all that was killed is known to be: a server without requests looks once a second."""
        self._unnoticed = [
            (server, pid, is_replaced)
            for server, pid, is_replaced in self._unnoticed
            if server.poll() is None and not (is_replaced and pid not in children(server.pid))
        ]
        return not self._unnoticed

    def wait_until_well(self) -> None:
        """Until all answer and no engine is missing."""
        wait_until(self.has_noticed, PATIENCE, "a killed process is not missed")
        for url in self.urls:
            wait_until(lambda url=url: self._is_well(url), START_SECONDS, f"{url} is not well")

    def _is_well(self, url: str) -> bool:
        self.keep_up()
        return get(url + "/health") == (200, b"")

    def are_well(self) -> bool:
        """True if all answer and no engine is missing."""
        return all(map(self._is_well, self.urls))

    def stop(self) -> list[str]:
        """End all; what was wrong about it."""
        running = [process for process in self.processes if process is not None]
        ended = [process.poll() is not None for process in running]
        for process in running:
            process.terminate()
        wrong = []
        for index, process in enumerate(running):
            if status := process.wait(PATIENCE):
                last = [line for line in self.log if line.startswith(f"{index + 1}: ")][-20:]
                before = "before it was told to, " if ended[index] else ""
                wrong.append(f"server {index + 1} ended {before}with {status}:\n{''.join(last)}")
        return wrong

    def kill(self) -> None:
        for process in self.processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(PATIENCE)


def get(url: str) -> tuple[int, bytes]:
    """Status and body; (0, b""): nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def command_line(pid: int) -> str:
    """Words of a process; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Engines and ranks of a server, and ranks of engines."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(entry.parent.name), *children(int(entry.parent.name))]
    return found


def left_behind(folder: str, own: Sequence[int]) -> list[str]:
    """Processes that were started with this folder and still run, files in it, and shared memory."""
    found = [str(path) for path in Path(folder).iterdir()]
    found += [str(path) for path in Path("/dev/shm").glob("*headrace*")]
    marker = b"TMPDIR=" + folder.encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker in path.read_bytes().split(b"\0"):
                found.append(f"process {path.parent.name}")
        except OSError:
            continue
    return [*found, *(f"process {pid}" for pid in own if Path(f"/proc/{pid}").exists())]


@contextmanager
def fleet(sim: bool) -> Iterator[tuple[Fleet, RunningServer, str]]:
    """Servers that are well, a router in front of them, and the folder of their temporary files."""
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="chaos-", dir="/tmp")  # names of sockets are short
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ports = [stack.enter_context(free_port()) for _ in range(2)]
        device = SIM if sim else REAL
        second = () if sim else ("-tp", "2")
        servers = Fleet([(*device, "-dp", "2"), (*device, *second)], ports, {"TMPDIR": folder})
        stack.callback(servers.kill)
        servers.keep_up()
        words = [word for url in servers.urls for word in ("--server", url)]
        quick = ("--health-interval", "0.2", "--dev-mode", "--disable-uvicorn-access-log")
        servers.wait_until_well()
        environment = {"TMPDIR": folder}
        router = stack.enter_context(running("route", *words, *quick, environment=environment))
        yield servers, router, folder


async def known_answers(url: str, count: int, sim: bool) -> list[list[int]]:
    """The longest answers, of one server that is left in peace."""
    if sim:
        return [
            expected_tokens(seed, TOKENS, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
            for seed in range(count)
        ]
    client = Client(url, timeout=PATIENCE)
    found = []
    for number in range(count):
        answer = await client.post("/v1/completions", Question(number, TOKENS, False).body())
        found.append(answer.json()["choices"][0]["token_ids"])
    client.close()
    return found


async def disturb(
    servers: Fleet, clients: Clients, seconds: float, pause: float, seed: int, log: Any = None
) -> list[str]:
    """Kill one process after the other, ``pause`` seconds apart on average; what was killed."""
    chosen, killed = random.Random(seed), []
    end = time.monotonic() + seconds
    bar = tqdm(total=round(seconds), unit="s", mininterval=5, disable=log is None)
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, chosen.uniform(0.2, 2 * pause)))
        await asyncio.to_thread(servers.keep_up)
        while (
            not await asyncio.to_thread(servers.are_well)
            and chosen.random() < PATIENT
            and time.monotonic() < end
        ):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(servers.keep_up)
        what = servers.kill_one(chosen)  # no client is told anything meanwhile: same thread
        if what:
            clients.last_kill, clients.last_killed = time.monotonic(), what
            killed.append(what)
        bar.update(round(seconds - (end - time.monotonic())) - bar.n)
        bar.set_postfix(kills=len(killed), asked=clients.answers.ends.total(), refresh=False)
    bar.close()
    return killed


async def run(
    servers: Fleet, router: RunningServer, args: argparse.Namespace
) -> tuple[Answers, list[str]]:
    """The whole run but its end; asserts that everything is well again."""
    known = await known_answers(servers.urls[0], args.questions, args.sim)
    clients = Clients(router.url, known, args.limit, args.seed)
    for number in range(len(known)):  # both servers say the same
        end = await clients.ask(Question(number, TOKENS, number % 2 == 0))
        assert end == "whole", clients.answers.wrong
    asking = [asyncio.create_task(clients.ask_on()) for _ in range(args.clients)]
    killed = await disturb(
        servers, clients, args.minutes * 60, args.pause, args.seed, log=args.progress or None
    )
    clients.stopping = True
    await asyncio.gather(*asking)
    await asyncio.to_thread(servers.wait_until_well)
    await asyncio.to_thread(_wait_until_known, router)
    for number in range(len(known)):
        end = await clients.ask(Question(number, TOKENS, number % 2 == 0))
        if end != "whole":
            clients.answers.wrong.append(f"after the last kill: {end}")
    clients.close()
    return clients.answers, killed


def _wait_until_known(router: RunningServer) -> None:
    def is_well() -> bool:
        states = json.loads(get(router.url + "/router/servers")[1])["servers"]
        return all(one["available"] and not one["requests_in_flight"] for one in states)

    wait_until(is_well, PATIENCE, "the router does not send requests to all servers")


def idle(servers: Fleet) -> list[str]:
    """What servers still do though nobody asks."""
    found = []
    for url in servers.urls:
        metrics = get(url + "/metrics")[1].decode()
        for line in metrics.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("headrace:")
            if name in ("num_requests_running", "num_requests_waiting", "http_requests_in_flight"):
                found += [f"{url}: {line}"] if float(value) else []
    return found


def chaos(args: argparse.Namespace) -> list[str]:
    """Run it; what was wrong."""
    with fleet(args.sim) as (servers, router, folder):
        answers, killed = asyncio.run(run(servers, router, args))
        wrong = answers.wrong + idle(servers)
        pids = [process.pid for process in servers.processes if process is not None]
        wrong += servers.stop()
        if status := router.stop():
            wrong.append(f"the router ended with {status}:\n{''.join(router.log[-20:])}")
        try:
            wait_until(lambda: not left_behind(folder, [*pids, router.process.pid]), 10.0)
        except AssertionError:
            wrong += [f"left behind: {one}" for one in left_behind(folder, pids)]
        if args.log:
            Path(args.log).write_text("".join([*servers.log, *router.log]))
        print(
            f"{answers.ends.total()} requests: {dict(answers.ends)}; {len(killed)} kills "
            f"({sum('of server' in one for one in killed)} of engines and ranks), "
            f"{servers.num_starts} starts of servers; the latest failure {answers.slowest:.1f} s after a kill"
        )
        return wrong


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--sim", action="store_true", help="the simulated device")
    made.add_argument("--clients", type=int, default=8, help="requests at a time")
    made.add_argument("--questions", type=int, default=16, help="different prompts")
    made.add_argument("--pause", type=float, default=4.0, help="seconds between kills, on average")
    made.add_argument("--limit", type=float, default=5.0, help="seconds from a kill to an error")
    made.add_argument("--log", default="", help="file for all logs")
    made.set_defaults(progress=True)
    return made


def main() -> int:
    wrong = chaos(parser().parse_args())
    for one in wrong[:30]:
        print(f"wrong: {one}")
    print(f"{len(wrong)} things were wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
