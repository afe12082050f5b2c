"""Beam search against transformers in float32: the same sequences, the same scores."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
from families import make_model

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.sampling_params import BeamSearchParams
from headrace_core.errors import PromptTooLong, RequestError
from headrace_testing.waiting import until

NUM_TOKENS = 10
PROMPTS = [[5, 9, 200, 31], [77, 3, 3, 140, 8, 61, 19, 250, 4], [300]]
SETTINGS = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 32, "max_logprobs": 64,
    "kv_cache_memory_bytes": 16 << 20, "num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=[("llama", 0), ("llama", 1), ("qwen3", 1), ("gpt2", 2)],
                ids=lambda p: f"{p[0]}-{p[1]}-ends")  # fmt: skip
def pair(request, tmp_path_factory):
    """A checkpoint whose end tokens really come up, and the transformers model."""
    family, num_ends = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{num_ends}")
    oracle = make_model(family)
    oracle.generation_config.eos_token_id = None
    likely = []
    for prompt in PROMPTS:
        beams = _theirs(oracle, prompt, 4, 1.0, False)
        likely += [tokens[step] for tokens, _ in beams for step in (2, 4)]
    ends = list(dict.fromkeys(likely))[:num_ends]
    oracle.generation_config.eos_token_id = ends or None
    oracle.config.eos_token_id = ends or None
    oracle.save_pretrained(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        yield oracle, ends, llm


def _theirs(oracle, prompt, width, penalty, stopping):
    """[(generated tokens, score)] of transformers."""
    ends = oracle.generation_config.eos_token_id or []
    found = oracle.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=NUM_TOKENS,
        length_penalty=penalty, early_stopping=stopping, return_dict_in_generate=True,
        output_scores=True, pad_token_id=0,
    )  # fmt: skip
    result = []
    scores = found.sequences_scores.tolist()
    for row, score in zip(found.sequences.tolist(), scores, strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        result.append((tokens[:end], score))
    return result


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("stopping", [False, True, "never"])
def test_sequences_and_scores_equal_transformers(pair, width, penalty, stopping):
    oracle, ends, llm = pair
    params = BeamSearchParams(width, NUM_TOKENS, length_penalty=penalty, early_stopping=stopping)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        theirs = _theirs(oracle, prompt, width, penalty, stopping)
        assert [s.output_token_ids for s in output.sequences] == [tokens for tokens, _ in theirs]
        for ours, (tokens, score) in zip(output.sequences, theirs, strict=True):
            assert ours.score == pytest.approx(score, rel=1e-4, abs=1e-4)
            assert ours.tokens == prompt + tokens
            assert (ours.finish_reason == "stop") == (tokens[-1] in ends)
            assert ours.text is None


def test_the_end_tokens_of_the_fixture_come_up(pair):
    oracle, ends, _ = pair
    if ends:
        found = [_theirs(oracle, p, 5, 0.0, True) for p in PROMPTS]
        assert any(tokens[-1] in ends for tokens, _ in itertools.chain(*found))


def test_width_one_is_greedy_and_ends_can_be_ignored(pair):
    _, _, llm = pair
    [output] = llm.beam_search(PROMPTS[1], BeamSearchParams(1, NUM_TOKENS))
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    [alone] = llm.generate(PROMPTS[1], greedy, use_tqdm=False)
    assert output.sequences[0].output_token_ids == alone.outputs[0].token_ids
    [output] = llm.beam_search(PROMPTS[1], BeamSearchParams(4, NUM_TOKENS, ignore_eos=True))
    assert {len(s.output_token_ids) for s in output.sequences} == {NUM_TOKENS}
    assert {s.finish_reason for s in output.sequences} == {"length"}


def test_limits_and_prefixes():
    with LLM(max_model_len=256, max_num_seqs=16, num_threads=1) as llm:
        prompts = ["The sky is", "What is 2 + 3?", {"prompt": "One two three four five"}]
        params = BeamSearchParams(3, 24)
        together = llm.beam_search(prompts, params)
        limited = llm.beam_search(prompts, params, concurrency_limit=1)
        assert [[s.tokens for s in o.sequences] for o in together] == [
            [s.tokens for s in o.sequences] for o in limited
        ]
        for prompt, output in zip(prompts, together, strict=True):
            text = prompt if isinstance(prompt, str) else prompt["prompt"]
            for one in output.sequences:
                assert text in one.text
                assert one.text.endswith(one.output_text.rstrip()) or one.output_text in one.text
        before = llm.engine.stats()
        llm.beam_search("a " * 60, BeamSearchParams(4, 32, ignore_eos=True))
        after = llm.engine.stats()
        computed = after.prefix_cache_queries - before.prefix_cache_queries
        found = after.prefix_cache_hits - before.prefix_cache_hits
        assert found > 0.8 * computed, "forks share what they have in common"
        with pytest.raises(RequestError, match="--max-logprobs"):
            llm.beam_search("x", BeamSearchParams(11, 4))
        with pytest.raises(PromptTooLong):
            llm.beam_search("a " * 100, BeamSearchParams(2, 200))
        with pytest.raises(RequestError, match="concurrency_limit"):
            llm.beam_search("x", params, concurrency_limit=0)
        assert not llm.engine.has_unfinished_requests()


def test_many_at_once_over_the_streaming_engine_and_cancelled():
    async def run():
        engine = AsyncLLM.from_engine_args(
            EngineArgs(max_model_len=256, max_num_seqs=16, num_threads=1, log_stats=False)
        )
        try:
            params = BeamSearchParams(3, 16)
            texts = ["The sky is", "What is 2 + 3?", "Hello"]
            tasks = [engine.beam_search(t, params, f"r{i}") for i, t in enumerate(texts)]
            together = await asyncio.gather(*tasks)
            for text, output in zip(texts, together, strict=True):
                again = await engine.beam_search(text, params, "again")
                assert [s.tokens for s in again.sequences] == [s.tokens for s in output.sequences]
            long = BeamSearchParams(4, 200, ignore_eos=True)
            before = (await engine.stats()).generation_tokens
            task = asyncio.create_task(engine.beam_search("Hello", long, "long"))

            async def has_begun():
                return (await engine.stats()).generation_tokens > before

            await until(has_begun)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def is_idle():
                stats = await engine.stats()
                return not stats.num_requests_running + stats.num_requests_waiting

            await until(is_idle, what="requests of a cancelled search still run")
        finally:
            await engine.shutdown()

    asyncio.run(run())
