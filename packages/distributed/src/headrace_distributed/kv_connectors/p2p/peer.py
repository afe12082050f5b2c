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
from headrace_distributed.kv_connectors.p2p.ranks import RankLayout
from headrace_distributed.kv_connectors.p2p.store import BlockStore, NoRoom, Slot, digest_of
from headrace_distributed.kv_connectors.p2p.ways import TCP, Piece, RemoteMemory, StillWriting


class Address(NamedTuple):
    """Where an engine gives its blocks away."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Engine(NamedTuple):
    """Another engine, as a request or the settings name it."""

    address: Address
    """Of its rank 0; the others have the next ports."""
    engine_id: str | None = None
    """None: any."""
    tp_size: int | None = None
    """Ranks that each of its stages should have; None: any."""


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
            welcome = messages.unpack_welcome(payload)
            self.engine_id, self.layout, self._description = welcome
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
            if not came:
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
    """Connections to ranks of other engines, kept for the next request. Thread-safe.

    Args:
        secret: that all know.
        memory: the way of the bytes; None: the connection.
        layout: of this rank.
    """

    def __init__(
        self, secret: bytes, memory: RemoteMemory | None, layout: RankLayout | None = None
    ) -> None:
        self._secret, self._memory = secret, memory
        self._layout = layout or RankLayout()
        self._idle: dict[Address, list[PeerConnection]] = {}
        self._known: dict[Address, RankLayout] = {}
        """By address: what was last said there."""

    def ranks(self, engine: Engine, deadline: float) -> list[Address]:
        """Addresses of the engine's ranks that may have what this one wants.

        Raises:
            OSError: the engine cannot be asked how many it has, or has others than it should.
        """
        address, stated = engine.address, engine.tp_size
        known = self._known.get(address)
        if known is None or stated not in (None, known.stage_size):
            connection = self._connect(engine, address, deadline)
            self._idle.setdefault(address, []).append(connection)
            known = connection.layout
        if stated not in (None, known.stage_size):
            raise ChannelError(f"it has {known.stage_size} ranks, not tp_size = {stated}")
        ports = (address.port + rank for rank in self._layout.ranks_to_ask(known))
        return [Address(address.host, port) for port in ports]

    def layout_at(self, address: Address) -> RankLayout | None:
        """What was last said there; None: nothing."""
        return self._known.get(address)

    def fetch(
        self,
        engine: Engine,
        address: Address,
        wanted: Sequence[Wanted],
        store: BlockStore,
        deadline: float,
    ) -> int:
        """Bring blocks into a store; the number of those that came.

        Args:
            engine: that should be there.
            address: of one of its ranks.

        Raises:
            OSError: it failed.
        """
        try:
            connection = self._idle.get(address, []).pop()
        except IndexError:
            connection = None
        if connection is not None:
            try:
                self._check(connection, engine, address)
                return self._fetch(connection, address, wanted, store, deadline)
            except OSError:
                # It may have been closed while it was idle.
                connection.close()
                wanted = [one for one in wanted if not store.contains(one.key)]
        try:
            connection = self._connect(engine, address, deadline)
            return self._fetch(connection, address, wanted, store, deadline)
        except OSError:
            self._known.pop(engine.address, None)  # it may come back with other ranks
            raise

    def close(self) -> None:
        """Close idle connections."""
        for connections in self._idle.values():
            while connections:
                with contextlib.suppress(IndexError):
                    connections.pop().close()

    def _connect(self, engine: Engine, address: Address, deadline: float) -> PeerConnection:
        connection = PeerConnection(address, self._secret, self._memory, deadline)
        try:
            self._known[address] = connection.layout
            self._check(connection, engine, address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: PeerConnection, engine: Engine, address: Address) -> None:
        """Raises: ChannelError: somebody else is there, or has blocks that are of no use here."""
        if engine.engine_id not in (None, connection.engine_id):
            raise ChannelError(
                f"the engine there is {connection.engine_id!r}, not {engine.engine_id!r}"
            )
        rank, there = address.port - engine.address.port, connection.layout
        if there.rank != rank:
            raise ChannelError(
                f"rank {there.rank} of {there.num_ranks} is there, not rank {rank}: kv_port is that of rank 0"
            )
        refusal = self._layout.refusal(there)
        if refusal:
            raise ChannelError(refusal)

    def _fetch(
        self,
        connection: PeerConnection,
        address: Address,
        wanted: Sequence[Wanted],
        store: BlockStore,
        deadline: float,
    ) -> int:
        try:
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
