"""The side that wants blocks: a connection to one engine that has them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace_distributed.kv_connectors.p2p import messages
from headrace_distributed.kv_connectors.p2p.channel import ChannelError, open_as_client
from headrace_distributed.kv_connectors.p2p.messages import Wanted
from headrace_distributed.kv_connectors.p2p.store import BlockStore, NoRoom, Slot, digest_of
from headrace_distributed.kv_connectors.p2p.ways import TCP, Piece, RemoteMemory, StillWriting


class Address(NamedTuple):
    """Where an engine gives its blocks away."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerConnection:
    """Used by one thread at a time.

    Args:
        address: of the other engine.
        secret: that both know.
        memory: the way of the bytes; None: the connection.
        deadline: of the opening.

    Raises:
        OSError: it cannot be reached, or is not who it should be.
    """

    def __init__(
        self, address: Address, secret: bytes, memory: RemoteMemory | None, deadline: float
    ) -> None:
        self._memory = memory
        seconds = _left(deadline)
        connection = socket.create_connection(address, seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channel = open_as_client(connection, secret, deadline)
            way = TCP if memory is None else memory.name
            self._channel.send(messages.HELLO, [way.encode()], deadline)
            kind, length = self._channel.next_frame(deadline)
            payload = self._channel.receive_bytes(length, messages.MAX_WELCOME, deadline)
            if kind != messages.WELCOME:
                raise ChannelError(payload[:256].decode("utf-8", "replace"))
            self.engine_id, self._description = messages.unpack_welcome(payload)
        except BaseException:
            connection.close()
            raise

    def fetch(self, wanted: Sequence[Wanted], store: BlockStore, deadline: float) -> int:
        """Bring blocks into a store; the number of those that came.

        Raises:
            OSError: it failed on the way: the connection must be closed. What came before is kept.
        """
        found = 0
        for start in range(0, len(wanted), messages.MAX_KEYS):
            part = wanted[start : start + messages.MAX_KEYS]
            self._channel.send(messages.GET, [messages.pack_get(part)], deadline)
            fetch = self._receive if self._memory is None else self._read
            came = fetch(part, store, deadline)
            found += came
            if came < len(part):
                break  # a prefix ends with its first missing block
        return found

    def close(self) -> None:
        self._channel.close()

    def _receive(self, wanted: Sequence[Wanted], store: BlockStore, deadline: float) -> int:
        found = 0
        for key, num_bytes in wanted:
            kind, length = self._channel.next_frame(deadline)
            if kind == messages.MISSING:
                self._channel.receive_bytes(length, 0, deadline)
                continue
            if kind != messages.BLOCK or length != num_bytes:
                raise ChannelError(f"a frame of kind {kind} and {length} bytes instead of a block")
            slot = store.reserve(num_bytes)
            try:
                self._channel.receive([store.view(slot)], deadline)
            except BaseException:
                store.abandon(slot)
                raise
            store.commit(key, slot, was_fetched=True)
            found += 1
        return found

    def _read(self, wanted: Sequence[Wanted], store: BlockStore, deadline: float) -> int:
        assert self._memory is not None
        kind, length = self._channel.next_frame(deadline)
        most = messages.located_bytes(len(wanted))
        located = self._channel.receive_bytes(length, most, deadline)
        if kind != messages.LOCATED:
            raise ChannelError(f"a message of kind {kind} instead of places in memory")
        places = messages.unpack_located(located, len(wanted))
        slots: list[tuple[Wanted, bytes, Slot]] = []
        pieces: list[Piece] = []
        for one, (address, digest) in zip(wanted, places, strict=True):
            if not address:
                continue
            try:
                slot = store.reserve(one.num_bytes)
            except NoRoom:
                break
            slots.append((one, digest, slot))
            pieces.append(Piece(store.arena.address + slot.start, address, one.num_bytes))
        try:
            if pieces:
                self._memory.read(self._description, pieces, deadline)
        except StillWriting:
            raise  # the slots stay taken for ever
        except BaseException:
            for _, _, slot in slots:
                store.abandon(slot)
            raise
        found = 0
        for one, digest, slot in slots:
            if digest_of(one.key, store.view(slot)) == digest:
                store.commit(one.key, slot, was_fetched=True)
                found += 1
            else:
                store.abandon(slot)
        self._channel.send(messages.DONE, [], deadline)
        return found


class Peers:
    """Connections to other engines, kept for the next request. Thread-safe.

    Args:
        secret: that all know.
        memory: the way of the bytes; None: the connection.
    """

    def __init__(self, secret: bytes, memory: RemoteMemory | None) -> None:
        self._secret, self._memory = secret, memory
        self._idle: dict[Address, list[PeerConnection]] = {}

    def fetch(
        self,
        address: Address,
        engine_id: str | None,
        wanted: Sequence[Wanted],
        store: BlockStore,
        deadline: float,
    ) -> int:
        """Bring blocks into a store; the number of those that came.

        Args:
            engine_id: of the engine that should be there; None: any.

        Raises:
            OSError: it failed.
        """
        try:
            connection = self._idle.get(address, []).pop()
        except IndexError:
            connection = None
        if connection is not None:
            try:
                return self._fetch(connection, address, engine_id, wanted, store, deadline)
            except OSError:
                # It may have been closed while it was idle.
                wanted = [one for one in wanted if not store.contains(one.key)]
        connection = PeerConnection(address, self._secret, self._memory, deadline)
        return self._fetch(connection, address, engine_id, wanted, store, deadline)

    def close(self) -> None:
        """Close idle connections."""
        for connections in self._idle.values():
            while connections:
                with contextlib.suppress(IndexError):
                    connections.pop().close()

    def _fetch(
        self,
        connection: PeerConnection,
        address: Address,
        engine_id: str | None,
        wanted: Sequence[Wanted],
        store: BlockStore,
        deadline: float,
    ) -> int:
        try:
            if engine_id not in (None, connection.engine_id):
                raise ChannelError(
                    f"the engine there is {connection.engine_id!r}, not {engine_id!r}"
                )
            found = connection.fetch(wanted, store, deadline)
        except BaseException:
            connection.close()
            raise
        self._idle.setdefault(address, []).append(connection)
        return found


def _left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("it took too long")
    return seconds
