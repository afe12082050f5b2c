"""Log-probabilities of tokens that are parts of characters, over real sockets and offline: their
``bytes``, joined, are the text, and ``text_offset`` finds them in it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from servers import PATIENCE, RunningServer, serving
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from headrace import LLM, SamplingParams

TEXT = "é你 👩‍👧 e\u0301!"
KINDS = ("byte level", "byte fallback")


def fallback_checkpoint(folder: Path) -> Path:
    """A tiny model with a SentencePiece vocabulary of a few letters: all others are bytes."""
    save_model("llama", folder)
    strings = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aeo!"]
    model = models.BPE({s: i for i, s in enumerate(strings)}, [], byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    words: tuple[str, ...] = ()  # the demo model, whose vocabulary has few letters but ASCII's
    if request.param == "byte fallback":
        words = (str(fallback_checkpoint(tmp_path_factory.mktemp("fallback"))),)
    with serving(*words) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    """The answer, or a stream's events."""
    request = urllib.request.Request(
        server.api + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        data = response.read().decode()
    if not body.get("stream"):
        return json.loads(data)
    lines = [line[6:] for line in data.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


CHOICE: dict[str, Any] = {"structured_outputs": {"choice": [TEXT]}, "max_tokens": 60}


def chat(server: RunningServer, stream: bool, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    body = {
        "messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 20,
        "stream": stream, **CHOICE, **fields,
    }  # fmt: skip
    found = post(server, "/chat/completions", body)
    if not stream:
        choice = found["choices"][0]
        return choice["message"]["content"], choice["logprobs"]["content"]
    parts = [choice for chunk in found for choice in chunk["choices"]]
    entries = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
    return "".join(part["delta"].get("content") or "" for part in parts), entries


def joined(entries: list[dict[str, Any]]) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


def check_entries(entries: list[dict[str, Any]]) -> None:
    """Some tokens are parts of characters, and so are some that were not chosen."""
    assert any(e["token"] == "�" and len(e["bytes"]) == 1 for e in entries)
    for entry in entries:
        for each in (entry, *entry["top_logprobs"]):
            if each["token"] and "�" not in each["token"] and each["bytes"]:
                assert bytes(each["bytes"]).decode() in (each["token"], each["token"][1:])
    rivals = [t for e in entries for t in e["top_logprobs"] if t["logprob"] != e["logprob"]]
    assert any(t["token"] == "�" and len(t["bytes"]) == 1 for t in rivals)


@pytest.mark.parametrize("stream", [False, True])
def test_chat(server: RunningServer, stream: bool) -> None:
    text, entries = chat(server, stream)
    assert (text, joined(entries)) == (TEXT, TEXT.encode())
    check_entries(entries)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_takes_its_bytes_along(server: RunningServer, stream: bool) -> None:
    for stop in ("👧 e", "👩", "!"):
        text, entries = chat(server, stream, stop=[stop])
        assert text == TEXT.partition(stop)[0]
        assert joined(entries) == text.encode()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_inside_a_character(server: RunningServer, stream: bool) -> None:
    ends = set()
    for length in range(2, 14):
        text, entries = chat(server, stream, max_tokens=length)
        assert len(entries) == length
        assert TEXT.encode().startswith(joined(entries))
        assert joined(entries).decode("utf-8", "replace") == text
        ends.add(text[-1])
    assert "�" in ends


def completion(
    server: RunningServer, stream: bool, **fields: Any
) -> tuple[str, dict[str, list[Any]]]:
    found = post(server, "/completions", {"logprobs": 3, "stream": stream, **CHOICE, **fields})
    parts = [c for chunk in (found if stream else [found]) for c in chunk["choices"]]
    block: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            block.setdefault(name, []).extend(values)
    return "".join(part["text"] for part in parts), block


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "👧 e"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_text_offset(
    server: RunningServer, stream: bool, stop: str | None, echo: bool, as_tokens: bool
) -> None:
    prompt: Any = "a 你é"
    if as_tokens:
        prompt = post_tokenize(server, prompt)
    text, block = completion(server, stream, prompt=prompt, echo=echo, stop=stop)
    offsets, tokens = block["text_offset"], block["tokens"]
    assert len(offsets) == len(tokens) == len(block["top_logprobs"])
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    # A whole character stands where its token is said to be.
    for offset, token in zip(offsets, tokens, strict=True):
        if "�" not in token and token.strip() and not token.startswith("<"):
            assert text.startswith(token, offset) or not text[offset:]
    # One in pieces, where the first of its tokens is said to be, and so are the others.
    for character in "你👩" if stop is None or echo else "":
        at = text.index(character)
        assert offsets.count(at) == len(character.encode())
    assert offsets.count(text.index("é")) == 2


def post_tokenize(server: RunningServer, text: str) -> list[int]:
    request = urllib.request.Request(
        server.url + "/tokenize", json.dumps({"prompt": text}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        found: list[int] = json.loads(response.read())["tokens"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: RunningServer, stream: bool) -> None:
    schema = {"type": "string", "enum": [TEXT]}
    found = post(server, "/responses", {
        "input": "é", "max_output_tokens": 60, "include": ["message.output_text.logprobs"],
        "top_logprobs": 20, "stream": stream, "store": False,
        "text": {"format": {"type": "json_schema", "name": "text", "schema": schema}},
    })  # fmt: skip
    wanted = f'"{TEXT}"'
    if stream:
        deltas = [e for e in found if e["type"] == "response.output_text.delta"]
        assert "".join(e["delta"] for e in deltas) == wanted
        [done] = [e for e in found if e["type"] == "response.output_text.done"]
        assert joined(done["logprobs"]) == wanted.encode()
        assert wanted.encode().startswith(joined([p for e in deltas for p in e["logprobs"]]))
        found = found[-1]["response"]
    [part] = found["output"][-1]["content"]
    assert (part["text"], joined(part["logprobs"])) == (wanted, wanted.encode())
    check_entries(part["logprobs"])


def test_tokens_in_tokens_out(server: RunningServer) -> None:
    request = urllib.request.Request(
        server.url + "/inference/v1/generate", json.dumps({
            "token_ids": post_tokenize(server, "é"),
            "sampling_params": {"max_tokens": 60, "logprobs": 1, **CHOICE},
        }).encode(), {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        [choice] = json.loads(response.read())["choices"]
    entries = choice["logprobs"]["content"]
    assert joined(entries).startswith(TEXT.encode())
    assert entries[0]["token"] == f"token_id:{choice['token_ids'][0]}"


@pytest.mark.parametrize("flat", [False, True])
def test_offline(flat: bool) -> None:
    with LLM() as llm:
        params = SamplingParams(
            max_tokens=60, logprobs=2, flat_logprobs=flat, prompt_logprobs=0, temperature=0.0,
            allowed_token_ids=llm.get_tokenizer().encode("é你😀", add_special_tokens=False),
        )  # fmt: skip
        [output] = llm.generate(["aé"], params)
    [completion] = output.outputs
    chosen = [next(iter(entries.values())) for entries in completion.logprobs]
    assert b"".join(e.token_bytes for e in chosen).decode("utf-8", "replace") == completion.text
    assert any(e.decoded_token == "�" and len(e.token_bytes) == 1 for e in chosen)
    prompt = [next(iter(entries.values())) for entries in output.prompt_logprobs[1:]]
    assert [e.token_bytes for e in prompt] == [b"\xc3", b"\xa9"]
