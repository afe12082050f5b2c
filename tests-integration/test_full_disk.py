"""A disk that is full while headrace starts, logs or writes results (F10)."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from forks import run_command
from servers import PATIENCE, free_port, serving

from headrace import demo
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(3)

SIM = ("--device", "sim", "--sim-step-ms", "1")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _ask(url: str, body: dict) -> int:
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.status


@pytest.mark.req("F10")
@pytest.mark.req("REL-14")
@pytest.mark.req("REL-19")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("words", [(), ("--engine-process",)], ids=["one", "two"])
def test_a_log_that_cannot_be_written(words):
    """Standard output and error go to a full disk; every line fails with ENOSPC."""
    with free_port() as port, open("/dev/full", "w") as full:
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", *SIM, *words, "--port", str(port)],
            stdout=full, stderr=full,
        )  # fmt: skip
        try:
            wait_until(lambda: process.poll() is not None or _answers(url), 2 * PATIENCE)
            assert process.poll() is None, f"it left with status {process.returncode}"
            for number in range(50):
                assert _ask(url, {"prompt": "x", "max_tokens": 5, f"unknown_{number}": 1}) == 200
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.mark.req("F10")
@pytest.mark.req("REL-14")
def test_temporary_folders_and_caches_on_a_full_disk(small_disk):
    """A running server needs neither; sockets take no room."""
    (small_disk / "filled").write_bytes(b"x" * (200 << 10))
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "rest").write_bytes(b"x" * (100 << 10))
    places = {name: str(small_disk) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")}
    with serving(*SIM, "--engine-process", environment=places) as server:
        for _ in range(20):
            assert _ask(server.url, {"prompt": "x", "max_tokens": 5}) == 200
        assert server.stop() == 0


@pytest.mark.req("F10")
@pytest.mark.req("REL-14")
def test_a_batch_whose_output_does_not_fit(small_disk, tmp_path):
    """The batch says so, keeps its answers, and goes on from there once there is room."""
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "x", "max_tokens": 100, "seed": i, "logprobs": 3}}
        for i in range(60)
    ]  # fmt: skip
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = small_disk / "out.jsonl"
    words = ["run-batch", "-i", str(given), "-o", str(out), *SIM]
    failed = _headrace(*words)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode not in (0, 70), failed.stderr[-2000:]
    assert "No space left" in last or "disk" in last, last
    assert "HR-BUG" not in failed.stderr
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = _headrace(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(line["custom_id"] for line in lines)
    assert all(a["response"]["status_code"] == 200 for a in answers)


def _headrace(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(*words, environment=environment, timeout=3 * PATIENCE)


@contextmanager
def _hub():
    """A hub with one repository: the demo model."""
    files = {file.name: file.read_bytes() for file in demo.path().iterdir()}

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            kind = "application/json"
            if "/resolve/" in self.path:
                data, kind = files.get(Path(self.path).name), "application/octet-stream"
            elif "/tree/" in self.path:
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
                    for name, data in files.items()
                ]
                data = json.dumps(listed).encode()
            else:
                listed = {
                    "id": "o/m", "sha": "a" * 40, "private": False, "gated": False, "tags": [],
                    "siblings": [{"rfilename": name} for name in files], "downloads": 0, "likes": 0,
                }  # fmt: skip
                data = json.dumps(listed).encode()
            self.send_response(404 if data is None else 200)
            data = data or b"{}"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", f'"{hash(data) & (2**64 - 1):032x}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.req("F10")
@pytest.mark.req("REL-13")
def test_a_download_that_does_not_fit(small_disk, tmp_path):
    """The error names the folder and the cause, and half a download is never loaded."""
    words = ("generate", "o/m", "--prompt", "Hello", "--max-tokens", "2")
    with _hub() as url:
        places = {"HF_ENDPOINT": url, "HF_HOME": str(small_disk), "HF_HUB_DISABLE_XET": "1"}
        failed = _headrace(*words, **places)
        last = failed.stderr.strip().splitlines()[-1]
        assert failed.returncode not in (0, 70), failed.stderr[-2000:]
        assert "No space left" in last, failed.stderr[-2000:]
        assert str(small_disk) in last
        again = _headrace(*words, **places)
        assert again.returncode == failed.returncode
        done = _headrace(*words, **{**places, "HF_HOME": str(tmp_path / "hub")})
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.req("F10")
def test_metrics_need_no_disk(small_disk):
    """Several processes share their metrics by asking each other, not by files."""
    (small_disk / "filled").write_bytes(b"x" * (255 << 10))
    with serving(
        *SIM, "--api-server-count", "2", environment={"PROMETHEUS_MULTIPROC_DIR": str(small_disk)}
    ) as server:
        assert _ask(server.url, {"prompt": "x", "max_tokens": 5}) == 200
        assert server.metric("generation_tokens_total") == 5
        assert server.stop() == 0
