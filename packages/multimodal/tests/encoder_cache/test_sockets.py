"""Vectors of media over loopback."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_multimodal.encoder_cache import sockets
from headrace_multimodal.encoder_cache.sockets import SocketConnector
from headrace_testing.engine.ec_connectors import (
    BUFFER_SIZE,
    ECConnectorConformance,
    Pair,
    key_of,
    vectors_of,
)


def connector(role: str, port: int = 0, **changes: Any) -> SocketConnector:
    clock = changes.pop("clock", None)
    settings = {
        "ec_role": role, "ec_buffer_size": BUFFER_SIZE, "ec_connector_extra_config": {}, **changes,
    }  # fmt: skip
    if not settings["ec_connector_extra_config"]:
        settings["ec_port"] = port
    return SocketConnector(settings) if clock is None else SocketConnector(settings, clock)


class TestSocketConnector(ECConnectorConformance):
    @contextmanager
    def connected(self) -> Iterator[Pair]:
        with (
            closing(connector("ec_producer")) as producer,
            closing(connector("ec_consumer", producer.port)) as consumer,
        ):
            yield producer, consumer


def test_a_consumer_asks_several_producers() -> None:
    with closing(connector("ec_producer")) as one, closing(connector("ec_producer")) as two:
        addresses = [f"127.0.0.1:{one.port}", f"localhost:{two.port}"]
        extra = {"ec_connector_extra_config": {"addresses": addresses}}
        with closing(connector("ec_consumer", **extra)) as consumer:
            one.save(key_of("a"), vectors_of(1))
            two.save(key_of("b"), vectors_of(2))
            assert consumer.load(key_of("a")) == vectors_of(1)
            assert consumer.load(key_of("b")) == vectors_of(2)
            assert consumer.load(key_of("c")) is None


def test_a_producer_that_is_away_is_asked_again_later() -> None:
    now = [0.0]
    producer = connector("ec_producer")
    port = producer.port
    with closing(connector("ec_consumer", port, clock=lambda: now[0])) as consumer:
        producer.save(key_of("a"), vectors_of(1))
        producer.close()
        with pytest.raises(OSError, match=f"producer at 127.0.0.1:{port}"):
            consumer.load(key_of("a"))
        with closing(connector("ec_producer", port)) as back:
            back.save(key_of("a"), vectors_of(2))
            assert consumer.load(key_of("a")) is None  # not asked
            now[0] += sockets.REST_SECONDS
            assert consumer.load(key_of("a")) == vectors_of(2)


def test_others_questions_are_not_answered() -> None:
    with closing(connector("ec_producer")) as producer:
        for question in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"HEC2" + bytes(32)):
            with socket.create_connection(("127.0.0.1", producer.port), 10) as client:
                client.sendall(question)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b""


@pytest.mark.parametrize(
    "answer", [struct.pack("<Q", 1 << 40), struct.pack("<Q", 8) + b"12345678", b"\x08"]
)
def test_answers_that_are_none_are_errors(answer: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(connector("ec_consumer", server.getsockname()[1])) as consumer,
        socket.create_connection(server.getsockname(), 10) as client,
    ):
        consumer._producers[0]._socket = client
        peer, _ = server.accept()
        with peer:
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match=r"ec_buffer_size|no file of vectors|closed"):
                consumer.load(key_of("a"))


def test_an_answer_that_comes_in_drops_ends_the_exchange() -> None:
    seconds = iter([0.0, 0.0, *[3.0] * 9])  # whether it rests, when it asks, what is left
    with closing(connector("ec_producer")) as producer:
        producer.save(key_of("a"), vectors_of(1))
        slow = connector("ec_consumer", producer.port, clock=lambda: next(seconds))
        with closing(slow), pytest.raises(OSError, match="0 of 8 bytes came within 2 s"):
            slow.load(key_of("a"))


def test_addresses_are_of_loopback() -> None:
    extra = {"ec_connector_extra_config": {"addresses": ["127.0.0.1:9"]}, "ec_ip": "127.0.0.1"}
    with pytest.raises(ConfigError, match="must be left out beside addresses"):
        connector("ec_consumer", **extra)
    with pytest.raises(ConfigError, match=r"ec_ip = '10\.0\.0\.1': must be an address of loopback"):
        connector("ec_producer", ec_ip="10.0.0.1")
    for wrong in ("127.0.0.1", "example.com:80", ":1", "127.0.0.1:0"):
        with pytest.raises(ConfigError, match="addresses = "):
            connector("ec_consumer", ec_connector_extra_config={"addresses": [wrong]})
    producer = connector("ec_producer")
    with closing(producer), pytest.raises(ConfigError, match=f"{producer.port}: must be free"):
        connector("ec_producer", producer.port)
