"""Events of a real engine's prefix cache, heard over a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace_engine.kv.event_subscriber import KVEventSubscriber
from headrace_engine.kv.events import CachedBlocks
from headrace_testing.waiting import wait_until

BLOCK = 16


def prompt(number: int, length: int) -> list[int]:
    """Token ids that begin as others of the same parity do."""
    return [100 + number % 2] * (2 * BLOCK) + [200 + number] * (length - 2 * BLOCK)


@pytest.mark.parametrize(("device", "engine_process"), [("cpu", False), ("sim", True)])
def test_events_rebuild_what_the_engine_has_cached(
    tmp_path: Path, device: str, engine_process: bool
) -> None:
    """More prompts than the cache holds, so that blocks are evicted; whoever listens from the middle
    on knows for every prompt how much of it the engine will find."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    settings: dict[str, Any] = {
        "max_model_len": 128, "block_size": BLOCK, "num_gpu_blocks_override": 16, "device": device,
        "max_num_seqs": 2, "kv_events_config": events, "use_tqdm_on_load": False,
        "engine_process": engine_process,
    }  # fmt: skip
    blocks, evicted = CachedBlocks(), 0
    with LLM(**settings) as llm:
        for number in range(6):
            known = _run(llm, prompt(number, 60 + 7 * number))[1]
        with KVEventSubscriber(events["endpoint"], events["replay_endpoint"]) as subscriber:
            for number in (5, 0, 3, 3, 1):
                _hear(subscriber, blocks, known)
                ids = prompt(number, 60 + 7 * number)
                expected = blocks.num_cached_tokens(ids[:-1])
                num_cached, known = _run(llm, ids)
                assert num_cached == expected
                evicted += expected < (len(ids) - 1) // BLOCK * BLOCK
            _hear(subscriber, blocks, known)
            llm.reset_prefix_cache()
            wait_until(lambda: not len(blocks) or _take(subscriber, blocks))
            assert subscriber.num_lost == 0
    assert evicted, "nothing was evicted: the test is too easy"


def _run(llm: LLM, ids: list[int]) -> tuple[int, list[int]]:
    """Tokens that the engine found, and all whose keys and values it has at the end: all but the last."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    return output.num_cached_tokens, [*ids, *output.outputs[0].token_ids[:-1]]


def _hear(subscriber: KVEventSubscriber, blocks: CachedBlocks, known: list[int]) -> None:
    """Events up to those of a request's end: nothing happens after them in an idle engine."""
    whole = len(known) // BLOCK * BLOCK
    wait_until(lambda: blocks.num_cached_tokens(known) >= whole or _take(subscriber, blocks))


def _take(subscriber: KVEventSubscriber, blocks: CachedBlocks) -> None:
    for batch in subscriber.poll(0.05):
        blocks.apply(batch)
