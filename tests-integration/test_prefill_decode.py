"""Prompts that one server computes and another answers: equal texts, less to compute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ports import free_ports
from servers import PATIENCE, RunningServer, running, serving

from headrace_testing.waiting import wait_until

MODEL = "headrace-demo"
TEXTS = [
    "the river runs past the old mill and " * 12,
    "one two three four five six seven eight " * 10,
    "add 12 and 30, then 7 and 9, then say so. " * 9,
]


def config(connector: str, role: str, **extra: Any) -> tuple[str, str]:
    stated = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    if connector != "file":
        stated |= {"kv_port": 0, "kv_buffer_size": 64 << 20}
    return "--kv-transfer-config", json.dumps(stated)


@contextmanager
def divided(
    connector: str, flags: tuple[str, ...] = (), **extra: Any
) -> Iterator[tuple[RunningServer, RunningServer, RunningServer]]:
    """A server that prefills, one that decodes, and a router before them."""
    flags = (*flags, "--enable-prompt-tokens-details")
    with ExitStack() as stack:
        first = stack.enter_context(serving(*flags, *config(connector, "kv_producer", **extra)))
        last = stack.enter_context(serving(*flags, *config(connector, "kv_consumer", **extra)))
        words = ("--prefill", first.url, "--decode", last.url, "--health-interval", "0.2")
        router = stack.enter_context(running("route", *words))
        yield first, last, router


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    with serving() as server:
        yield server


def complete(server: RunningServer, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0, **more}
    answer = httpx.post(server.api + "/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: RunningServer, text: str) -> str:
    client = openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=PATIENCE)
    messages: Any = [{"role": "user", "content": text}]
    pieces = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True
    )
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


LIBRARIES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}


@pytest.mark.parametrize("connector", ["p2p", "file", "nixl", "mooncake"])
def test_one_server_prefills_and_another_decodes(
    plain: RunningServer, connector: str, tmp_path: Path
) -> None:
    if connector in LIBRARIES:
        # In a process of its own: a fork of one that has it is none that it works in.
        command = [sys.executable, "-c", f"import {LIBRARIES[connector]}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{connector} is not installed")
    extra: dict[str, Any] = {"mooncake": {"trust_network": True}}.get(connector, {})
    if connector == "file":
        extra = {"shared_storage_path": str(tmp_path)}
    with divided(connector, **extra) as (first, last, router):
        for text in TEXTS:
            answer = complete(router, text)
            assert answer["choices"] == complete(plain, text)["choices"]
            details = answer["usage"]["prompt_tokens_details"]
            assert answer["usage"]["prompt_tokens"] - details["cached_tokens"] <= 16
            assert streamed(router, text) == streamed(plain, text)
        assert router.metric("router_prefills_total") == 2 * len(TEXTS)
        assert last.metric("kv_offload_loaded_blocks_total") > 0
        assert last.metric("kv_offload_failed_blocks_total") == 0
        assert first.metric("generation_tokens_total") == 2 * len(TEXTS)


def test_two_ranks_prefill_and_one_decodes() -> None:
    """The server that decodes reads its halves of the heads from both ranks of the other."""
    flags = ("--dtype", "float32", "--enable-prompt-tokens-details", "--kv-transfer-config")

    def stated(role: str, port: int) -> str:
        own = {"kv_connector": "p2p", "kv_role": role, "kv_port": port, "kv_head_parts": 2}
        return json.dumps({**own, "kv_buffer_size": 64 << 20})

    with ExitStack() as stack:
        first = stack.enter_context(
            serving(*flags, stated("kv_producer", free_ports(2)), "-tp", "2")
        )
        last = stack.enter_context(serving(*flags, stated("kv_consumer", 0)))
        words = ("--prefill", first.url, "--decode", last.url, "--health-interval", "0.2")
        router = stack.enter_context(running("route", *words))
        for text in TEXTS:
            answer = complete(router, text)
            alone = complete(last, text, cache_salt="nobody has this")
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
            details = answer["usage"]["prompt_tokens_details"]
            assert answer["usage"]["prompt_tokens"] - details["cached_tokens"] <= 16
        assert last.metric("kv_offload_failed_blocks_total") == 0


def test_a_server_that_prefills_may_die(plain: RunningServer) -> None:
    with divided("p2p") as (first, last, router):
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        found = complete(first, TEXTS[0], max_tokens=1, kv_transfer_params=asked)
        params = found["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        first.process.kill()
        first.process.wait(PATIENCE)
        # Its blocks are gone with it: what it promised is computed.
        answer = complete(last, TEXTS[0], kv_transfer_params=params)
        assert answer["choices"] == complete(plain, TEXTS[0])["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert last.metric("kv_offload_failed_blocks_total") > 0
        for text in TEXTS[1:]:
            assert complete(router, text)["choices"] == complete(plain, text)["choices"]
        assert router.metric("router_whole_requests_total") == 2


def test_blocks_are_offered_again_and_prompts_may_fail_with_them(plain: RunningServer) -> None:
    """What the prefilling engine has cached, but no longer given away, is given away again."""
    asked = {"do_remote_decode": True}
    with serving(
        "--enable-prompt-tokens-details", *config("p2p", "kv_both", keep_seconds=0.2)
    ) as first:
        params = complete(first, TEXTS[0], kv_transfer_params=asked)["kv_transfer_params"]
        strict = json.loads(config("p2p", "kv_consumer")[1]) | {"kv_load_failure_policy": "fail"}
        with serving("--kv-transfer-config", json.dumps(strict)) as last:
            wait_until(lambda: not _answers(last, params), PATIENCE)
            again = complete(first, TEXTS[0], kv_transfer_params=asked)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 32


def _answers(server: RunningServer, params: dict[str, Any]) -> bool:
    body = {"model": MODEL, "prompt": TEXTS[0], "max_tokens": 3, "kv_transfer_params": params}
    answer = httpx.post(server.api + "/completions", json=body, timeout=PATIENCE)
    return answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] != "error"


@pytest.mark.parametrize(
    ("flags", "params", "message"),
    [
        ((), {"do_remote_decode": True}, "it has no --kv-transfer-config"),
        (config("p2p", "kv_consumer"), {"do_remote_decode": True}, "its kv_role is kv_consumer"),
    ],
)
def test_refused_params(flags: tuple[str, ...], params: dict[str, Any], message: str) -> None:
    with serving(*flags) as server:
        body = {"model": MODEL, "prompt": "a", "kv_transfer_params": params}
        answer = httpx.post(server.api + "/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "kv_transfer_params"
