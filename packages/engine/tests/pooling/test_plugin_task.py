from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.engine import AdmissionTicket
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor, IOProcessorResponse
from headrace_core.request import ChatPrompt
from headrace_engine.pooling.plugin_task import answer, as_prompts, plugin_params
from headrace_testing.fakes.engine import fake_served_model

SETTINGS = SimpleNamespace(model=ModelConfig(), load=LoadConfig())
MODEL = fake_served_model(tasks=("score", "embed", "plugin"))


class Lengths(IOProcessor):
    """Lists of texts -> the lengths of their results."""

    def parse_request(self, request: Any) -> Any:
        return request

    def pre_process(self, prompt: Any, request_id: str | None = None, **_: Any) -> Any:
        return prompt

    def post_process(self, model_output: Any, request_id: str | None = None, **_: Any) -> Any:
        return [output.outputs.data for output in model_output]

    def output_to_response(self, output: Any) -> IOProcessorResponse:
        return IOProcessorResponse(output)


class Engine:
    """Answers with the prompt's length, long prompts first."""

    def __init__(self, processor: IOProcessor | None) -> None:
        self.io_processor, self.model = processor, MODEL
        self.calls: list[tuple[str, str, PoolingParams, int]] = []
        self.entries: set[AdmissionTicket] = set()
        self.cancelled: list[str] = []

    async def encode(
        self,
        prompt: str,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int,
        add_special_tokens: bool | None,
        entry: AdmissionTicket,
    ) -> PoolingRequestOutput[PoolingOutput]:
        self.calls.append((request_id, task, params, priority))
        self.entries.add(entry)
        if prompt == "bad":
            raise RequestError("bad prompt", param="prompt")
        try:
            for _ in range(30 - len(prompt)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        return PoolingRequestOutput(request_id, PoolingOutput(len(prompt)), [1])


def processor() -> Lengths:
    return Lengths(SETTINGS, MODEL)


def run(engine: Engine, prompt: Any, params: PoolingParams | None = None) -> Any:
    encode: Any = engine.encode
    return asyncio.run(
        answer(engine.io_processor, encode, engine.model, prompt, params, "r", priority=2)
    )


def test_results_come_in_the_order_of_the_prompts() -> None:
    engine = Engine(processor())
    assert run(engine, ["a", "bbb", "cc"]) == [1, 3, 2]
    assert [call[0] for call in engine.calls] == ["r-0", "r-1", "r-2"]
    assert {call[1] for call in engine.calls} == {"embed"}  # the first task of one prompt's own
    assert all(call[2].skip_reading_prefix_cache for call in engine.calls)
    assert {call[3] for call in engine.calls} == {2}
    assert len(engine.entries) == 1, "for the queue they are one request"


def test_a_prompt_that_fails_cancels_the_others() -> None:
    engine = Engine(processor())
    with pytest.raises(RequestError, match="bad prompt"):
        run(engine, ["a", "bad", "c"])
    assert sorted(engine.cancelled) == ["r-0", "r-2"]


def test_pairs_may_be_taken_as_they_are_ready() -> None:
    class Streaming(Lengths):
        async def post_process_async(
            self, model_output: AsyncIterator[Any], request_id: str | None = None, **_: Any
        ) -> Any:
            return [index async for index, _ in model_output]

    engine = Engine(Streaming(SETTINGS, MODEL))
    assert run(engine, ["a", "bbb", "cc"]) == [1, 2, 0]


def test_without_one_the_engine_says_so() -> None:
    with pytest.raises(UnsupportedFeature, match="--io-processor-plugin"):
        run(Engine(None), "text")


def test_whose_task_it_is() -> None:
    asked = plugin_params(processor(), MODEL, PoolingParams(task="plugin", normalize=False))
    assert asked == (PoolingParams(normalize=False, skip_reading_prefix_cache=True), "embed")

    class Own(Lengths):
        def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
            return PoolingParams(task="token_embed", skip_reading_prefix_cache=False)

    params, task = plugin_params(Own(SETTINGS, MODEL), MODEL, None)
    assert (task, params.skip_reading_prefix_cache) == ("token_embed", False)


def test_who_reads_extra_keywords() -> None:
    asked = PoolingParams(extra_kwargs={"size": 2})
    with pytest.raises(RequestError, match=r"extra_kwargs = {'size': 2}: must be left out"):
        plugin_params(processor(), MODEL, asked)

    class Own(Lengths):
        def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
            assert params is not None
            assert params.extra_kwargs == {"size": 2}
            return params

    params, _ = plugin_params(Own(SETTINGS, MODEL), MODEL, asked)
    assert params.extra_kwargs is None, "the model's pooler reads none"
    theirs = fake_served_model(tasks=("embed", "plugin"), source="plugin:theirs")
    for kind in (Own, Lengths):
        params, _ = plugin_params(kind(SETTINGS, theirs), theirs, asked)
        assert params.extra_kwargs == {"size": 2}


def test_what_counts_as_one_prompt() -> None:
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    for one in ("text", {"prompt": "text"}, [1, 2, 3], chat):
        assert as_prompts(one) == [one]
    assert as_prompts(("a", [1])) == ["a", [1]]
    with pytest.raises(RequestError, match="no prompt"):
        as_prompts([])
