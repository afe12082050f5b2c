"""The connector ``mooncake``: blocks are read from the other engine's memory by Mooncake's transfer engine.

As ``nixl``, with another library. Engines find each other by its ``P2PHANDSHAKE``: no metadata server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace_core.errors import MissingDependency
from headrace_distributed.kv_connectors.extra import wrong
from headrace_distributed.kv_connectors.p2p.arena import Arena
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_distributed.kv_connectors.p2p.settings import TRUST, PeerSettings, check_trust
from headrace_distributed.kv_connectors.p2p.ways import Piece, RemoteMemory, StillWriting

PROTOCOL = "mooncake_protocol"
MAX_DESCRIPTION = 512


class MooncakeConnector(P2PConnector):
    """See the module.

    Raises:
        ConfigError: ``mooncake_protocol`` is not ``tcp``; ``trust_network`` is not true: the library listens
            at all addresses, and asks nobody who he is.
        MissingDependency: the library is not installed, or cannot be loaded.
    """

    extra_names = (PROTOCOL, TRUST)

    def remote_memory(self, own: PeerSettings) -> RemoteMemory:
        extra = self.settings["kv_connector_extra_config"]
        protocol = extra.get(PROTOCOL, "tcp")
        if protocol != "tcp":
            raise wrong(PROTOCOL, protocol, "'tcp': no other has been tried")
        check_trust(extra, "Mooncake")
        return MooncakeMemory(self._store.arena, own.advertised_host, protocol, _load())


class MooncakeMemory(RemoteMemory):
    """Memory that Mooncake reads. See :class:`RemoteMemory`.

    Args:
        host: address that others reach this engine at.
        engine: the library's, not initialized.
    """

    name = "mooncake"

    def __init__(self, arena: Arena, host: str, protocol: str, engine: Any) -> None:
        super().__init__(arena)
        self._engine, self._host = engine, host
        _check(engine.initialize(host, "P2PHANDSHAKE", protocol, ""), "initialize")
        _check(engine.register_memory(arena.address, arena.num_bytes), "register_memory")
        self._is_registered = True

    def describe(self) -> bytes:
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def read(self, description: bytes, pieces: Sequence[Piece], deadline: float) -> None:
        if len(description) > MAX_DESCRIPTION or not description.isascii():
            raise OSError("Mooncake: the other engine sent something other than an address")
        failed = self._engine.batch_transfer_sync_read(
            description.decode(),
            [piece.ours for piece in pieces],
            [piece.theirs for piece in pieces],
            [piece.num_bytes for piece in pieces],
        )
        if failed and time.monotonic() > deadline:
            raise StillWriting("Mooncake: a transfer took too long")
        if failed:
            raise OSError(f"Mooncake: a transfer failed ({failed})")

    def close(self) -> None:
        if self._is_registered:
            self._is_registered = False
            self._engine.unregister_memory(self.arena.address)


def _check(status: int, call: str) -> None:
    if status:
        raise OSError(f"Mooncake: {call} failed ({status})")


def _load() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise MissingDependency(
            error.name or "mooncake",
            needed_for=f"the KV connector mooncake ({error})",
            install="pip install 'headrace-distributed[mooncake]'",
        ) from error
    return TransferEngine()
