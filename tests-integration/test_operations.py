"""Operations of a real server with the demo model, in both process modes."""

from __future__ import annotations

import gzip
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import PATIENCE, alive, children_of, free_port, serving, slow_steps

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError
from headrace_testing.sampling import todays
from headrace_testing.waiting import wait_until

ROOT = Path(__file__).parents[1]
LONG = {"prompt": "Once", "max_tokens": 250, "ignore_eos": True}
SLOW = {"X-Request-Id": "slow"}
"""Of a request that takes its seconds, so that it is seen and met while it runs."""


@pytest.fixture(scope="module", params=todays(["one-process", "engine-process"], days=2))
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    words = ["--engine-process"] if request.param == "engine-process" else []
    with serving(
        "--dev-mode", "--profiler-config.profiler", "torch", "--log-format", "json",
        "--profiler-config.torch_profiler_dir", str(folder),
        "--profiler-config.torch_profiler_with_stack", "false",
        "--profiler-config.delay_iterations", "1", "--profiler-config.max_iterations", "3",
        "--enable-prompt-tokens-details", "--admin-port", "0", *words,
        environment=slow_steps(0.02, "slow"),
    ) as running:  # fmt: skip
        line = next(line for line in running.log if "control routes at" in line)
        running.control = "http://" + line.split("control routes at http://")[1].split('"')[0]
        running.traces = folder
        yield running


def post(url: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    data = b"" if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Asking(threading.Thread):
    """A completion that somebody waits for."""

    def __init__(self, server, body, headers=None) -> None:
        super().__init__(daemon=True)
        self.server, self.body, self.headers, self.answer = server, body, headers, None
        self.start()

    def run(self) -> None:
        status, text = post(self.server.api + "/completions", self.body, self.headers)
        self.answer = (status, json.loads(text))

    @property
    def reason(self) -> str:
        self.join(PATIENCE)
        return self.answer[1]["choices"][0]["finish_reason"]


def running(server) -> float:
    return server.metric("num_requests_running")


def test_pause_aborts_and_holds(server):
    first = Asking(server, LONG, SLOW)
    wait_until(lambda: running(server) == 1)
    assert post(server.control + "/pause")[0] == 200
    assert first.reason == "abort"
    assert running(server) == 0
    assert server.status("/health") == 200
    assert server.status("/readyz") == 503
    held = Asking(server, {"prompt": "Once", "max_tokens": 3})
    wait_until(lambda: server.metric("num_requests_waiting") == 1)
    assert server.metric("engine_paused") == 1
    assert post(server.api + "/completions", {"prompt": "a", "temperature": -1})[0] == 400
    assert held.answer is None
    assert post(server.control + "/resume")[0] == 200
    assert held.reason == "length"
    assert server.status("/readyz") == 200


def test_pause_waits(server):
    first = Asking(server, {**LONG, "max_tokens": 100}, SLOW)
    wait_until(lambda: running(server) > 0)
    assert post(server.control + "/pause?wait_for_inflight_requests=true")[0] == 200
    assert first.reason == "length"
    assert post(server.control + "/resume")[0] == 200


def test_a_repeated_prompt_is_computed_again(server):
    body = {"prompt": "word " * 60, "max_tokens": 1}

    def cached() -> int:
        usage = json.loads(post(server.api + "/completions", body)[1])["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    cached()
    assert cached() > 0
    assert post(server.control + "/reset_prefix_cache")[0] == 200
    assert cached() == 0
    long = Asking(server, LONG, SLOW)
    wait_until(lambda: running(server) == 1)
    assert post(server.control + "/reset_prefix_cache")[0] == 409
    assert post(server.control + "/reset_prefix_cache?reset_running_requests=true")[0] == 200
    assert long.reason == "length"
    assert server.metric("num_preemptions_total") >= 1


def test_a_profile_holds_the_steps_asked_for(server):
    assert post(server.control + "/start_profile")[0] == 200
    assert post(server.control + "/start_profile")[0] == 400
    post(server.api + "/completions", {"prompt": "a", "max_tokens": 12, "ignore_eos": True})
    assert post(server.control + "/stop_profile")[0] == 200
    (trace,) = server.traces.glob("*.json.gz")
    with gzip.open(trace, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    steps = [
        e for e in events
        if e.get("name") == "headrace.step" and e.get("cat") == "user_annotation"
    ]  # fmt: skip
    assert len(steps) == 3
    assert list(server.traces.glob("*.txt"))


def test_workers_and_settings_can_be_asked(server):
    status, text = post(server.control + "/collective_rpc", {"method": "report"})
    [report] = json.loads(text)["results"]
    assert status == 200
    assert report["device"] == "cpu"
    assert report["weights_bytes"] > 0
    assert post(server.control + "/collective_rpc", {"method": "close"})[0] == 400
    with urllib.request.urlopen(server.control + "/server_info?config_format=json") as answer:
        info = json.load(answer)
    assert info["engine"]["profiler_config"]["max_iterations"] == 3
    assert info["server"]["dev_mode"] is True
    for path in ("/pause", "/collective_rpc", "/server_info"):
        assert post(server.url + path)[0] == 404


def test_log_lines_are_json(server):
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert len(lines) > 10
    others = [line for line in server.log if not line.startswith("{")]
    native = ("External init callback", "profiler_start", "profiler_stop")  # torch's own profiler
    assert [line for line in others if not any(word in line for word in native)] == []
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any("memory plan" in line["message"] for line in lines)


def test_the_minimal_server():
    with free_port() as port:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/minimal_server.py"), "--port", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}/generate"
        try:
            _ask_the_minimal_server(process, url)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def _ask_the_minimal_server(process, url):
    def answers() -> bool:
        assert process.poll() is None, process.stderr.read()
        try:
            return post(url, {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})[0] == 200
        except OSError:
            return False

    wait_until(answers, 2 * PATIENCE, "it did not answer")
    _, whole = post(url, {"prompt": "Hello", "max_tokens": 4, "temperature": 0})
    _, lines = post(url, {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "stream": True})
    assert json.loads(lines.splitlines()[-1]) == json.loads(whole)
    assert post(url, {"prompt": "Hello", "temprature": 0})[0] == 400


@pytest.mark.req("SEC-18")
@pytest.mark.req("SEC-19")
@pytest.mark.req("SEC-23")
def test_hardened(tmp_path):
    first, second = "first-" + "k" * 24, "second-" + "k" * 24
    file = tmp_path / "keys"
    file.write_text(f"a {first}\nb {second}\n")
    words = ("--api-key-file", str(file), "--enable-prompt-tokens-details")
    with serving(*words, environment={"HEADRACE_HARDENED": "1"}) as server:
        prompt = {"prompt": "word " * 60, "max_tokens": 1}

        def ask(key: str, body=prompt, **headers: str) -> tuple[int, dict]:
            sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            request = urllib.request.Request(
                server.api + "/completions", json.dumps(body).encode(), {**sent, **headers}
            )
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    return response.status, json.load(response)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        def cached(key: str) -> int:
            usage = ask(key)[1]["usage"]
            return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        assert ask("other")[0] == 401
        assert [cached(first), cached(second)] == [0, 0], "nothing of another owner's is found"
        assert min(cached(first), cached(second)) > 0
        assert ask(first, Host="evil.example")[0] == 403
        assert ask(first, Origin="http://evil.example")[0] == 403
        status, answer = ask(first, {**prompt, "temprature": 0})
        assert (status, "temperature" in answer["error"]["message"]) == (400, True)
        file.write_text(f"b {second}\n")
        wait_until(lambda: ask(first)[0] == 401, what="the key that was taken away still works")
        assert ask(second)[0] == 200
        log = "".join(server.log)
        assert first not in log
        assert second not in log
        assert "open settings" not in log


def test_offline_control(tmp_path):
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path),
        "torch_profiler_with_stack": False,
    }
    with LLM(use_tqdm_on_load=False, profiler_config=config) as llm:
        [report] = llm.collective_rpc("report")
        assert report["rank"] == 0
        for wrong in ("close", 3):
            with pytest.raises(RequestError):
                llm.collective_rpc(wrong)
        assert llm.collective_rpc(lambda worker: worker.rank) == [0]
        llm.start_profile()
        llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.stop_profile()
    assert list(tmp_path.glob("*.json.gz"))


@pytest.mark.req("REL-19")
def test_a_server_whose_log_nobody_reads():
    """Its standard error is a pipe that is full; it still answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", "0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    try:
        url = _read_until_it_serves(process.stderr.fileno())
        wait_until(lambda: _status(url + "/health") == 200)
        for _ in range(1500):  # 64 KiB of access log and more
            assert _status(url + "/v1/models") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stderr.close()


def _read_until_it_serves(log: int) -> str:
    """Read a server's log until it says its URL, and no more."""
    text = ""
    while piece := os.read(log, 4096):
        text += piece.decode(errors="replace")
        found = re.search(r"serving at (http://[\d.:]+)\s", text)
        if found:
            return found[1]
    raise AssertionError(f"it ended:\n{text}")


NOISE = """
import atexit, sys, threading, time, warnings

def noise():
    print("o" * 1000)
    sys.stderr.write("e" * 1000 + "\\n")
    warnings.warn("w" * 1000)

def always():
    while True:
        time.sleep(0.1)  # noise all along, without filling the disk
        noise()

threading.Thread(target=always, daemon=True).start()
atexit.register(lambda: [noise() for _ in range(100)])
"""


@pytest.mark.req("REL-09")
@pytest.mark.req("REL-19")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("words", [(), ("--engine-process",)], ids=["thread", "process"])
def test_a_server_stops_whoever_writes_to_full_pipes(tmp_path, words):
    """Nobody reads its standard output and error, and other code prints to both, to its last."""
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    reading, writing = os.pipe()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", "0", *words],
        stdout=writing, stderr=writing, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        url = _read_until_it_serves(reading)
        wait_until(lambda: _status(url + "/health") == 200)
        wait_until(lambda: not select.select([], [writing], [], 0)[1], what="the pipe is not full")
        for _ in range(50):
            assert _status(url + "/v1/models") == 200
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE) == 0
        wait_until(lambda: not any(map(alive, children)))
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(reading)
        os.close(writing)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status
    except OSError:
        return 0
