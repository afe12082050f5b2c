"""Texts that cannot fit into the context are refused before they are tokenized, on every route, and the
memory of long ones that are tokenized comes back."""

from __future__ import annotations

import json

import pytest
from endurance import MIB, resident
from fuzz import SERVER
from malformed import Client
from pooling_checkpoints import serving_bert
from servers import serving

from headrace import LLM
from headrace_core.errors import PromptTooLong

LONG = "the quick brown fox " * (12 * MIB // 20)
pytestmark = [pytest.mark.req("SEC-13"), pytest.mark.req("REL-21")]


@pytest.fixture(scope="module")
def server():
    with serving(*SERVER, "--max-body-bytes", "64M") as running:
        yield running


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    with serving_bert(tmp_path_factory.mktemp("bert"), "--max-body-bytes", "64M") as running:
        yield running


def _post(server, path, body):
    client = Client(server.url)
    try:
        return client.post(path, json.dumps(body).encode())
    finally:
        client.close()


CHAT = [{"role": "user", "content": LONG}]
BODIES = {
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"model": "headrace-demo", "messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "headrace-demo", "messages": CHAT},
    "/tokenize": {"prompt": LONG},
    "/invocations": {"prompt": LONG},
}


@pytest.mark.parametrize("path", BODIES)
def test_what_cannot_fit_is_refused_unread(server, path):
    """Tokenizing it would take as much as 100 times its memory, and seconds."""
    before = resident(server.process.pid)
    answer = _post(server, path, BODIES[path])
    assert answer.status == 400, answer.body[:300]
    if "messages" not in BODIES[path] and "input" not in BODIES[path]:  # those are rendered first
        assert b"maximum context length is 128 tokens" in answer.body
    grown = resident(server.process.pid) - before
    assert grown < 20 * len(LONG), f"{grown / MIB:.0f} MiB"


def test_cutting_a_prompt_does_not_make_any_length_readable(server):
    answer = _post(
        server, "/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 10, "max_tokens": 1}
    )
    assert answer.status == 400
    assert b"maximum context length is 128 tokens" in answer.body
    short = LONG[: MIB - 10]
    answer = _post(
        server, "/v1/completions", {"prompt": short, "truncate_prompt_tokens": 10, "max_tokens": 1}
    )
    assert answer.status == 200
    assert json.loads(answer.body)["usage"]["prompt_tokens"] == 10


def test_the_memory_of_long_texts_comes_back(server):
    """A megabyte is tokenized for its own sake; afterwards the server is as small as before."""
    body = {"prompt": LONG[: MIB - 10]}
    assert _post(server, "/tokenize", body).status == 200
    before = resident(server.process.pid)
    for _ in range(5):
        answer = _post(server, "/tokenize", body)
        assert answer.status == 200
        assert json.loads(answer.body)["count"] > 100_000
    grown = resident(server.process.pid) - before
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["short", LONG]}),
        ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 8}),
        ("/score", {"text_1": "short", "text_2": LONG}),
        ("/rerank", {"query": LONG, "documents": ["short"]}),
        ("/rerank", {"query": "short", "documents": [LONG], "truncate_prompt_tokens": -1}),
        ("/pooling", {"input": LONG}),
    ],
)
def test_texts_to_be_pooled(scorer, path, body):
    before = resident(scorer.process.pid)
    answer = _post(scorer, path, body)
    assert answer.status == 400, answer.body[:300]
    assert b"maximum context length is" in answer.body, answer.body[:300]
    grown = resident(scorer.process.pid) - before
    assert grown < 20 * len(LONG), f"{grown / MIB:.0f} MiB"


def test_offline():
    with LLM(device="sim", sim_step_ms=0.0, max_model_len=128) as llm:
        with pytest.raises(PromptTooLong, match="maximum context length is 128 tokens"):
            llm.generate(LONG)
        [output] = llm.generate("a" * 40)
        assert output.outputs[0].token_ids
