"""Host and Origin: web pages that somebody looks at do not reach the server."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.req("SEC-19")


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost", True), ("localhost:8000", True), ("127.0.0.1:1", True), ("[::1]:8000", True),
        ("LOCALHOST", True), ("ours.example", True), ("ours.example:443", True),
        ("evil.example", False), ("localhost.evil.example", False), ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False), ("[::2]", False), ("", False), ("10.0.0.1", False),
    ],
)  # fmt: skip
async def test_hosts(connect: Any, host: str, good: bool) -> None:
    for settings in ({"hardened": True}, {"check_hosts": True}, {}):
        client = connect(allowed_hosts=("Ours.example",), **settings)
        answer = await client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == (200 if good else 403), settings
        assert (await client.get("/health", headers={"Host": host})).status_code == 200
    assert (await connect().get("/v1/models", headers={"Host": host})).status_code == 200


async def test_the_address_listened_on_is_a_host(connect: Any) -> None:
    client = connect(host="10.1.2.3", check_hosts=True)
    assert (await client.get("/v1/models", headers={"Host": "10.1.2.3:8000"})).status_code == 200
    client = connect(host="fd00::1", check_hosts=True)
    assert (await client.get("/v1/models", headers={"Host": "[fd00::1]:80"})).status_code == 200


async def test_two_hosts_are_none(connect: Any) -> None:
    headers = [("Host", "localhost"), ("Host", "localhost")]
    answer = await connect(check_hosts=True).get("/v1/models", headers=headers)
    assert answer.status_code == 403


async def test_a_unix_socket_has_no_host(connect: Any, tmp_path: Any) -> None:
    client = connect(uds=str(tmp_path / "s"), hardened=True)
    assert (await client.get("/v1/models", headers={"Host": "any"})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "good"),
    [
        (None, True), ("http://localhost:8000", True), ("https://ok.example", True),
        ("http://evil.example", False), ("null", False), ("http://localhost:9000", False),
        ("https://ok.example.evil.example", False), ("", False),
    ],
)  # fmt: skip
async def test_origins(connect: Any, origin: str | None, good: bool) -> None:
    headers = {"Host": "localhost:8000"} | ({} if origin is None else {"Origin": origin})
    for settings in ({"hardened": True}, {"check_origin": True}):
        client = connect(allowed_origins=("https://ok.example",), **settings)
        answer = await client.get("/v1/models", headers=headers)
        assert answer.status_code == (200 if good else 403), settings
    assert (await connect().get("/v1/models", headers=headers)).status_code == 200


async def test_cors_still_answers_its_preflights(connect: Any) -> None:
    client = connect(hardened=True, allowed_origins=("https://ok.example",))
    headers = {"Host": "localhost", "Access-Control-Request-Method": "POST"}
    for origin, good in (("https://ok.example", True), ("https://evil.example", False)):
        answer = await client.options("/v1/completions", headers={**headers, "Origin": origin})
        assert ("access-control-allow-origin" in answer.headers) == good
