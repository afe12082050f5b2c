"""Run commands beside a server: ``python tests-clients/with_server.py COMMAND [-- COMMAND ...]``.

Starts ``headrace serve`` with the demo model and everything that clients use, on a free port of this
machine; runs each command with its address in ``HEADRACE_URL``, one after the other, all of them
even if one fails; ends the server. The status is the first that is not 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

FLAGS = (
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    "--enable-responses-store", "--port", "0",
)  # fmt: skip
START_SECONDS = 120
COMMAND_SECONDS = 600


def commands(words: list[str]) -> Iterator[list[str]]:
    """The commands, as ``--`` separates them."""
    while words:
        end = words.index("--") if "--" in words else len(words)
        if words[:end]:
            yield words[:end]
        words = words[end + 1 :]


def main() -> int:
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", *FLAGS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found, ready = [""], threading.Event()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            address = re.search(r"serving at (http://\S+)", line)
            if address:
                found[0] = address[1]
                ready.set()
            elif "WARNING" in line or "ERROR" in line:
                sys.stderr.write(line)
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not ready.wait(START_SECONDS) or not found[0]:
            print("the server did not start", file=sys.stderr)
            return 1
        environment = {**os.environ, "HEADRACE_URL": found[0]}
        statuses = [
            subprocess.run(command, env=environment, timeout=COMMAND_SECONDS).returncode
            for command in commands(sys.argv[1:])
        ]
        return next((status for status in statuses if status), 0)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
