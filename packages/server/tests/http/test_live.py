"""A real server on a loopback port: clients that leave, servers that stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings, bind, create_app, run, serve
from headrace_server.streaming import event_stream as stream
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(server: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key=options.pop("key", "none"), max_retries=0, **options
    )


async def test_openai_client(live: Any) -> None:
    server = await live(FakeEngine("Hello there."))
    async with client_of(server) as client:
        assert [m.id async for m in client.models.list()] == ["fake-model"]
        assert (await client.models.retrieve("fake-model")).owned_by == "headrace"
        chat = await client.chat.completions.create(
            model="fake-model", messages=HI, logprobs=True, top_logprobs=3, n=2, seed=1
        )
        assert [c.message.content for c in chat.choices] == ["Hello there."] * 2
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or []) == 13
        text = ""
        async for chunk in await client.chat.completions.create(
            model="fake-model", messages=HI, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            else:
                assert chunk.usage is not None
                assert chunk.usage.completion_tokens == 13
        assert text == "Hello there."
        plain = await client.completions.create(model="fake-model", prompt=["a", "b"], logprobs=1)
        assert len(plain.choices) == 2
        streamed = await client.completions.create(model="fake-model", prompt="a", stream=True)
        assert "".join([c.choices[0].text async for c in streamed]) == "Hello there."


async def test_openai_client_errors(live: Any) -> None:
    server = await live(FakeEngine("x", fail_after=1), api_key=("right",))
    async with client_of(server) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(server, key="right") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=HI)
        assert missing.value.body["code"] == 404  # type: ignore[index]
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake-model", messages=HI, temperature=-1)
        assert bad.value.body["code"] == 400  # type: ignore[index]
        assert bad.value.param == "temperature"
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(
                model="fake-model", messages=HI, stream=True
            ):
                pass


async def test_twenty_at_once(live: Any) -> None:
    server = await live(FakeEngine())
    async with client_of(server) as client:
        asked = [[{"role": "user", "content": f"question {i}"}] for i in range(20)]
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="fake-model", messages=m) for m in asked)  # type: ignore[call-overload]
        )
    for i, answer in enumerate(answers):
        assert f"question {i}<" in answer.choices[0].message.content


@pytest.mark.req("REL-05")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("middleware", [(), ("headrace_server_test_middleware.tag",)])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_aborts(
    live: Any,
    until: Any,
    foreign: Any,
    streaming: bool,
    middleware: Any,
    started: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine("x" * 3000, delay=0.02, first_delay=0 if started else 60)  # a minute
    server = await live(engine, middleware=middleware, enable_server_load_tracking=True)
    body = {"prompt": ["a", "b"], "max_tokens": 3000, "stream": streaming}
    async with httpx2.AsyncClient() as client:
        asking = asyncio.create_task(client.post(server.url + "/v1/completions", json=body))
        await until(lambda: engine.num_running == 2 and server.state.load == 1)
        load = (await client.get(server.url + "/load")).json()
        assert load == {"server_load": 1}
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: engine.num_running == 0, 20)
        assert len(engine.aborted) == 2
        await until(lambda: server.state.load == 0)
        assert (await client.get(server.url + "/health")).status_code == 200
    await until(lambda: server.state.lifecycle.num_in_flight == 0)
    # An exporter of another test's spans may still say that it gives up.
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert [r for r in errors if not r.name.startswith("opentelemetry")] == []


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with middleware in it."""
    (tmp_path / "headrace_server_test_middleware.py").write_text(
        textwrap.dedent("""
        async def tag(request, call_next):
            response = await call_next(request)
            response.headers["x-function"] = "1"
            return response

        class Tag:
            def __init__(self, app):
                self.app = app

            async def __call__(self, scope, receive, send):
                async def tagged(message):
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], (b"x-class", b"1")]
                    await send(message)
                await self.app(scope, receive, tagged)

        NUMBER = 3
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_foreign_middleware(connect: Any, foreign: Any, events: Any) -> None:
    module = "headrace_server_test_middleware"
    client = connect(FakeEngine("xy"), middleware=(f"{module}.tag", f"{module}.Tag"))
    answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert (answer.headers["x-function"], answer.headers["x-class"]) == ("1", "1")
    assert len(events(answer.text)) == 3
    for path in ("NUMBER", "missing"):
        with pytest.raises(ConfigError, match=path):
            connect(middleware=(f"{module}.{path}",))
    with pytest.raises(ConfigError, match="could not be imported"):
        connect(middleware=("nowhere",))


@pytest.mark.req("REL-06")
async def test_a_slow_reader_costs_bounded_memory(live: Any, until: Any) -> None:
    """Nothing more is taken from the engine while the socket is full."""
    taken = 0

    class Counting(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            async for output in super().generate(*args, **kwargs):
                taken += 1
                yield output

    model = fake_served_model(max_model_len=10**6)
    server = await live(Counting("x" * 300_000, model=model, tokens_per_output=10))
    sock = socket.create_connection(server.sock.getsockname())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"prompt": "a", "max_tokens": 300_000, "stream": True}).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    looks: list[int] = []

    def stands() -> bool:
        looks.append(taken)
        return taken > 0 and len(looks) > 30 and len(set(looks[-30:])) == 1

    await until(stands)
    assert taken < 29_000
    sock.close()
    await until(lambda: server.engine.num_running == 0)


class Turnstile(asyncio.Event):
    """Lets one through each time that it is opened."""

    async def wait(self) -> Literal[True]:
        await super().wait()
        self.clear()
        return True


async def test_blank_lines_in_quiet_times(
    live: Any, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_AFTER", 0.1)
    turnstile = Turnstile()
    server = await live(FakeEngine("xy", gate=turnstile))
    body, text, stripped, opened = {"prompt": "a", "stream": True}, "", [], 0
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as answer,
    ):
        async for piece in answer.aiter_text():
            text += piece
            stripped.append(piece.strip())
            if text.count("\n\n") - text.count("data: ") >= 2 * (opened + 1):
                turnstile.set()
                opened += 1
    assert opened >= 2, "before the first output, and between it and the second"
    assert len(events(text)) == 3
    # There are clients that strip pieces before they join them: nothing stands before an event then.
    assert all(piece.startswith("data: ") for piece in stripped if piece)


@pytest.mark.req("REL-06")
async def test_a_reader_that_never_reads_is_dropped(
    live: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(stream, "WRITE_TIMEOUT", 0.3)
    model = fake_served_model(max_model_len=10**6)
    engine = FakeEngine("x" * 900_000, model=model, tokens_per_output=20)
    server = await live(engine)
    sock = socket.create_connection(server.sock.getsockname())
    body = json.dumps({"prompt": "a", "max_tokens": 900_000, "stream": True}).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    await until(lambda: bool(engine.aborted))
    sock.close()


class Stream:
    """A streamed completion being read."""

    def __init__(self, server: Any) -> None:
        self.text = ""
        self.task = asyncio.create_task(self._read(server))

    async def _read(self, server: Any) -> None:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        async with (
            httpx2.AsyncClient(timeout=60) as client,
            client.stream("POST", server.url + "/v1/completions", json=body) as answer,
        ):
            async for piece in answer.aiter_text():
                self.text += piece


@pytest.mark.req("REL-09")
async def test_drain_lets_running_work_finish(live: Any, until: Any, events: Any) -> None:
    engine = FakeEngine("x" * 100, delay=0.01)
    server = await live(engine, drain_timeout=20)
    running = Stream(server)
    await until(lambda: bool(running.text))
    async with httpx2.AsyncClient() as client:
        server.state.lifecycle.begin_drain()
        for path, status in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
            assert (await client.get(server.url + path)).status_code == status, path
        refused = await client.post(server.url + "/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    await running.task
    chunks = events(running.text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "x" * 100
    assert await asyncio.wait_for(server.task, 60) == 0
    assert engine.shut_down


@pytest.mark.req("REL-09")
async def test_drain_ends_what_does_not_finish(live: Any, until: Any, events: Any) -> None:
    engine = FakeEngine("x" * 3000, delay=0.05)
    server = await live(engine, drain_timeout=0.3)
    running = Stream(server)
    async with httpx2.AsyncClient() as client:
        waiting = asyncio.create_task(
            client.post(server.url + "/v1/completions", json={"prompt": "b", "max_tokens": 3000})
        )
        await until(lambda: bool(running.text) and engine.num_running == 2)
        server.state.lifecycle.begin_drain()
        await running.task
        error = events(running.text)[-1]["error"]
        assert error["code"] == 503
        assert (await waiting).status_code == 503
    assert await asyncio.wait_for(server.task, 60) == 0
    assert engine.num_running == 0


@pytest.mark.req("REL-03")
@pytest.mark.parametrize("silent", [False, True])
async def test_engine_death(live: Any, until: Any, events: Any, silent: bool) -> None:
    class Silent(FakeEngine):
        """Dies without telling its running requests."""

        def kill(self, reason: str = "") -> None:
            self._dead = RuntimeError("canary")

        def _raise_if_dead(self) -> None:
            if not self._running:
                super()._raise_if_dead()

    engine = (Silent if silent else FakeEngine)("x" * 3000, delay=0.02)
    server = await live(engine)
    running = Stream(server)
    await until(lambda: bool(running.text))
    engine.kill()
    async with httpx2.AsyncClient() as client:
        if not silent:
            assert (await client.get(server.url + "/health")).status_code == 503
    await asyncio.wait_for(running.task, 30)
    assert events(running.text)[-1]["error"]["code"] in (500, 503)
    assert "canary" not in running.text
    assert await asyncio.wait_for(server.task, 60) == 1


async def test_a_taken_port_fails_at_once() -> None:
    first = bind(ServerSettings(port=0))
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=str(port)):
        bind(ServerSettings(port=port))
    first.close()


async def test_unix_socket(live: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind(ServerSettings(uds=str(path))).close()  # leaves a stale file
    settings = ServerSettings(uds=str(path))
    sock = bind(settings)
    with pytest.raises(ConfigError, match="uds"):
        bind(settings)
    app = create_app(FakeEngine("x"), settings)
    task = asyncio.create_task(serve(app, sock, settings))
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(path))) as client:
        answer = await client.get("http://any/version")
        assert answer.status_code == 200
    app.state.headrace.lifecycle.begin_drain()
    assert await asyncio.wait_for(task, 60) == 0
    assert not path.exists()


async def test_staying_up_with_a_dead_engine(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    monkeypatch.setattr(run, "WATCH_INTERVAL", 0.001)
    server = await live()
    server.engine.kill()
    async with httpx2.AsyncClient() as client:
        for _ in range(30):  # each a round of the watch, and more
            assert (await client.get(server.url + "/health")).status_code == 503
    server.state.lifecycle.begin_drain()
    assert await asyncio.wait_for(server.task, 60) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_tls(live: Any, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    settings = ServerSettings(port=0, ssl_keyfile=key, ssl_certfile=certificate)
    sock = bind(settings)
    assert run.address(sock, settings).startswith("https://127.0.0.1:")
    app = create_app(FakeEngine("x"), settings)
    task = asyncio.create_task(serve(app, sock, settings))
    trusted = ssl.create_default_context(cafile=certificate)
    async with httpx2.AsyncClient(verify=trusted) as client:
        answer = await client.get(run.address(sock, settings) + "/version")
    assert answer.status_code == 200
    app.state.headrace.lifecycle.begin_drain()
    assert await asyncio.wait_for(task, 60) == 0


async def test_addresses_of_ipv6_hosts_are_in_brackets() -> None:
    settings = ServerSettings(host="::1", port=0)
    try:
        sock = bind(settings)
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert run.address(sock, settings).startswith("http://[::1]:")
    sock.close()


SERVE = """
import sys
from headrace_testing.fakes.engine import FakeEngine
from headrace_server import ServerSettings, create_app
from headrace_server.run import bind, run
settings = ServerSettings(port=0, drain_timeout=float(sys.argv[1]))
sock = bind(settings)
app = create_app(FakeEngine("x" * 3000, delay=0.02), settings)
print(sock.getsockname()[1], flush=True)
sys.exit(run(app, sock, settings))
"""


@pytest.mark.req("REL-09")
@pytest.mark.parametrize(
    ("signals", "drain"), [((signal.SIGTERM,), "0.2"), ((signal.SIGTERM, signal.SIGINT), "60")]
)
async def test_signals(until: Any, events: Any, signals: Any, drain: str) -> None:
    """One signal drains, a second stops at once; both leave with status 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, drain], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))

        class Server:
            url = f"http://127.0.0.1:{port}"

        running = Stream(Server)
        await until(lambda: bool(running.text))

        async def drains() -> bool:
            async with httpx2.AsyncClient() as client:
                return (await client.get(Server.url + "/readyz")).status_code == 503

        for index, number in enumerate(signals):
            if index:
                await until(drains)  # two signals at once are one
            process.send_signal(number)
        await asyncio.wait_for(running.task, 30)
        assert events(running.text)[-1]["error"]["code"] == 503
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
