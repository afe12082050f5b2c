"""Trace a streamed chat of a running server: which files does it pass?

    python tools/request_walk.py            the demo model
    python tools/request_walk.py --model PATH --eager

``headrace serve`` runs under a profiler that counts calls by file. Two chats of different lengths are
streamed: files that the longer one calls more often are the walk of a token (server, loop, the model's step
and its kernels, and back); the others are passed once a request. docs/architecture.md lists both, and
tests-integration/test_request_walk.py holds that list against this trace.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SHORT, LONG = 4, 36
"""Tokens of the two chats."""
SECONDS = 120.0
"""After which a server that does not answer is given up."""
_OWN = re.compile(r"/(headrace\w*/.*)\.py$")


@dataclass(frozen=True)
class Walk:
    """Files of headrace, as ``package/folder/module``, in the order of their first call."""

    request: tuple[str, ...]
    """Passed once (or a few times) by a request, on its way in and when it ends."""
    token: tuple[str, ...]
    """Passed by each further token."""


def trace(*options: str) -> Walk:
    """Serve with ``options``, stream two chats, and tell the walks apart.

    Raises:
        RuntimeError: the server did not start, or a chat was not as long as asked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder, "calls.json")
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(snapshot), *options, "--port", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            url = _address(server)
            _chat(url, SHORT)  # the first is slower in many ways
            short = _calls_of(server, snapshot, lambda: _chat(url, SHORT))
            long = _calls_of(server, snapshot, lambda: _chat(url, LONG))
        finally:
            server.terminate()
            server.wait(SECONDS)
    token = {
        name for name, calls in long.items() if calls - short.get(name, 0) >= (LONG - SHORT) // 2
    }
    return Walk(
        tuple(name for name in long if name not in token),
        tuple(name for name in long if name in token),
    )


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    lines: list[str] = []
    for line in server.stdout:
        lines.append(line)
        if found := re.search(r"serving at (http://[\d.]+:\d+)", line):
            drain = threading.Thread(target=server.stdout.read, daemon=True)
            drain.start()  # a full pipe would stop the server
            return found[1]
    raise RuntimeError("the server did not start:\n" + "".join(lines[-20:]))


def _chat(url: str, num_tokens: int) -> None:
    body = {
        "messages": [{"role": "user", "content": f"What is 12 + 7? ({time.monotonic()})"}],
        "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        lines = response.read().decode().splitlines()
    usage = [json.loads(line[6:]).get("usage") for line in lines if line.startswith("data: {")][-1]
    if usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"{num_tokens} tokens were asked for, usage is {usage}")


def _calls_of(
    server: subprocess.Popen[str], snapshot: Path, act: Callable[[], None]
) -> Mapping[str, int]:
    """Calls by file while ``act`` runs; files in the order of their first call."""
    _snapshot(server, snapshot)
    act()
    return _snapshot(server, snapshot)


def _snapshot(server: subprocess.Popen[str], path: Path) -> dict[str, int]:
    """The counts since the last snapshot, which begin anew."""
    path.unlink(missing_ok=True)
    server.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > deadline or server.poll() is not None:
            raise RuntimeError("the traced server gave no snapshot")
        time.sleep(0.01)
    counts: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return counts


def serve(snapshot: Path, words: Sequence[str]) -> int:
    """``headrace serve``, its calls counted; SIGUSR1 writes the counts and begins anew."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        path = frame.f_code.co_filename
        if (name := names.get(path)) is None:
            found = _OWN.search(path)
            name = names[path] = found[1] if found else ""
        if name:
            counts[name] += 1

    def write(*_: Any) -> None:
        taken = dict(counts)
        counts.clear()
        part = snapshot.with_suffix(".part")
        part.write_text(json.dumps(taken), encoding="utf-8")
        os.replace(part, snapshot)

    signal.signal(signal.SIGUSR1, write)
    threading.setprofile(count)
    sys.setprofile(count)
    from headrace.cli.main import main

    return main(["serve", *words])


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint to serve (default: the demo model)")
    parser.add_argument("--eager", action="store_true", help="serve with --enforce-eager")
    args = parser.parse_args()
    model = [args.model] if args.model else []
    walk = trace(*model, *(["--enforce-eager"] if args.eager else []))
    for title, files in (("a request, once", walk.request), ("each token", walk.token)):
        print(f"{title}: {len(files)} files")
        print("".join(f"  {name}\n" for name in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
