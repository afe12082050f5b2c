"""Images over every wire, by the clients that people use, from data URLs, URLs and local files."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import torch
from image_checkpoints import data_url, encoded, picture, save_qwen2_vl
from posted import post
from safetensors.torch import save
from servers import RunningServer, serving
from speech_checkpoints import token_ids

from headrace import LLM, SamplingParams

WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216",
)  # fmt: skip
NUM_TOKENS = 6


class Files(http.server.BaseHTTPRequestHandler):
    """Pictures by number; a redirect; a file that is none."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/1.png")
            self.end_headers()
            return
        known = self.path.removesuffix(".png").lstrip("/")
        body = encoded(picture(int(known))) if known.isdigit() else b"no picture"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and the model in it of transformers."""
    folder = tmp_path_factory.mktemp("seer")
    return folder, save_qwen2_vl(folder)


@pytest.fixture(scope="module")
def folder(checkpoint: tuple[Path, Any]) -> Path:
    return checkpoint[0]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "1.png").write_bytes(encoded(picture(1)))
    (folder.parent / "secret.png").write_bytes(encoded(picture(2)))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, local: Path) -> Iterator[RunningServer]:
    words = (
        "--allow-private-media",
        "--allowed-local-media-path",
        str(local),
        "--enable-mm-embeds",
    )
    with serving(str(folder), *WORDS, *words, "--served-model-name", "seer") as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """What is said of pictures 1; 1 and 2, offline."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        str(folder), dtype="float32", max_model_len=256, block_size=8,
        kv_cache_memory_bytes=16 << 20, use_tqdm_on_load=False,
    ) as model:  # fmt: skip
        said = {}
        for name in ("1", "12"):
            parts: list[Any] = [{"type": "text", "text": "the water "}]
            parts += [{"type": "image_pil", "image_pil": picture(int(n))} for n in name]
            (output,) = model.chat([{"role": "user", "content": parts}], params)
            said[name] = output.outputs[0].text
    return said


def url_parts(*urls: str) -> list[Any]:
    return [{"type": "text", "text": "the water "}] + [
        {"type": "image_url", "image_url": {"url": url}} for url in urls
    ]


SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}


def test_the_openai_client_sends_images(
    server: RunningServer, files: str, local: Path, expected: dict[str, str]
) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)

    def asked(*urls: str, stream: bool = False) -> str:
        given: Any = [{"role": "user", "content": url_parts(*urls)}]
        made = client.chat.completions.create(
            model="seer", messages=given, stream=stream, extra_body={"ignore_eos": True}, **SETTINGS
        )
        if not stream:
            return made.choices[0].message.content or ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)

    for stream in (False, True):
        assert asked(data_url(picture(1)), stream=stream) == expected["1"]
        assert asked(f"{files}/1.png", stream=stream) == expected["1"]
        assert asked(data_url(picture(1)), f"{files}/2.png", stream=stream) == expected["12"]
    assert asked(f"{files}/moved") == expected["1"]
    assert asked(f"file://{local}/1.png") == expected["1"]


def test_tokens_that_stand_for_images_are_none_alone(
    server: RunningServer, folder: Path, expected: dict[str, str]
) -> None:
    """In completions they are refused; in a chat's turns they are text, beside images, too."""
    mark = "<|image_pad|>"
    [number] = token_ids(folder, mark)
    for prompt in (f"the {mark} water", [number]):
        body = {"model": "seer", "prompt": prompt, **SETTINGS}
        answer = httpx2.post(f"{server.api}/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert f"has token {number} ('{mark}')" in answer.json()["error"]["message"]
    turns = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
    for parts in ("the water ", url_parts(data_url(picture(1)))):
        body = {
            "model": "seer",
            "messages": [*turns, {"role": "user", "content": parts}],
            **SETTINGS,
        }
        made = post(f"{server.api}/chat/completions", body)
        assert made["usage"]["prompt_tokens"] > 2 * len(mark)


def vectors_of(folder: Path, oracle: Any) -> dict[str, torch.Tensor]:
    """Picture 1 as transformers' tower has it, and its grid."""
    from transformers import Qwen2VLImageProcessor

    made = Qwen2VLImageProcessor.from_pretrained(folder)(images=picture(1), return_tensors="pt")
    with torch.inference_mode():
        found = oracle.model.get_image_features(**made)
    [vectors] = getattr(found, "pooler_output", found)
    return {"image_embeds": vectors.clone(), "image_grid_thw": made["image_grid_thw"][0]}


def test_chats_bring_vectors(
    server: RunningServer, checkpoint: tuple[Path, Any], expected: dict[str, str]
) -> None:
    given = vectors_of(*checkpoint)

    def asked(content: Any, **more: Any) -> httpx2.Response:
        part = {"type": "image_embeds", "image_embeds": content, **more}
        parts = [{"type": "text", "text": "the water "}, part]
        messages = [{"role": "user", "content": parts}]
        body = {"model": "seer", "messages": messages, "ignore_eos": True, **SETTINGS}
        return httpx2.post(f"{server.api}/chat/completions", json=body, timeout=60)

    def text(answer: httpx2.Response) -> str:
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def files(**changes: torch.Tensor) -> dict[str, str]:
        named = {**given, **changes}
        return {k: base64.b64encode(save({"x": v.contiguous()})).decode() for k, v in named.items()}

    assert text(asked(files(), uuid="one")) == expected["1"]
    assert (
        text(asked({**files(), "image_grid_thw": given["image_grid_thw"].tolist()}))
        == expected["1"]
    )
    assert text(asked(None, uuid="one")) == expected["1"]
    where = "messages[0].content[1].image_embeds"
    wrong = {
        "hidden size": files(image_embeds=given["image_embeds"][:, 1:]),
        "vectors; must be": files(image_embeds=given["image_embeds"][1:]),
        "not finite": files(image_embeds=given["image_embeds"] / 0),
        "must be one of": files(image_embeds=given["image_grid_thw"][None]),
        "int64 or int32": files(image_grid_thw=given["image_embeds"]),
        "image_grid_thw: must be given": files()["image_embeds"],
        "must have image_embeds": {"image_grid_thw": [1, 4, 4]},
        "base64": "!",
        "safetensors": base64.b64encode(b"\x80\x04.").decode(),
    }  # fmt: skip
    for message, content in wrong.items():
        answer = asked(content)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith(where)
        assert message in error["message"]
    assert text(asked(files())) == expected["1"]


def test_the_responses_api(server: RunningServer, files: str, expected: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)
    for url in (data_url(picture(1)), f"{files}/1.png"):
        content: Any = [
            {"type": "input_text", "text": "the water "},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
        made = client.responses.create(
            model="seer", input=[{"role": "user", "content": content}], temperature=0,
            max_output_tokens=NUM_TOKENS, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert made.output_text == expected["1"]


def test_the_anthropic_client(server: RunningServer, files: str, expected: dict[str, str]) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    data = base64.b64encode(encoded(picture(1))).decode()
    first = {"type": "base64", "media_type": "image/png", "data": data}
    second = {"type": "url", "url": f"{files}/2.png"}
    for sources, name in (((first,), "1"), ((first, second), "12")):
        content: Any = [{"type": "text", "text": "the water "}]
        content += [{"type": "image", "source": source} for source in sources]
        made = client.messages.create(
            model="seer", max_tokens=NUM_TOKENS,
            messages=[{"role": "user", "content": content}],
            extra_body={"ignore_eos": True, "temperature": 0},
        )  # fmt: skip
        assert made.content[0].text == expected[name]  # type: ignore[union-attr]
        counted = client.messages.count_tokens(
            model="seer", messages=[{"role": "user", "content": content}]
        )
        usage = made.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def refused(server: RunningServer, url: str) -> str:
    body = {"model": "seer", **SETTINGS, "messages": [{"role": "user", "content": url_parts(url)}]}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.req("SEC-21")
@pytest.mark.req("SEC-06")
@pytest.mark.req("SEC-05")
def test_what_may_not_be_fetched_is_refused(
    server: RunningServer, files: str, local: Path, folder: Path
) -> None:
    where = "messages[0].content[1].image_url.url"
    for url, message in {
        f"{files}/none": "is not one of PNG",
        "ftp://example.org/1.png": "must begin with",
        "http://127.0.0.1:9/1.png": "ConnectError",
        f"file://{local}/../secret.png": "below the allowed folder",
        f"file://{local}/link.png": "below the allowed folder",
        f"file://elsewhere{local}/1.png": "below the allowed folder",
        "data:image/png,abc": "base64",
        "data:image/png;base64,!!!": "must be base64",
        "picture.png": "must begin with",
    }.items():
        said = refused(server, url)
        assert where in said, said
        assert message in said, said
    with serving(str(folder), *WORDS, "--served-model-name", "seer") as closed:
        assert "not public" in refused(closed, f"{files}/1.png")
        assert "--allowed-local-media-path" in refused(closed, f"file://{local}/1.png")


def test_a_model_of_text_says_so() -> None:
    with serving() as server:
        model = post(f"{server.url}/v1/chat/completions", {
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1,
        })["model"]  # fmt: skip
        body = {"model": model, "messages": [{"role": "user", "content": url_parts("data:,")}]}
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "this model takes text only" in answer.json()["error"]["message"]
        image = {"type": "image", "source": {"type": "url", "url": "http://x/1.png"}}
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
        answer = httpx2.post(f"{server.url}/v1/messages", json=body, timeout=60)
        assert answer.status_code == 400
        assert "this model takes text only" in answer.json()["error"]["message"]
