"""The router between a real client's socket and scripted servers' sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct

import pytest
from scripted_servers import (
    CHAT,
    END,
    PATIENCE,
    SSE,
    Received,
    Script,
    ScriptedServer,
    chunk,
    routed,
    whole,
)


async def says_yes(request: Received) -> None:
    request.writer.write(whole(200, b'{"ok": 1}', "content-type: application/json", "x-own: 1"))


async def hangs_up(request: Received) -> None:
    request.writer.close()


def refuses(status: int) -> Script:
    async def script(request: Received) -> None:
        request.writer.write(whole(status, b'{"error": {"message": "no"}}', "retry-after: 7"))

    return script


async def test_requests_and_answers_pass_whole() -> None:
    async with ScriptedServer(says_yes) as one, routed(one) as router:
        answer = await router.ask(
            "/v1/x?a=1&b=%20", {"messages": ["hi"]}, authorization="Bearer k", connection="x-hop",
            x_hop="1", te="trailers", x_request_id="mine", x_other="2",
        )  # fmt: skip
        assert (answer.status, answer.body) == (200, b'{"ok": 1}')
        assert answer.headers["x-own"] == "1"
        [got] = one.received
        assert got.target == "/v1/x?a=1&b=%20"
        assert json.loads(got.body) == {"messages": ["hi"]}
        assert got.headers["authorization"] == "Bearer k"
        assert got.headers["x-request-id"] == "mine"
        assert got.headers["x-other"] == "2"
        assert got.headers["host"] == one.url.removeprefix("http://")
        assert not {"x-hop", "te"} & set(got.headers)


async def test_events_come_one_by_one() -> None:
    heard = asyncio.Event()

    async def script(request: Received) -> None:
        request.writer.write(SSE + chunk(b"data: 1\n\n"))
        await asyncio.wait_for(
            heard.wait(), PATIENCE
        )  # the first has come before the second is sent
        request.writer.write(chunk(b"data: 2\n\n") + END)

    async with ScriptedServer(script) as one, routed(one) as router:
        reader, writer = await router.open()
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), PATIENCE)
        heard.set()
        await asyncio.wait_for(reader.readuntil(b"data: 2\n\n"), PATIENCE)
        writer.close()


@pytest.mark.parametrize("bad", [hangs_up, refuses(503), refuses(429), refuses(502)])
async def test_another_server_answers_what_one_has_not_begun(bad: Script) -> None:
    async with (
        ScriptedServer(bad) as one, ScriptedServer(says_yes) as two, routed(one, two) as router,
    ):  # fmt: skip
        for _ in range(4):
            assert (await router.ask()).body == b'{"ok": 1}'
        assert one.received
        assert len(two.received) == 4
        metrics = (await router.ask("/metrics", method="GET")).body.decode()
        assert re.search(r"headrace:router_retries_total [1-4]\.0\n", metrics)


async def test_a_head_without_a_body_is_no_answer_yet() -> None:
    async def script(request: Received) -> None:
        request.writer.write(SSE)
        await request.writer.drain()
        request.writer.close()

    async with (
        ScriptedServer(script) as one, ScriptedServer(says_yes) as two, routed(one, two) as router,
    ):  # fmt: skip
        for _ in range(2):
            assert (await router.ask()).body == b'{"ok": 1}'
        assert one.received


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (CHAT, b'data: {"error":{"message":"server 1 broke off in the middle'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error"'),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error(path: str, form: bytes) -> None:
    async def script(request: Received) -> None:
        request.writer.write(SSE + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\ndata: 3\n\n")[:-6])
        await request.writer.drain()
        request.writer.close()  # within an event

    async with ScriptedServer(script) as one, routed(one) as router:
        answer = await router.ask(path)
        assert answer.status == 200
        assert answer.is_whole
        assert answer.body.startswith(b"data: 1\n\ndata: 2\n\n" + form)
        assert b"it closed the connection" in answer.body
        assert len(one.received) == 1  # never again after the first byte


@pytest.mark.parametrize("resets", [False, True])
async def test_wherever_a_stream_breaks_off_its_client_is_told(resets: bool) -> None:
    """Cut after every number of bytes: another server answers, or the last event says what happened."""
    sent = SSE + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + END
    cut_at = 0

    async def script(request: Received) -> None:
        request.writer.write(sent[:cut_at])
        await request.writer.drain()
        if resets:
            once = struct.pack("ii", 1, 0)
            sock = request.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, once)
        request.writer.close()

    async with (
        ScriptedServer(script) as one, ScriptedServer(says_yes) as two,
        routed(one, two, max_failures=1000) as router,
    ):  # fmt: skip
        told = []
        for cut_at in range(len(sent)):
            while len(one.received) <= cut_at:  # in turn
                answer = await router.ask()
            assert answer.is_whole, cut_at
            if answer.body == b'{"ok": 1}':
                continue
            told.append(cut_at)
            *events, error, done, rest = answer.body.split(b"\n\n")
            assert events == [b"data: 1", b"data: 2"][: len(events)], cut_at
            assert error.startswith(b'data: {"error":{"message":"server 1 broke off'), cut_at
            assert (done, rest) == (b"data: [DONE]", b""), cut_at
        assert told
        if not resets:  # a reset may take along what was not read yet
            assert told == list(range(sent.index(b"data: 1") + 1, len(sent)))


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (CHAT, b"data: [DONE]\n\n"),
        (CHAT, b"data: 3\r\n\r\ndata:[DONE]\r\n\r\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ],
)
@pytest.mark.parametrize(("apart", "rest"), [(False, b""), (True, b""), (True, chunk(b": half"))])
async def test_what_breaks_off_behind_its_last_event_is_whole(
    path: str, last: bytes, apart: bool, rest: bytes
) -> None:
    """The client has got its end, and gets no second one."""
    first = b"data: 1\n\n"
    pieces = [first, last[:7], last[7:]] if apart else [first + last]

    async def script(request: Received) -> None:
        request.writer.write(SSE)
        for piece in pieces:
            request.writer.write(chunk(piece))
            await request.writer.drain()
        request.writer.write(rest)
        request.writer.close()  # no end of the body

    async with ScriptedServer(script) as one, routed(one) as router:
        answer = await router.ask(path)
        assert answer.is_whole
        assert answer.body == first + last


async def test_a_last_event_that_is_quoted_ends_nothing() -> None:
    quoted = b'data: {"text": "data: [DONE]"}\n\n: event: message_stop\n\n'

    async def script(request: Received) -> None:
        request.writer.write(SSE + chunk(quoted))
        await request.writer.drain()
        request.writer.close()

    async with ScriptedServer(script) as one, routed(one) as router:
        answer = await router.ask()
        assert answer.body.startswith(quoted + b'data: {"error":{"message":"server 1 broke off')
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_breaks_off_within_is_cut() -> None:
    async def script(request: Received) -> None:
        request.writer.write(whole(200, b"{" * 100)[:-50])
        await request.writer.drain()
        request.writer.close()

    async with ScriptedServer(script) as one, routed(one) as router:
        answer = await router.ask()
        assert answer.body == b"{" * 50
        assert not answer.is_whole


async def test_the_last_refusal_is_passed_on() -> None:
    async with (
        ScriptedServer(refuses(503)) as one, ScriptedServer(refuses(429)) as two,
        routed(one, two) as router,
    ):  # fmt: skip
        answer = await router.ask()
        assert answer.status in (429, 503)
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["message"] == "no"


async def test_a_request_that_ends_servers_does_not_end_all() -> None:
    async with (
        ScriptedServer(hangs_up) as one, ScriptedServer(hangs_up) as two,
        ScriptedServer(hangs_up) as three, routed(one, two, three) as router,
    ):  # fmt: skip
        answer = await router.ask()
        assert answer.status == 502
        assert "closed the connection before its answer" in answer.json()["error"]["message"]
        assert sum(not server.received for server in (one, two, three)) == 1


async def test_who_breaks_off_again_and_again_gets_no_more() -> None:
    async with (
        ScriptedServer(hangs_up) as one, ScriptedServer(says_yes) as two,
        routed(one, two, health_interval=1000.0, max_failures=2) as router,
    ):  # fmt: skip
        for _ in range(10):
            assert (await router.ask()).status == 200
        assert len(one.received) in (2, 3)  # once more if the connection was idle before
        assert not router.pool.servers[0].is_well
        await router.pool.look()
        assert router.pool.servers[0].is_well  # a good look brings it back


async def test_a_server_that_cannot_be_reached_gets_nothing() -> None:
    async with (
        ScriptedServer(says_yes) as one, ScriptedServer(says_yes) as two,
        routed(one, two, health_interval=1000.0) as router,
    ):  # fmt: skip
        two.stop()
        for _ in range(6):
            assert (await router.ask()).status == 200
        assert not router.pool.servers[1].is_well
        one.stop()
        answer = await router.ask()
        assert answer.status == 503
        assert "of 2, 2 cannot be reached" in answer.json()["error"]["message"]
        assert (await router.ask("/health", method="GET")).status == 503
        assert (await router.ask("/livez", method="GET")).status == 200


async def test_a_client_that_leaves_ends_its_request() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def script(request: Received) -> None:
        began.set()
        await request.reader.read()
        ended.set()

    async with ScriptedServer(script) as one, routed(one) as router:
        _, writer = await router.open()
        await asyncio.wait_for(began.wait(), PATIENCE)
        writer.close()
        await asyncio.wait_for(ended.wait(), PATIENCE)


async def test_a_stopping_router_tells_its_clients() -> None:
    async def script(request: Received) -> None:
        request.writer.write(SSE + chunk(b"data: 1\n\n"))
        await request.reader.read()

    async with ScriptedServer(script) as one, routed(one) as router:
        reader, writer = await router.open()
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), PATIENCE)
        lifecycle = router.app.state.headrace.lifecycle
        assert lifecycle.num_in_flight == 1
        lifecycle.begin_drain()
        assert (await router.ask()).status == 503
        lifecycle.stop_all()
        rest = await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n"), PATIENCE)
        assert b"the server is shutting down" in rest
        writer.close()


async def test_drain_and_undrain_by_hand() -> None:
    settings = {"enable_control_routes": True, "api_key": ("key-key-key",)}
    async with (
        ScriptedServer(says_yes) as one, ScriptedServer(says_yes) as two,
        routed(one, two, settings=settings) as router,
    ):  # fmt: skip
        key = {"authorization": "Bearer key-key-key", "content_type": "application/json"}
        assert (await router.ask("/router/drain", {"server": one.url})).status == 401
        wrong = await router.ask("/router/drain", {"server": "http://x"}, **key)
        assert wrong.status == 400
        assert one.url in wrong.json()["error"]["message"]
        told = (await router.ask("/router/drain", {"server": one.url}, **key)).json()
        assert (told["draining"], told["available"]) == (True, False)
        for _ in range(4):
            assert (await router.ask(**key)).status == 200
        assert not one.received
        await router.ask("/router/undrain", {"server": one.url}, **key)
        await router.ask(**key)
        await router.ask(body={"messages": ["other"]}, **key)
        assert one.received
        states = (await router.ask("/router/servers", method="GET", **key)).json()["servers"]
        assert [state["requests"] for state in states] == [len(one.received), len(two.received)]


async def test_keys() -> None:
    settings = {"api_key": ("for-the-router",)}
    async with (
        ScriptedServer(says_yes) as one,
        routed(one, settings=settings, server_api_key="for-the-server") as router,
    ):
        assert (await router.ask(authorization="Bearer wrong")).status == 401
        assert (await router.ask(authorization="Bearer for-the-router")).status == 200
        assert one.received[0].headers["authorization"] == "Bearer for-the-server"


async def test_models_are_merged_and_requests_go_where_theirs_is() -> None:
    async with (
        ScriptedServer(says_yes, '{"data": [{"id": "a"}, {"id": "b"}]}') as one,
        ScriptedServer(says_yes, '{"data": [{"id": "b"}, {"id": "c"}]}') as two,
        routed(one, two) as router,
    ):
        models = (await router.ask("/v1/models", method="GET")).json()["data"]
        assert [model["id"] for model in models] == ["a", "b", "c"]
        assert (await router.ask("/v1/models/c", method="GET")).json() == {"id": "c"}
        assert (await router.ask("/v1/models/d", method="GET")).status == 404
        for _ in range(3):
            await router.ask(body={"model": "c", "messages": []})
        assert len(two.received) == 3


async def test_control_routes_of_servers_are_not_passed_on() -> None:
    async with ScriptedServer(says_yes) as one, routed(one) as router:
        answer = await router.ask("/pause")
        assert answer.status == 404
        assert "ask the server itself" in answer.json()["error"]["message"]
        assert not one.received


async def test_bodies_have_a_limit() -> None:
    async with (
        ScriptedServer(says_yes) as one, routed(one, settings={"max_body_bytes": 100}) as router,
    ):  # fmt: skip
        assert (await router.ask(body={"messages": "x" * 200})).status == 413
        assert not one.received


async def test_stored_responses_are_where_they_were_made() -> None:
    def storing(name: bytes) -> Script:
        async def script(request: Received) -> None:
            request.writer.write(whole(200, b'{"id": "resp_%b"}' % name))

        return script

    async with (
        ScriptedServer(storing(b"one")) as one, ScriptedServer(storing(b"two")) as two,
        routed(one, two) as router,
    ):  # fmt: skip
        made = [(await router.ask("/v1/responses", {"input": str(n)})).json()["id"] for n in "abcd"]
        assert set(made) == {"resp_one", "resp_two"}
        for server, name in ((one, "resp_one"), (two, "resp_two")):
            before = len(server.received)
            for _ in range(3):
                await router.ask(f"/v1/responses/{name}", method="GET")
                await router.ask("/v1/responses", {"previous_response_id": name})
            assert len(server.received) == before + 6
