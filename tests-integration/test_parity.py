"""Every family against transformers in float32, and against itself in every mode of running.

Tokens must equal transformers' and log-probabilities agree within 1e-4; between our own modes both
must be equal bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCAB_SIZE, save_model

from headrace import LLM, SamplingParams

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 8,
    "num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "use_tqdm_on_load": False,
}  # fmt: skip


FEW_BLOCKS = {"mistral": 17, "gemma2": 40, "gemma3": 97}
"""Enough for one request and not for seven; hybrid models need blocks in each cache group."""


def _prompts() -> list[list[int]]:
    """Different lengths, some sharing a beginning of several blocks, one aligned to blocks."""
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = draw(40)
    return [draw(1), draw(7), shared + draw(5), shared + draw(9), shared, draw(33), draw(64)]


PROMPTS = _prompts()


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    """A checkpoint, transformers' answers to the prompts, and ours, one request at a time."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_model(request.param, folder)
    expected = [_greedy(oracle, prompt) for prompt in PROMPTS]
    del oracle
    return folder, expected, _run(folder, alone=True)


def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[tuple[int, float]]:
    """transformers' greedy tokens and their log-probabilities, without its cache."""
    tokens, result = list(prompt), []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        best = int(logprobs.argmax())
        result.append((best, float(logprobs[best])))
        tokens.append(best)
    return result


def _run(
    folder, *, alone: bool = False, repeat: int = 1, preempt: bool = False, **settings
) -> list[list[tuple[int, float]]]:
    if preempt:
        settings["num_gpu_blocks_override"] = FEW_BLOCKS.get(folder.name.rstrip("0"), 24)
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        for _ in range(repeat):
            if alone:
                outputs = [llm.generate(p, PARAMS, use_tqdm=False)[0] for p in PROMPTS]
            else:
                outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        if repeat > 1:
            assert outputs[2].num_cached_tokens >= 40, "the second run must hit the cache"
        assert not preempt or llm.engine.stats().num_preemptions > 0
    return [_pairs(output) for output in outputs]


def _pairs(output) -> list[tuple[int, float]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    return [
        (token, entry[token].logprob)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def test_tokens_equal_and_logprobs_agree_with_transformers(family):
    _, expected, alone = family
    for ours, theirs in zip(alone, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        for (_, our_logprob), (_, their_logprob) in zip(ours, theirs):
            assert our_logprob == pytest.approx(their_logprob, abs=1e-4)


@pytest.mark.req("REL-15")
@pytest.mark.spec("APC")
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"repeat": 2},
        {"max_num_batched_tokens": 13, "max_num_seqs": 4},
        {"max_num_seqs": 7, "preempt": True},
        {"num_threads": 2},
        {"engine_process": True},
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": [1, 9]},
    ],
    ids=[
        "batched", "simple-loop", "no-prefix-cache", "prefix-hits", "chunked", "preempted",
        "two-threads", "engine-process", "eager", "mostly-eager",
    ],
)  # fmt: skip
def test_every_mode_gives_the_same_bits(family, mode):
    folder, _, alone = family
    assert _run(folder, **mode) == alone
