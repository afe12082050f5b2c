"""The core's process: ``python -m headrace_engine.clients.child``.

Two threads. The loop's thread runs the core and sends its outputs itself, so that no output waits
for another thread. The main thread takes commands, sends heartbeats, and watches the parent: its
standard input is a pipe that the parent holds open, so the parent's end, however it comes, is the
pipe's end, and with it the end of this process.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import Future
from typing import Any, TextIO, cast

import msgspec
import zmq

from headrace_core.engine import EngineStats
from headrace_core.log_lines import JsonLines, QueuedText, ThreadedHandler
from headrace_engine.clients.wire import (
    Abort,
    Add,
    CallReply,
    CallWorkers,
    Command,
    Died,
    ErrorReply,
    Failed,
    FrameDecoder,
    GetStats,
    Heartbeat,
    Hello,
    Outputs,
    Ready,
    Report,
    ResetPrefixCache,
    ResetReply,
    StatsReply,
    as_data,
    phases_of,
)
from headrace_engine.core import EngineCore
from headrace_engine.loop import EngineLoop
from headrace_engine.messages import CoreOutputs
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000
"""Messages that may wait in a socket: enough for any pause that is not a hang."""
HEARTBEAT_SECONDS = 0.5
SEND_SECONDS = 30.0
"""Longest wait for a parent that takes no messages; then it counts as gone."""
LINGER_MILLISECONDS = 1000
EXIT_ORPHANED = 70


class Sender:
    """Says things to the parent. Each thread has a socket of its own: they cannot be shared."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._context = context
        self._address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._local = threading.local()
        self._sockets: list[zmq.Socket[bytes]] = []

    def send(self, report: Report) -> None:
        """Send; ends this process if the parent takes nothing for too long."""
        socket: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if socket is None:
            socket = self._local.socket = self._connect()
        try:
            socket.send(self._encoder.encode(report))
        except zmq.Again:
            logger.critical("the parent process takes no messages; giving up")
            os._exit(EXIT_ORPHANED)

    def close(self) -> None:
        """Close all sockets, sending first what waits. The other threads must have ended."""
        for socket in self._sockets:
            socket.close(linger=LINGER_MILLISECONDS)

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
        socket.connect(self._address)
        self._sockets.append(socket)
        return socket


class _Sink:
    """Outputs of the loop's thread, straight to the parent."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self._sender.send(Outputs(outputs))

    def on_death(self, error: BaseException) -> None:
        self._sender.send(Died(as_data(error.__cause__ or error)))


def main() -> None:
    """Run until told to stop, or until the parent is gone."""
    # A terminal's Ctrl-C reaches the whole process group; when to end is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hello = msgspec.json.decode(_read_line(), type=Hello)
    _configure_logging(hello)
    threading.Thread(
        target=_end_with_parent, args=(hello,), name="headrace-parent-watch", daemon=True
    ).start()
    context = zmq.Context(io_threads=1)
    sender = Sender(context, f"ipc://{hello.folder}/reports")
    commands = context.socket(zmq.PULL)
    commands.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    commands.connect(f"ipc://{hello.folder}/commands")
    try:
        _serve(hello, sender, commands)
    finally:
        sender.close()
        commands.close(linger=0)
        context.term()


def _configure_logging(hello: Hello) -> None:
    handler = ThreadedHandler(sys.stderr)
    text = logging.Formatter("%(levelname)s %(asctime)s %(message)s")
    handler.setFormatter(JsonLines() if hello.log_json else text)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(hello.log_level)
    sys.stderr = cast(TextIO, QueuedText(sys.stderr, handler))
    sys.stdout = cast(TextIO, QueuedText(sys.stdout, ThreadedHandler(sys.stdout)))


def _serve(hello: Hello, sender: Sender, commands: zmq.Socket[bytes]) -> None:
    timeline = StartupTimeline()
    try:
        core = _build(hello, timeline)
    except BaseException as error:
        logger.exception("the engine could not be started")
        sender.send(Failed(as_data(error)))
        return
    loop = EngineLoop(core, _Sink(sender))
    loop.start()
    sender.send(Ready(phases_of(timeline), core.memory_plan, core.max_model_len,
                      core.step_seconds))  # fmt: skip
    try:
        _take_commands(loop, sender, commands)
    finally:
        loop.stop()


def _build(hello: Hello, timeline: StartupTimeline) -> EngineCore:
    module, _, name = hello.factory.partition(":")
    with timeline.phase("import"):
        factory = getattr(importlib.import_module(module), name)
    core: EngineCore = factory(hello.config, timeline)
    return core


def _take_commands(loop: EngineLoop, sender: Sender, commands: zmq.Socket[bytes]) -> None:
    decoder = FrameDecoder[Command](Command)
    while loop.is_alive:
        # Answers to calls are sent from here too: their futures end in the loop's thread.
        if commands.poll(int(HEARTBEAT_SECONDS * 1000)):
            command = decoder.decode(commands.recv())
            if isinstance(command, Add):
                loop.add(command.requests)
            elif isinstance(command, Abort):
                loop.abort(command.request_ids)
            elif isinstance(command, GetStats):
                _answer(loop.stats(command.drain), command.call_id, sender)
            elif isinstance(command, ResetPrefixCache):
                done = loop.reset_prefix_cache(command.reset_running_requests)
                _answer(done, command.call_id, sender)
            elif isinstance(command, CallWorkers):
                _answer(loop.call_workers(command.method, command.args), command.call_id, sender)
            else:
                return
        else:
            sender.send(Heartbeat(loop.heartbeat_age))


def _answer(future: Future[Any], call_id: int, sender: Sender) -> None:
    """Send the result when it is there, from the loop's thread."""

    def send(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            sender.send(ErrorReply(call_id, as_data(error)))
        elif isinstance(result := done.result(), EngineStats):
            sender.send(StatsReply(call_id, result))
        elif isinstance(result, list):
            sender.send(CallReply(call_id, result))
        else:
            sender.send(ResetReply(call_id, result))

    future.add_done_callback(send)


def _read_line() -> bytes:
    """The parent's first line, read without buffering what follows."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 1)
        if not piece:
            os._exit(EXIT_ORPHANED)
        line += piece
    return bytes(line)


def _end_with_parent(hello: Hello) -> None:
    """End this process, whatever it is doing, when the parent is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # The parent removes its folder of sockets itself, unless it was killed.
    shutil.rmtree(hello.folder, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main()
