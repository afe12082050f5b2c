"""Whom a core in a process of its own serves: the parent that started it, and further front ends.

Each has two sockets and a name. Each front end chooses its request ids: in the core, those of
further ones carry its name, so that two that chose the same id never meet. A further front end that
takes no messages is given up; the parent is not, it is what this process lives for.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import zmq

from headrace_core.request import CoreRequest
from headrace_engine.clients.wire import (
    HIGH_WATER_MARK,
    PARENT,
    Add,
    Attach,
    BadFrame,
    Command,
    Died,
    FrameDecoder,
    Outputs,
    Report,
    as_data,
    commands_address,
    reports_address,
)
from headrace_engine.messages import CoreOutputs
from headrace_engine.shared_objects.items import ReceivedItems
from headrace_engine.shared_objects.named_items import KeptByName, NamedItem
from headrace_engine.shared_objects.ring_buffer import RingHandle

logger = logging.getLogger(__name__)

SEND_SECONDS = 30.0
"""Longest wait for a parent that takes no messages; then it counts as gone."""
LINGER_SECONDS = 1.0
"""Longest time that another front end may take to fetch the last messages; the parent has SEND_SECONDS."""
EXIT_ORPHANED = 70
MAX_KEPT_IDS = 1 << 15
"""Ids of requests of which it is remembered whose they are."""
_BORDER = "\x1f"
"""Between a front end's name and its request's id; no name holds it."""


class FrontEnds:
    """The sockets of all front ends, and an :class:`~headrace_engine.loop.OutputSink`.

    Commands are read by one thread; reports are sent by any.

    Args:
        context: of the sockets.
        folder: where they are.
        max_kept_bytes: of named media that are kept for all of them.
    """

    def __init__(self, context: zmq.Context[Any], folder: str, max_kept_bytes: int = 0) -> None:
        self._context, self._folder = context, folder
        self._named = KeptByName(max_kept_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = FrameDecoder[Command](Command)
        self._local = threading.local()
        """The thread's own sockets by name: they cannot be shared."""
        self._all: list[zmq.Socket[bytes]] = []
        self._inboxes: dict[str, zmq.Socket[bytes]] = {}
        self._running: dict[str, set[str]] = {}
        """Further front ends -> the ids in the core of what they asked for."""
        self._lock = threading.Lock()
        self._stuck: set[str] = set()
        self._items: dict[str, ReceivedItems] = {}
        self._split = lru_cache(MAX_KEPT_IDS)(_split)
        """An id comes with each token; only the loop's thread splits them."""
        self._poller = zmq.Poller()
        self._open(PARENT)

    @property
    def names(self) -> list[str]:
        """Further front ends."""
        return list(self._running)

    def join(self, name: str) -> None:
        """Serve a further front end."""
        with self._lock:
            self._running[name] = set()
        self._open(name)

    def leave(self, name: str) -> list[str]:
        """Forget one; returns the ids in the core of what it left behind."""
        with self._lock:
            left = self._running.pop(name, set())
            self._stuck.discard(name)
        items = self._items.pop(name, None)
        if items is not None:
            items.close()
        inbox = self._inboxes.pop(name, None)
        if inbox is not None:
            self._poller.unregister(inbox)
            inbox.close(linger=0)
        return sorted(left)

    def stuck(self) -> list[str]:
        """Those that took no more messages."""
        return list(self._stuck)

    def take(self, seconds: float) -> Iterator[tuple[str, Command]]:
        """Wait for commands; of each front end at most one, with its name.

        Raises:
            BadFrame: the parent sent what is no command.
        """
        ready = dict(self._poller.poll(int(seconds * 1000)))
        for name, inbox in list(self._inboxes.items()):
            if inbox not in ready:
                continue
            try:
                yield name, self._decoder.decode(inbox.recv())
            except BadFrame:
                if name == PARENT:
                    raise
                logger.exception("front end %s is given up", name)
                self._stuck.add(name)

    def attach(self, name: str, told: Attach) -> None:
        """Have a front end's shared memory. One that has gone is given up.

        Raises:
            BadFrame: the parent's cannot be opened.
        """
        handle = RingHandle(told.pid, told.descriptor, told.size)
        try:
            self._items[name] = ReceivedItems(handle, told.max_object_size)
        except (OSError, ValueError) as error:
            self._give_up(name, f"its shared memory cannot be opened: {error}", error)

    def entering(self, name: str, added: Add) -> list[CoreRequest]:
        """A front end's requests under their ids in the core, with their media.

        Raises:
            BadFrame: media of the parent's are not where it says.
        """
        requests: Sequence[CoreRequest] = added.requests
        if added.items:
            try:
                requests = self._items[name].restored(requests, added.items)
            except (LookupError, ValueError) as error:
                self._give_up(name, f"media are not in its shared memory: {error}", error)
                return []
        for place in added.named:
            item = requests[place.request].media[place.item]
            self._named.keep(place.name, place.form, item)
        if name == PARENT:
            return list(requests)
        renamed = [
            dataclasses.replace(request, request_id=_core_id(name, request.request_id))
            for request in requests
        ]
        with self._lock:
            if name in self._running:
                self._running[name].update(request.request_id for request in renamed)
        return renamed

    def recalled(self, item_name: str) -> NamedItem | None:
        """The item that a front end sent under a name; None: it is not kept."""
        return self._named.find(item_name)

    def _give_up(self, name: str, why: str, cause: Exception) -> None:
        """Serve a further front end no more.

        Raises:
            BadFrame: it is the parent.
        """
        if name == PARENT:
            raise BadFrame(f"the parent process: {why}") from cause
        logger.error("front end %s is given up: %s", name, why)
        self._stuck.add(name)

    def core_ids(self, name: str, request_ids: Sequence[str]) -> list[str]:
        """Ids in the core."""
        if name == PARENT:
            return list(request_ids)
        return [_core_id(name, request_id) for request_id in request_ids]

    def send(self, report: Report, to: str = PARENT) -> None:
        """Send a report; ends this process if the parent takes nothing for too long."""
        self._send(self._encoder.encode(report), to)

    def tell_all(self, report: Report) -> None:
        """Send a report to everybody."""
        frame = self._encoder.encode(report)
        for name in (PARENT, *self.names):
            self._send(frame, name)

    def close(self) -> None:
        """Close all sockets, sending first what waits. The other threads must have ended."""
        for inbox in self._inboxes.values():
            inbox.close(linger=0)
        for socket in self._all:
            socket.close()
        for items in self._items.values():
            items.close()

    # OutputSink: the loop's thread.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        """Outputs straight to whom they are for."""
        if not self._running:
            self.send(Outputs(outputs))
            return
        for name, own in self._sorted(outputs).items():
            self.send(Outputs(own), name)

    def on_death(self, error: BaseException) -> None:
        """Tell all front ends of the core's death."""
        self.tell_all(Died(as_data(error.__cause__ or error)))

    def _sorted(self, step: CoreOutputs) -> dict[str, CoreOutputs]:
        """A step's outputs by front end, ids as they know them."""
        for output in step.outputs:
            name, _ = self._split(output.request_id)
            if output.finish_reason is not None and name != PARENT:
                with self._lock:
                    self._running.get(name, set()).discard(output.request_id)
        return _by_front_end(step, self._split)

    def _open(self, name: str) -> None:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        inbox.connect(commands_address(self._folder, name))
        self._inboxes[name] = inbox
        self._poller.register(inbox, zmq.POLLIN)

    def _send(self, frame: bytes, to: str) -> None:
        if to != PARENT and (to not in self._running or to in self._stuck):
            return
        try:
            self._outbox(to).send(frame, 0 if to == PARENT else zmq.NOBLOCK)
        except zmq.Again:
            if to == PARENT:
                logger.critical("the parent process takes no messages; giving up")
                os._exit(EXIT_ORPHANED)
            logger.error("front end %s takes no messages; it is given up", to)
            self._stuck.add(to)

    def _outbox(self, name: str) -> zmq.Socket[bytes]:
        """This thread's socket to a front end."""
        outboxes: dict[str, zmq.Socket[bytes]] = self._local.__dict__.setdefault("outboxes", {})
        if name not in outboxes:
            for gone in [n for n in outboxes if n != PARENT and n not in self._running]:
                outboxes.pop(gone).close(linger=0)
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
            linger = SEND_SECONDS if name == PARENT else LINGER_SECONDS
            socket.setsockopt(zmq.LINGER, int(linger * 1000))
            socket.connect(reports_address(self._folder, name))
            outboxes[name] = socket
            self._all.append(socket)
        return outboxes[name]


class _OutputsByName(dict[str, CoreOutputs]):
    """Outputs of a step by front end: empty ones for each that is asked for.

    Args:
        step: all of them.
    """

    def __init__(self, step: CoreOutputs) -> None:
        super().__init__()
        self._step = step

    def __missing__(self, name: str) -> CoreOutputs:
        step = self._step
        found = CoreOutputs([], step.timestamp, weights_version=step.weights_version)
        self[name] = found
        return found


def _by_front_end(
    step: CoreOutputs, split: Callable[[str], tuple[str, str]]
) -> dict[str, CoreOutputs]:
    """A step's outputs by the name of whom they are for; the outputs' ids are changed.

    Args:
        step: of all front ends.
        split: the front end's name, and the id as it knows it.
    """
    found = _OutputsByName(step)
    for output in step.outputs:
        name, output.request_id = split(output.request_id)
        found[name].outputs.append(output)
    for core_id, token_id in step.tokens.items():  # thousands
        name, own_id = split(core_id)
        found[name].tokens[own_id] = token_id
    if step.timed is not None:
        own_ids: dict[str, list[str]] = {}
        for name, own_id in map(split, step.timed.request_ids):
            own_ids.setdefault(name, []).append(own_id)
        for name, ids in own_ids.items():
            found[name].timed = step.timed._replace(request_ids=ids)
    for core_id, versions in (step.earlier_versions or {}).items():
        name, own_id = split(core_id)
        own = found[name]
        own.earlier_versions = {**(own.earlier_versions or {}), own_id: versions}
    return found


def _core_id(name: str, request_id: str) -> str:
    return f"{name}{_BORDER}{request_id}"


def _split(core_id: str) -> tuple[str, str]:
    """The front end's name, and the id as it knows it."""
    name, border, request_id = core_id.partition(_BORDER)
    return (name, request_id) if border else (PARENT, core_id)
