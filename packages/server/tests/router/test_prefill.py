"""Prompts that other servers compute: what each server is sent, and what happens where they fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from scripted_servers import (
    CHAT,
    END,
    SSE,
    Received,
    Router,
    Script,
    ScriptedServer,
    chunk,
    routed,
    whole,
)

from headrace_core.errors import ConfigError
from headrace_server.router.settings import RouterSettings

FOUND = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}
TEXT = "/v1/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "top_k": 1}


async def prefills(request: Received) -> None:
    body = json.dumps({"id": "x", "choices": [], "kv_transfer_params": FOUND}).encode()
    request.writer.write(whole(200, body))


async def decodes(request: Received) -> None:
    if json.loads(request.body or b"{}").get("stream"):
        request.writer.write(SSE + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + END)
    else:
        request.writer.write(whole(200, b'{"said": "decoded"}'))


def refuses(status: int) -> Script:
    async def refuse(request: Received) -> None:
        request.writer.write(whole(status, b"{}"))

    return refuse


async def breaks_off(request: Received) -> None:
    request.writer.close()


@asynccontextmanager
async def divided(
    *prefill: Script, decode: Script = decodes
) -> AsyncIterator[tuple[Router, list[ScriptedServer], ScriptedServer]]:
    async with AsyncExitStack() as stack:
        first = [await stack.enter_async_context(ScriptedServer(one)) for one in prefill]
        last = await stack.enter_async_context(ScriptedServer(decode))
        urls = tuple(one.url for one in first)
        router = await stack.enter_async_context(routed(prefill=urls, decode=(last.url,)))
        yield router, first, last


def sent(server: ScriptedServer) -> list[Any]:
    return [json.loads(one.body) for one in server.received]


async def test_a_prompt_is_computed_by_one_server_and_answered_by_another() -> None:
    async with divided(prefills) as (router, [first], last):
        more = {"n": 2, "logprobs": True, "min_tokens": 2, "stream_options": {}, "stream": True}
        answer = await router.ask(CHAT, {**BODY, **more})
        assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"
        [asked] = sent(first)
        params = asked.pop("kv_transfer_params")
        assert params["do_remote_decode"] is True
        assert params["do_remote_prefill"] is False
        assert {params[name] for name in params if name.startswith("remote_")} == {None}
        kept = {name: value for name, value in BODY.items() if name != "max_tokens"}
        assert asked == {**kept, "max_completion_tokens": 1, "stream": False}
        assert sent(last) == [{**BODY, **more, "kv_transfer_params": FOUND}]
        ids = {one.headers["x-request-id"] for one in (*first.received, *last.received)}
        assert len(ids) == 1
        assert (await router.ask("/metrics", method="GET")).body.count(
            b"router_prefills_total 1.0"
        ) == 1


async def test_completions_are_divided_too() -> None:
    async with divided(prefills) as (router, [first], last):
        await router.ask(TEXT, {"model": "m", "prompt": "a", "max_tokens": 5})
        assert sent(first)[0]["max_tokens"] == 1
        assert sent(last)[0]["max_tokens"] == 5
        assert sent(last)[0]["kv_transfer_params"] == FOUND


@pytest.mark.parametrize(
    "scripts",
    [
        [refuses(503), refuses(503)],
        [refuses(400)],
        [breaks_off, breaks_off],
        [decodes],
    ],
)
async def test_without_a_server_that_prefills_the_request_goes_whole(scripts: list[Script]) -> None:
    async with divided(*scripts) as (router, _, last):
        answer = await router.ask(CHAT, BODY)
        assert answer.json() == {"said": "decoded"}
        assert sent(last) == [BODY]
        assert (
            b"router_whole_requests_total 1.0" in (await router.ask("/metrics", method="GET")).body
        )


async def test_a_server_that_is_gone_is_not_waited_for() -> None:
    async with divided(prefills) as (router, [first], last):
        first.stop()
        for _ in range(2):
            assert (await router.ask(CHAT, BODY)).json() == {"said": "decoded"}
        assert sent(last) == [BODY, BODY]


async def test_the_next_server_prefills_where_one_does_not() -> None:
    async with divided(refuses(503), prefills) as (router, first, last):
        for _ in range(2):
            await router.ask(CHAT, BODY)
        assert sent(last) == [{**BODY, "kv_transfer_params": FOUND}] * 2
        assert first[1].received


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "m", "input": "a"}),
        ("/v1/messages", BODY),
        (CHAT, {**BODY, "use_beam_search": True}),
        (CHAT, {**BODY, "kv_transfer_params": {"do_remote_decode": True}}),
    ],
)
async def test_other_requests_go_whole(path: str, body: Any) -> None:
    async with divided(prefills) as (router, [first], last):
        await router.ask(path, body)
        assert not first.received
        assert sent(last) == [body]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": ("http://a",)}, "server: must be given"),
        ({"decode": ("http://a",)}, r"prefill = \(\): must be given with --decode"),
        ({"server": ("http://a",), "prefill": ("http://b",)}, "prefill = .*must be given with --decode"),
        ({"server": ("http://a",), "decode": ("http://b",)}, "decode = .*: must be left out with --se"),
        ({"prefill": ("http://a",), "decode": ("http://a/",)}, "prefill = .*must be different URLs"),
        ({"prefill": ("ftp://a",), "decode": ("http://b",)}, "prefill = 'ftp://a': must be a URL"),
        (
            {"prefill": ("http://a",), "decode": ("http://b",), "kv_events": ("tcp://c",)},
            "kv_events = .*: must be left out with --prefill",
        ),
    ],
)  # fmt: skip
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**changes)
