"""``headrace serve --data-parallel-size`` and ``LLM(data_parallel_size=...)``: real processes and sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from ports import free_ports
from servers import PATIENCE, SLACK, RunningServer, alive, children_of, serving

from headrace_engine.kv.event_subscriber import KVEventSubscriber
from headrace_testing.waiting import wait_until

SIM = ("--device", "sim", "--sim-step-ms", "10", "--data-parallel-size", "2")


def post(
    server: RunningServer, path: str, body: dict[str, Any], rank: str | None = None
) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = rank
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)


def complete(server: RunningServer, rank: str | None = None, **body: Any) -> dict[str, Any]:
    return post(server, "/v1/completions", {"prompt": "a b c", "seed": 1, **body}, rank)


def by_engine(server: RunningServer, name: str) -> list[float]:
    """A metric's value by its label ``engine``."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    found = re.findall(rf'^headrace:{name}\{{.*engine="(\d+)".*\}} (\S+)$', text, re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


def engines(server: RunningServer) -> list[int]:
    """Process ids of the engines, in the order of their start."""
    listed = subprocess.run(
        ["ps", "--ppid", str(server.process.pid), "-o", "pid=,args="],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = [line.split(None, 1) for line in listed.splitlines()]
    return [int(pid) for pid, args in lines if "clients.child" in args]


def health(server: RunningServer) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Calls:
    """Completions side by side, in threads."""

    def __init__(self, server: RunningServer, count: int, **body: Any) -> None:
        self.answers: list[Any] = [None] * count
        self._threads = [
            threading.Thread(target=self._run, args=(server, index, body), daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: RunningServer, index: int, body: dict[str, Any]) -> None:
        try:
            self.answers[index] = complete(server, prompt=f"number {index}", **body)
        except urllib.error.HTTPError as error:
            self.answers[index] = error.read().decode()

    def join(self, seconds: float = PATIENCE) -> list[Any]:
        for thread in self._threads:
            thread.join(seconds)
        return self.answers


@pytest.fixture(scope="module")
def server():
    with serving(*SIM, "--enable-prompt-tokens-details") as running:
        yield running


def test_requests_are_spread_over_engines(server):
    before = by_engine(server, "generation_tokens_total")
    answers = Calls(server, 8, max_tokens=40).join()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [40] * 8
    after = by_engine(server, "generation_tokens_total")
    assert sum(after) - sum(before) == 320
    assert min(a - b for a, b in zip(after, before, strict=True)) >= 120
    assert len(engines(server)) == 2


def test_a_client_may_name_the_engine(server):
    for rank in (1, 0, 1):
        before = by_engine(server, "generation_tokens_total")
        complete(server, str(rank), max_tokens=7)
        after = by_engine(server, "generation_tokens_total")
        expected = [0.0, 0.0]
        expected[rank] = 7
        assert [a - b for a, b in zip(after, before, strict=True)] == expected
    for bad in ("2", "-1", "x", "٢"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(server, bad.encode().decode("latin-1"), max_tokens=1)
        assert refused.value.code == 400
        assert "must be the number of an engine, 0 to 1" in refused.value.read().decode()


def test_a_prefix_goes_where_it_was(server):
    prompt = " ".join(f"word{i}" for i in range(120))
    for _ in range(4):
        before = by_engine(server, "prefix_cache_hits_total")
        complete(server, prompt=prompt, max_tokens=2)
        found = sum(by_engine(server, "prefix_cache_hits_total")) - sum(before)
    assert found > 100
    queries = by_engine(server, "prefix_cache_hits_total")
    assert sum(1 for value in queries if value > 100) == 1


def test_several_completions(server):
    answer = complete(server, n=3, max_tokens=5, seed=None, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@pytest.mark.req("REL-03")
def test_a_killed_engine_fails_its_requests_and_comes_back():
    with serving(*SIM) as server:
        first = engines(server)
        assert len(first) == 2
        calls = Calls(server, 6, max_tokens=300)
        wait_until(lambda: sum(by_engine(server, "num_requests_running")) == 6, what="not running")
        os.kill(first[1], signal.SIGKILL)
        wait_until(
            lambda: sum(isinstance(a, str) for a in calls.answers) > 0, 5 * SLACK, "nothing failed"
        )
        status, named = health(server)
        assert status == 200
        wait_until(lambda: len(by_engine(server, "engine_healthy")) == 2)
        answers = calls.join()
        failed = [answer for answer in answers if isinstance(answer, str)]
        assert 0 < len(failed) < 6
        # Engines start side by side, so that either may have the higher process id.
        pattern = r"engine (\d): the engine process ended \(killed by signal 9\)"
        told = [re.search(pattern, one) for one in failed]
        assert all(told), failed
        (rank,) = {found[1] for found in told if found is not None}
        assert all(one["usage"]["completion_tokens"] == 300 for one in answers if one not in failed)
        assert named == "" or f"engine {rank}" in named  # replaced within moments
        wait_until(lambda: health(server) == (200, "") and len(engines(server)) == 2)
        assert complete(server, rank, max_tokens=3)["usage"]["completion_tokens"] == 3
        last = engines(server)
        assert first[0] in last
        assert first[1] not in last
        # What runs is drained at the end.
        calls = Calls(server, 4, max_tokens=50)
        wait_until(lambda: sum(by_engine(server, "num_requests_running")) == 4, what="not running")
        assert server.stop() == 0
        assert all(one["usage"]["completion_tokens"] == 50 for one in calls.join())
    assert not any(map(alive, [*first, *last]))


OFFLINE = """
from headrace import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [f"What is {i} plus 1?" for i in range(6)]

    def tokens(**settings):
        llm = LLM(**settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        counts = [one.generation_tokens for one in llm.llm_engine.engine.stats().by_engine]
        reports = llm.collective_rpc("report")
        return [list(output.outputs[0].token_ids) for output in outputs], counts, len(reports)

    one, _, _ = tokens(enforce_eager=True)
    two, counts, reports = tokens(data_parallel_size=2, enforce_eager=True)
    assert one == two, (one, two)
    assert sum(counts) == 48 and min(counts) > 0, counts
    assert reports == 2
    print("the same")
"""


def test_offline_outputs_are_those_of_one_engine(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OFFLINE)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same" in done.stdout


UNCLOSED = """
from headrace import LLM, SamplingParams

llm = LLM(device="sim", data_parallel_size=2)
print(len(llm.generate(["a", "b"], SamplingParams(max_tokens=4), use_tqdm=False)), "answers")
"""


def test_a_script_that_closes_nothing_ends(tmp_path):
    """Its engines end when the interpreter does, which starts no threads any more."""
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )  # fmt: skip
    assert (done.returncode, "2 answers" in done.stdout) == (0, True), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--device", "sim", "-dp", "2", "--api-server-count", "2"), "must be 1 with api_server_count"),
        (("--device", "sim", "-dp", "2", "--kv-events-config", '{"enable_kv_cache_events": true}'),
         "enable_kv_cache_events: must be left out"),
        (("--device", "sim", "-dp", "65"), "must be in 1..64"),
        (("--device", "sim", "-dp", "2", "--mm-processor-cache-type", "shm"), "mm_processor_cache_type"),
        (("--data-parallel-external-lb",), "data_parallel_external_lb = True: must be used with"),
        (("--data-parallel-rank", "1"),
         "data_parallel_rank = 1: must be in 0..0 with data_parallel_size = 1"),
        (("--data-parallel-address", "10.0.0.1"),
         "data_parallel_address: not built yet: engines of one server on several hosts (start a server on"),
    ],
)  # fmt: skip
def test_refusals(argv, text):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", *argv, "--port", "0"],
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert text in done.stderr + done.stdout


def test_servers_that_share_engines_of_a_load_know_which_are_theirs():
    """External and hybrid load balancing: a server has the third of four engines, another the last two."""
    port = free_ports(3)
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    third = ("-dp", "4", "-dpn", "2", "-dpe", "--kv-events-config", json.dumps(events))
    with (
        serving(*SIM[:4], *third) as external,
        KVEventSubscriber(f"tcp://127.0.0.1:{port + 2}") as subscriber,
    ):
        assert children_of(external.process.pid) == [], "the one engine is in the server's process"
        heard: list[Any] = []

        def hears() -> bool:  # whoever has just joined may miss the first events
            complete(external, prompt=[*range(100 + len(heard), 140)], max_tokens=1)
            heard.extend(subscriber.poll(0.1))
            return any(batch.data_parallel_rank == 2 for batch in heard)

        wait_until(hears)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            complete(external, "1", max_tokens=1)
    last = ("-dp", "4", "-dpl", "2", "-dpr", "2", "-dph")
    with serving(*SIM[:4], *last) as hybrid:
        assert len(engines(hybrid)) == 2
        for rank in ("0", "1"):
            complete(hybrid, rank, max_tokens=1)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            complete(hybrid, "2", max_tokens=1)
