"""Layers divided over two processes give what one gives: the same tokens, log-probabilities within 1e-4."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_heads import eagle3
from families import FAMILIES, VOCAB_SIZE, save_model
from modes import PROMPTS, SETTINGS
from servers import alive, children_of
from together import together

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
DIVIDED = {**SETTINGS, "tensor_parallel_size": 2, "num_gpu_blocks_override": 24,
           "max_num_batched_tokens": 32, "max_num_seqs": 7}  # fmt: skip
"""Small steps and few blocks: prompts are computed in parts, and requests are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def divided(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **DIVIDED) as llm:
        yield llm
    wait_until(
        lambda: not children_of(os.getpid()) or not rank_pids(), what="a rank is left behind"
    )


def rank_pids() -> list[int]:
    return [
        pid for pid in children_of(os.getpid())
        if alive(pid) and b"multiproc.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip


def said(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of each prompt's completions."""
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for one in output.outputs:
            entries = zip(one.token_ids, one.logprobs, strict=True)
            found.append([(token, entry[token].logprob) for token, entry in entries])
    return found


def agree(left: list[list[tuple[int, float]]], right: list[list[tuple[int, float]]]) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def test_two_ranks_say_what_one_says(whole: LLM, divided: LLM) -> None:
    assert len(rank_pids()) == 1
    alone = [said(divided, [prompt])[0] for prompt in PROMPTS]
    agree(alone, said(whole, PROMPTS))
    before = divided.engine.stats().num_preemptions
    with together(divided, len(PROMPTS)):
        batched = said(divided, PROMPTS)
    stats = divided.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    assert batched == alone, "bits do not depend on batches, chunks, hits and preemptions"
    assert said(divided, PROMPTS) == alone, "nor on the run"


def test_reports_are_by_rank(divided: LLM) -> None:
    reports = divided.collective_rpc("report")
    assert [report["rank"] for report in reports] == [0, 1]
    assert [report["pid"] for report in reports] == [os.getpid(), *rank_pids()]
    assert {report["communicator"] for report in reports} <= {"shm", "gloo"}


def test_random_choices_penalties_and_bias(whole: LLM, divided: LLM) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.7, top_k=8, top_p=0.9, seed=6, n=2, max_tokens=NUM_TOKENS,
                       ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.6, logprobs=0,
                       frequency_penalty=0.4, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0, logit_bias={9: 3.0}, min_tokens=4, stop_token_ids=[9],
                       max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    ]  # fmt: skip
    prompts = PROMPTS[1:5]
    agree(said(divided, prompts, params), said(whole, prompts, params))


def test_prompt_logprobs(whole: LLM, divided: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)

    def scores(llm: LLM) -> list[float]:
        [output] = llm.generate([PROMPTS[6]], params, use_tqdm=False)
        pairs = zip(PROMPTS[6][1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in pairs]

    assert scores(divided) == pytest.approx(scores(whole), abs=1e-4)


@pytest.mark.parametrize("communicator", ["auto", "gloo"])
def test_a_vocabulary_that_ranks_do_not_divide(communicator: str, tmp_path: Path) -> None:
    """The last rank has fewer tokens. Recorded with shared memory, eager over gloo."""
    kind, sizes = FAMILIES["llama"]
    odd = {**sizes, "vocab_size": VOCAB_SIZE + 3, "tie_word_embeddings": False}
    save_model("llama", tmp_path, {"llama": (kind, odd)})
    last = [[VOCAB_SIZE + 2, VOCAB_SIZE, VOCAB_SIZE + 1, 3], *PROMPTS[1:4]]
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = said(llm, last, params)
    with LLM(str(tmp_path), **DIVIDED, communicator=communicator) as llm:
        found = said(llm, last, params)
        assert said(llm, last, params) == found
    agree(found, expected)


def test_another_communicator_and_loop_give_the_same_bits(folder: Path, divided: LLM) -> None:
    """Steps run eagerly over gloo, and as recordings through shared memory where that is built."""
    with LLM(str(folder), **{**DIVIDED, "async_scheduling": False}, communicator="gloo") as llm:
        assert said(llm, PROMPTS) == said(divided, PROMPTS)


def test_functions_for_workers_are_refused(divided: LLM) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        divided.apply_model(lambda model: 1)
    assert said(divided, PROMPTS[:1])


@pytest.mark.parametrize("how", ["ngram", "draft_model", "eagle3"])
def test_guesses_are_checked_by_every_rank(
    folder: Path, whole: LLM, how: str, tmp_path: Path
) -> None:
    """What guesses is rank 0's alone."""
    config: dict[str, Any] = {"method": how, "num_speculative_tokens": 3}
    if how == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    elif how == "draft_model":
        save_model("llama3", tmp_path)
        config["model"] = str(tmp_path)
    elif how == "eagle3":
        eagle3(tmp_path)
        config["model"] = str(tmp_path)
    settings = {**DIVIDED, "num_gpu_blocks_override": 120}
    with LLM(str(folder), **settings, speculative_config=config) as llm:
        agree(said(llm, PROMPTS), said(whole, PROMPTS))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"worker_extension_cls": "a.b:C"}, "parallel.worker_extension_cls"),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "cache.calculate_kv_scales"),
        ({"distributed_executor_backend": "uni"}, "parallel.distributed_executor_backend"),
        ({"distributed_executor_backend": "nobody"}, "nobody"),
        ({"device": "sim"}, "parallel.tensor_parallel_size"),
        ({"communicator": "nccl"}, "parallel.communicator = 'nccl'.*needs device 'cuda'"),
        ({"communicator": "single"}, "parallel.communicator = 'single'.*gloo"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size = 3: it must be a divisor of \d"),
        ({"tensor_parallel_size": 0}, "parallel.tensor_parallel_size = 0"),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    folder: Path, settings: dict[str, Any], field: str
) -> None:
    before = rank_pids()
    with pytest.raises((ValueError, LookupError), match=field):
        LLM(str(folder), **{**DIVIDED, **settings})
    assert rank_pids() == before
