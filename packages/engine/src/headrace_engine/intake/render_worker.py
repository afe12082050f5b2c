"""Rendering in a process that can be killed, for templates or inputs that could take long.

The process reads one JSON object per line from its standard input and answers with one per line.
It has limits on memory and processor time, and ends when its input does, so it cannot outlive its
parent. Parent's half: :class:`RenderWorker`; child's half: :func:`main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jinja2

from headrace_engine.intake.sandbox import TemplateTooLarge, render_template

RENDER_SECONDS = 1.0
"""Wall-clock limit of one rendering."""
START_SECONDS = 30.0
"""Wall-clock limit of starting the process."""
MEMORY_BYTES = 1 << 30
"""Address-space limit of the process."""
READY = b'{"ready": true}\n'


class RenderTimeout(Exception):
    """Rendering took longer than its limit; the process was killed."""


class RenderFailed(Exception):
    """The template failed; the message says how, in words fit for whoever sent it."""


class RenderWorker:
    """One child process that renders, replaced when it had to be killed. Thread-safe.

    Args:
        seconds: limit of one rendering.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Like :func:`~headrace_engine.intake.sandbox.render_template`, with limits that hold.

        Raises:
            RenderFailed: the template failed.
            RenderTimeout: it took too long.
        """
        job = {"source": source, "variables": variables, "max_chars": max_chars}
        try:
            line = json.dumps(job).encode() + b"\n"
        except (TypeError, ValueError, RecursionError):
            raise RenderFailed("its variables must be plain data (JSON)") from None
        with self._lock:
            answer = json.loads(self._exchange(line))
        if "error" in answer:
            raise RenderFailed(answer["error"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _exchange(self, line: bytes) -> bytes:
        process = self._running()
        deadline = time.monotonic() + self._seconds
        try:
            return _talk(process, line, deadline)
        except (TimeoutError, OSError, EOFError) as error:
            self._kill()
            if isinstance(error, TimeoutError):
                raise RenderTimeout(f"rendering took longer than {self._seconds:g} s") from None
            raise RenderFailed("rendering needed more memory or time than it may have") from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.intake.render_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            _talk(self._process, b"", time.monotonic() + START_SECONDS)
        except (TimeoutError, OSError, EOFError) as error:
            self._kill()
            raise RenderTimeout("the rendering process did not start") from error
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait(timeout=10)


def _talk(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Write a line and read one, neither longer than until the deadline."""
    assert process.stdin is not None
    assert process.stdout is not None
    source, target = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(target, False)
    unsent, answer = memoryview(line), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if unsent:
            selector.register(target, selectors.EVENT_WRITE)
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                if key.fd == target:
                    unsent = unsent[os.write(target, unsent[:65536]) :]
                    if not unsent:
                        selector.unregister(target)
                    continue
                piece = os.read(source, 1 << 20)
                if not piece:
                    raise EOFError
                answer += piece
    return bytes(answer)


def describe_error(error: BaseException) -> str:
    """What went wrong in a template, without what Python would add of its own."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error) or type(error).__name__
    if isinstance(error, (MemoryError, RecursionError, OverflowError)):
        return "rendering needed more memory than it may have"
    return f"an expression raised {type(error).__name__}"


def main() -> None:
    """The child: answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing but answers may reach the parent
    output.write(READY)
    for line in sys.stdin.buffer:
        output.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")


def _answer(job: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": render_template(job["source"], job["variables"], job["max_chars"])}
    except TemplateTooLarge as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": describe_error(error)}


if __name__ == "__main__":
    main()
