"""A process that imports ``headrace`` once and runs each command in a fork of itself.

``python fork_server.py FD``: FD is a socket on which each message is a command. A message is a JSON object
with ``argv``, ``folder``, ``environment`` and ``has_terminal``. With it come four descriptors: standard
input, output and error of the command, and a pipe for what becomes of it: its process id, then its exit
status (two C ints).
The process ends with whoever has the other end of the socket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading

from headrace_core.reliability import failpoints

LONGEST = 1 << 17
"""Most bytes of a message: as many as the system lets a command line have."""
IMPORTED = (
    "headrace.assembly.inspection", "headrace.assembly.worker.factory", "headrace.cli.generate",
    "headrace.cli.inspect", "headrace.cli.main", "headrace.cli.quantize", "headrace.cli.run_batch",
    "headrace.cli.serve", "headrace_attention.paged", "headrace_demo", "headrace_engine.clients.inproc",
    "headrace_engine.engine", "headrace_engine.execution.capture", "headrace_engine.execution.late",
    "headrace_engine.execution.pooling", "headrace_engine.execution.reloading",
    "headrace_engine.weights.worker", "headrace_engine.input_processing.guarded_backend",
    "headrace_engine.input_processing.tokenizer", "headrace_engine.kv.manager",
    "headrace_engine.sampling.sampler", "headrace_engine.scheduler.scheduler",
    "headrace_engine.structured.matching_threads", "headrace_engine.uniproc",
    "headrace_kernels.cpu.graph", "headrace_kernels.cpu.ops", "headrace_kernels.triton.provider",
    "headrace_models.convert", "headrace_models.families.decoder.llama",
    "headrace_models.formats.dummy", "headrace_models.formats.safetensors",
    "headrace_models.formats.tekken", "headrace_models.loading.loader",
    "headrace_models.pooling.pooler", "headrace_models.resolve", "headrace_models.text_part",
    "headrace_quant.none", "headrace_reference.provider", "headrace_server.app",
    "headrace_server.chat.beam", "headrace_server.harmony.parse", "headrace_server.preflight",
    "headrace_server.reasoning_parsers.formats.openai_gptoss", "headrace_server.routes.anthropic",
    "headrace_server.routes.health", "headrace_server.routes.metrics", "headrace_server.routes.models",
    "headrace_server.routes.openai", "headrace_server.routes.pooling",
    "headrace_server.routes.responses", "headrace_server.routes.speech",
    "headrace_server.routes.tokenize", "headrace_server.routes.tokens", "headrace_server.run",
    "headrace_server.tool_parsers.formats.openai", "multiprocessing.synchronize", "numpy.typing",
    "pydantic.v1", "tokenizers", "torch", "uvicorn.lifespan.on",
)  # fmt: skip
"""Modules that most commands import; a fork imports the rest."""


class Children:
    """Forks that run, and the pipes of those who wait for them."""

    def __init__(self) -> None:
        self._pipes: dict[int, int] = {}

    def add(self, pid: int, pipe: int) -> None:
        self._pipes[pid] = pipe
        _tell(pipe, pid)

    def close(self) -> None:
        """In a fork: nobody shall wait for it to learn what became of the others."""
        for pipe in self._pipes.values():
            os.close(pipe)

    def reap(self) -> None:
        """Tell the status of those that have ended."""
        for pid, pipe in list(self._pipes.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)
                del self._pipes[pid]

    def kill(self) -> None:
        for pid in self._pipes:
            os.kill(pid, signal.SIGKILL)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(pipe, struct.pack("i", number))


class Wakes:
    """A socket that is readable when a child has ended."""

    def __init__(self) -> None:
        self.readable, self._writable = socket.socketpair()
        self.readable.setblocking(False)
        self._writable.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writable.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.readable.close()
        self._writable.close()


def forked(commands: socket.socket) -> dict | None:
    """Fork at each message.

    Returns:
        In a fork the message, with the descriptors in place; in this process, at the end, None.
    """
    children, wakes = Children(), Wakes()
    while True:
        ready, _, _ = select.select([commands, wakes.readable], [], [])
        if wakes.readable in ready:
            wakes.readable.recv(LONGEST)
            children.reap()
        if commands not in ready:
            continue
        message, descriptors, *_ = socket.recv_fds(commands, LONGEST, 4)
        if not message:
            children.kill()
            return None
        *streams, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            for left in (wakes, commands, children):
                left.close()
            os.close(pipe)
            _put_in_place(streams)
            return json.loads(message)
        children.add(pid, pipe)
        for stream in streams:
            os.close(stream)


def _put_in_place(streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _run(call: dict) -> None:
    """Be as a process is that ``python -m headrace`` has just started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if call["has_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdout.reconfigure(line_buffering=True)
    for name, value in call["environment"].items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # as the environment says now
    if text := os.environ.get(failpoints.VARIABLE):
        failpoints.PLAN = failpoints.parse(text)
    os.chdir(call["folder"])
    sys.path[0] = call["folder"]
    sys.argv[1:] = call["argv"]
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)


def _leave(end: SystemExit) -> None:
    """End a fork here, after all that its modules asked for at their end.

    The interpreter would take every imported module apart first, 0.15 s of work. It does where the end is
    not a number or where the output cannot be written: both change the status. Whether a command
    survives being taken apart is seen by those in interpreters of their own.
    """
    if not isinstance(end.code, int | None):
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(end.code or 0)


def main() -> None:
    """Import, then fork until the other end of the socket is closed."""
    commands = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and what they started
    sys.path[0] = os.getcwd()
    for name in IMPORTED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork would have none of the threads that an import has started"
    gc.collect()
    gc.freeze()  # a fork that ends does not walk what it shares
    call = forked(commands)
    if call is None:
        return
    try:
        _run(call)
    except SystemExit as end:
        _leave(end)
        raise


if __name__ == "__main__":
    main()
