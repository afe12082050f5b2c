from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from headrace_core.errors import AddressError, ConfigError
from headrace_engine.config import CacheConfig, EngineConfig, KVEventsConfig
from headrace_engine.kv.event_publisher import (
    END_OF_REPLAY,
    ZmqEventPublisher,
    endpoint_of,
    make_publisher,
)
from headrace_engine.kv.event_subscriber import KVEventSubscriber
from headrace_engine.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    KVEventBatch,
)
from headrace_testing.waiting import wait_until

PATIENCE = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


def publisher(context: zmq.Context[Any], name: str = "a", **settings: Any) -> ZmqEventPublisher:
    given = {"endpoint": f"inproc://{name}", "replay_endpoint": f"inproc://{name}-replay"}
    config = KVEventsConfig(enable_kv_cache_events=True, **{**given, **settings})
    return ZmqEventPublisher(config, context=context)


def stored(number: int) -> BlockStored:
    return BlockStored([number], None, [number], 1)


def received(subscriber: KVEventSubscriber, num_batches: int) -> list[KVEventBatch]:
    """So many batches that are not clearings."""
    found: list[KVEventBatch] = []

    def enough() -> bool:
        found.extend(subscriber.poll(0.05))
        return sum(b.events != [AllBlocksCleared()] for b in found) >= num_batches

    wait_until(enough, PATIENCE, f"{num_batches} batches did not come")
    return found


def test_who_comes_late_gets_everything(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    for number in range(3):
        source.publish([stored(number)])
    wait_until(lambda: len(source._kept) == 3, PATIENCE)
    with KVEventSubscriber("inproc://a", "inproc://a-replay", context=context) as subscriber:
        first = received(subscriber, 3)
        source.publish([stored(3)])
        rest = received(subscriber, 1)
    assert [batch.events for batch in first + rest] == [[stored(n)] for n in range(4)]
    assert {batch.data_parallel_rank for batch in first} == {0}
    assert (subscriber.num_replayed, subscriber.num_lost) == (3, 0)
    source.shutdown()


def test_a_gap_is_noticed_and_replayed(context: zmq.Context[Any]) -> None:
    """The reader's messages are lost on the way: here by taking them out of its socket."""
    source = publisher(context)
    with KVEventSubscriber("inproc://a", "inproc://a-replay", context=context) as subscriber:
        source.publish([stored(0)])
        received(subscriber, 1)
        for number in (1, 2):
            source.publish([stored(number)])
            assert subscriber._sub.poll(PATIENCE * 1000)
            subscriber._sub.recv_multipart()
        source.publish([stored(3)])
        batches = received(subscriber, 3)
    assert [batch.events for batch in batches] == [[stored(n)] for n in (1, 2, 3)]
    assert subscriber.num_lost == 0
    assert subscriber.num_replayed >= 2
    source.shutdown()


def test_what_is_lost_for_good_clears_what_was_believed(context: zmq.Context[Any]) -> None:
    source = publisher(context, buffer_steps=1)
    blocks = CachedBlocks()
    with KVEventSubscriber("inproc://a", "inproc://a-replay", context=context) as subscriber:
        source.publish([stored(0)])
        for batch in received(subscriber, 1):
            blocks.apply(batch)
        for events in ([BlockRemoved([0])], [stored(2)]):  # the first of them is lost
            source.publish(events)
            assert subscriber._sub.poll(PATIENCE * 1000)
            subscriber._sub.recv_multipart()
        source.publish([stored(3)])
        for batch in received(subscriber, 1):
            blocks.apply(batch)
    assert subscriber.num_lost == 2
    assert blocks.hashes == {3}
    source.shutdown()


def test_an_engine_that_begins_anew_clears_what_was_believed(context: zmq.Context[Any]) -> None:
    blocks = CachedBlocks()
    first = publisher(context, endpoint="tcp://127.0.0.1:*", replay_endpoint=None)
    with KVEventSubscriber(first.endpoint, context=context) as subscriber:
        _publish_until_heard(first, subscriber, blocks)
        assert blocks.hashes
        first.shutdown()
        second = _at_free_address(context, first.endpoint)
        second.publish([stored(1000)])  # nobody listens yet, perhaps
        _publish_until_heard(second, subscriber, blocks)
        second.shutdown()
    assert 0 not in blocks.hashes
    assert blocks.hashes <= {1000, *range(100, 200)}


def _at_free_address(context: zmq.Context[Any], endpoint: str) -> ZmqEventPublisher:
    """ZeroMQ gives an address up a moment after its socket is closed."""
    found: list[ZmqEventPublisher] = []

    def binds() -> bool:
        with contextlib.suppress(AddressError):
            found.append(publisher(context, endpoint=endpoint, replay_endpoint=None))
        return bool(found)

    wait_until(binds, PATIENCE)
    return found[0]


def _publish_until_heard(
    source: ZmqEventPublisher, subscriber: KVEventSubscriber, blocks: CachedBlocks
) -> None:
    """Subscribing takes a moment: what is sent before is not heard."""
    base = 100 if source._next else 0
    for number in range(base, base + 100):
        source.publish([stored(number)])
        batches = subscriber.poll(0.1)
        for batch in batches:
            blocks.apply(batch)
        if batches:
            return
    raise AssertionError("nothing was heard")


def test_a_full_queue_leaves_a_gap_and_never_waits(context: zmq.Context[Any]) -> None:
    source = publisher(context, max_queue_size=1)
    with source._lock:  # its thread waits for this with the first one in its hands
        source.publish([stored(0)])
        wait_until(lambda: source._queue.empty(), PATIENCE)
        for number in (1, 2, 3):
            source.publish([stored(number)])
    assert source.num_dropped == 2
    wait_until(lambda: len(source._kept) == 2, PATIENCE)
    source.publish([stored(4)])
    with KVEventSubscriber("inproc://a", "inproc://a-replay", context=context) as subscriber:
        wait_until(lambda: len(source._kept) == 3, PATIENCE)
        batches = received(subscriber, 3)
    assert [b.events for b in batches] == [
        [stored(0)], [stored(1)], [AllBlocksCleared()], [stored(4)],
    ]  # fmt: skip
    assert subscriber.num_lost == 2
    source.shutdown()


def test_replay_protocol(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    for number in range(3):
        source.publish([stored(number)])
    wait_until(lambda: len(source._kept) == 3, PATIENCE)
    client = context.socket(zmq.REQ)
    client.connect("inproc://a-replay")
    client.send(b"wrong")  # ignored: nothing is read into it
    other = context.socket(zmq.DEALER)
    other.connect("inproc://a-replay")
    other.send_multipart([b"", (1).to_bytes(8, "big")])
    messages = []
    while not messages or messages[-1][1] != END_OF_REPLAY:
        assert other.poll(PATIENCE * 1000)
        messages.append(other.recv_multipart())
    assert [int.from_bytes(m[1], "big", signed=True) for m in messages] == [1, 2, -1]
    assert messages[-1] == [b"", b"\xff" * 8, b""]
    for socket in (client, other):
        socket.close(linger=0)
    source.shutdown()


def test_publishing_after_the_end(context: zmq.Context[Any]) -> None:
    source = publisher(context)
    source.shutdown()
    source.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        source.publish([stored(0)])


def test_addresses_of_ranks() -> None:
    assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("inproc://x", 1) == "inproc://x_dp1"
    with pytest.raises(ValueError, match="tcp://"):
        endpoint_of("udp://x", 0)
    assert endpoint_of("tcp://127.0.0.1:65534", 1) == "tcp://127.0.0.1:65535"
    for port, rank in ((99999, 0), (65535, 1), (0, 0)):
        with pytest.raises(ValueError, match=rf"its port must be in 1\.\.{65535 - rank}"):
            endpoint_of(f"tcp://127.0.0.1:{port}", rank)


def test_off_by_default_and_refused_by_name() -> None:
    assert make_publisher(KVEventsConfig()) is None
    assert make_publisher(KVEventsConfig(enable_kv_cache_events=True, publisher="null")) is None
    with pytest.raises(ConfigError, match="publisher = 'kafka': must be one of 'zmq', 'null'"):
        KVEventsConfig(publisher="kafka")
    with pytest.raises(ConfigError, match="prefixes are not cached"):
        EngineConfig(
            cache=CacheConfig(enable_prefix_caching=False),
            kv_events=KVEventsConfig(enable_kv_cache_events=True),
        )


def test_an_address_in_use_is_named() -> None:
    first = ZmqEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"))
    with pytest.raises(AddressError, match="could not be had"):
        ZmqEventPublisher(KVEventsConfig(endpoint=first.endpoint))
    first.shutdown()
