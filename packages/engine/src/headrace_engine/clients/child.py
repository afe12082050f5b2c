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
import time
from concurrent.futures import Future
from typing import Any, TextIO, cast

import msgspec
import zmq

from headrace_core.context import MODEL
from headrace_core.engine import EngineStats
from headrace_core.errors import BUG, entry_of
from headrace_engine.clients.front_ends import EXIT_ORPHANED, FrontEnds
from headrace_engine.clients.wire import (
    HEARTBEAT_SECONDS,
    PARENT,
    Abort,
    Add,
    AddLoRA,
    Attach,
    CallReply,
    CallWorkers,
    Command,
    DoneReply,
    ErrorReply,
    Failed,
    GetStats,
    Heartbeat,
    Hello,
    Join,
    Leave,
    ListLoRAs,
    LoRAsReply,
    Ready,
    Recall,
    RecallReply,
    RemoveLoRA,
    Report,
    ResetPrefixCache,
    Resume,
    StatsReply,
    Suspend,
    as_data,
    phases_of,
)
from headrace_engine.core import EngineCore
from headrace_engine.log_lines import JsonLines, LineFormatter, QueuedText, ThreadedHandler
from headrace_engine.loop import EngineLoop
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)


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
    kept_gb = hello.config.multimodal.mm_processor_cache_gb
    front_ends = FrontEnds(context, hello.folder, int(kept_gb * (1 << 30)))
    try:
        _serve(hello, front_ends)
    finally:
        front_ends.close()
        context.term()


def _configure_logging(hello: Hello) -> None:
    """Lines of the form, and to the stream, of the process that this one belongs to."""
    MODEL.set(hello.log_model)
    stderr, stdout = ThreadedHandler(sys.stderr), ThreadedHandler(sys.stdout)
    handler = stdout if os.environ.get("HEADRACE_LOGGING_STREAM") == "stdout" else stderr
    text = LineFormatter(hello.log_colour, process="engine")
    handler.setFormatter(JsonLines() if hello.log_json else text)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(hello.log_level)
    sys.stderr = cast(TextIO, QueuedText(sys.stderr, stderr))
    sys.stdout = cast(TextIO, QueuedText(sys.stdout, stdout))


def _serve(hello: Hello, front_ends: FrontEnds) -> None:
    timeline = StartupTimeline()
    try:
        core = _build(hello, timeline)
    except BaseException as error:
        if entry_of(error) is BUG:  # of all else the parent says what is to be said
            logger.exception("the engine could not be started")
        front_ends.send(Failed(as_data(error)))
        return
    loop = EngineLoop(core, front_ends)
    loop.start()
    ready = Ready(phases_of(timeline), core.memory_plan, core.max_model_len, core.step_seconds)
    front_ends.send(ready)
    try:
        Commands(loop, front_ends, msgspec.structs.replace(ready, phases=[])).take()
    finally:
        loop.stop()


def _build(hello: Hello, timeline: StartupTimeline) -> EngineCore:
    module, _, name = hello.factory.partition(":")
    with timeline.phase("import"):
        factory = getattr(importlib.import_module(module), name)
    place = () if hello.place is None else (hello.place,)
    core: EngineCore = factory(hello.config, timeline, *place)
    return core


class Commands:
    """Takes commands until the parent says stop, or the loop has ended.

    Args:
        loop: runs the core.
        front_ends: where commands come from and answers go.
        ready: said to each further front end.
    """

    def __init__(self, loop: EngineLoop, front_ends: FrontEnds, ready: Ready) -> None:
        self._loop, self._front_ends, self._ready = loop, front_ends, ready

    def take(self) -> None:
        """Take them, with a heartbeat now and then: also while one front end says much and another
        hears nothing."""
        beat = time.monotonic()
        while self._loop.is_alive:
            for name, command in self._front_ends.take(HEARTBEAT_SECONDS):
                if not self._obey(name, command):
                    return
            if (now := time.monotonic()) - beat >= HEARTBEAT_SECONDS:
                beat = now
                self._front_ends.tell_all(Heartbeat(self._loop.heartbeat_age))
            for name in self._front_ends.stuck():
                self._loop.abort(self._front_ends.leave(name))

    def _obey(self, name: str, command: Command) -> bool:
        """Do as a front end says; False: leave."""
        loop, front_ends = self._loop, self._front_ends
        if isinstance(command, Add):
            loop.add(front_ends.entering(name, command))
        elif isinstance(command, Attach):
            front_ends.attach(name, command)
        elif isinstance(command, Abort):
            loop.abort(front_ends.core_ids(name, command.request_ids))
        elif isinstance(command, Suspend):
            loop.suspend(front_ends.core_ids(name, command.request_ids))
        elif isinstance(command, Resume):
            loop.resume(front_ends.core_ids(name, command.request_ids))
        elif isinstance(command, GetStats):
            self._answer(loop.stats(command.drain), command.call_id, name)
        elif isinstance(command, ResetPrefixCache):
            reset = loop.reset_prefix_cache(command.reset_running_requests)
            self._answer(reset, command.call_id, name)
        elif isinstance(command, AddLoRA):
            self._answer(loop.add_lora(command.lora_request), command.call_id, name)
        elif isinstance(command, RemoveLoRA):
            self._answer(loop.remove_lora(command.lora_int_id), command.call_id, name)
        elif isinstance(command, ListLoRAs):
            self._answer(loop.list_loras(), command.call_id, name)
        elif isinstance(command, CallWorkers):
            done = loop.call_workers(command.method, command.args)
            self._answer(done, command.call_id, name)
        elif isinstance(command, Recall):
            item = front_ends.recalled(command.name)
            front_ends.send(RecallReply(command.call_id, item), name)
        elif name != PARENT:
            logger.error("front end %s may not say %s", name, type(command).__name__)
        elif isinstance(command, Join):
            front_ends.join(command.name)
            front_ends.send(self._ready, command.name)
        elif isinstance(command, Leave):
            loop.abort(front_ends.leave(command.name))
        else:
            return False
        return True

    def _answer(self, future: Future[Any], call_id: int, name: str) -> None:
        """Send the result when it is there, from the loop's thread."""

        def send(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                report: Report = ErrorReply(call_id, as_data(error))
            elif isinstance(result := done.result(), EngineStats):
                report = StatsReply(call_id, result)
            elif isinstance(result, list):
                report = CallReply(call_id, result)
            elif isinstance(result, tuple):
                report = LoRAsReply(call_id, result)
            else:
                report = DoneReply(call_id, result)
            self._front_ends.send(report, name)

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
    if hello.place is not None:
        shutil.rmtree(os.path.dirname(hello.place.path), ignore_errors=True)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main()
