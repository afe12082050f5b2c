"""A real server tells of its start and of its answers, answers HEAD, and ends with its engine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import urllib.error
import urllib.request

import pytest
from servers import PATIENCE, children_of, serving

from headrace_testing.waiting import wait_until

HI = [{"role": "user", "content": "Hi"}]


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=PATIENCE) as answer:
        return json.load(answer)


def post(server, path, body):
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.mark.parametrize(
    "path", ["/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nowhere"]
)
def test_head_over_a_socket(server, path):
    """One connection for all: a body that came anyway would be read as the next answer."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    for _ in range(2):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert answer.status == server.status(path)
        assert answer.read() == b""
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b""
    connection.close()


@pytest.mark.req("L6")
@pytest.mark.req("REL-12")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("words", [(), ("--engine-process",), ("--api-server-count", "2")])
def test_the_start_is_told(words):
    with serving(*words, fresh=True) as running:  # a fork has nothing to import
        told = get(running, "/v1/system/startup")
        if not words:
            assert any(f"{told['seconds']:.2f} s in total" in line for line in running.log)
    assert told["seconds"] > 0
    assert told["accounted"] >= 0.9
    assert sum(phase["seconds"] for phase in told["phases"]) <= told["seconds"] + 0.01
    names = {phase["name"] for phase in told["phases"]}
    assert {"start python", "build routes"} <= names
    if words != ("--api-server-count", "2"):
        assert told["engine"] is None
        assert "load model" in names
    else:
        assert "load model" in {phase["name"] for phase in told["engine"]["phases"]}


@pytest.mark.req("REL-15")
def test_fingerprints_follow_what_decides_answers(server):
    first = get(server, "/v1/system/determinism")
    assert first["repeatable"] is True
    assert first["workers"][0]["kernels"] == ["cpu"]
    assert first["seed"] == 0
    body = {"messages": HI, "max_tokens": 1}
    assert (
        post(server, "/v1/chat/completions", body)["system_fingerprint"]
        == first["system_fingerprint"]
    )
    for words, same in (
        (("--engine-process", "--max-num-seqs", "4", "--enforce-eager"), True),
        (("--dtype", "float32"), False),
    ):
        with serving(*words) as other:
            answer = post(other, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert (answer["system_fingerprint"] == first["system_fingerprint"]) == same, words


def _ask(server, body, ends):
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            ends.append(answer.read().decode())
    except urllib.error.HTTPError as error:
        ends.append(error.read().decode())


@pytest.mark.parametrize("words", [(), ("--dev-mode", "--admin-port", "0")])
def test_no_stacks_after_the_engine_s_end(words):
    with serving("--engine-process", "--max-num-seqs", "4", *words) as running:
        ends = []
        body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
        asking = [threading.Thread(target=_ask, args=(running, {**body, "stream": bool(i % 2)}, ends))
                  for i in range(8)]  # fmt: skip
        for thread in asking:
            thread.start()
        wait_until(lambda: running.metric("num_requests_running") == 4)
        [core] = children_of(running.process.pid)
        os.kill(core, signal.SIGKILL)
        for thread in asking:
            thread.join(PATIENCE)
        assert running.process.wait(PATIENCE) == 1
    assert len(ends) == 8
    assert all("the engine has stopped" in end for end in ends)
    text = "".join(running.log)
    assert "Traceback" not in text, text
    assert sum("the engine died" in line for line in running.log) == 1
    assert not any("uvicorn.error" in line and "ERROR" in line for line in running.log)
