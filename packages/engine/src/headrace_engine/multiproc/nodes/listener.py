"""Where rank 0's process waits for the other hosts."""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.errors import EngineDead
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.nodes import tcp
from headrace_engine.multiproc.nodes.joined import MOST_BYTES, JoinedNode
from headrace_engine.multiproc.nodes.messages import (
    MirrorJoins,
    NodeAccepted,
    NodeJoins,
    NodeRefused,
    RankJoins,
)
from headrace_engine.multiproc.nodes.plan import NodePlan, difference
from headrace_engine.multiproc.nodes.secret import NotTrusted, admit
from headrace_engine.multiproc.places import RankedWorkers

logger = logging.getLogger(__name__)

JOIN_SECONDS = 600.0
"""Longest wait for all hosts."""
STRANGER_SECONDS = 5.0
"""Longest time from a connection to the proof of the secret and the first message."""
MOST_STRANGERS = 16
"""Connections that have not proved anything yet; more are closed at once."""
_LOOK_SECONDS = 0.05


class _Arrival(NamedTuple):
    connection: socket.socket
    name: str
    message: Any


class NodeListener:
    """Listens until every host and each of its ranks has a connection.

    Args:
        accepted: what a host is told; its ranks are filled in here.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, plan: NodePlan, accepted: NodeAccepted) -> None:
        self._plan, self._accepted = plan, accepted
        self._listener = tcp.listen(plan.host, plan.port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._nodes: dict[int, JoinedNode] = {}
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have proved nothing yet, and when they came."""
        self._lock = threading.Lock()
        self._warned = 0.0
        self._closed = False

    def gather(self, seconds: float) -> list[JoinedNode]:
        """All other hosts, by number. The listener is closed then, and if this raises.

        Raises:
            EngineDead: some have not come in time; names them.
        """
        deadline = time.monotonic() + seconds
        address = tcp.name_of((self._plan.host, self.port))
        logger.info("waiting at %s for nodes: %s", address, self._missing())
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while missing := self._missing():
                    if time.monotonic() > deadline:
                        raise EngineDead(
                            f"nodes {missing} did not join at {address} within {seconds:g} s: start each "
                            "with the same --nnodes, --master-addr and --master-port, its own --node-rank, "
                            "and --headless"
                        )
                    self._look(selector)
        except BaseException:
            for node in self._nodes.values():
                node.close()
            raise
        finally:
            self.close()
        return [self._nodes[node] for node in sorted(self._nodes)]

    def close(self) -> None:
        """Listen no longer; strangers are sent away."""
        self._listener.close()
        with self._lock:
            self._closed = True
            for connection in self._strangers:
                _end(connection)
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrivals.get_nowait().connection.close()

    def _missing(self) -> str:
        """Numbers of the nodes that are not there with all their ranks."""
        plan, size = self._plan, self._accepted.world_size
        return ", ".join(
            str(node)
            for node in range(1, plan.count)
            if node not in self._nodes
            or len(self._nodes[node].ranks) < len(plan.ranks_of(node, size))
            or (plan.mirrored and self._nodes[node].mirror is None)
        )

    def _look(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_LOOK_SECONDS):
            if key.data is None:
                self._accept()
            else:  # what a host says before all are there is that it ends
                selector.unregister(key.fileobj)
                self._leave(key.data)
        self._end_slow_strangers()
        if (trouble := self._plan.trouble()) is not None:
            raise EngineDead(trouble)
        with contextlib.suppress(queue.Empty):
            while True:
                joined = self._take(self._arrivals.get_nowait())
                if joined is not None:
                    selector.register(joined.control, selectors.EVENT_READ, joined)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it went before it was looked at
            return
        with self._lock:
            if len(self._strangers) >= MOST_STRANGERS:
                connection.close()
                return
            self._strangers[connection] = time.monotonic()
        threading.Thread(
            target=self._meet, args=(connection, tcp.name_of(address)), daemon=True,
            name="headrace-node-meets",
        ).start()  # fmt: skip

    def _end_slow_strangers(self) -> None:
        oldest = time.monotonic() - STRANGER_SECONDS
        with self._lock:
            for connection, came in self._strangers.items():
                if came < oldest:
                    _end(connection)

    def _meet(self, connection: socket.socket, name: str) -> None:
        """The thread of one connection, until its first message."""
        try:
            admit(connection, self._plan.secret)
            message = frames.receive(connection, MOST_BYTES)
        except NotTrusted as error:
            self._warn(f"a connection from {name} is refused: {error}")
        except (OSError, EOFError, frames.BadFrame) as error:
            logger.debug("a connection from %s ended: %s", name, error)
        else:
            tcp.watch(connection)
            with self._lock:
                del self._strangers[connection]
                if not self._closed:
                    self._arrivals.put(_Arrival(connection, name, message))
                    return
            connection.close()
            return
        with self._lock:
            del self._strangers[connection]
        connection.close()

    def _warn(self, text: str) -> None:
        """Once a second: strangers do not fill the log."""
        if time.monotonic() - self._warned >= 1.0:
            self._warned = time.monotonic()
            logger.warning("%s", text)

    def _take(self, arrival: _Arrival) -> JoinedNode | None:
        """Take a connection that has proved the secret; a node, if it is a new node's own."""
        connection, name, message = arrival
        if isinstance(message, NodeJoins):
            refusal = self._refusal(message)
            node = JoinedNode(message.node, name, connection)
            if refusal is None:
                ranks = list(self._plan.ranks_of(message.node, self._accepted.world_size))
                self._nodes[message.node] = node
                with contextlib.suppress(OSError):  # gone: what it does not say is read
                    frames.send(connection, frames.pack(self._accepted._replace(ranks=ranks)))
                logger.info("node %d joined from %s", message.node, name)
                return node
            logger.error("node %s at %s is refused: %s", message.node, name, refusal)
            node.tell(NodeRefused(refusal))
            node.close()
            return None
        if isinstance(message, RankJoins) and self._expects(message):
            self._nodes[message.node].ranks[message.rank] = connection
            return None
        if isinstance(message, MirrorJoins) and self._plan.mirrored and message.node in self._nodes:
            self._nodes[message.node].mirror = connection
            return None
        logger.error("%s is refused: %.200r is not expected of it", name, message)
        connection.close()
        return None

    def _refusal(self, message: NodeJoins) -> str | None:
        count, node = self._plan.count, message.node
        if message.num_nodes != count:
            return (
                f"nnodes: {count} on node 0, {message.num_nodes} on node {node}; must be the same"
            )
        if not 1 <= node < count:
            return f"node_rank = {node}: must be in 1..{count - 1}"
        if node in self._nodes:
            return f"node_rank = {node}: {self._nodes[node].name} has it"
        return difference(self._plan.settings, message.settings, node)

    def _expects(self, message: RankJoins) -> bool:
        node = self._nodes.get(message.node)
        ranks = self._plan.ranks_of(message.node, self._accepted.world_size)
        return node is not None and message.rank in ranks and message.rank not in node.ranks

    def _leave(self, node: JoinedNode) -> None:
        logger.warning("%s; it may join again", node.reason(0.0) or f"node {node.node} has left")
        del self._nodes[node.node]
        node.close()


def gather(ranked: RankedWorkers, rendezvous: Mapping[str, str]) -> list[JoinedNode]:
    """The other hosts of an engine, once they have joined; none, if all ranks are on this one.

    Raises: as :class:`NodeListener` and its :meth:`~NodeListener.gather`.
    """
    plan = ranked.nodes
    if plan is None:
        return []
    accepted = NodeAccepted(
        [], ranked.world_size, ranked.communicator, dict(rendezvous), ranked.stages
    )
    listener = NodeListener(plan, accepted)
    plan.opened(listener.port)
    nodes = listener.gather(JOIN_SECONDS)
    plan.joined(nodes)
    return nodes


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
