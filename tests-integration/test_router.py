"""``headrace route`` in front of real servers, asked by real clients."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest
from servers import PATIENCE, RunningServer, running, serving

from headrace_testing.waiting import wait_until

SIM = ("--device", "sim", "--sim-step-ms", "2", "--enable-prompt-tokens-details")
MODEL = "headrace-demo"


@contextmanager
def routing(*servers: RunningServer, more: tuple[str, ...] = ()) -> Iterator[RunningServer]:
    words = [word for server in servers for word in ("--server", server.url)]
    quick = ("--health-interval", "0.2", "--dev-mode")
    with running("route", *words, *quick, *more) as router:
        wait_until(lambda: all(one["available"] for one in states(router)), PATIENCE)
        yield router


def states(router: RunningServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(router.url + "/router/servers", timeout=PATIENCE) as answer:
        found: list[dict[str, Any]] = json.load(answer)["servers"]
        return found


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def two() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(*SIM)) for _ in range(2)]


def client(router: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=router.api, api_key="none", max_retries=0, timeout=PATIENCE)


def test_a_conversation_stays_where_its_prefix_is(two: list[RunningServer]) -> None:
    with routing(*two) as router:
        ask = client(router).chat.completions.create
        assert [model.id for model in client(router).models.list()] == [MODEL]
        for talk in range(6):
            messages: list[Any] = [{"role": "user", "content": f"talk {talk}: " + "word " * 60}]
            for turn in range(3):
                stream = ask(
                    model=MODEL, messages=messages, max_tokens=16, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                chunks = list(stream)
                text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                details = chunks[-1].usage.prompt_tokens_details
                cached = details.cached_tokens or 0 if details else 0
                if turn:
                    assert cached >= 48, (talk, turn, cached)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and then?"},
                ]
        assert all(one["requests"] >= 3 for one in states(router))  # both have talks


def test_drained_and_killed_servers_lose_no_request() -> None:
    """Clients that ask all the time, while one server is drained and another killed: each request gets its
    whole answer, or is told that it broke off after its first byte."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(*SIM)) for _ in range(3)]
        router = stack.enter_context(routing(*servers))
        ends: list[str] = []
        stop = threading.Event()

        def ask(number: int) -> None:
            own = client(router)
            while not stop.is_set():
                ends.append(_asked(own, number))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(ends) > 10, PATIENCE)
            post(router.url + "/router/drain", {"server": servers[0].url})
            wait_until(lambda: states(router)[0]["requests_in_flight"] == 0, PATIENCE)
            before = len(ends)
            assert servers[0].stop() == 0
            servers[1].process.send_signal(signal.SIGKILL)
            wait_until(lambda: not states(router)[1]["available"], PATIENCE)
            wait_until(lambda: len(ends) > before + 20, PATIENCE)
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert set(ends) <= {"whole", "broken"}, ends
        assert ends.count("broken") <= len(threads)
        assert router.metric("router_broken_answers_total") == ends.count("broken")


def _asked(own: openai.OpenAI, number: int) -> str:
    try:
        stream = own.completions.create(
            model=MODEL, prompt=f"{number} " * 40, max_tokens=30, stream=True, temperature=0
        )
        num_tokens = sum(1 for chunk in stream if chunk.choices)
    except openai.APIError as error:
        return "broken" if "in the middle of its answer" in str(error) else repr(error)
    return "whole" if num_tokens >= 10 else f"{num_tokens} chunks"


def test_sigterm_lets_running_streams_end(two: list[RunningServer]) -> None:
    with routing(*two) as router:
        stream = client(router).completions.create(
            model=MODEL, prompt="x", max_tokens=300, stream=True
        )
        next(stream)
        router.process.send_signal(signal.SIGTERM)
        wait_until(lambda: router.status("/health") == 503, PATIENCE)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert router.process.wait(PATIENCE) == 0


def test_a_router_that_restarts_knows_what_is_cached(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """KV events tell a new router where conversations are that it has not sent there."""
    with ExitStack() as stack:
        servers, words = [], []
        for number in range(2):
            events = {
                "enable_kv_cache_events": True,
                "endpoint": f"ipc://{tmp_path}/{number}",
                "replay_endpoint": f"ipc://{tmp_path}/{number}r",
            }
            servers.append(
                stack.enter_context(serving(*SIM, "--kv-events-config", json.dumps(events)))
            )
            words += ["--kv-events", f"{events['endpoint']},{events['replay_endpoint']}"]
        chats = [
            {"model": MODEL, "max_tokens": 4,
             "messages": [{"role": "user", "content": f"{n} is the number " * 20}]}
            for n in range(6)
        ]  # fmt: skip
        for number, chat in enumerate(chats):
            post(servers[number % 2].url + "/v1/chat/completions", chat)
        router = stack.enter_context(routing(*servers, more=tuple(words)))
        for chat in chats:
            answer = post(router.url + "/v1/chat/completions", chat)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
        assert [one["requests"] for one in states(router)] == [3, 3]


def test_help_and_bad_settings() -> None:
    from forks import run_command as run

    assert "/router/drain" in run("route", "--help").stdout
    assert "a URL as http://host:port" in run("route", "--server", "nowhere").stderr
