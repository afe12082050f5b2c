"""What every spelling of a turn gets from it: choices, and text that is written without an output for it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace_core.output import RequestOutput
from headrace_testing.fakes.engine import FakeEngine

HI = [{"role": "user", "content": "Hi"}]
TEXT = " \n Hello, these are some words."
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 1000, "model": "fake-model"},
}


class CountingEngine(FakeEngine):
    """Counts outputs that are pushed: whole ones, and texts in place of them."""

    outputs = texts = 0

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[RequestOutput]:
        stream: Any = super().generate(*args, **kwargs)
        push = stream.push

        async def counted(
            take: Callable[[RequestOutput], bool],
            take_text: Callable[[str, int], bool] | None = None,
        ) -> None:
            def one(output: RequestOutput) -> bool:
                self.outputs += 1
                return take(output)

            def text(new: str, num_tokens: int) -> bool:
                assert take_text is not None
                self.texts += 1
                return take_text(new, num_tokens)

            await push(one, None if take_text is None else text)

        stream.push = counted
        result: AsyncIterator[RequestOutput] = stream
        return result


def without_names(text: str) -> str:
    """A stream with ids and times taken out."""
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    return re.sub(r'("(?:created|created_at|completed_at)":)\d+', r"\1 0", text)


@pytest.mark.parametrize("url", BODIES)
async def test_plain_text_is_written_without_outputs(connect: Any, url: str) -> None:
    body = {**BODIES[url], "stream": True}
    engine = CountingEngine(TEXT)
    told = (await connect(engine).post(url, json=body)).text
    assert (engine.outputs, engine.texts) == (
        1,
        len(TEXT) - 1,
    )  # the first is pulled, the last is whole
    pulled = (await connect(FakeEngine(TEXT, pushes=False)).post(url, json=body)).text
    assert without_names(told) == without_names(pulled)


@pytest.mark.parametrize("url", BODIES)
async def test_parsed_text_is_read_from_outputs(connect: Any, url: str) -> None:
    engine = CountingEngine(TEXT)
    client = connect(engine, reasoning_parser="qwen3")
    assert (await client.post(url, json={**BODIES[url], "stream": True})).status_code == 200
    assert (engine.outputs, engine.texts) == (len(TEXT), 0)


async def test_responses_that_keep_their_tokens_see_every_output(connect: Any) -> None:
    engine = CountingEngine(TEXT)
    body = {**BODIES["/v1/responses"], "stream": True, "enable_response_messages": True}
    assert (await connect(engine).post("/v1/responses", json=body)).status_code == 200
    assert engine.texts == 0
