"""Operations of a real server with the demo model, in both process modes."""

from __future__ import annotations

import gzip
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import children_of, serving, wait_for

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError

ROOT = Path(__file__).parents[1]
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module", params=["one-process", "engine-process"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    words = ["--engine-process"] if request.param == "engine-process" else []
    with serving(
        "--dev-mode", "--profiler-config.profiler", "torch", "--log-format", "json",
        "--profiler-config.torch_profiler_dir", str(folder),
        "--profiler-config.torch_profiler_with_stack", "false",
        "--profiler-config.delay_iterations", "1", "--profiler-config.max_iterations", "3",
        "--enable-prompt-tokens-details", "--admin-port", "0", *words,
    ) as running:  # fmt: skip
        line = next(line for line in running.log if "control routes at" in line)
        running.control = "http://" + line.split("control routes at http://")[1].split('"')[0]
        running.traces = folder
        yield running


def post(url: str, body: object = None, timeout: float = 60) -> tuple[int, str]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Asking(threading.Thread):
    """A completion that somebody waits for."""

    def __init__(self, server, body) -> None:
        super().__init__(daemon=True)
        self.server, self.body, self.answer = server, body, None
        self.start()

    def run(self) -> None:
        status, text = post(self.server.api + "/completions", self.body)
        self.answer = (status, json.loads(text))

    @property
    def reason(self) -> str:
        self.join(60)
        return self.answer[1]["choices"][0]["finish_reason"]


def running(server) -> float:
    return server.metric("num_requests_running")


@pytest.mark.spec("API-PAUSE")
def test_pause_aborts_and_holds(server):
    first = Asking(server, LONG)
    wait_for(lambda: running(server) == 1)
    assert post(server.control + "/pause")[0] == 200
    assert first.reason == "abort"
    assert running(server) == 0
    assert server.status("/health") == 200
    assert server.status("/readyz") == 503
    held = Asking(server, {"prompt": "Once", "max_tokens": 3})
    wait_for(lambda: server.metric("num_requests_waiting") == 1)
    time.sleep(0.3)
    assert held.answer is None
    assert server.metric("engine_paused") == 1
    assert post(server.api + "/completions", {"prompt": "a", "temperature": -1})[0] == 400
    assert post(server.control + "/resume")[0] == 200
    assert held.reason == "length"
    assert server.status("/readyz") == 200


@pytest.mark.spec("API-PAUSE")
def test_pause_waits(server):
    first = Asking(server, {**LONG, "n": 8})  # long enough to be seen
    wait_for(lambda: running(server) > 0)
    assert post(server.control + "/pause?wait_for_inflight_requests=true")[0] == 200
    assert first.reason == "length"
    assert post(server.control + "/resume")[0] == 200


@pytest.mark.spec("API-CACHE-RESET")
def test_a_repeated_prompt_is_computed_again(server):
    body = {"prompt": "word " * 60, "max_tokens": 1}

    def cached() -> int:
        usage = json.loads(post(server.api + "/completions", body)[1])["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    cached()
    assert cached() > 0
    assert post(server.control + "/reset_prefix_cache")[0] == 200
    assert cached() == 0
    long = Asking(server, LONG)
    wait_for(lambda: running(server) == 1)
    assert post(server.control + "/reset_prefix_cache")[0] == 409
    assert post(server.control + "/reset_prefix_cache?reset_running_requests=true")[0] == 200
    assert long.reason == "length"
    assert server.metric("num_preemptions_total") >= 1


@pytest.mark.spec("API-PROFILE")
@pytest.mark.spec("CFG-PROF")
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


@pytest.mark.spec("API-DEV")
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


@pytest.mark.spec("OBS-LOG")
def test_log_lines_are_json(server):
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert len(lines) > 10
    others = [line for line in server.log if not line.startswith("{")]
    native = ("External init callback", "profiler_start", "profiler_stop")  # torch's own profiler
    assert [line for line in others if not any(word in line for word in native)] == []
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any("memory plan" in line["message"] for line in lines)


@pytest.mark.spec("API-DEMO")
def test_the_minimal_server():
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/minimal_server.py"), "--port", "18100"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = "http://127.0.0.1:18100/generate"
    try:

        def answers() -> bool:
            assert process.poll() is None, process.stderr.read()
            try:
                return post(url, {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})[0] == 200
            except OSError:
                return False

        wait_for(answers, 60, "it did not answer")
        _, whole = post(url, {"prompt": "Hello", "max_tokens": 4, "temperature": 0})
        _, lines = post(url, {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "stream": True})
        assert json.loads(lines.splitlines()[-1]) == json.loads(whole)
        assert post(url, {"prompt": "Hello", "temprature": 0})[0] == 400
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


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
                with urllib.request.urlopen(request, timeout=30) as response:
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
        wait_for(lambda: ask(first)[0] == 401, 10, "the key that was taken away still works")
        assert ask(second)[0] == 200
        log = "".join(server.log)
        assert first not in log
        assert second not in log
        assert "open settings" not in log


@pytest.mark.spec("ENGINE-LLM-CONTROL")
def test_offline_control(tmp_path):
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path),
        "torch_profiler_with_stack": False,
    }
    with LLM(use_tqdm_on_load=False, profiler_config=config) as llm:
        [report] = llm.collective_rpc("report")
        assert report["rank"] == 0
        for wrong in ("close", lambda worker: worker):
            with pytest.raises(RequestError):
                llm.collective_rpc(wrong)
        llm.start_profile()
        llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.stop_profile()
    assert list(tmp_path.glob("*.json.gz"))


@pytest.mark.req("REL-19")
def test_a_server_whose_log_nobody_reads():
    """Its standard error is a pipe that is full; it still answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1/models"
    try:

        def answers() -> bool:
            try:
                return urllib.request.urlopen(url, timeout=5).status == 200
            except OSError:
                return False

        wait_for(answers, 60, "it did not start")
        for _ in range(1500):  # 64 KiB of access log and more
            assert answers()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


NOISE = """
import atexit, sys, threading, time, warnings

def noise():
    print("o" * 1000)
    sys.stderr.write("e" * 1000 + "\\n")
    warnings.warn("w" * 1000)

def always():
    while True:
        time.sleep(0.1)
        noise()

threading.Thread(target=always, daemon=True).start()
atexit.register(lambda: [noise() for _ in range(100)])
"""


@pytest.mark.req("REL-09")
@pytest.mark.req("REL-19")
@pytest.mark.parametrize("words", [(), ("--engine-process",)], ids=["thread", "process"])
def test_a_server_stops_whoever_writes_to_full_pipes(tmp_path, words):
    """Nobody reads its standard output and error, and other code prints to both, to its last."""
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", str(port), *words],
        stdout=writing, stderr=writing, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _status(url + "/health") == 200, 120, "it did not start")
        wait_for(lambda: not select.select([], [writing], [], 0)[1], 60, "the pipe is not full")
        for _ in range(50):
            assert _status(url + "/v1/models") == 200
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_for(lambda: not any(os.path.exists(f"/proc/{child}") for child in children), 30)
    finally:
        process.kill()
        process.wait(30)
        os.close(reading)
        os.close(writing)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status
    except OSError:
        return 0
