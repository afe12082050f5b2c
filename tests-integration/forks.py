"""``headrace`` commands in forks of one process that has imported it: a fifth of a fresh process's work.

A fork is like a process of its own, but for what an interpreter and its imports read of the environment.
:func:`start` starts a command in a fork where that makes no difference.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

SCRIPT = Path(__file__).with_name("fork_server.py")
INT = struct.calcsize("i")
LIMIT = 300.0
"""Seconds after which a command is given up; nothing takes that long unless it is broken."""
READ_LATE = {
    "HEADRACE_API_KEY", "HEADRACE_FAILPOINTS", "HEADRACE_HARDENED", "HEADRACE_LOGGING_LEVEL", "TERM",
    "TMPDIR", "XDG_STATE_HOME",
}  # fmt: skip
"""Variables that a fork may have of its own; all others need a fresh interpreter."""


class ForkedProcess:
    """A command that runs: what tests use of ``subprocess.Popen``."""

    def __init__(self, argv: Sequence[str], told: int) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self.stdout: TextIO | None = None
        self.stderr: TextIO | None = None
        self._told = told
        self._lock = threading.Lock()
        self.pid = self._next()

    def poll(self) -> int | None:
        """Exit status, minus a signal's number; None while it runs."""
        with self._lock:
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self.returncode = self._next()
                os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once there is one; for one thread at a time.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._told], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it writes to its output and, where they are apart, its errors, until it ends.

        Raises:
            subprocess.TimeoutExpired: it still ran, and was killed.
        """
        with ThreadPoolExecutor() as pool:
            texts = [pool.submit(_read_and_close, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return texts[0].result(), texts[1].result()

    def _next(self) -> int:
        data = os.read(self._told, INT)
        if not data:
            raise RuntimeError("the fork server ended, see its traceback")
        return struct.unpack("i", data)[0]


Process = ForkedProcess | subprocess.Popen[str]
"""A command that was started."""


def _read_and_close(stream: TextIO | None) -> str:
    if stream is None:
        return ""
    with stream:
        return stream.read()


class ForkServer:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def start(
        self,
        argv: Sequence[str],
        streams: Sequence[int],
        environment: Mapping[str, str | None],
        *,
        has_terminal: bool = False,
    ) -> ForkedProcess:
        """Start ``headrace ARGV`` in the folder of this process.

        Args:
            argv: words after ``headrace``.
            streams: descriptors of its standard input, output and error.
            environment: variables it has of its own; None: not that one.
            has_terminal: its standard input is to be its controlling terminal.
        """
        call = {"argv": list(argv), "folder": os.getcwd(), "environment": dict(environment),
                "has_terminal": has_terminal}  # fmt: skip
        told, tells = os.pipe()
        socket.send_fds(self._commands, [json.dumps(call).encode()], [*streams, tells])
        os.close(tells)
        return ForkedProcess(argv, told)

    def close(self) -> None:
        self._commands.close()
        self._process.wait()


@functools.cache
def fork_server(owner: int) -> ForkServer:
    """The fork server of a process, which is this one."""
    server = ForkServer()
    atexit.register(server.close)
    return server


OF_TESTS = {"HEADRACE_TEST_SEED", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that pytest and torch set in the process of the tests, and that mean nothing to a command."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_TESTS}


ENVIRONMENT = _environment()
"""The fork server's: that of the tests before the first one begins."""


def own_variables(environment: Mapping[str, str] | None) -> dict[str, str | None]:
    """What a command's environment has that the fork server's has not; None: it has not that one."""
    wanted = {**_environment(), **(environment or {})}
    return {
        name: wanted.get(name)
        for name in wanted.keys() | ENVIRONMENT.keys()
        if wanted.get(name) != ENVIRONMENT.get(name)
    }


def start(
    *argv: str,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
    fresh: bool = False,
) -> Process:
    """Start ``headrace ARGV`` with nothing to read and pipes for its output.

    Args:
        argv: words after ``headrace``.
        environment: variables besides those of the tests.
        stderr: ``subprocess.STDOUT`` for its errors to go where its output goes.
        fresh: in an interpreter of its own, whatever the environment.
    """
    own = own_variables(environment)
    if fresh or not own.keys() <= READ_LATE:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
    out, written = os.pipe()
    errors, complained = os.pipe() if stderr == subprocess.PIPE else (-1, written)
    with open(os.devnull) as nothing:
        streams = [nothing.fileno(), written, complained]
        process = fork_server(os.getpid()).start(argv, streams, own)
    process.stdout = open(out)  # noqa: SIM115
    if errors >= 0:
        process.stderr = open(errors)  # noqa: SIM115
    for descriptor in {written, complained}:
        os.close(descriptor)
    return process


def run_command(
    *argv: str,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
    timeout: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Run ``headrace ARGV`` until it ends; see :func:`start`."""
    process = start(*argv, environment=environment, stderr=stderr)
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(argv, process.wait(), out, errors)
