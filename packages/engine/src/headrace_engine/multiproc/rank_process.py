"""The process of a rank other than 0: ``python -m headrace_engine.multiproc.rank_process DESCRIPTOR``.

On another host than rank 0's there is a second descriptor: of a pair of sockets with the host's process,
which says over it what the rank is, and whose end ends the rank, too.

The main thread builds the worker, reads what rank 0 says and does it: a thread between the two would have to
be woken for each pass. Another one only waits for rank 0's end, which is seen at once, however it comes, and
is the end of this process, too. Adapters are read in further ones, and blocks outside the cache are looked
for in one of their own, as other weights are read beside passes.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headrace_core.context import MODEL
from headrace_engine.clients.wire import as_data
from headrace_engine.cores import most_threads
from headrace_engine.kv_transfer.calls import FIND, FORGET, LOAD, SAVE
from headrace_engine.log_lines import JsonLines, LineFormatter, ThreadedHandler
from headrace_engine.lora.store import READ_THREADS
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.adapters import READ
from headrace_engine.multiproc.incoming import Incoming
from headrace_engine.multiproc.messages import (
    Answer,
    Failed,
    ModelPass,
    Raised,
    Stop,
    WorkerCall,
)
from headrace_engine.multiproc.places import RankHello
from headrace_engine.threads import lower_priority
from headrace_engine.weights.led_calls import BUILD, CHANGE

logger = logging.getLogger(__name__)

CALLS = (
    "load", "kv_specs", "begin_profile", "profile", "allocate_cache", "warm_up", "report", "close",
    "update_config", "give_back_memory", "read_weights", "restore_cache",
)  # fmt: skip
"""Methods of a worker that rank 0 may call."""
MOVES = (LOAD, SAVE, CHANGE)
"""Likewise, for its own worker only."""
BESIDE = (READ,)
"""Likewise, in threads of their own beside the passes."""
FINDS = (FIND, FORGET)
"""Likewise, in one thread of their own."""
BUILDS = (BUILD,)
"""Likewise, in another one, before which passes go."""
_ALL = CALLS + MOVES + BESIDE + FINDS + BUILDS
EXIT_ORPHANED = 70
"""Exit status of a process whose rank 0 has gone."""
STARTED = 0
"""Call id of the answer that says that the worker was made."""


def main() -> None:
    """Run until told to stop, or until rank 0 is gone."""
    # When to end is rank 0's decision, whoever signals.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    host = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    try:
        hello = msgspec.json.decode(frames.receive(host or connection), type=RankHello)
    except (EOFError, OSError):
        os._exit(EXIT_ORPHANED)
    if host is not None:
        threading.Thread(
            target=_end_with, args=(host,), name="headrace-host-watch", daemon=True
        ).start()
    _configure_logging(hello)
    replies = Replies(connection)
    threading.Thread(
        target=_end_after, args=(connection,), name="headrace-rank-watch", daemon=True
    ).start()
    try:
        place = hello.place
        spins = most_threads() >= place.size_here * place.num_engines
        incoming = Incoming(connection, spins=spins)
        follow(lambda: _make(hello), replies, lambda: _next(incoming))
    except BaseException as error:
        logger.debug("rank %d ends", hello.place.rank, exc_info=True)
        with contextlib.suppress(OSError):
            replies.send(Failed(type(error).__name__, str(error)))
        logging.shutdown()
        # Threads of a communicator may wait for ranks that are no longer in step.
        os._exit(1)
    logging.shutdown()
    os._exit(0)  # the interpreter would take a second to take torch apart


class Replies:
    """Sends rank 0 what this rank answers, one message at a time. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Answer | Raised | Failed) -> None:
        """Send a message whole. Raises OSError."""
        pieces = frames.pack(message)
        with self._lock:
            frames.send(self._connection, pieces)


def _configure_logging(hello: RankHello) -> None:
    """Lines of the form, and to the stream, of the process that this one belongs to."""
    MODEL.set(hello.log_model)
    to_stdout = os.environ.get("HEADRACE_LOGGING_STREAM") == "stdout"
    handler = ThreadedHandler(sys.stdout if to_stdout else sys.stderr)
    text = LineFormatter(hello.log_colour, process=f"rank {hello.place.rank}")
    handler.setFormatter(JsonLines() if hello.log_json else text)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(hello.log_level)


def _next(incoming: Incoming) -> Any:
    """What rank 0 says next; ends this process when rank 0 is gone."""
    try:
        return incoming.receive()
    except (EOFError, OSError):
        os._exit(EXIT_ORPHANED)


def _end_after(connection: socket.socket) -> None:
    """End this process, whatever it is doing, when rank 0 is gone."""
    gone = select.poll()
    hung_up = getattr(select, "POLLRDHUP", select.POLLHUP)  # the first is Linux's
    gone.register(connection, hung_up)  # not for what there is to read
    gone.poll()
    os._exit(EXIT_ORPHANED)


def _end_with(host: socket.socket) -> None:
    """End this process when its host's is gone."""
    with contextlib.suppress(OSError):
        host.recv(1)
    os._exit(EXIT_ORPHANED)


def _make(hello: RankHello) -> Any:
    module, _, name = hello.factory.partition(":")
    return getattr(importlib.import_module(module), name)(hello.config, hello.place)


def follow(make: Callable[[], Any], replies: Replies, receive: Callable[[], Any]) -> None:
    """Make a rank's worker and do what rank 0 says until it says to stop.

    Args:
        receive: waits for rank 0's next message; one that is an exception is raised.

    Raises: what a pass, making the worker, or ``receive`` raises.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    worker = make()
    replies.send(Answer(STARTED, os.getpid()))
    # They start threads when they are needed.
    readers = ThreadPoolExecutor(READ_THREADS, "headrace-adapter")
    finder = ThreadPoolExecutor(1, "headrace-kv-finder")
    builder = ThreadPoolExecutor(1, "headrace-build-beside", _begin_building, (cores,))
    while not isinstance(message := receive(), Stop):
        if isinstance(message, ModelPass):
            worker.run_pass(message.method, message.args)
        elif isinstance(message, WorkerCall) and message.method in BESIDE:
            readers.submit(_reply, replies, worker, message)
        elif isinstance(message, WorkerCall) and message.method in FINDS:
            finder.submit(_reply, replies, worker, message)
        elif isinstance(message, WorkerCall) and message.method in BUILDS:
            builder.submit(_reply, replies, worker, message)
        elif isinstance(message, WorkerCall):
            _reply(replies, worker, message)
        else:
            raise message if isinstance(message, BaseException) else TypeError(f"{message!r:.200}")
        message = None  # tensors are given up now, not when the next pass has come
    worker.close()


def _begin_building(cores: set[int]) -> None:
    """Let the thread that builds beside passes go last, on any core: it inherits the one of passes.

    Args:
        cores: of the process; empty: threads are not bound.
    """
    if cores:
        with contextlib.suppress(OSError):  # some have gone since
            os.sched_setaffinity(0, cores)
    lower_priority()


def _reply(replies: Replies, worker: Any, call: WorkerCall) -> None:
    replies.send(_answer(worker, call))


def _answer(worker: Any, call: WorkerCall) -> Answer | Raised:
    try:
        if call.method not in _ALL:
            raise ValueError(f"{call.method!r}: must be one of {_ALL}")
        return Answer(call.call_id, getattr(worker, call.method)(*call.args))
    except Exception as error:
        return Raised.of(call.call_id, as_data(error))


if __name__ == "__main__":
    main()
