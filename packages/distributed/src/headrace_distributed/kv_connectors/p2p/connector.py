"""The connector ``p2p``: engines that give blocks to each other over TCP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.extra import FIELD
from headrace_distributed.kv_connectors.p2p.fetcher import Fetcher
from headrace_distributed.kv_connectors.p2p.peer import Address, Engine, Peers
from headrace_distributed.kv_connectors.p2p.server import BlockServer
from headrace_distributed.kv_connectors.p2p.settings import BUFFER, PeerSettings, peer_settings
from headrace_distributed.kv_connectors.p2p.store import BlockStore
from headrace_distributed.kv_connectors.p2p.ways import RemoteMemory

logger = logging.getLogger(__name__)


class P2PConnector(KVConnector):
    """Blocks are kept in memory as they become full, and given to engines that ask at ``kv_ip``:``kv_port``;
    a request whose ``kv_transfer_params`` name such an engine waits while its blocks come. A ``kv_producer``
    only gives, a ``kv_consumer`` only takes. Each rank has one, with the parts of blocks that it has
    (:mod:`headrace_distributed.kv_connectors.p2p.ranks`).

    Subclasses take another way for the bytes (:meth:`remote_memory`).

    Raises:
        ConfigError: a setting is wrong, or the address cannot be had.
    """

    saves_full_blocks = True
    extra_names: tuple[str, ...] = ()
    """Settings of the extra config that the subclass reads itself."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._own = own = peer_settings(settings, *self.extra_names)
        self._store = BlockStore(own.buffer_bytes, own.keep_seconds)
        self._memory = self.remote_memory(own)
        role, self._server, self._fetcher = settings["kv_role"], None, None
        if role != "kv_consumer":
            self._server = self._listen()
        if role != "kv_producer":
            peers = Peers(own.secret, self._memory, own.layout)
            self._fetcher = Fetcher(
                self._store, peers, own.num_workers, own.fetch_timeout, own.layout
            )

    def remote_memory(self, own: PeerSettings) -> RemoteMemory | None:
        """The way of the bytes, with :attr:`_store`'s arena; None: the control connection."""
        return None

    def contains(self, key: bytes) -> bool:
        return self._store.contains(key)

    def load(self, key: bytes, into: memoryview) -> bool:
        return self._store.load(key, into)

    def save(self, key: bytes, content: memoryview) -> None:
        self._store.save(key, content)

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        if self._fetcher is None:
            return False
        engines = tuple(map(Engine, self._own.peers))
        if "remote_host" in params:
            named = Address(params["remote_host"], params["remote_port"])
            if not self._own.allows(named):
                logger.warning(
                    "KV transfer: request %s names %s, which is none of the peers of %s",
                    request_id, named, f"{FIELD}.kv_connector_extra_config",
                )  # fmt: skip
                return False
            engines = (Engine(named, params.get("remote_engine_id"), params.get("tp_size")),)
        return bool(engines) and self._fetcher.fetch(request_id, blocks, engines)

    def forget(self, request_id: str) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(request_id)

    def address(self) -> Mapping[str, Any]:
        if self._server is None:
            return {}
        layout = self._own.layout
        return {
            "remote_host": self._own.advertised_host,
            "remote_port": self._server.port - layout.rank,
            "remote_engine_id": self._own.engine_id,
            **({"tp_size": layout.stage_size} if layout.num_ranks > 1 else {}),
        }

    def check_block(self, num_bytes: int) -> None:
        if self._own.buffer_bytes < num_bytes:
            ranks, stated = self._own.layout.num_ranks, self.settings.get("kv_buffer_size", BUFFER)
            where = "" if ranks == 1 else f" on each of {ranks} ranks"
            raise ConfigError(
                f"{FIELD}.kv_buffer_size = {stated}: must be at least {num_bytes * ranks}, the bytes of a "
                f"block{where}",
                field=f"{FIELD}.kv_buffer_size",
            )

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._memory is not None:
            self._memory.close()

    def _listen(self) -> BlockServer:
        own = self._own
        try:
            server = BlockServer(
                own.address, self._store, own.secret, own.engine_id, own.layout, self._memory
            )
        except OSError as error:
            raise ConfigError(
                f"{FIELD}.kv_port = {own.address.port}: must be free at {own.address.host}: "
                f"{error.strerror or error}",
                field=f"{FIELD}.kv_port",
            ) from error
        logger.info("KV transfer: blocks are given away at %s:%d", own.address.host, server.port)
        return server
