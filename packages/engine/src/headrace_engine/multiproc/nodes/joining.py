"""How a host other than rank 0's joins."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable

from headrace_core.errors import ConfigError, EngineDead
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.nodes import tcp
from headrace_engine.multiproc.nodes.joined import MOST_BYTES
from headrace_engine.multiproc.nodes.messages import (
    MirrorJoins,
    NodeAccepted,
    NodeJoins,
    NodeRefused,
    RankJoins,
)
from headrace_engine.multiproc.nodes.plan import NodePlan
from headrace_engine.multiproc.nodes.secret import NotTrusted, join

logger = logging.getLogger(__name__)

JOIN_SECONDS = 600.0
"""Longest wait for rank 0 to listen."""
ANSWER_SECONDS = 30.0
"""Longest wait for each of its answers."""
_PAUSE = 0.2


class Joined:
    """This host's connections: its own to rank 0, one for each of its ranks, and one for the engine's
    outputs if the plan says so."""

    def __init__(self, accepted: NodeAccepted, control: socket.socket) -> None:
        self.accepted, self.control = accepted, control
        self.ranks: dict[int, socket.socket] = {}
        self.mirror: socket.socket | None = None

    @property
    def all(self) -> list[socket.socket]:
        """Those that are open."""
        mirror = [] if self.mirror is None else [self.mirror]
        return [self.control, *self.ranks.values(), *mirror]

    def close(self) -> None:
        """Close them all."""
        for connection in self.all:
            with contextlib.suppress(OSError):  # also under a thread that reads
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def join_rank_0(plan: NodePlan, seconds: float = JOIN_SECONDS) -> Joined:
    """Join the engine; waits until rank 0 listens.

    Raises:
        ConfigError: settings differ from those of rank 0, which says in what.
        NotTrusted: one of both does not know the secret.
        EngineDead: rank 0 does not listen, or ended.
    """
    deadline = time.monotonic() + seconds
    place = tcp.name_of((plan.host, plan.port))
    hello = NodeJoins(plan.node, plan.count, dict(plan.settings))
    joined: Joined | None = None
    control = _connected(plan, hello, deadline)
    try:
        accepted = frames.receive(control, MOST_BYTES)
        if isinstance(accepted, NodeRefused):
            raise ConfigError(
                f"node {plan.node} is refused by rank 0 at {place}: {accepted.reason}"
            )
        if not isinstance(accepted, NodeAccepted):
            raise frames.BadFrame(
                f"rank 0 answered {accepted!r:.200}: not an answer to a node that joins"
            )
        joined = Joined(accepted, control)
        for rank in accepted.ranks:
            joined.ranks[rank] = _connected(plan, RankJoins(plan.node, rank), deadline)
        if plan.mirrored:
            joined.mirror = _connected(plan, MirrorJoins(plan.node), deadline)
        for connection in joined.all:
            tcp.watch(connection)
        return joined
    except BaseException as error:
        control.close()
        if joined is not None:
            joined.close()
        if isinstance(error, EOFError | OSError | frames.BadFrame):
            raise EngineDead(f"rank 0 at {place} ended while this node joined: {error}") from error
        raise


def _connected(
    plan: NodePlan, first: NodeJoins | RankJoins | MirrorJoins, deadline: float
) -> socket.socket:
    """A connection over which both sides have proved the secret, and the first message is sent."""
    place = tcp.name_of((plan.host, plan.port))
    say: Callable[..., None] = logger.info
    while True:
        connection = None
        try:
            connection = socket.create_connection((plan.host, plan.port), timeout=ANSWER_SECONDS)
            join(connection, plan.secret)
            frames.send(connection, frames.pack(first))
            return connection
        except NotTrusted as error:
            assert connection is not None
            connection.close()
            raise NotTrusted(f"rank 0 at {place}: {error}") from error
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline:
                raise EngineDead(f"rank 0 does not listen at {place}: {error}") from error
            say("waiting for rank 0 at %s: %s", place, error)
            say = logger.debug
            time.sleep(_PAUSE)
