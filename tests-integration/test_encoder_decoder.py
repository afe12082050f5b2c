"""Encoder-decoder models in the whole engine: Whisper equals transformers' generate."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from speech_checkpoints import features, save_whisper, sound, token_ids
from together import together

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.engine_args import EngineArgs
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_models.families.speech.whisper_alignment import AlignmentHeads

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
LENGTHS = (1.5, 0.3, 2.0, 0.9, 1.1, 0.02)
TEXT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
OTHER = "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
PREFIX = [284, 285, 288, 291]
"""TEXT's tokens."""
PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return save_whisper(folder), folder


@pytest.fixture(scope="module")
def wanted(whisper):
    """Tokens of each clip, by transformers: English transcripts, then German translations."""
    oracle, folder = whisper
    found = []
    for language, task in (("en", "transcribe"), ("de", "translate")):
        for seed, seconds in enumerate(LENGTHS):
            with torch.inference_mode():
                tokens = oracle.generate(
                    features(folder, sound(seed, seconds)), language=language, task=task,
                    max_new_tokens=20, do_sample=False,
                )  # fmt: skip
            found.append(tokens[0].tolist())
    assert len(set(map(tuple, found))) > len(LENGTHS), "the model hears differences"
    return found


def prompts():
    """Every clip in English and in German, in the two forms by turns."""
    found = []
    for text in (TEXT, OTHER):
        for seed, seconds in enumerate(LENGTHS):
            media = {"audio": (sound(seed, seconds), 16000)}
            implicit = {"prompt": text, "multi_modal_data": media}
            encoder = {"prompt": "", "multi_modal_data": media}
            explicit = {"encoder_prompt": encoder, "decoder_prompt": text}
            found.append(explicit if seed % 2 else implicit)
    return found


MODES = {
    "batched": {},
    "steps one by one": {"async_scheduling": False},
    "preempted": {"num_gpu_blocks_override": 44, "kv_cache_memory_bytes": None},
    "two requests at once": {"max_num_seqs": 2},
    "two processes": {"engine_process": True},
    "eager": {"enforce_eager": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_whisper_equals_generate_of_transformers(whisper, wanted, mode):
    with LLM(str(whisper[1]), **{**SETTINGS, **MODES[mode]}) as llm:
        every = prompts()
        with together(llm, len(every)) if mode == "preempted" else contextlib.nullcontext():
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        stats = llm.engine.stats()
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    assert stats.num_free_blocks == stats.num_blocks
    assert [o.prompt for o in outputs] == [TEXT] * len(LENGTHS) + [OTHER] * len(LENGTHS)
    assert [list(o.outputs[0].token_ids) for o in outputs] == wanted


def spoken(tokens, seed):
    media = {"audio": (sound(seed, LENGTHS[seed]), 16000)}
    encoder = {"prompt": "", "multi_modal_data": media}
    return {"encoder_prompt": encoder, "decoder_prompt": tokens}


def expected_weights(oracle, folder, tokens, seed):
    """Of the transcript's tokens, from transformers' attention."""
    oracle.set_attn_implementation("eager")
    with torch.inference_mode():
        attention = oracle(
            features(folder, sound(seed, LENGTHS[seed])), decoder_input_ids=torch.tensor([tokens]),
            output_attentions=True,
        ).cross_attentions  # fmt: skip
    pairs = [tuple(pair) for pair in oracle.generation_config.alignment_heads]
    heads = AlignmentHeads(pairs, 5)
    weights = {(layer, head): attention[layer][0, head] for layer, head in pairs}
    return heads.matrix(weights, len(PREFIX), round(LENGTHS[seed] * 50))


async def last_output(stream):
    async for output in stream:
        last = output
    return last


@pytest.mark.parametrize("engine_process", [False, True])
async def test_alignment_beside_requests_that_generate(whisper, wanted, engine_process):
    oracle, folder = whisper
    args = EngineArgs(model=str(folder), **SETTINGS, engine_process=engine_process)
    llm = AsyncLLM.from_engine_args(args)
    clips = [0, 2, 3]
    sequences = [[*PREFIX, 17, 190, 34, 259, 60 + seed] for seed in clips]
    aligned = [
        llm.engine.align(spoken(tokens, seed), f"a{seed}")
        for tokens, seed in zip(sequences, clips, strict=True)
    ]
    texts = [last_output(llm.generate(p, PARAMS, f"g{i}")) for i, p in enumerate(prompts()[:4])]
    try:
        *found, one, two, three, four = await asyncio.gather(*aligned, *texts)
        again = await llm.engine.align(spoken(sequences[1], clips[1]), "again")
        stats = await llm.stats()
    finally:
        await llm.shutdown()
    assert [list(o.outputs[0].token_ids) for o in (one, two, three, four)] == wanted[:4]
    for tokens, seed, array in zip(sequences, clips, found, strict=True):
        assert array.shape == (len(tokens), round(LENGTHS[seed] * 50))
        got = torch.tensor(array.tolist())[len(PREFIX) :]
        expected = expected_weights(oracle, folder, tokens, seed)
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
    assert again == found[1]
    assert stats.num_free_blocks == stats.num_blocks


def test_alignment_and_times_of_words_offline(whisper):
    oracle, folder = whisper
    clips = [0, 2, 3]
    with LLM(str(folder), **SETTINGS) as llm:
        sequences = [[*PREFIX, 17, 190, 34, 259, 60 + seed] for seed in clips]
        aligned = llm.align([spoken(t, seed) for t, seed in zip(sequences, clips, strict=True)])
        asked = [spoken(PREFIX, seed) for seed in clips]
        outputs = llm.generate(asked, PARAMS, use_tqdm=False)
        timed = llm.word_times(asked, outputs, language="en")
        with pytest.raises(RequestError, match="must be token ids"):
            llm.word_times(prompts()[:1], outputs[:1])
        assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks
    for tokens, seed, weights in zip(sequences, clips, aligned, strict=True):
        expected = expected_weights(oracle, folder, tokens, seed)
        torch.testing.assert_close(weights[len(PREFIX) :], expected, atol=2e-3, rtol=0)
    for output, words, seed in zip(outputs, timed, clips, strict=True):
        said = "".join(word.word for word in words)
        assert "".join(said.split()) == "".join(output.outputs[0].text.split())
        starts = [word.start for word in words]
        assert starts == sorted(starts)
        assert all(0 <= word.start <= word.end <= LENGTHS[seed] for word in words)


def test_what_is_refused_by_name(whisper):
    silence = np.zeros(1600, np.float32)
    media = {"audio": silence}
    cases = [
        (TEXT, RequestError, "multi_modal_data: must be given"),
        ({"prompt": TEXT, "multi_modal_data": {"audio": [silence] * 2}}, RequestError,
         r"2 items; at most 1 are taken \(--limit-mm-per-prompt '\{\"audio\": 1\}'\)"),
        ({"prompt": TEXT, "multi_modal_data": {"image": silence}}, UnsupportedFeature,
         "multi_modal_data.image: this model takes audio only"),
        ({"prompt": TEXT, "multi_modal_data": {"audio": silence.astype(int)}}, RequestError,
         "dtype int64; must be"),
        ({"prompt": TEXT, "multi_modal_data": media, "mm_processor_kwargs": {"x": 1}}, RequestError,
         "the only option is 'truncation'"),
        ({"prompt": TEXT, "multi_modal_data": {"audio": np.zeros(40000, np.float32)}}, RequestError,
         "at most 2 s"),
        ({"encoder_prompt": {"prompt": "hear", "multi_modal_data": media}, "decoder_prompt": TEXT},
         RequestError, "encoder_prompt = 'hear': must be empty"),
        ({"encoder_prompt": "", "decoder_prompt": TEXT}, RequestError, "must be given"),
        ({"encoder_prompt": {"multi_modal_data": media},
          "decoder_prompt": {"prompt": TEXT, "multi_modal_data": media}}, RequestError,
         "decoder_prompt.multi_modal_data: no such field"),
    ]  # fmt: skip
    settings = {**SETTINGS, "limit_mm_per_prompt": {"audio": 1}}
    with LLM(str(whisper[1]), **settings) as llm:
        for prompt, kind, message in cases:
            with pytest.raises(kind, match=message):
                llm.generate(prompt, PARAMS, use_tqdm=False)
        bare = {"prompt": "", "multi_modal_data": media}
        first = {"prompt": "<|startoftranscript|>", "multi_modal_data": media}
        outputs = llm.generate([bare, first], PARAMS, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    with LLM(str(whisper[1]), **{**settings, "limit_mm_per_prompt": {"audio": 0}}) as llm:  # noqa: SIM117
        with pytest.raises(RequestError, match="1 items; at most 0"):
            llm.generate(bare, PARAMS, use_tqdm=False)


def test_no_speech_probabilities_come_with_every_token(whisper):
    oracle, folder = whisper
    silent = token_ids(folder, "<|nospeech|>")[0]
    params = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[silent])
    prompt = {"prompt": "<|startoftranscript|>", "multi_modal_data": {"audio": sound(0, 1.5)}}
    with LLM(str(folder), **SETTINGS, engine_process=True) as llm:
        [output] = llm.generate(prompt, params, use_tqdm=False)
    with torch.inference_mode():
        logits = oracle(
            features(folder, sound(0, 1.5)), decoder_input_ids=torch.tensor([PREFIX[:1]])
        ).logits[0, -1]
    found = output.outputs[0].logprobs[0]
    assert found[silent].logprob == pytest.approx(float(logits.log_softmax(-1)[silent]), abs=1e-4)
    assert len(found) == 2


def bits(outputs):
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_do_not_depend_on_the_batch_by_one_bit(whisper, dtype):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    settings = {**SETTINGS, "dtype": dtype}
    with LLM(str(whisper[1]), **settings) as llm:
        wanted = [bits(llm.generate(p, params, use_tqdm=False))[0] for p in prompts()]
        assert bits(llm.generate(prompts(), params, use_tqdm=False)) == wanted
    few = {"num_gpu_blocks_override": 44, "kv_cache_memory_bytes": None, "enforce_eager": True}
    with LLM(str(whisper[1]), **{**settings, **few}) as llm:
        with together(llm, len(wanted)):
            outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
    assert bits(outputs) == wanted
