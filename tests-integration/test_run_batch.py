"""``headrace run-batch`` with the demo model: paths, URLs, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import forks
import pytest
from servers import PATIENCE, slow_steps

from headrace_testing.waiting import wait_until


def lines(count: int, max_tokens: int = 8) -> str:
    made = []
    for number in range(count):
        body = {
            "messages": [{"role": "user", "content": f"What is {number} + 1?"}],
            "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        url = "/v1/nowhere" if number == 3 else "/v1/chat/completions"
        made.append({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body})
    return "".join(json.dumps(line) + "\n" for line in made)


def start(*words: str, environment: dict[str, str] | None = None) -> forks.Process:
    return forks.start("run-batch", *words, environment=environment, stderr=subprocess.STDOUT)


def finish(process: forks.Process, status: int = 0) -> str:
    log, _ = process.communicate(timeout=180)
    assert process.returncode == status, log
    return log


def answers(text: str, count: int) -> list:
    found = [json.loads(line) for line in text.splitlines()]
    assert [answer["custom_id"] for answer in found] == [f"id-{i}" for i in range(count)]
    assert [i for i, answer in enumerate(found) if answer["error"]] == [3]
    return found


def test_requests_through_a_pipe(tmp_path):
    """It can be read once, and is checked before it is answered."""
    source, output = tmp_path / "in", tmp_path / "out"
    os.mkfifo(source)
    writer = threading.Thread(target=source.write_text, args=(lines(5),), daemon=True)
    writer.start()
    assert "5 requests answered" in finish(start("-i", str(source), "-o", str(output)))
    answers(output.read_text(), 5)
    writer.join(PATIENCE)


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_batch_goes_on_where_it_stopped(tmp_path, number):
    count = 40
    source, output, partial = tmp_path / "in", tmp_path / "out", tmp_path / "out.partial"
    source.write_text(lines(count, max_tokens=48))
    words = ("-i", str(source), "-o", str(output), "--max-concurrency", "2")
    process = start(*words, environment=slow_steps(0.01))
    try:
        wait_until(
            lambda: partial.exists() and partial.read_bytes().count(b"\n") > 5,
            2 * PATIENCE,
            "no answers came",
        )
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert not output.exists()
    before = partial.read_bytes().split(b"\n")[1:-1]
    assert 5 <= len(before) < count, "the batch was over too soon for this test"
    log = finish(start(*words))
    assert f"{len(before)} of {count} requests are answered already" in log
    found = answers(output.read_text(), count)
    kept = {json.loads(line)["output"]["id"] for line in before}
    assert kept <= {answer["id"] for answer in found}, "a finished request was run again"
    assert not partial.exists()


class _Store(BaseHTTPRequestHandler):
    """Gives the input, takes the output; the first PUT finds it busy."""

    def do_GET(self) -> None:
        data = self.server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts += 1
        if self.server.puts > 1:
            self.server.files[self.path] = data
        self.send_response(200 if self.server.puts > 1 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def store():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    server.files, server.puts = {}, 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE)


@pytest.mark.req("SEC-06")
def test_files_behind_urls_and_metrics(store, tmp_path):
    url = f"http://127.0.0.1:{store.server_address[1]}"
    store.files["/in?key=secret"] = lines(6).encode()
    process = start(
        "-i", url + "/in?key=secret", "-o", url + "/out?key=secret", "--output-tmp-dir",
        str(tmp_path / "kept"), "--enable-metrics", "--port", "0",
    )  # fmt: skip
    log = finish(process)
    answers(store.files["/out?key=secret"].decode(), 6)
    assert store.puts == 2
    assert "secret" not in log
    assert list((tmp_path / "kept").iterdir()) == []


def test_metrics_answer_while_the_batch_runs(tmp_path):
    (tmp_path / "in").write_text(lines(60, max_tokens=100))
    process = start("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"),
                    "--max-concurrency", "2", "--enable-metrics", "--port", "0",
                    environment=slow_steps(0.01))  # fmt: skip
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "metrics at http://" in line:
                url = line.split("metrics at ")[1].strip()
                break
        else:
            pytest.fail("".join(seen))
        threading.Thread(target=process.stdout.read, daemon=True).start()

        def counted() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                    return b"headrace:" in response.read()
            except OSError:
                return False

        wait_until(counted, what="no metrics")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(url.replace("/metrics", "/v1/models"), timeout=PATIENCE)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_equal_custom_ids_and_a_byte_order_mark(tmp_path):
    """The mark, which editors on Windows write, is ignored; a line with an id that was there is refused."""
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + (lines(2) + lines(1)).encode())
    log = finish(start("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")))
    assert "line 3: its custom_id is that of line 1; it is refused" in log
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [answer["error"] and answer["error"]["code"] for answer in found] == [
        None, None, "duplicate_custom_id",
    ]  # fmt: skip
    assert found[2]["error"]["message"] == (
        "line 3: custom_id = 'id-0': must differ from that of line 1"
    )


def test_a_bad_line_stops_before_the_model_is_loaded(tmp_path):
    (tmp_path / "in").write_text(lines(2) + "{nonsense\n")
    log = finish(start("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")), status=2)
    assert "line 3" in log.strip().splitlines()[-1]
    assert "Traceback" not in log
    assert not (tmp_path / "out.partial").exists()
