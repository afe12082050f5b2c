"""Answers that are made while they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace_server.streaming.json_parts import JsonParts, answer_of, json_parts
from headrace_server.streaming.offload import PIECE, OffLoop

SIZE = PIECE // 4


@pytest.mark.parametrize("value", [{}, {"a": 1, "b": {"c": []}}, "text", [1, 2]])
def test_parts_are_the_json_of_the_whole(value: Any) -> None:
    assert json.loads(b"".join(json_parts(value))) == value


@pytest.mark.parametrize("items", [[], [1], [{"b": 1}, {}, "text", [2]]])
def test_an_iterator_is_a_list(items: list[Any]) -> None:
    whole = {"a": items, "b": {"c": items}}
    lazy = {"a": iter(items), "b": {"c": iter(items)}}
    assert json.loads(b"".join(json_parts(lazy))) == whole


def test_what_brings_its_json_is_not_encoded_again() -> None:
    value = {"a": JsonParts([b"[1,", b"2]"]), "b": msgspec.Raw(b"3")}
    assert b"".join(json_parts(value)) == b'{"a":[1,2],"b":3}'


async def sent(
    answer: Any, made: list[int], leaves_after: int | None = None
) -> list[tuple[int, int]]:
    """(parts made, bytes) at each piece that is sent to a client, who may leave after some."""
    seen: list[tuple[int, int]] = []
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            seen.append((len(made), len(message["body"])))
            if len(seen) == leaves_after:
                left.set()
                for _ in range(3):  # until the connection's task has told
                    await asyncio.sleep(0)

    await answer({"type": "http"}, receive, send)
    return seen


async def test_a_piece_is_made_when_the_one_before_it_has_been_sent() -> None:
    made: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(10):
            made.append(number)
            yield bytes(SIZE)

    off_loop = OffLoop()
    large = answer_of(parts(), off_loop, off_loop.light + 1)
    assert "content-length" not in large.headers
    assert await sent(large, made) == [(4, PIECE), (8, PIECE), (10, 2 * SIZE), (10, 0)]
    made.clear()
    small = answer_of(parts(), off_loop, off_loop.light)
    assert small.headers["content-length"] == str(10 * SIZE)
    off_loop.close()


async def test_nothing_is_made_for_a_client_that_has_left() -> None:
    made: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(100):
            made.append(number)
            yield bytes(SIZE)

    off_loop = OffLoop()
    large = answer_of(parts(), off_loop, off_loop.light + 1)
    assert await sent(large, made, leaves_after=2) == [(4, PIECE), (8, PIECE)]
    assert len(made) == 8
    off_loop.close()
