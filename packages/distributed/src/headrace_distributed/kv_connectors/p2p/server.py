"""The side that has blocks: answers engines that ask for them, a thread each."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from headrace_distributed.kv_connectors.p2p import messages
from headrace_distributed.kv_connectors.p2p.channel import Channel, ChannelError, open_as_server
from headrace_distributed.kv_connectors.p2p.messages import Located, Wanted, Welcome
from headrace_distributed.kv_connectors.p2p.ranks import RankLayout
from headrace_distributed.kv_connectors.p2p.store import BlockStore
from headrace_distributed.kv_connectors.p2p.ways import TCP, RemoteMemory

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
IDLE_SECONDS = 300.0
"""A connection on which nothing is asked ends."""
ANSWER_SECONDS = 30.0
"""Longest answer: memory that is read is held so long at most."""


class BlockServer:
    """Listens until :meth:`close`.

    Args:
        address: host and port; port 0: any.
        store: what it gives away.
        secret: that askers must know; b"": none.
        engine_id: its name.
        layout: its place among its engine's ranks.
        memory: the way of the bytes; None: the connection.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(
        self,
        address: tuple[str, int],
        store: BlockStore,
        secret: bytes,
        engine_id: str,
        layout: RankLayout,
        memory: RemoteMemory | None,
    ) -> None:
        self._store, self._secret, self._memory = store, secret, memory
        self._way = TCP if memory is None else memory.name
        described = b"" if memory is None else memory.describe()
        self._welcome = messages.pack_welcome(Welcome(engine_id, layout, described))
        self._server = _Server(address, self)
        self._warned = False
        serve = partial(self._server.serve_forever, poll_interval=0.05)
        threading.Thread(target=serve, name="headrace-kv-server", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening, and end all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()

    def answer(self, connection: socket.socket) -> None:
        """Answer one engine until it leaves."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = open_as_server(connection, self._secret)
        kind, length = channel.next_frame(_in(ANSWER_SECONDS))
        way = channel.receive_bytes(length, messages.MAX_NAME, _in(ANSWER_SECONDS))
        if kind != messages.HELLO or way != self._way.encode():
            reason = f"this engine gives its blocks away by {self._way!r}, not {way[:32]!r}"
            channel.send(messages.REFUSED, [reason.encode()], _in(ANSWER_SECONDS))
            return
        channel.send(messages.WELCOME, [self._welcome], _in(ANSWER_SECONDS))
        while True:
            kind, length = channel.next_frame(_in(IDLE_SECONDS))
            if kind != messages.GET:
                raise ChannelError(f"a message of the unknown kind {kind}")
            asked = channel.receive_bytes(length, messages.MAX_GET, _in(ANSWER_SECONDS))
            wanted = messages.unpack_get(asked)
            if self._memory is None:
                self._send_blocks(channel, wanted)
            else:
                self._locate(channel, wanted, self._memory)

    def note(self, peer: object, error: OSError) -> None:
        """Log what ended a connection; the first of a kind that an operator should know as a warning."""
        told = isinstance(error, ChannelError) and "secret" in str(error) and not self._warned
        self._warned = self._warned or told
        level = logging.WARNING if told else logging.DEBUG
        logger.log(level, "KV transfer: %s asked for blocks: %s", peer, error)

    def _send_blocks(self, channel: Channel, wanted: list[Wanted]) -> None:
        deadline = _in(ANSWER_SECONDS)
        for key, num_bytes in wanted:
            slot = self._store.pin(key)
            try:
                if slot is None or slot.num_bytes != num_bytes:
                    channel.send(messages.MISSING, [], deadline)
                else:
                    channel.send(messages.BLOCK, [self._store.view(slot)], deadline)
            finally:
                if slot is not None:
                    self._store.unpin(slot)

    def _locate(self, channel: Channel, wanted: list[Wanted], memory: RemoteMemory) -> None:
        """Say where blocks lie, and hold them until they have been read."""
        deadline, located = _in(ANSWER_SECONDS), []
        with ExitStack() as stack:
            for key, num_bytes in wanted:
                slot = self._store.pin(key)
                if slot is not None:
                    stack.callback(self._store.unpin, slot)
                if slot is None or slot.num_bytes != num_bytes:
                    located.append(Located(0, b""))
                    continue
                address = memory.arena.address + slot.start
                located.append(Located(address, self._store.digest(key, slot)))
            channel.send(messages.LOCATED, [messages.pack_located(located)], deadline)
            kind, length = channel.next_frame(deadline)
            channel.receive_bytes(length, 0, deadline)
            if kind != messages.DONE:
                raise ChannelError(f"a message of kind {kind} instead of the end of a transfer")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], answering: BlockServer) -> None:
        self.answering = answering
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Connection)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._places.release()

    def end_connections(self) -> None:
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.exception("KV transfer: answering %s failed", client_address)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            self.server.answering.answer(self.request)
        except OSError as error:
            self.server.answering.note(self.client_address, error)


def _in(seconds: float) -> float:
    return time.monotonic() + seconds
