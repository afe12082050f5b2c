"""Targets for tails of latency at a server: prompts in parts that streams can bear, short ones first."""

from __future__ import annotations

import asyncio

import pytest
from forks import run_command
from servers import PATIENCE, serving
from soak import Stream, run_stream

from headrace_testing.waiting import until

pytestmark = pytest.mark.days(2)

SIM = (
    "--device", "sim", "--sim-step-ms", "5", "--sim-token-us", "500", "--max-num-batched-tokens", "2048",
    "--disable-uvicorn-access-log",
)  # fmt: skip
LONG, SHORT = "on and on " * 300, "once"
"""Prompts: of about a thousand tokens, each of which takes half a millisecond, and of one or two."""


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize(
    "words", [(), ("--engine-process",), ("--no-async-scheduling",)], ids=" ".join
)
def test_long_prompts_delay_neither_streams_nor_short_prompts(words):
    """Steps take as long as they should, or longer on a busy machine: never are there fewer of them."""
    with serving(*SIM, "--target-itl", "0.02", "--target-ttft", "30", *words) as server:
        read, long, short = Stream(1, 1200), [Stream(2 + i, 3) for i in range(2)], Stream(9, 3)

        async def run():
            reading = asyncio.create_task(run_stream(server.url, read, prompt=SHORT))
            await until(lambda: len(read.token_ids) >= 10)
            before = len(read.token_ids)
            prompts = [
                asyncio.create_task(run_stream(server.url, one, prompt=f"{one.seed} {LONG}"))
                for one in long
            ]
            await until(lambda: len(read.token_ids) >= before + 3)
            await run_stream(server.url, short, prompt=SHORT)
            assert not all(one.token_ids for one in long), "both came before the short one"
            await asyncio.gather(*prompts)
            during = len(read.token_ids) - before
            await reading
            return during

        during = asyncio.run(run())
        assert [s.wrong for s in (read, short, *long) if s.wrong] == []
        prompt_tokens = server.metric("prompt_tokens_total")
        # A part is 30 tokens or so; twice as many would be 60. Without a target both prompts are one step.
        assert during >= prompt_tokens / 60 > 8, (during, prompt_tokens)
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target-itl", "0"), "scheduler.target_itl = 0.0: must be a number of seconds above 0"),
        (("--target-ttft", "nan"), "scheduler.target_ttft = nan: must be a number of seconds"),
        (("--target-itl", "soon"), "argument --target-itl: invalid float value: 'soon'"),
        (("--target-ttft", "1", "--scheduling-policy", "fair"), "scheduler.policy = 'fair'"),
    ],
    ids=" ".join,
)
def test_targets_that_mean_nothing_are_refused_by_name(words, message):
    ended = run_command("serve", "--device", "sim", "--port", "0", *words, timeout=PATIENCE)
    assert ended.returncode != 0
    assert message in ended.stdout + ended.stderr
