"""Prompt embeddings over HTTP: the same tokens as the text's, and hostile files."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import save
from servers import serving

import headrace_demo

TEXT = "The red box is in the kitchen. The"


@pytest.fixture(scope="module")
def url():
    with serving("--enable-prompt-embeds", "--dtype", "float32") as running:
        yield running.url


def post(url: str, path: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def vectors(ids: list[int]) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(headrace_demo.model_path())
    with torch.no_grad():
        return model.float().get_input_embeddings()(torch.tensor(ids)).clone()


def encoded(value: object, form: str = "torch") -> str:
    buffer = io.BytesIO()
    if form == "safetensors":
        buffer.write(save({"prompt_embeds": value}))
    else:
        torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_embeddings_give_the_tokens_of_their_text(url, form):
    _, tokens = post(url, "/tokenize", {"prompt": TEXT})
    embeds = encoded(vectors(tokens["tokens"]), form)
    asked = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    status, both = post(
        url, "/v1/completions", {**asked, "prompt": TEXT, "prompt_embeds": [embeds, embeds]}
    )
    assert status == 200, both
    first, second, text = (choice["token_ids"] for choice in both["choices"])
    assert first == second == text
    assert both["usage"]["prompt_tokens"] == 3 * tokens["count"]


class Marker:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.req("SEC-10")
@pytest.mark.parametrize(
    "value",
    [
        Marker(), {"a": 1}, torch.zeros(3, 7), torch.zeros(3), torch.zeros(2, 3, 4, 5),
        torch.full((2, 128), float("nan")), torch.zeros((0, 128)), torch.zeros((2, 128)).long(),
    ],
    ids=lambda value: str(getattr(value, "shape", type(value).__name__)),
)  # fmt: skip
def test_hostile_embeddings_are_refused(url, value):
    status, answer = post(
        url, "/v1/completions", {"prompt_embeds": encoded(value), "max_tokens": 1}
    )
    assert status == 400, answer
    assert answer["error"]["param"] == "prompt_embeds", answer
    assert "unpickled" not in json.dumps(answer)
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
