"""A process that mirrors another one's engine: the same requests, and the outputs of one core."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.mirrored import following
from headrace_engine.mirrored.following import FollowingClient
from headrace_engine.mirrored.leading import LeadingClient
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.messages import Stop
from headrace_engine.multiproc.nodes.joined import JoinedNode
from headrace_engine.multiproc.nodes.joining import Joined
from headrace_engine.multiproc.nodes.messages import NodeAccepted
from headrace_engine.startup import StartupTimeline
from headrace_testing.waiting import wait_until

PATIENCE = 20.0


class Core:
    """The way to a core that computes nothing; the test puts out what it wants."""

    in_process = True
    max_model_len, step_seconds, memory_plan = 77, 0.5, "a plan"
    failure: BaseException | None = None

    def __init__(self) -> None:
        self.timeline = StartupTimeline()
        self.added: list[str] = []
        self.called: Future[Any] = Future()

    def start(self, sink: Any) -> None:
        self.sink = sink

    def add(self, requests: Sequence[CoreRequest]) -> None:
        self.added += [request.request_id for request in requests]

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[Any]:
        return self.called

    def put(self, *outputs: CoreOutput) -> None:
        self.sink.on_outputs(CoreOutputs(list(outputs), 1.0))


class Sink:
    def __init__(self) -> None:
        self.outputs: list[tuple[str, list[int]]] = []
        self.death: BaseException | None = None

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self.outputs += [(one.request_id, one.new_token_ids) for one in outputs.outputs]

    def on_death(self, error: BaseException) -> None:
        self.death = error


class Pair:
    """Rank 0's client and a mirror's, connected."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        ours, theirs = [one[0] for one in pairs], [one[1] for one in pairs]
        node = JoinedNode(1, "there", ours[0])
        node.ranks, node.mirror = {1: ours[1]}, ours[2]
        joined = Joined(NodeAccepted([1], 2, "", ""), theirs[0])
        joined.ranks, joined.mirror = {1: theirs[1]}, theirs[2]
        self.node, self.core = node, Core()
        self.leader = LeadingClient(self.core)  # type: ignore[arg-type]
        self.leader.take([node])
        self.mirror = FollowingClient(
            lambda: joined, lambda place: SimpleNamespace(close=lambda: None)
        )
        self.sinks = Sink(), Sink()
        starting = threading.Thread(target=self.mirror.start, args=(self.sinks[1],))
        starting.start()
        self.leader.start(self.sinks[0])
        starting.join(PATIENCE)

    def close(self) -> None:
        frames.send(self.node.ranks[1], frames.pack(Stop()))
        self.mirror.shutdown()
        self.node.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def request(name: str, tokens: list[int], when: float = 0.0, **params: Any) -> CoreRequest:
    return CoreRequest(name, tokens, SamplingParams(**params), frozenset(), 5, when)


def test_the_mirror_knows_what_the_engine_is(pair: Pair) -> None:
    assert (pair.mirror.max_model_len, pair.mirror.memory_plan) == (77, "a plan")


def test_outputs_come_under_the_mirrors_own_names(pair: Pair) -> None:
    """Whichever side is first, and whenever a request came."""
    pair.leader.add([request("a", [1, 2]), request("b", [3])])
    pair.core.put(CoreOutput("a", [7]), CoreOutput("b", [8], finish_reason="stop"))
    pair.mirror.add([request("x", [1, 2], 9.0)])
    wait_until(lambda: pair.sinks[1].outputs == [("x", [7])], PATIENCE)
    pair.mirror.add([request("y", [3], 9.0), request("z", [4])])
    pair.core.put(CoreOutput("a", [9], finish_reason="length"))
    wait_until(lambda: len(pair.sinks[1].outputs) == 3, PATIENCE)
    assert sorted(pair.sinks[1].outputs) == [("x", [7]), ("x", [9]), ("y", [8])]
    pair.leader.add([request("c", [4])])
    pair.core.put(CoreOutput("c", [1]))
    wait_until(lambda: ("z", [1]) in pair.sinks[1].outputs, PATIENCE)
    assert pair.sinks[0].outputs[-1] == ("c", [1])


def test_a_mirror_that_is_behind_gets_what_rank_0_got_before_it_ended() -> None:
    pair = Pair()
    pair.leader.add([request("a", [1, 2])])
    pair.core.put(CoreOutput("a", [7], finish_reason="length"))
    pair.node.close()
    wait_until(lambda: pair.mirror._state is not None and pair.mirror._state._end, PATIENCE)
    pair.mirror.add([request("x", [1, 2], 9.0)])
    wait_until(lambda: pair.sinks[1].death is not None, PATIENCE)
    assert pair.sinks[1].outputs == [("x", [7])]
    with pytest.raises(EngineDead, match="rank 0 of this engine is gone"):
        pair.mirror.add([request("y", [3])])
    pair.mirror.shutdown()


@pytest.mark.parametrize("other", [request("x", [2]), request("x", [1], seed=3)])
def test_another_request_ends_both(pair: Pair, other: CoreRequest) -> None:
    pair.leader.add([request("a", [1])])
    pair.mirror.add([other])
    wait_until(lambda: all(sink.death for sink in pair.sinks), PATIENCE)
    for sink in pair.sinks:
        assert "rank 1 of this engine asked for a request that is not rank 0's" in str(sink.death)
    with pytest.raises(EngineDead, match="not rank 0's"):
        pair.leader.add([request("b", [1])])
    with pytest.raises(EngineDead, match="not rank 0's"):
        pair.mirror.add([request("b", [1])])


def test_what_rank_0_never_asks_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SAME_SECONDS", 0.0)
    pair.mirror.add([request("x", [1])])
    wait_until(lambda: all(sink.death for sink in pair.sinks), PATIENCE)
    assert "something that rank 0 has not asked for within 0 s" in str(pair.sinks[1].death)


def test_calls_of_workers(pair: Pair) -> None:
    theirs = pair.mirror.call_workers("report", [1])
    ours = pair.leader.call_workers("report", [1])
    pair.core.called.set_result([{"rank": 0}])
    assert theirs.result(PATIENCE) == ours.result(PATIENCE) == [{"rank": 0}]
    with pytest.raises(UnsupportedFeature, match="stats: only on rank 0"):
        pair.mirror.stats()


def test_a_call_that_raises(pair: Pair) -> None:
    theirs = pair.mirror.call_workers("report")
    pair.leader.call_workers("report")
    pair.core.called.set_exception(UnsupportedFeature("not this"))
    with pytest.raises(UnsupportedFeature, match="not this"):
        theirs.result(PATIENCE)


def test_the_engines_death_and_its_process(pair: Pair) -> None:
    pair.core.sink.on_death(EngineDead("rank 3 ended"))
    wait_until(lambda: pair.sinks[1].death is not None, PATIENCE)
    assert str(pair.sinks[1].death) == "rank 3 ended"
    other = Pair()
    other.node.close()
    wait_until(lambda: other.sinks[1].death is not None, PATIENCE)
    assert "rank 0 of this engine is gone" in str(other.sinks[1].death)
    other.mirror.shutdown()
