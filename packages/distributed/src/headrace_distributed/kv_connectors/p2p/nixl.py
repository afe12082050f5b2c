"""The connector ``nixl``: blocks are read from the other engine's memory by NIXL, with UCX.

Who has what is asked over the control connection, as by ``p2p``; then the engine that wants blocks reads the
registered memory of the one that has them, and checks each block's digest.
"""

from __future__ import annotations

import logging.config
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace_core.errors import MissingDependency
from headrace_distributed.kv_connectors.extra import wrong
from headrace_distributed.kv_connectors.p2p.arena import Arena
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_distributed.kv_connectors.p2p.settings import (
    TRUST,
    PeerSettings,
    check_trust,
    is_loopback,
)
from headrace_distributed.kv_connectors.p2p.ways import Piece, RemoteMemory, StillWriting

BACKENDS = "backends"
POLL_SECONDS = 0.0002


class NixlConnector(P2PConnector):
    """See the module.

    Raises:
        ConfigError: ``backends`` is not ``["UCX"]``; addresses are not of loopback, and ``trust_network`` is
            not true: UCX asks nobody who he is.
        MissingDependency: the library is not installed, or cannot be loaded.
    """

    extra_names = (BACKENDS, TRUST)

    def remote_memory(self, own: PeerSettings) -> RemoteMemory:
        extra = self.settings["kv_connector_extra_config"]
        backends = extra.get(BACKENDS, ["UCX"])
        if backends != ["UCX"]:
            raise wrong(BACKENDS, backends, "['UCX']: no other has been tried")
        stays_here = is_loopback(own.advertised_host) and is_loopback(own.address.host)
        stays_here = stays_here and all(is_loopback(peer.host) for peer in own.peers)
        if not stays_here:
            check_trust(extra, "UCX")
        else:
            # Its ports would be open at every address of the machine. It can be told only so.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        return NixlMemory(self._store.arena, own.engine_id, _load())


class NixlMemory(RemoteMemory):
    """Memory that NIXL reads. See :class:`RemoteMemory`.

    Args:
        engine_id: of this engine.
        make_agent: of the library: an agent of a name.
    """

    name = "nixl"

    def __init__(self, arena: Arena, engine_id: str, make_agent: Callable[[str], Any]) -> None:
        super().__init__(arena)
        # Engines that were given the same name must not be taken for one another.
        self._agent = make_agent(f"{engine_id}-{os.getpid()}-{id(self):x}")
        self._lock = threading.Lock()
        """Held for each call: the agent is not made for several threads."""
        self._remotes: dict[bytes, str] = {}
        """Description of another engine -> its agent's name."""
        region = [(arena.address, arena.num_bytes, 0, "")]
        self._registered = self._agent.register_memory(region, "DRAM")

    def describe(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def read(self, description: bytes, pieces: Sequence[Piece], deadline: float) -> None:
        try:
            self._read(description, pieces, deadline)
        except OSError:
            raise
        except Exception as error:  # the library has classes of its own for each status
            with self._lock:
                self._forget(description)
            raise OSError(f"NIXL: {error}") from error

    def close(self) -> None:
        with self._lock:
            if self._registered is not None:
                self._agent.deregister_memory(self._registered)
                self._registered = None

    def _read(self, description: bytes, pieces: Sequence[Piece], deadline: float) -> None:
        with self._lock:
            handle = self._begin(description, pieces)
            state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise StillWriting("NIXL: a transfer took too long")
            time.sleep(POLL_SECONDS)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                self._forget(description)
                raise OSError(f"NIXL: a transfer failed ({state})")

    def _begin(self, description: bytes, pieces: Sequence[Piece]) -> Any:
        agent, remote = self._agent, self._remotes.get(description)
        if remote is None:
            remote = agent.add_remote_agent(description)
            remote = remote.decode() if isinstance(remote, bytes) else remote
            self._remotes[description] = remote
        ours = agent.get_xfer_descs([(p.ours, p.num_bytes, 0) for p in pieces], "DRAM")
        theirs = agent.get_xfer_descs([(p.theirs, p.num_bytes, 0) for p in pieces], "DRAM")
        return agent.initialize_xfer("READ", ours, theirs, remote)

    def _forget(self, description: bytes) -> None:
        """Connect anew the next time: the other engine may have gone."""
        remote = self._remotes.pop(description, None)
        if remote is not None:
            self._agent.remove_remote_agent(remote)


def _load() -> Callable[[str], Any]:
    try:
        with _keeping_log_handlers():
            from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise MissingDependency(
            error.name or "nixl",
            needed_for=f"the KV connector nixl ({error})",
            install="pip install 'headrace-distributed[nixl]'",
        ) from error
    return lambda name: nixl_agent(name, nixl_agent_config(backends=["UCX"]))


@contextmanager
def _keeping_log_handlers() -> Iterator[None]:
    """The library's import configures logging anew, which closes the handlers of the whole program."""
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure
