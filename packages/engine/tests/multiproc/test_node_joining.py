"""Hosts that join rank 0's process, and those that it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from headrace_core.errors import ConfigError, EngineDead
from headrace_engine.multiproc.nodes import joining
from headrace_engine.multiproc.nodes import listener as listening
from headrace_engine.multiproc.nodes.joined import JoinedNode
from headrace_engine.multiproc.nodes.joining import Joined, join_rank_0
from headrace_engine.multiproc.nodes.listener import MOST_STRANGERS, NodeListener
from headrace_engine.multiproc.nodes.messages import NodeAccepted
from headrace_engine.multiproc.nodes.plan import NodePlan
from headrace_engine.multiproc.nodes.secret import NotTrusted, join
from headrace_testing.waiting import wait_until

SECRET = b"0123456789abcdef"
PLAN = NodePlan(3, "127.0.0.1", 0, SECRET, {"model.seed": "0", "dtype": "float32"})
PATIENCE = 20.0


class Gathering:
    """A listener that gathers in a thread."""

    def __init__(self, plan: NodePlan, pool: ThreadPoolExecutor) -> None:
        self.listener = NodeListener(plan, NodeAccepted([], 6, "gloo", "tcp://here", 3))
        self.nodes: Future[list[JoinedNode]] = pool.submit(self.listener.gather, PATIENCE)
        self.pool = pool
        self.plan = dataclasses.replace(plan, port=self.listener.port)

    def join(self, node: int, **changes: Any) -> Future[Joined]:
        plan = dataclasses.replace(self.plan, node=node, **changes)
        return self.pool.submit(join_rank_0, plan, PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.plan.port), PATIENCE)

    def all(self) -> list[JoinedNode]:
        """The nodes, which the missing ones complete."""
        found = self.nodes.result(PATIENCE)
        for node in found:
            node.close()
        return found


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    with ThreadPoolExecutor(8) as pool:
        made = Gathering(PLAN, pool)
        yield made
        made.listener._plan = dataclasses.replace(PLAN, count=1)  # nobody is missing any more
        for node in made.nodes.result(PATIENCE):
            node.close()


def test_nodes_come_in_any_order_with_their_ranks(gathering: Gathering) -> None:
    second = gathering.join(2).result(PATIENCE)
    assert not gathering.nodes.done()
    first = gathering.join(1).result(PATIENCE)
    assert first.accepted == NodeAccepted([2, 3], 6, "gloo", "tcp://here", 3)
    assert second.accepted.ranks == [4, 5]
    nodes = gathering.all()
    assert [node.node for node in nodes] == [1, 2]
    assert [sorted(node.ranks) for node in nodes] == [[2, 3], [4, 5]]
    for joined in (first, second):
        joined.close()
    with pytest.raises(OSError):
        gathering.connect()


def test_a_wrong_secret_is_refused_and_the_right_one_still_joins(
    gathering: Gathering, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        NotTrusted, match=r"rank 0 at 127.0.0.1:\d+: the secret of this host is refused"
    ):
        gathering.join(1, secret=SECRET + b"?").result(PATIENCE)
    wait_until(lambda: "does not know the secret" in caplog.text, PATIENCE)
    assert "a connection from 127.0.0.1:" in caplog.text
    gathering.join(1).result(PATIENCE).close()


@pytest.mark.parametrize(
    ("node", "changes", "told"),
    [
        (1, {"settings": {"model.seed": "1", "dtype": "float32"}},
         "settings differ: model.seed: 0 on node 0, 1 on node 1; must be the same"),
        (1, {"settings": {"dtype": "float32"}}, "model.seed: 0 on node 0, unknown on node 1"),
        (1, {"settings": {"model.seed": "1"}},
         "settings differ: model.seed: 0 on node 0, 1 on node 1; must be the same"),
        (1, {"count": 2}, "nnodes: 3 on node 0, 2 on node 1"),
        (3, {}, r"node_rank = 3: must be in 1..2"),
        (0, {}, r"node_rank = 0: must be in 1..2"),
    ],
)  # fmt: skip
def test_what_differs_is_named_on_both_sides(
    gathering: Gathering, caplog: pytest.LogCaptureFixture, node: int, changes: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        gathering.join(node, **changes).result(PATIENCE)
    assert told.split(": must")[0] in caplog.text


def test_a_rank_is_one_nodes(gathering: Gathering) -> None:
    """Until that has gone."""
    first = gathering.join(1).result(PATIENCE)
    with pytest.raises(ConfigError, match=r"node_rank = 1: 127.0.0.1:\d+ has it"):
        gathering.join(1).result(PATIENCE)
    first.close()

    joined: list[Joined] = []

    def joins() -> bool:
        with contextlib.suppress(ConfigError):
            joined.append(gathering.join(1).result(PATIENCE))
        return bool(joined)

    wait_until(joins, PATIENCE)
    joined.append(gathering.join(2).result(PATIENCE))
    assert len(gathering.all()) == 2
    for one in joined:
        one.close()


def test_strangers_are_few_and_leave_soon(
    gathering: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that say nothing keep nobody out."""
    held = [gathering.connect() for _ in range(MOST_STRANGERS)]
    wait_until(lambda: len(gathering.listener._strangers) == MOST_STRANGERS, PATIENCE)
    with gathering.connect() as further:
        assert further.recv(48) == b"", "one more is closed at once"
    assert all(connection.recv(48) for connection in held), "while these may still prove something"
    monkeypatch.setattr(listening, "STRANGER_SECONDS", 0.0)
    for connection in held:
        assert connection.recv(1) == b""
        connection.close()
    monkeypatch.setattr(listening, "STRANGER_SECONDS", 5.0)
    gathering.join(2).result(PATIENCE).close()


@pytest.mark.parametrize(
    "sent", [struct.pack("<QQ", 1 << 40, 0), struct.pack("<QQ", 2, 0) + b"\xc1x"]
)
def test_frames_of_those_who_know_the_secret_are_bounded_too(
    gathering: Gathering, sent: bytes
) -> None:
    with gathering.connect() as connection:
        join(connection, SECRET)
        connection.sendall(sent)
        assert connection.recv(1) == b""
    gathering.join(1).result(PATIENCE).close()


def test_who_does_not_come_is_named() -> None:
    found = NodeListener(PLAN, NodeAccepted([], 3, "gloo", ""))
    with pytest.raises(EngineDead, match=r"nodes 1, 2 did not join at 127.0.0.1:\d+ within 0 s"):
        found.gather(0.0)


def test_rank_0_that_never_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"master_port = {port}: cannot be listened on"):
            NodeListener(dataclasses.replace(PLAN, port=port), NodeAccepted([], 3, "", ""))
    with pytest.raises(EngineDead, match=rf"rank 0 does not listen at 127.0.0.1:{port}"):
        joining.join_rank_0(dataclasses.replace(PLAN, node=1, port=port), 0.0)
