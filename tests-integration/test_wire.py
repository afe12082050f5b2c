"""The ``openai`` client against ``headrace serve`` with the demo model, over a real socket."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import openai
import pytest
from servers import serving

from headrace_testing.waiting import wait_until

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.fixture(scope="module", params=["one-process", "engine-process"])
def server(request):
    words = ["--engine-process"] if request.param == "engine-process" else []
    with serving("--max-num-seqs", "48", "--enable-prompt-tokens-details", *words) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "headrace-demo"
    assert model.max_model_len > 0


def test_chat_whole_and_streamed_are_equal(client):
    whole = client.chat.completions.create(
        model="headrace-demo", messages=QUESTION, temperature=0, max_tokens=32
    )
    text = whole.choices[0].message.content
    assert "19" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="headrace-demo", messages=QUESTION, temperature=0, max_tokens=32, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert (
        chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    )


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="headrace-demo",
        messages=QUESTION,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes).decode() == entry.token


def test_completions_of_several_prompts_and_samples(client):
    def ask() -> list:
        return client.completions.create(
            model="headrace-demo", prompt=["Hello", "The capital of"], n=3, max_tokens=8, seed=1,
            temperature=3.0, top_p=1.0, extra_body={"top_k": -1},
        ).choices  # fmt: skip

    choices = ask()
    assert [choice.index for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in ask()] == [choice.text for choice in choices]
    assert len({choice.text for choice in choices[:3]}) == 3, "samples of one prompt must differ"


def test_echo_and_logprobs(client):
    answer = client.completions.create(
        model="headrace-demo",
        prompt="Hello there",
        echo=True,
        logprobs=2,
        max_tokens=3,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.text.startswith("Hello there")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert "".join(choice.logprobs.tokens) == choice.text


def test_stop_string(client):
    def ask(**options):
        return client.chat.completions.create(
            model="headrace-demo", messages=QUESTION, temperature=0, max_tokens=32, **options
        ).choices[0]

    whole = ask().message.content
    stop = whole[len(whole) // 2 :][:2]
    stopped = ask(stop=stop)
    assert stopped.message.content == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    kept = ask(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.message.content == whole[: whole.index(stop)] + stop


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.body["param"] == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="headrace-demo", messages=QUESTION, temperature=-1)
    assert refused.value.body["param"] == "temperature"
    assert refused.value.body["code"] == 400
    with pytest.raises(openai.BadRequestError, match=r"context|max_model_len"):
        client.completions.create(model="headrace-demo", prompt="a " * 20_000)


def test_tokenize_round_trip(server, client):
    tokens = _post(server, "/tokenize", {"messages": QUESTION})
    answer = client.chat.completions.create(model="headrace-demo", messages=QUESTION, max_tokens=1)
    assert tokens["count"] == answer.usage.prompt_tokens
    plain = _post(server, "/tokenize", {"prompt": "Grüße, 世界!"})
    assert _post(server, "/detokenize", {"tokens": plain["tokens"]})["prompt"] == "Grüße, 世界!"


def test_cached_tokens_are_reported(client):
    long = [{"role": "user", "content": "Remember: " + "the red box is in the kitchen. " * 12}]
    for _ in range(2):
        answer = client.chat.completions.create(model="headrace-demo", messages=long, max_tokens=1)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < answer.usage.prompt_tokens


def test_concurrent_answers_equal_single_ones(server):
    questions = [f"What is {a} + {b}?" for a in (3, 14, 25) for b in (7, 18, 40)]

    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        answer = await client.chat.completions.create(
            model="headrace-demo", messages=[{"role": "user", "content": question}], temperature=0,
            max_tokens=32,
        )  # fmt: skip
        return answer.choices[0].message.content

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none") as client:
            together = await asyncio.gather(*(ask(client, q) for q in questions))
            assert together == [await ask(client, q) for q in questions]

    asyncio.run(run())


@pytest.mark.req("REL-05")
def test_64_streams_half_of_them_dropped_leave_nothing(server):
    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model="headrace-demo", prompt=f"Story number {number}:", max_tokens=120, stream=True,
            temperature=1.0, seed=number, extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = 0
        async for _ in stream:
            chunks += 1
            if number % 2 and chunks == 3 + number % 20:
                await stream.close()
                return -1
        return chunks

    async def run() -> list[int]:
        limits = {"timeout": 120.0, "max_retries": 0}
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", **limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    results = asyncio.run(run())
    assert results.count(-1) == 32
    assert all(chunks >= 30 for chunks in results if chunks != -1)
    wait_until(lambda: server.metric("num_requests_running") == 0, what="requests still run")
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == 0.0


def test_generation_counter_counts(server, client):
    before = server.metric("generation_tokens_total")
    client.completions.create(
        model="headrace-demo", prompt="x", max_tokens=7, extra_body={"ignore_eos": True}
    )
    wait_until(lambda: server.metric("generation_tokens_total") == before + 7)


def _post(server, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
