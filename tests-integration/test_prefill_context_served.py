"""A server whose ranks divide prompts: real sockets, a rank that is killed."""

from __future__ import annotations

import os
import signal

import pytest
from posted import post
from servers import SLACK, serving, slow_steps
from test_faults import _Stream as OpenStream
from test_tensor_parallel_served import ranks_of

from headrace import LLM, SamplingParams

WORDS = ("-pcp", "2", "--dtype", "float32", "--served-model-name", "demo", "--block-size", "16")
BODY = {"model": "demo", "temperature": 0, "max_tokens": 24, "logprobs": True,
        "messages": [{"role": "user", "content": "What is 3 plus 4? " * 30}]}  # fmt: skip


def test_answers_and_a_killed_rank() -> None:
    """A long prompt gets the answer of one process; then the rank that computed half of it is killed."""
    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
        [expected] = llm.chat(BODY["messages"], params, use_tqdm=False)
    [output] = expected.outputs
    assert len(expected.prompt_token_ids) >= 128, "long enough to be divided"
    with serving(*WORDS, environment=slow_steps(0.02)) as server:
        [choice] = post(f"{server.api}/chat/completions", BODY)["choices"]
        assert choice["message"]["content"] == output.text
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        wanted = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
        assert found == pytest.approx(wanted[: len(found)], abs=1e-4)
        [rank] = ranks_of(server)
        opened = OpenStream(server, 1500)
        os.kill(rank, signal.SIGKILL)
        opened.join(5 * SLACK)
        assert any('"error"' in line for line in opened.lines), opened.lines[-3:]
        assert server.process.wait(15 * SLACK) != 0
        log = "".join(server.log)
    assert f"rank 1 (process {rank}) ended: killed by signal 9" in log
