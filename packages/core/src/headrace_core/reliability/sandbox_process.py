"""A child process with limits of time and memory, which can be killed: for work that a client can make slow
or large.

The process reads messages from its standard input and answers each with one on its standard output:
eight bytes of length, then so many bytes; JSON, or whatever both sides know. Its own limits hold memory
and processor time; this side holds the clock, and counts what the child worked, not how long it waited on a
busy machine. It ends when its input does, so it does not outlive its parent. Parent's half:
:class:`SandboxProcess`; child's half: :func:`serve`, :func:`serve_json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

START_SECONDS = 30.0
"""Wall-clock limit of starting a process, unless it imports much."""
PATIENCE = 6
"""Times its limit that a job may take on the wall's clock, where the machine gives the child less."""
_LENGTH = struct.Struct("<Q")
_READY = b""
"""A child's first message: it has started."""


class TookTooLong(Exception):
    """The answer did not come in time; the process was killed."""


class ProcessEnded(Exception):
    """The process ended instead of answering: it ran into its own limits, or crashed."""


class SandboxProcess:
    """One child that answers jobs; started when needed, replaced when it had to be killed.

    Not thread-safe.

    Args:
        module: run as ``python -m module``; its main calls :func:`serve` or :func:`serve_json`.
        argv: its arguments.
        start_seconds: wall-clock limit of its start.
    """

    def __init__(self, module: str, *argv: str, start_seconds: float = START_SECONDS) -> None:
        self._command = [sys.executable, "-m", module, *argv]
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if the child lives. A killed child has lost its state."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the child, if it lives."""
        return self._process.pid if self._process is not None and self.running else None

    def start(self) -> None:
        """Start the child now, not with the first message; where that fails, the message will say so."""
        with contextlib.suppress(TookTooLong):
            self._started()

    def ask(self, message: bytes, seconds: float) -> bytes:
        """Send a message and wait for its answer.

        Args:
            seconds: that the child may work on it; it may wait for a processor besides, up to
                :data:`PATIENCE` times as long in all.

        Raises:
            TookTooLong, ProcessEnded: the process is gone; the next message gets a new one.
        """
        process = self._started()
        try:
            return _talk(process, message, _time_to_work(process.pid, seconds))
        except TimeoutError:
            self.kill()
            raise TookTooLong(f"took longer than {seconds:g} s") from None
        except (OSError, EOFError):
            self.kill()
            raise ProcessEnded("exceeded its limit of memory or time") from None

    def ask_json(self, job: bytes, seconds: float) -> dict[str, Any]:
        """:meth:`ask` of a child that answers with JSON objects. Raises: the same."""
        answer = self.ask(job, seconds)
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            self.kill()
            raise ProcessEnded("gave no sensible answer") from None

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
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0, process_group=0,  # a terminal's Ctrl-C is its parent's
        )  # fmt: skip
        deadline = time.monotonic() + self._start_seconds
        try:
            _talk(self._process, None, lambda: deadline - time.monotonic())
        except (TimeoutError, OSError, EOFError) as error:
            self.kill()
            raise TookTooLong("the process for it did not start") from error
        return self._process


def _time_to_work(pid: int, seconds: float) -> Callable[[], float]:
    """Tells how long a child may be waited for, in seconds; 0 or less: no longer."""
    begin, worked = time.monotonic(), _processor_seconds(pid)

    def left() -> float:
        passed = time.monotonic() - begin
        if passed < seconds:
            return seconds - passed
        return min(seconds - (_processor_seconds(pid) - worked), PATIENCE * seconds - passed)

    return left


def _processor_seconds(pid: int) -> float:
    """Processor time of a process; where the system does not tell, that of the wall's clock."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # what Linux' clock_getcpuclockid(3) gives
    except OSError:
        return time.monotonic()


def _talk(
    process: subprocess.Popen[bytes], message: bytes | None, time_left: Callable[[], float]
) -> bytes:
    """Write a message, if there is one, and read one, while time is left."""
    assert process.stdin is not None
    assert process.stdout is not None
    source, target = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(target, False)
    unsent = memoryview(b"" if message is None else _LENGTH.pack(len(message)) + message)
    answer = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if unsent:
            selector.register(target, selectors.EVENT_WRITE)
        while not _is_whole(answer):
            left = time_left()
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
    return bytes(memoryview(answer)[_LENGTH.size :])


def _is_whole(answer: bytearray) -> bool:
    if len(answer) < _LENGTH.size:
        return False
    size: int = _LENGTH.unpack_from(answer)[0]
    return len(answer) >= _LENGTH.size + size


def serve(answer: Callable[[bytes], bytes | bytearray]) -> None:
    """The child: answer messages until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing but answers may reach the parent
    _send(output, _READY)
    while (message := _receive(sys.stdin.buffer)) is not None:
        _send(output, answer(message))


def serve_json(answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """:func:`serve` of JSON objects."""
    serve(lambda message: json.dumps(answer(json.loads(message))).encode())


def limit_time(seconds: float) -> None:
    """In the child: end it if the coming job takes so much processor time, also if nobody is there to
    kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if most == resource.RLIM_INFINITY or allowed < most:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))


def address_space() -> int:
    """Bytes that this process has mapped; where nobody says, a generous guess."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 16 << 30


def _receive(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    message = source.read(size)
    return message if len(message) == size else None


def _send(target: BinaryIO, message: bytes | bytearray) -> None:
    for part in (_LENGTH.pack(len(message)), message):
        unsent = memoryview(part)
        while unsent:
            unsent = unsent[target.write(unsent) :]
