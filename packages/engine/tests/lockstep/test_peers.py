"""Engines that share experts hear of each other through the front end."""

from __future__ import annotations

import os
import threading

import pytest

from headrace_engine.lockstep.peers import EnginePlace, PeerEngines
from headrace_engine.lockstep.relay import EngineRelay
from headrace_testing.waiting import wait_until


class Opened:
    def address(self, name: str) -> str:
        return f"tcp://127.0.0.1:1/{name}"


def engines(relay: EngineRelay, count: int) -> list[PeerEngines]:
    return [PeerEngines(EnginePlace(index, count, relay.path)) for index in range(count)]


def test_all_learn_where_to_meet_and_of_waves() -> None:
    relay = EngineRelay(3)
    first, second = (PeerEngines(EnginePlace(index, 3, relay.path)) for index in (0, 1))
    expected = {name: f"tcp://127.0.0.1:1/{name}" for name in ("ep", "ep:moves")}
    assert first.meet(Opened()) == expected
    late = PeerEngines(EnginePlace(2, 3, relay.path))
    assert second.meet(None) == late.meet(None) == expected
    due = threading.Event()
    late.when_due = due.set
    second.waves.enter()
    assert due.wait(30)
    wait_until(lambda: first.waves.is_due and late.waves.is_due)
    for one in (first, second, late):
        one.close()
    relay.close()
    relay.close()
    assert not os.path.exists(os.path.dirname(relay.path))


def test_an_engine_that_has_gone_is_not_told() -> None:
    relay = EngineRelay(2)
    first, second = engines(relay, 2)
    second.close()
    first.waves.enter()
    first.waves.rest()
    third = PeerEngines(EnginePlace(1, 2, relay.path))
    first.meet(Opened())
    assert third.meet(None)
    relay.close()


def test_nonsense_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    relay = EngineRelay(2)
    first, second = engines(relay, 2)
    for message in (b"wave -1", b"wave x", b"__import__('os')"):
        first._send(message)
    first.waves.enter()
    wait_until(lambda: second.waves.is_due)
    assert caplog.text.count("is not a message") == 3
    relay.close()


def test_all_hear_what_each_says_of_a_call() -> None:
    relay = EngineRelay(3)
    peers = engines(relay, 3)
    peers[0].meet(Opened())
    for one in peers[1:]:
        one.meet(None)  # the relay knows it by then
    for one in peers[:2]:
        assert one.say(f"word of {one.engine} ü") == 0
    assert peers[0].words(0) is None
    peers[0].wait_for_news(0, 0.0)
    peers[2].say("")
    for one in peers:
        one.wait_for_news(0, 30)
        assert one.words(0) == ["word of 0 ü", "word of 1 ü", ""]
    for nonsense in (b"said 1 3 x", b"said -1 0 x", b"said 1"):
        peers[1]._send(nonsense)
    peers[1].waves.enter()
    peers[0].wait_for_news(1, 30)
    assert peers[0].waves.is_due, "which ends the wait, too"
    relay.close()
