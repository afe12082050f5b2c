"""Batches of chats, and requests rendered to tokens, over a real socket: the same tokens as one by one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

QUESTIONS = ["What is 12 + 7?", "What is 5 + 6?", "Hello!", "What is 30 - 4?"]
GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}


def post(server, path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def chat(text):
    return [{"role": "user", "content": text}]


def test_a_batch_is_its_chats(server):
    many = {"messages": [chat(text) for text in QUESTIONS], **GREEDY}
    answer = post(server, "/v1/chat/completions/batch", many)
    alone = [
        post(server, "/v1/chat/completions", {"messages": chat(q), **GREEDY}) for q in QUESTIONS
    ]
    assert [c["message"] for c in answer["choices"]] == [a["choices"][0]["message"] for a in alone]
    assert [c["token_ids"] for c in answer["choices"]] == [
        a["choices"][0]["token_ids"] for a in alone
    ]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [
        a["prompt_token_ids"] for a in alone
    ]
    total = sum(a["usage"]["total_tokens"] for a in alone)
    assert answer["usage"]["total_tokens"] == total
    long = [*many["messages"], chat("x " * 20_000)]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v1/chat/completions/batch", {**many, "messages": long})
    told = json.load(caught.value)["error"]
    assert (told["param"], told["code"]) == ("messages[4]", "context_length_exceeded")


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"structured_outputs": {"regex": "[0-9]{3}"}}, {"logit_bias": {"5": -100}, "min_tokens": 3},
        {"temperature": 0.8, "seed": 5, "n": 2},
        {"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}}]},
    ],
)  # fmt: skip
def test_a_rendered_chat_gives_the_same_tokens(server, asked):
    body = {"messages": chat(QUESTIONS[0]), **GREEDY, "max_tokens": 24, **asked}
    rendered = post(server, "/v1/chat/completions/render", body)
    same = post(server, "/v1/chat/completions", body)
    answer = post(server, "/inference/v1/generate", rendered)
    assert rendered["token_ids"] == same["prompt_token_ids"]
    assert [c["token_ids"] for c in answer["choices"]] == [c["token_ids"] for c in same["choices"]]


def test_rendered_prompts_give_the_same_tokens(server):
    body = {"prompt": ["Hello", "One two", [5, 6, 7]], **GREEDY}
    rendered = post(server, "/v1/completions/render", body)
    same = post(server, "/v1/completions", body)
    answers = [post(server, "/inference/v1/generate", one) for one in rendered]
    assert [a["choices"][0]["token_ids"] for a in answers] == [
        c["token_ids"] for c in same["choices"]
    ]
