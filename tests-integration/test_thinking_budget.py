"""A bound on reasoning, with the demo model, which marks start and end itself."""

from __future__ import annotations

import asyncio

import pytest

from headrace.assembly import connect
from headrace_core.config import ModelConfig
from headrace_core.errors import UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.config import EngineConfig, SchedulerConfig, StructuredOutputsConfig

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


async def answer(engine, name, *, think, **params):
    prompt = ChatPrompt(QUESTION, chat_template_kwargs={"enable_thinking": think})
    settings = SamplingParams(
        temperature=0, max_tokens=64, skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY, **params,
    )  # fmt: skip
    async for output in engine.generate(prompt, settings, name):
        last = output
    return last.outputs[0]


def test_reasoning_ends_where_its_budget_does():
    async def run():
        config = EngineConfig(
            model=ModelConfig(max_model_len=512),
            scheduler=SchedulerConfig(max_num_seqs=4),
            structured_outputs=StructuredOutputsConfig(reasoning_parser="qwen3"),
        )
        engine = connect(config)
        try:
            [start] = (await engine.tokenize("<think>")).token_ids
            [end] = (await engine.tokenize("</think>")).token_ids
            free = await answer(engine, "free", think=True)
            before = free.token_ids.index(start)
            length = free.token_ids.index(end) - before - 1
            assert length > 3
            for budget in (0, 1, 3, length + 1):
                bound = await answer(engine, "b", think=True, thinking_token_budget=budget)
                place = before + 1 + min(budget, length)
                assert bound.token_ids.index(end) == place
                assert bound.token_ids[:place] == free.token_ids[:place]
                assert bound.text.partition("</think>")[2].strip(), "the answer follows"
            plain = await answer(engine, "p", think=False)
            again = await answer(engine, "p", think=False, thinking_token_budget=0)
            assert again.token_ids == plain.token_ids, "an answer without reasoning"
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_an_engine_that_knows_no_reasoning_refuses_a_budget():
    async def run():
        engine = connect(EngineConfig(model=ModelConfig(max_model_len=256)))
        try:
            with pytest.raises(UnsupportedFeature, match="--reasoning-parser"):
                await answer(engine, "x", think=True, thinking_token_budget=3)
        finally:
            await engine.shutdown()

    asyncio.run(run())
