"""Videos over HTTP: by the client that people use, from data URLs, URLs and local files; and files that are
no videos."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from image_checkpoints import data_url, picture
from servers import RunningServer, serving
from video_checkpoints import save_qwen3, video_file, video_url

from headrace import LLM, SamplingParams
from headrace_testing.videos import frames, written

WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216", "--served-model-name", "seer", "--media-io-kwargs", '{"video": {"num_frames": 6}}',
)  # fmt: skip
LIMITS = (
    "--max-video-seconds",
    "4",
    "--max-video-file-bytes",
    "200000",
    "--max-image-pixels",
    "20000",
)
NUM_TOKENS = 6
WHERE = "messages[0].content[1].video_url.url"
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}


class Files(http.server.BaseHTTPRequestHandler):
    """A video; a redirect to it; one that never comes."""

    never = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/video.mp4")
            self.end_headers()
            return
        if self.path == "/never":
            self.never.wait(60)
            return
        body = video_file()
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
    Files.never.set()
    server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen3(folder)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    (folder / "video.mp4").write_bytes(video_file())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, local: Path) -> Iterator[RunningServer]:
    words = ("--allow-private-media", "--allowed-local-media-path", str(local))
    with serving(str(folder), *WORDS, *LIMITS, *words) as running:
        yield running


def parts(url: str, *more: Any) -> list[Any]:
    video = {"type": "video_url", "video_url": {"url": url}}
    return [{"type": "text", "text": "the water "}, video, *more]


IMAGE = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """What is said of the video, and of it with a picture, offline."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    said = []
    with LLM(
        str(folder), dtype="float32", max_model_len=256, block_size=8,
        kv_cache_memory_bytes=16 << 20, use_tqdm_on_load=False,
        media_io_kwargs={"video": {"num_frames": 6}},
    ) as model:  # fmt: skip
        for more in ((), (IMAGE,)):
            content = parts(video_url(video_file()), *more)
            (output,) = model.chat([{"role": "user", "content": content}], params)
            said.append(output.outputs[0].text)
    return said


def test_the_openai_client_sends_videos(
    server: RunningServer, files: str, local: Path, expected: list[str]
) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)

    def asked(url: str, *more: Any, stream: bool = False) -> str:
        given: Any = [{"role": "user", "content": parts(url, *more)}]
        made = client.chat.completions.create(
            model="seer", messages=given, stream=stream, extra_body={"ignore_eos": True}, **SETTINGS
        )
        if not stream:
            return made.choices[0].message.content or ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)

    url = video_url(video_file())
    assert [asked(url), asked(url, IMAGE)] == expected
    assert asked(url, stream=True) == expected[0]
    assert asked(f"{files}/video.mp4") == expected[0]
    assert asked(f"{files}/moved") == expected[0]
    assert asked(f"file://{local}/video.mp4") == expected[0]


def post(server: RunningServer, url: str) -> httpx2.Response:
    body = {**SETTINGS, "model": "seer", "messages": [{"role": "user", "content": parts(url)}]}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def hostile() -> dict[str, tuple[bytes, str]]:
    """Files that are no good videos -> what is said of them."""
    whole = video_file()
    webm = written(frames(), kind="webm", codec="libvpx-vp9")
    return {
        "no video": (b"hello" * 100, "not one of MP4"),
        "empty": (b"", "not one of MP4"),
        "picture": (b"\x89PNG\r\n\x1a\n" + bytes(99), "not one of MP4"),
        "half": (whole[: len(whole) // 2], "cut off"),
        "head": (whole[:60], "no pictures"),
        "index alone": (whole[: whole.index(b"mdat") + 4], "cut off"),
        "rubbish in a frame": (b"".join((webm[:500], bytes(2000))), "video"),
        "long": (video_file(40), "longer than 4 s"),
        "large file": (bytes(200001), "at most 200000"),
        "large frames": (written(frames(2, 200, 200)), "200 x 200 pixels: at most 20000"),
        "playlist": (b"#EXTM3U\nfile:///etc/passwd\n", "not one of MP4"),
    }


@pytest.mark.req("SEC-07")
@pytest.mark.req("SEC-08")
def test_hostile_files_are_refused_and_harm_nobody(server: RunningServer) -> None:
    good = video_url(video_file())
    for name, (data, said) in hostile().items():
        answer = post(server, video_url(data))
        assert answer.status_code == 400, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert WHERE in message, (name, message)
        assert said in message, (name, message)
        assert post(server, good).status_code == 200, name


@pytest.mark.req("SEC-05")
def test_times_and_redirects_are_settings(folder: Path, files: str) -> None:
    """A transfer that takes too long is the client's error, and the operator may forbid redirects."""
    environment = {"HEADRACE_VIDEO_FETCH_TIMEOUT": "0.5", "HEADRACE_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    with serving(str(folder), *WORDS, "--allow-private-media", environment=environment) as running:
        slow = post(running, f"{files}/never")
        assert (slow.status_code, "longer than 0.5 s" in slow.text) == (400, True), slow.text
        moved = post(running, f"{files}/moved")
        assert (moved.status_code, "redirects" in moved.text) == (400, True), moved.text
        assert post(running, f"{files}/video.mp4").status_code == 200


def test_a_model_without_videos_says_so(folder: Path) -> None:
    with serving(str(folder), *WORDS, "--limit-mm-per-prompt", '{"video": 0}') as running:
        answer = post(running, video_url(video_file()))
        assert answer.status_code == 400
        assert "messages[0].content[1]" in answer.json()["error"]["message"]
