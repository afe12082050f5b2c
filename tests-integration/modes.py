"""Running a checkpoint's prompts in every mode that must give the same bits."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from families import VOCAB_SIZE
from together import together

from headrace import LLM, SamplingParams

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 8,
    "num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "use_tqdm_on_load": False,
}  # fmt: skip


FEW_BLOCKS = {"mistral": 17, "gemma2": 40, "gemma3": 97, "cohere2": 40, "gpt_oss": 32, "mamba2": 3}
"""Enough for one request and not for seven; hybrid models need blocks in each cache group."""
NEVER_GROW = {"mamba2"}
"""Families whose requests hold a state and nothing else: they wait for it, and keep it to their end."""


def _prompts() -> list[list[int]]:
    """Different lengths, some sharing a beginning of several blocks, one aligned to blocks."""
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = draw(40)
    return [draw(1), draw(7), shared + draw(5), shared + draw(9), shared, draw(33), draw(64)]


PROMPTS = _prompts()

MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "simple-loop": {"async_scheduling": False},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "prefix-hits": {"repeat": 2},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preempted": {"max_num_seqs": 7, "preempt": True},
    "two-threads": {"num_threads": 2},
    "engine-process": {"engine_process": True},
    "eager": {"enforce_eager": True},
    "mostly-eager": {"cudagraph_capture_sizes": [1, 9]},
}
"""Keywords of :func:`run`."""


def run(
    folder, *, alone: bool = False, repeat: int = 1, preempt: bool = False, **settings
) -> list[list[tuple[int, float]]]:
    """Every prompt's greedy tokens and their log-probabilities; nothing stays in the cache.

    Args:
        folder: of the checkpoint.
        alone: one request at a time.
        repeat: how often all prompts run; the last time counts.
        preempt: with so few blocks that requests are preempted.
        settings: of the engine.
    """
    family = folder.name.rpartition("-")[0]
    if preempt:
        settings["num_gpu_blocks_override"] = FEW_BLOCKS.get(family, 24)
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        for _ in range(repeat):
            if alone:
                outputs = [llm.generate(p, PARAMS, use_tqdm=False)[0] for p in PROMPTS]
            else:
                with together(llm, len(PROMPTS)) if preempt else contextlib.nullcontext():
                    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        if repeat > 1:
            assert outputs[2].num_cached_tokens >= 40, "the second run must hit the cache"
        stats = llm.engine.stats()
        assert not preempt or (stats.num_preemptions > 0) == (family not in NEVER_GROW)
        assert stats.num_free_blocks == stats.num_blocks
    return [_pairs(output) for output in outputs]


def _pairs(output) -> list[tuple[int, float]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    return [
        (token, entry[token].logprob)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
