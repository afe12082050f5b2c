"""Every failpoint fails its own request and nobody else's, and its words reach no client."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from forks import run_command
from servers import serving

from headrace_core.reliability import failpoints
from headrace_engine.sim.tokens import expected_tokens
from headrace_testing.waiting import wait_until

KINDS = {
    "input.prepare": "raise",
    "engine.add": "raise",
    "kv.match": "raise",
    "kv.alloc": "memory",
    "engine.step.prepare": "raise",
    "engine.step.forward": "memory",
    "engine.step.sample": "nan",
    "engine.update": "raise",
    "output.update": "raise",
    "server.answer": "raise",
    "stream.write": "raise",
}
"""What is tried at each point that a request passes; the rest are tested below."""
AFTER = {"kv.alloc": 1, "engine.step.forward": 3, "engine.step.sample": 4, "engine.update": 2,
         "output.update": 5, "engine.step.prepare": 2}  # fmt: skip
"""So that a part of the answer is out already."""
VOCAB_SIZE, EOS, NUM_TOKENS = 1408, (2, 0), 24
SIM = ("--device", "sim", "--sim-step-ms", "4", "--sim-token-us", "0")
SECRETS = ("canary", "RuntimeError", "MemoryError", "OSError", "No space", "Traceback")


def test_every_failpoint_is_tested():
    assert set(failpoints.POINTS) == {*KINDS, "loader.read"}


def _plan(words: dict[str, str]) -> dict[str, str]:
    """Each point fails the request whose id holds the point's own name."""
    parts = [
        f"{point}={kind}(match=at-{point}-,after={AFTER.get(point, 0)},times=1000000)"
        for point, kind in words.items()
    ]
    return {failpoints.VARIABLE: ";".join(parts)}


async def _ask(client: httpx2.AsyncClient, request_id: str, seed: int, stream: bool) -> tuple:
    """(status, tokens, whole body)."""
    body = {
        "prompt": f"prompt {seed}", "seed": seed, "max_tokens": NUM_TOKENS, "stream": stream,
        "return_token_ids": True, "temperature": 1.0, "ignore_eos": True,
    }  # fmt: skip
    answer = await client.post(
        "/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=60
    )
    tokens = []
    if stream and answer.status_code == 200:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        for chunk in map(json.loads, lines):
            for choice in chunk.get("choices", ()):
                tokens += choice.get("token_ids") or []
    elif answer.status_code == 200:
        tokens = answer.json()["choices"][0]["token_ids"]
    return answer.status_code, tokens, answer.text


async def _batch_of_eight(url: str, victim: str, victim_streams: bool) -> tuple[tuple, list]:
    """The victim's answer, and the seven others' by seed."""
    async with httpx2.AsyncClient(base_url=url) as client:
        others = [_ask(client, f"other-{s}", s, stream=bool(s % 2)) for s in range(1, 8)]
        answers = await asyncio.gather(_ask(client, victim, 99, victim_streams), *others)
    return answers[0], list(enumerate(answers[1:], 1))


@pytest.fixture(scope="module")
def failing():
    with serving(*SIM, environment=_plan(KINDS)) as server:
        yield server


@pytest.mark.req("REL-01")
@pytest.mark.req("SEC-09")
@pytest.mark.req("F7")
@pytest.mark.keep(12, every_value=False)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("point", KINDS)
def test_a_failpoint_ends_its_request_alone(failing, point, stream):
    victim, others = asyncio.run(_batch_of_eight(failing.url, f"at-{point}-", stream))
    status, tokens, text = victim
    if (point == "stream.write" and not stream) or (point == "server.answer" and stream):
        pass  # that answer does not come by there, or is refused before it begins
    elif status == 200:
        assert stream
        assert '"error"' in text
        assert text.count("data: [DONE]") == 1
        assert tokens == expected_tokens(99, len(tokens), vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        assert len(tokens) < NUM_TOKENS
    else:
        assert status == 500
        assert json.loads(text)["error"]["headrace_code"] in ("HR-ENG-001", "HR-SRV-002")
    assert not [word for word in SECRETS if word in text]
    for seed, (status, tokens, _) in others:
        assert status == 200
        assert tokens == expected_tokens(seed, NUM_TOKENS, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    assert failing.status("/health") == 200
    # A server that fails to write has the request ended: a moment later.
    wait_until(lambda: failing.metric("num_requests_running") == 0)
    assert failing.metric("num_requests_waiting") == 0
    assert failing.metric("kv_cache_usage_perc") == 0


@pytest.mark.req("REL-01")
@pytest.mark.req("F7")
@pytest.mark.req("REL-15")
def test_a_real_model_s_step_fails_one_request_alone():
    """Prepare, forward and sample raise in the real runner; seven neighbours are bit-equal."""
    points = {"engine.step.prepare": "raise", "engine.step.forward": "memory",
              "engine.step.sample": "raise"}  # fmt: skip
    with serving(environment=_plan(points)) as server:
        plain, others = asyncio.run(_batch_of_eight(server.url, "nobody", True))
        wanted = {seed: tokens for seed, (_, tokens, _) in others}
        assert plain[0] == 200
        for point in points:
            (_, _, text), others = asyncio.run(
                _batch_of_eight(server.url, f"at-{point}-", point != "engine.step.prepare")
            )
            assert '"error"' in text
            assert "canary" not in text
            assert {seed: tokens for seed, (_, tokens, _) in others} == wanted
        wait_until(lambda: server.metric("kv_cache_usage_perc") == 0)


@pytest.mark.req("REL-11")
@pytest.mark.req("REL-14")
@pytest.mark.parametrize(("kind", "status"), [("enospc", 3), ("raise", 70), ("memory", 4)])
@pytest.mark.parametrize("words", [(), ("--engine-process",)], ids=["thread", "process"])
def test_a_start_that_fails_says_why(kind, status, words):
    plan = {failpoints.VARIABLE: f"loader.read={kind}"}
    done = run_command("serve", "--port", "0", *words, environment=plan)
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("headrace serve: HR-")
    assert lines[-2].startswith("hint: ")
    assert done.returncode == status
