from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_server.router.prefixes import PIECE_BYTES, PromptText, SentPrefixes
from headrace_server.router.requests import read_request
from headrace_server.router.servers import Server, ServerPool
from headrace_server.router.settings import KVEventAddress, RouterSettings

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")


def pool(**settings: Any) -> ServerPool:
    """Servers that are all well."""
    made = RouterSettings(server=URLS, **settings)
    servers = ServerPool(made, SentPrefixes(made.prefix_entries))
    for server in servers.servers:
        server.problem = ""
    return servers


def chosen(servers: ServerPool, text: str, **how: Any) -> Server:
    found = asyncio.run(servers.choose(PromptText(text.encode()), **how))
    assert found is not None
    return found


def piece(letter: str) -> str:
    return letter * PIECE_BYTES


def test_a_prompt_goes_where_its_longest_beginning_is() -> None:
    servers = pool()
    first = chosen(servers, piece("a") + piece("b"))
    second = chosen(servers, piece("x"))
    assert second is not first  # nobody has it: in turn
    assert chosen(servers, piece("a") + piece("b") + piece("c")) is first
    assert chosen(servers, piece("x") + piece("c")) is second


def test_a_busy_server_loses_its_prefixes() -> None:
    servers = pool(max_imbalance=2.0, imbalance_slack=1)
    first = chosen(servers, piece("a"))
    for server in servers.servers:
        server.in_flight = 4
    first.in_flight = 8
    assert chosen(servers, piece("a")) is first
    first.in_flight = 9
    assert chosen(servers, piece("a")) is not first


def test_of_equals_the_least_busy() -> None:
    servers = pool()
    servers.servers[0].in_flight = servers.servers[2].in_flight = 1
    assert chosen(servers, "short") is servers.servers[1]


def test_who_is_ill_drained_tried_or_serves_another_model_gets_nothing() -> None:
    servers = pool()
    one, two, three = servers.servers
    one.problem = "gone"
    two.is_draining = True
    assert chosen(servers, "x") is three
    assert asyncio.run(servers.choose(PromptText(b"x"), None, [three])) is None
    one.problem, two.is_draining = "", False
    one.models, two.models = frozenset({"a"}), frozenset({"b"})
    three.models = frozenset({"b"})
    assert chosen(servers, "x", model="a") is one
    assert chosen(servers, "x", model="unknown") in servers.servers  # who says so itself


def test_the_oldest_pieces_are_forgotten_from_their_ends() -> None:
    seen = SentPrefixes(3)
    long = PromptText((piece("a") + piece("b") + piece("c")).encode())
    seen.sent(long, "s")
    assert seen.num_seen(long, "s") == 3
    seen.sent(PromptText(piece("x").encode()), "s")
    assert seen.num_seen(long, "s") == 2
    seen.forget("s")
    assert seen.num_seen(long, "s") == 0


def read(body: Any, path: str = "/v1/chat/completions") -> list[bytes]:
    return read_request(path, json.dumps(body).encode()).prompt.hashes


def test_turns_of_one_conversation_share_their_beginning() -> None:
    turns = [{"role": "user", "content": "n" * 300}, {"role": "assistant", "content": "y" * 300}]
    one, two = read({"messages": turns[:1]}), read({"temperature": 0.5, "messages": turns})
    assert len(one) >= 2
    assert two[: len(one)] == one
    assert read({"messages": turns[:1], "model": "other"})[0] != one[0]
    assert read({"messages": turns[:1], "cache_salt": "s"})[0] != one[0]
    assert read({"messages": turns[:1], "tools": [{"type": "function"}]})[0] != one[0]


def test_models_of_bodies() -> None:
    found = read_request(
        "/v1/responses", b'{"model": "m", "input": "x", "previous_response_id": "r"}'
    )
    assert (found.model, found.previous_response_id) == ("m", "r")


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b"\xff", b"{" * 100_000, b'{"model": 3}'])
def test_bodies_that_cannot_be_read_are_for_the_server_to_refuse(body: bytes) -> None:
    assert read_request("/v1/completions", body).model is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": ()}, "server: must be given"),
        ({"server": ("localhost:8001",)}, "server = 'localhost:8001': must be a URL"),
        *(
            ({"server": (url,)}, "must be a URL as http://host:port, without user")
            for url in (
                "http://",
                "http://a:x",
                "http://a:70000",
                "http://a:0",
                "http://[::1",
                "ftp://a",
                "http://a?b",
                "http://a#b",
                "http://user@a",
                "http://user:key@a",
            )
        ),
        ({"server": ("http://a", "http://a/")}, "must be different URLs"),
        *(
            (
                {"server": ("http://a",), "kv_events": (address,)},
                "must be an address as tcp://host:port",
            )
            for address in (
                "nonsense",
                "tcp://a",
                "tcp://a:x",
                "ipc://",
                "tcp://a:1,nonsense",
                "http://a:1",
            )
        ),
        ({"kv_events": ("tcp://a:1",)}, "one address for each server \\(3\\)"),
        (
            {"server": ("http://a:1", "http://b:1/v1/")},
            "server = 'http://b:1/v1/': must be the server's URL without /v1",
        ),
        ({"max_imbalance": 0.5}, "max_imbalance = 0.5: must be at least 1"),
        ({"health_interval": 0.0}, "health_interval = 0.0: must be above 0"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**{"server": URLS, **settings})


def test_addresses_of_events() -> None:
    settings = RouterSettings(server=URLS[:2], kv_events=("tcp://a:1", "tcp://b:1,tcp://b:2"))
    assert settings.event_addresses == [
        KVEventAddress("tcp://a:1", None), KVEventAddress("tcp://b:1", "tcp://b:2"),
    ]  # fmt: skip
