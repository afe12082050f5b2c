"""A model of attention and recurrences in the whole engine: states are found again, bit for bit.

That every mode of running gives the same bits is in ``test_parity.py``; here is what only a cache of
states does.
"""

from __future__ import annotations

import logging

import pytest
from families import save_model
from modes import PROMPTS, SETTINGS
from together import together

from headrace import LLM, SamplingParams
from headrace_kernels.cpu import library

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
BLOCK = SETTINGS["block_size"]
LONG = PROMPTS[6]
"""64 tokens: its last block boundary with a token behind is at 56."""

MODES = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "steps one by one": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def bamba(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bamba")
    save_model("bamba", folder)
    return folder


@pytest.fixture(scope="module")
def cold(bamba):
    """What an engine that caches nothing says to a prompt, alone."""
    with LLM(str(bamba), **SETTINGS, enable_prefix_caching=False) as llm:
        yield lambda prompt: answer(llm, prompt)[0]


def answer(llm, prompt):
    """Tokens with their log-probabilities, and how much of the prompt was found in the cache."""
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    return pairs(output), output.num_cached_tokens


def pairs(output):
    completion = output.outputs[0]
    entries = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, entry[token].logprob) for token, entry in entries]


@pytest.mark.parametrize("mode", MODES)
def test_who_begins_from_a_state_says_the_same(bamba, cold, mode):
    with LLM(str(bamba), **SETTINGS, **MODES[mode]) as llm:
        said, found = answer(llm, LONG)
        assert (said, found) == (cold(LONG), 0)
        assert answer(llm, LONG) == (said, 56), "the prompt again"
        talk = [*LONG, *(token for token, _ in said), 7, 8, 9]
        # 64 and 19 of the answer's tokens were computed; the state after 80 of them stayed.
        assert answer(llm, talk) == (cold(talk), 80), "the conversation goes on"
        other = [*LONG[:27], 5, 5]
        first, _ = answer(llm, other)
        assert first == cold(other), "keys of 24 tokens are there, a state of them is not"
        again = [*LONG[:27], 6, 6, 6]
        assert answer(llm, again) == (cold(again), 24), "now it is: two have parted there"
        stats = llm.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


def test_several_begin_from_one_state_at_once(bamba, cold):
    with LLM(str(bamba), **SETTINGS) as llm:
        answer(llm, LONG)
        prompts = [[*LONG[:56], 3 + i, 40 - i] for i in range(6)]
        with together(llm, len(prompts)):
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [pairs(output) for output in outputs] == [cold(prompt) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [56] * 6


def test_few_states_and_few_blocks(bamba, cold):
    """Requests are preempted, snapshots evicted; everybody gets an answer, the same one."""
    with LLM(str(bamba), **SETTINGS, max_num_seqs=3, num_gpu_blocks_override=20) as llm:
        for _ in range(2):
            with together(llm, len(PROMPTS)):
                outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [pairs(output) for output in outputs] == [cold(prompt) for prompt in PROMPTS]
        stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_blocks == 20 + 2 * 3, "blocks of tokens; states that run, and as many to keep"


@pytest.mark.skipif(library.path() is None, reason="the native library is not built")
def test_steps_with_states_are_captured(bamba, caplog):
    with caplog.at_level(logging.INFO, "headrace_engine.execution"), LLM(str(bamba), **SETTINGS):
        pass
    assert "captured steps of up to" in caplog.text


def test_the_plan_names_both_pools(bamba, caplog):
    with caplog.at_level(logging.INFO, "headrace_engine.core"), LLM(str(bamba), **SETTINGS):
        pass
    assert "2 pools, by kv_cache_memory_bytes" in caplog.text
    assert f"blocks of {BLOCK} tokens in 1 group" in caplog.text
    assert "states of recurrent layers in 1 group" in caplog.text


def test_a_cache_of_one_byte_leaves_states_as_they_are(bamba):
    """Keys and values are rounded, states are not: the answers are near, and hits change nothing."""
    settings = {**SETTINGS, "kv_cache_dtype": "int8", "calculate_kv_scales": True}
    with LLM(str(bamba), **settings) as llm:
        said, _ = answer(llm, LONG)
        assert answer(llm, LONG) == (said, 56)
