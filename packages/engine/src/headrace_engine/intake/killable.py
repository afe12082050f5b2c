"""Work in a process that can be killed: for what a client can make slow or large.

The process reads one JSON object per line from its standard input and answers with one per line.
Its own limits hold memory and processor time; this side holds the clock. It ends when its input
does, so it does not outlive its parent. Parent's half: :class:`KillableProcess`; child's half:
:func:`serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

START_SECONDS = 30.0
"""Wall-clock limit of starting a process."""
READY = b'{"ready": true}\n'


class TookTooLong(Exception):
    """The answer did not come in time; the process was killed."""


class ProcessEnded(Exception):
    """The process ended instead of answering: it ran into its own limits, or crashed."""


class KillableProcess:
    """One child that answers jobs; started when needed, replaced when it had to be killed.

    Not thread-safe.

    Args:
        module: run as ``python -m module``; its main calls :func:`serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the child lives: one that was killed has forgotten what it was told."""
        return self._process is not None and self._process.poll() is None

    def ask(self, job: bytes, seconds: float) -> dict[str, Any]:
        """Send a job, a line of JSON, and wait for its answer.

        Raises:
            TookTooLong, ProcessEnded: the process is gone; the next job gets a new one.
        """
        process = self._started()
        try:
            answer = json.loads(_talk(process, job + b"\n", time.monotonic() + seconds))
        except TimeoutError:
            self.kill()
            raise TookTooLong(f"took longer than {seconds:g} s") from None
        except (OSError, EOFError, ValueError):
            self.kill()
            raise ProcessEnded("needed more memory or time than it may have") from None
        return dict(answer)

    def interrupt(self) -> None:
        """Make a job that runs fail. May be called from another thread than :meth:`ask`."""
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait(timeout=10)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            _talk(self._process, b"", time.monotonic() + START_SECONDS)
        except (TimeoutError, OSError, EOFError) as error:
            self.kill()
            raise TookTooLong("the process for it did not start") from error
        return self._process


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


def serve(answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """The child: answer jobs until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing but answers may reach the parent
    output.write(READY)
    for line in sys.stdin.buffer:
        output.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
