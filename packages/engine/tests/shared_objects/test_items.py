"""Media of requests on their way through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients import wire
from headrace_engine.shared_objects.items import ReceivedItems, SharedItems


def item(name: str, size: int = 1000) -> MediaInput:
    array = PackedArray("uint8", (size,), (name[:1] or "x").encode() * size)
    return MediaInput("image", {"pixels": array}, name, 4, 1)


def request(number: int, *media: MediaInput) -> CoreRequest:
    return CoreRequest(
        request_id=f"r{number}", prompt_token_ids=[1, 2], params=SamplingParams(),
        stop_token_ids=frozenset(), max_tokens=1, arrival_time=0.0, media=list(media),
    )  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[SharedItems, ReceivedItems]]:
    sent = SharedItems(1 << 14, 1 << 13)
    received = ReceivedItems(sent.handle(), sent.max_object_size)
    yield sent, received
    received.close()
    sent.close()


def test_an_item_is_written_once_and_no_frame_has_it(pair: Any) -> None:
    sent, received = pair
    requests = [request(0, item("a"), item("b")), request(1), request(2, item("b"))]
    for _ in range(20):
        added = wire.Add(*sent.moved(requests))
        frame = msgspec.msgpack.encode(added)
        assert b"a" * 100 not in frame
        again = msgspec.msgpack.decode(frame, type=wire.Add)
        assert received.restored(again.requests, again.items) == requests
    assert sent.num_written == 2
    assert requests[0].media[0].inputs, "the caller's requests keep theirs"


def test_what_finds_no_room_goes_with_its_request(pair: Any) -> None:
    sent, received = pair
    requests = [request(i, item(f"{i}", 7000)) for i in range(3)]
    requests += [request(3, item("large", 9000)), request(4, item("", 10))]
    left, places = sent.moved(requests)
    assert [place.request for place in places] == [0, 1], "the ring holds two of them"
    assert left[2:] == requests[2:]
    assert received.restored(left, places) == requests
    left, places = sent.moved(requests[2:3])
    assert [place.request for place in places] == [0], "the first has been read"
