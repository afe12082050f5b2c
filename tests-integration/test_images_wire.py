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
from image_checkpoints import data_url, encoded, picture, save_qwen2_vl
from posted import post
from servers import RunningServer, serving

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen2_vl(folder)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "1.png").write_bytes(encoded(picture(1)))
    (folder.parent / "secret.png").write_bytes(encoded(picture(2)))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, local: Path) -> Iterator[RunningServer]:
    words = ("--allow-private-media", "--allowed-local-media-path", str(local))
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
