"""A server whose model is divided over two processes: real sockets, streams, processes that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from posted import post, stream
from servers import PATIENCE, SLACK, RunningServer, alive, children_of, serving, slow_steps
from test_faults import _Stream as OpenStream

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

WORDS = ("-tp", "2", "--dtype", "float32", "--served-model-name", "demo")
BODY = {
    "model": "demo", "temperature": 0, "max_tokens": 24, "logprobs": True,
    "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """With the engine in a process of its own, whose child is rank 1."""
    with serving(*WORDS, "--engine-process") as running:
        yield running


def ranks_of(server: RunningServer) -> list[int]:
    """Processes of ranks beside rank 0, wherever that is."""
    own = children_of(server.process.pid)
    return [pid for parent in [server.process.pid, *own] for pid in children_of(parent)
            if "multiproc.rank_process" in command_of(pid)]  # fmt: skip


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def test_chats_whole_and_streamed(server: RunningServer) -> None:
    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
        [expected] = llm.chat(BODY["messages"], params, use_tqdm=False)
    url = f"{server.api}/chat/completions"
    [choice] = post(url, BODY)["choices"]
    assert choice["message"]["content"] == expected.outputs[0].text
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    ids = expected.outputs[0].token_ids
    wanted = [e[t].logprob for t, e in zip(ids, expected.outputs[0].logprobs, strict=True)]
    assert found == pytest.approx(wanted[: len(found)], abs=1e-4)
    events = stream(url, BODY)
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(pieces) == expected.outputs[0].text
    assert len(ranks_of(server)) == 1


def test_structured_output(server: RunningServer) -> None:
    body = {**BODY, "structured_outputs": {"choice": ["seventeen", "eleven"]}}
    url = f"{server.api}/chat/completions"
    text = post(url, body)["choices"][0]["message"]["content"]
    assert text in ("seventeen", "eleven")
    pieces = [
        e["choices"][0]["delta"].get("content") or "" for e in stream(url, body) if e["choices"]
    ]
    assert "".join(pieces) == text


def test_a_killed_server_leaves_no_process(server: RunningServer) -> None:
    """The last test of this server."""
    [rank] = ranks_of(server)
    [engine] = [pid for pid in children_of(server.process.pid) if rank in children_of(pid)]
    server.stop(signal.SIGKILL)
    wait_until(lambda: not alive(engine) and not alive(rank), 5 * SLACK, "a process lives on")


def test_a_killed_rank_ends_streams_and_the_server_with_the_cause() -> None:
    with serving(*WORDS, environment=slow_steps(0.02)) as server:
        [rank] = ranks_of(server)
        opened = OpenStream(server, 1500)
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(15 * SLACK) != 0
        opened.join(PATIENCE)
        assert any('"error"' in line for line in opened.lines), opened.lines[-3:]
        log = "".join(server.log)
    assert f"rank 1 (process {rank}) ended: killed by signal 9" in log


def test_sigterm_ends_every_process() -> None:
    with serving(*WORDS) as server:
        [rank] = ranks_of(server)
        assert server.stop(signal.SIGTERM) == 0
        assert not alive(rank)
