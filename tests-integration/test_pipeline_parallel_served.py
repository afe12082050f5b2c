"""A server whose model is on three stages: real sockets, streams, a stage's process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from posted import post, stream
from servers import SLACK, RunningServer, alive, serving, slow_steps
from test_faults import _Stream as OpenStream
from test_tensor_parallel_served import BODY, ranks_of

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

WORDS = ("-pp", "3", "--dtype", "float32", "--served-model-name", "demo")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(*WORDS, environment=slow_steps(0.02)) as running:
        yield running


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
    assert found == wanted[: len(found)]
    events = stream(url, BODY)
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(pieces) == expected.outputs[0].text
    assert len(ranks_of(server)) == 2


def test_structured_output(server: RunningServer) -> None:
    body = {**BODY, "structured_outputs": {"choice": ["seventeen", "eleven"]}}
    url = f"{server.api}/chat/completions"
    text = post(url, body)["choices"][0]["message"]["content"]
    assert text in ("seventeen", "eleven")


def test_a_killed_stage_ends_streams_and_the_server_with_the_cause(server: RunningServer) -> None:
    """The last test of this server: the one that dies exchanges nothing with rank 0 itself."""
    segments = os.listdir("/dev/shm")
    [middle, last] = ranks_of(server)
    opened = OpenStream(server, 1500)
    os.kill(middle, signal.SIGKILL)
    opened.join(5 * SLACK)
    assert any('"error"' in line for line in opened.lines), opened.lines[-3:]
    assert server.process.wait(15 * SLACK) != 0
    wait_until(lambda: not alive(last), 5 * SLACK, "a stage lives on")
    log = "".join(server.log)
    assert f"rank 1 (process {middle}) ended: killed by signal 9" in log
    assert os.listdir("/dev/shm") == segments
