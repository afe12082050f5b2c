"""Layers on several stages give the bits of one process: nothing is added in another order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_heads import eagle3
from families import save_model
from modes import PROMPTS, SETTINGS
from servers import children_of
from test_tensor_parallel import NUM_TOKENS, agree, rank_pids, said
from together import together

from headrace import LLM, SamplingParams
from headrace_distributed.shm import library as shared_memory
from headrace_kernels.cpu import library as kernels
from headrace_testing.waiting import wait_until

STAGED = {**SETTINGS, "pipeline_parallel_size": 2, "num_gpu_blocks_override": 24,
          "max_num_batched_tokens": 32, "max_num_seqs": 7}  # fmt: skip
"""Small steps and few blocks: prompts are computed in parts, and requests are preempted."""
PARTITION = "HEADRACE_PP_LAYER_PARTITION"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers."""
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **STAGED) as llm:
        yield llm
    wait_until(
        lambda: not children_of(os.getpid()) or not rank_pids(), what="a rank is left behind"
    )


def test_two_stages_say_what_one_process_says(whole: LLM, staged: LLM) -> None:
    assert len(rank_pids()) == 1
    alone = [said(staged, [prompt])[0] for prompt in PROMPTS]
    assert alone == said(whole, PROMPTS)
    before = staged.engine.stats().num_preemptions
    with together(staged, len(PROMPTS)):
        batched = said(staged, PROMPTS)
    stats = staged.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    assert batched == alone, "bits do not depend on batches, chunks, hits and preemptions"
    assert said(staged, PROMPTS) == alone, "nor on the run"


def test_random_choices_penalties_and_prompt_logprobs(whole: LLM, staged: LLM) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.7, top_k=8, top_p=0.9, seed=6, n=2, max_tokens=NUM_TOKENS,
                       ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.6, logprobs=0,
                       frequency_penalty=0.4, max_tokens=NUM_TOKENS, ignore_eos=True),
    ]  # fmt: skip
    prompts = PROMPTS[1:4]
    assert said(staged, prompts, params) == said(whole, prompts, params)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    left, right = (llm.generate([PROMPTS[6]], scored, use_tqdm=False)[0] for llm in (staged, whole))
    assert left.prompt_logprobs == right.prompt_logprobs


def test_three_stages_as_they_are_wanted(
    folder: Path, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo, with the other loop; each stage's cache is that of its layers."""
    monkeypatch.setenv(PARTITION, "1,2,1")
    settings = {**STAGED, "pipeline_parallel_size": 3, "async_scheduling": False}
    with LLM(str(folder), **settings, communicator="gloo") as llm:
        assert said(llm, PROMPTS) == said(whole, PROMPTS)
        reports = llm.collective_rpc("report")
    first, *others = [report["cache_bytes"] for report in reports]
    assert others == [2 * first, first]


def test_two_stages_of_two_ranks(folder: Path, whole: LLM) -> None:
    with LLM(str(folder), **STAGED, tensor_parallel_size=2) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        assert said(llm, PROMPTS) == alone
    agree(alone, said(whole, PROMPTS))


def test_guesses_are_checked_by_every_stage(
    folder: Path, whole: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are recorded where ranks talk through shared memory."""
    config = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    with (
        caplog.at_level(logging.INFO),
        LLM(str(folder), **STAGED, speculative_config=config) as llm,
    ):
        assert said(llm, PROMPTS) == said(whole, PROMPTS)
    captured = any(record.getMessage().startswith("captured steps") for record in caplog.records)
    assert captured == (shared_memory.available() and kernels.path() is not None)


def test_a_head_reads_layers_of_every_stage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guesses what it guesses in one process, as it gets the same bits."""
    monkeypatch.setenv(PARTITION, "1,2,1")
    eagle3(tmp_path, streams=(2, 0, 4, 3))
    config = {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    found = []
    for stages in (1, 3):
        settings = {**STAGED, "pipeline_parallel_size": stages, "num_gpu_blocks_override": 120}
        with LLM(str(folder), **settings, speculative_config=config) as llm:
            alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
            stats = llm.engine.stats()
            found.append((alone, stats.num_draft_tokens, stats.num_accepted_per_position))
            assert said(llm, PROMPTS) == alone
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize(
    ("settings", "partition", "message"),
    [
        ({"device": "sim"}, "", "parallel.pipeline_parallel_size"),
        ({"pipeline_parallel_size": 0}, "", "parallel.pipeline_parallel_size = 0"),
        ({"pipeline_parallel_size": 33, "tensor_parallel_size": 2}, "", r"in 1\.\.32"),
        ({"distributed_executor_backend": "uni"}, "", "parallel.distributed_executor_backend"),
        ({}, "1,2,1", "must be 2 numbers"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused_by_name(
    folder: Path,
    settings: dict[str, Any],
    partition: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if partition:
        monkeypatch.setenv(PARTITION, partition)
    before = rank_pids()
    with pytest.raises((ValueError, LookupError), match=message):
        LLM(str(folder), **{**STAGED, **settings})
    assert rank_pids() == before
