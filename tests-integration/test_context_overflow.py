"""A prompt that does not fit is refused in the same words on every route, which clients know."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import anthropic
import openai
import pytest
from forks import run_command
from pooling_checkpoints import serving_bert, text
from servers import serving

from headrace import LLM
from headrace_core.errors import PromptTooLong

LIMIT, ENCODER_LIMIT = 256, 128
LONG = "one two three " * 300
HUGE = "one two three " * 40_000
"""More than the renderer writes for such a context."""
SENTENCE = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (?:at least )?"
    r"(\d+) tokens \((\d+) in the (messages|prompt)(?:, (\d+) in the completion)?\)\. "
)
MODEL = "headrace-demo"
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "description": LONG, "parameters": {}}}
    for i in range(40)
]


@pytest.fixture(scope="module")
def server():
    words = ("--max-model-len", str(LIMIT), "--enable-responses-store", "--enable-auto-tool-choice",
             "--tool-call-parser", "hermes")  # fmt: skip
    with serving(*words) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    with serving_bert(folder, "--served-model-name", "e") as running:
        yield running


def refused(server, path, **body):
    """The body of a 400."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60).read()
    told = json.loads(caught.value.read())
    assert caught.value.code == 400, told
    return told["error"]


def check(error, limit=LIMIT):
    """The numbers in an overflow's message: of the prompt and of the output."""
    found = SENTENCE.match(error["message"])
    assert found, error["message"]
    told, total, prompt, _, output = found.groups()
    assert int(told) == limit
    assert int(total) == int(prompt) + int(output or 0) > limit
    assert error["code"] == "context_length_exceeded"
    assert (error["type"], error["headrace_code"]) == ("BadRequestError", "HR-REQ-003")
    return int(prompt), int(output or 0)


def chat(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": "a", "max_tokens": LIMIT}, LIMIT),
        ("/v1/completions", {"prompt": [5] * LIMIT, "max_tokens": None}, 1),
        ("/v1/completions", {"prompt": ["a", LONG]}, 16),
        ("/v1/completions", {"prompt": LONG, "use_beam_search": True, "n": 2}, 16),
        ("/v1/chat/completions", {"messages": chat(LONG)}, 1),
        ("/v1/chat/completions", {"messages": chat("a"), "max_tokens": 300}, 300),
        ("/v1/chat/completions", {"messages": chat(HUGE)}, 0),
        ("/v1/chat/completions", {"messages": chat("a"), "tools": TOOLS}, 0),
        ("/v1/chat/completions", {"messages": chat(HUGE), "n": 3, "max_tokens": 2}, 0),
        ("/v1/responses", {"input": LONG}, 1),
        ("/v1/responses", {"input": HUGE, "max_output_tokens": 3}, 0),
        ("/v1/responses", {"input": LONG, "truncation": "auto"}, 1),
        ("/inference/v1/generate", {"token_ids": [5] * 300, "sampling_params": {"max_tokens": 4}}, 4),
    ],
)  # fmt: skip
def test_every_route_that_generates(server, path, body, output, stream):
    stream = stream and "use_beam_search" not in body
    error = refused(server, path, model=MODEL, stream=stream, **body)
    assert check(error)[1] == output


def test_a_chat_counted_and_a_chat_too_long_to_write(server):
    """A template that fails for another reason still says so."""
    counted = refused(server, "/tokenize", model=MODEL, messages=chat(HUGE))
    check(counted)
    wrong = refused(server, "/v1/chat/completions", model=MODEL, messages=chat("a"),
                    chat_template_kwargs={"messages": 1})  # fmt: skip
    assert wrong["code"] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": text(200, 1)}),
        ("/v1/embeddings", {"input": [text(3, 1), text(200, 1)], "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": [5] * 200}),
        ("/pooling", {"input": text(200, 1)}),
        ("/score", {"text_1": text(200, 1), "text_2": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", text(200, 1)]}),
        ("/rerank", {"query": text(200, 1), "documents": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["a", text(200, 1)]}),
    ],
)
def test_every_route_that_pools(encoder, path, body):
    prompt, output = check(refused(encoder, path, model="e", **body), ENCODER_LIMIT)
    assert (prompt >= 200, output) == (True, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", [LONG, HUGE])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_words(server, content, stream, path):
    """Coding agents look for this sentence, then shorten the conversation."""
    count = path.endswith("count_tokens")
    if count and content is LONG:
        return  # counting what does not fit is allowed
    more = {} if count else {"max_tokens": 4, "stream": stream}
    error = refused(server, path, model=MODEL, messages=chat(content), **more)
    assert error["type"] == "invalid_request_error"
    found = re.match(
        r"prompt is too long: (?:at least )?(\d+) tokens > (\d+) maximum", error["message"]
    )
    assert found, error
    assert int(found[1]) > int(found[2]) >= LIMIT - 1


def test_the_anthropic_client(server):
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
    ):
        client.messages.create(model=MODEL, max_tokens=4, messages=chat(LONG))


def test_the_openai_client(server):
    with openai.OpenAI(base_url=server.api, api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=chat(LONG))
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        stored = client.responses.create(model=MODEL, input=LONG, background=True)
        while stored.status in ("queued", "in_progress"):
            stored = client.responses.retrieve(stored.id)
        assert (stored.status, stored.error.code) == ("failed", "context_length_exceeded")


def test_offline():
    with LLM(max_model_len=LIMIT) as llm:
        with pytest.raises(PromptTooLong) as caught:
            llm.chat(chat(HUGE))
        assert SENTENCE.match(str(caught.value))
        with pytest.raises(PromptTooLong) as caught:
            llm.generate([LONG])
        assert SENTENCE.match(str(caught.value))[4] == "prompt"
        assert caught.value.limit == LIMIT < caught.value.num_prompt_tokens


def test_a_batch(tmp_path):
    body = {"model": MODEL, "messages": chat(LONG)}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(json.dumps(line) + "\n")
    words = ("-i", str(source), "-o", str(output), "--max-model-len", str(LIMIT))
    run_command("run-batch", *words).check_returncode()
    [answer] = map(json.loads, output.read_text().splitlines())
    check(answer["error"])
