"""Models that no library has over a socket: chats with one image and two, streamed and whole, against plain
readings of the published models."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from image_checkpoints import data_url, picture
from kin_checkpoints import KIN, by_own_processor, mark_of
from posted import post, stream
from servers import RunningServer, serving
from speech_checkpoints import token_ids

from headrace_testing.sampling import todays

NUM_TOKENS = 6


@pytest.fixture(scope="module", params=todays(list(KIN), days=3))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, KIN[request.param](folder)


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, Any]) -> Iterator[RunningServer]:
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(checkpoint[0]), *words, "--served-model-name", "kin") as running:
        yield running


def expected(checkpoint: tuple[Path, Any], parts: Sequence[str | int]) -> tuple[str, int]:
    """What the plain reading says of texts and numbered pictures; and the prompt's tokens."""
    from tokenizers import Tokenizer

    folder, oracle = checkpoint
    made = by_own_processor(folder, [picture(part) for part in parts if isinstance(part, int)])
    text = "".join(mark_of(folder) if isinstance(part, int) else part for part in parts)
    [mark] = token_ids(folder, mark_of(folder))
    items = iter(made["items"])
    ids = token_ids(folder, f"user: {text}assistant:")
    ids = [x for i in ids for x in (next(items) if i == mark else [i])]
    tokens = torch.tensor([[*made["first"], *ids]])
    out = oracle.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), images=made["images"],
        do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(out[0, tokens.shape[1] :].tolist()), tokens.shape[1]


def body(parts: Sequence[str | int]) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture(part))}}
        if isinstance(part, int)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"model": "kin", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": NUM_TOKENS, "ignore_eos": True}  # fmt: skip


def test_chats_with_images(server: RunningServer, checkpoint: tuple[Path, Any]) -> None:
    url = f"{server.api}/chat/completions"
    found = []
    for parts in (["the ", 1, " water"], [1, "runs ", 2], ["in the race"]):
        text, count = expected(checkpoint, parts)
        made = post(url, body(parts))
        assert made["choices"][0]["message"]["content"] == text
        assert made["usage"]["prompt_tokens"] == count
        events = stream(url, body(parts))
        pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
        assert "".join(pieces) == text
        found.append(text)
    assert len(set(found)) == 3
    wrong = body(["the ", 1])
    data = base64.b64encode(b"a text that is called x.png").decode()
    wrong["messages"][0]["content"][1]["image_url"]["url"] = f"data:image/png;base64,{data}"
    answer = httpx2.post(url, json=wrong, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    assert post(url, body(["in the race"]))["choices"][0]["message"]["content"] == found[-1]
