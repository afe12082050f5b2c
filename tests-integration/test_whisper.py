"""Whisper's own ways in the whole engine, against transformers: timestamps, previous text, probes of
the language."""

from __future__ import annotations

import pytest
import torch
from speech_checkpoints import RATE, features, save_whisper, sound

from headrace import LLM, SamplingParams
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_models.families.speech.whisper import WhisperForConditionalGeneration as Whisper

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=20)
SECONDS = (1.5, 0.4, 2.0, 1.1)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """One that may say timestamps."""
    folder = tmp_path_factory.mktemp("whisper")
    oracle = save_whisper(folder)
    oracle.generation_config.suppress_tokens = [3, 4]
    oracle.generation_config.save_pretrained(folder)
    return oracle, folder


@pytest.fixture(scope="module")
def llm(whisper):
    with LLM(str(whisper[1]), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    """One that never says any."""
    folder = tmp_path_factory.mktemp("wordy")
    oracle = save_whisper(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        yield oracle, folder, llm


def asked(llm, samples, **how):
    """The family's own prompt for a clip."""
    values = {
        "language": "en", "task_type": "transcribe", "request_prompt": "", "to_language": None,
    }  # fmt: skip
    clip = AudioClip(samples, RATE)
    return Whisper.get_generation_prompt(
        clip, llm.model_info, SpeechToTextConfig(), **{**values, **how}
    )


def first_pass(oracle, folder, samples, language, task):
    """What transformers samples from the clip's beginning, before it seeks on from a timestamp."""
    with torch.inference_mode():
        made = oracle.generate(
            features(folder, samples), max_new_tokens=20, do_sample=False, language=language,
            task=task, return_timestamps=True, return_dict_in_generate=True, return_segments=True,
        )  # fmt: skip
    return made["segments"][0][0]["result"]["sequences"].tolist()


@pytest.mark.parametrize(("language", "task"), [("en", "transcribe"), ("de", "translate")])
def test_timestamps_equal_those_of_transformers(whisper, llm, language, task):
    oracle, folder = whisper
    clips = [sound(seed, seconds) for seed, seconds in enumerate(SECONDS)]
    prompts = [
        asked(llm, clip, language=language, task_type=task, timestamps=True) for clip in clips
    ]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for clip, prompt, output in zip(clips, prompts, outputs):
        found = list(output.outputs[0].token_ids)
        times = [t for i in found if (t := Whisper.get_timestamp(i, llm.model_info)) is not None]
        assert times
        assert times == sorted(times)
        expected = first_pass(oracle, folder, clip, language, task)
        assert prompt["decoder_prompt"] + found == expected


def test_previous_text_equals_prompt_ids_of_transformers(wordy):
    oracle, folder, llm = wordy
    prompt = asked(llm, sound(0), request_prompt="the water runs")
    whole = prompt["decoder_prompt"]
    before = whole[: whole.index(oracle.generation_config.decoder_start_token_id)]
    assert len(before) > 1
    with torch.inference_mode():
        expected = oracle.generate(
            features(folder, sound(0)), prompt_ids=torch.tensor(before), language="en",
            task="transcribe", max_new_tokens=20, do_sample=False,
        )[0].tolist()  # fmt: skip
    with_text, without = llm.generate([prompt, asked(llm, sound(0))], PARAMS, use_tqdm=False)
    assert list(with_text.outputs[0].token_ids) == expected
    assert with_text.outputs[0].token_ids != without.outputs[0].token_ids


def test_a_probe_hears_the_language_that_transformers_hears(whisper, llm):
    oracle, folder = whisper
    for seed, seconds in enumerate(SECONDS):
        samples = sound(seed, seconds)
        probe = Whisper.get_language_probe(
            AudioClip(samples, RATE), llm.model_info, SpeechToTextConfig()
        )
        ids = sorted(probe.languages)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=ids)
        (output,) = llm.generate([probe.prompt], params, use_tqdm=False)
        (logprobs,) = output.outputs[0].logprobs
        best = max(ids, key=lambda token: logprobs[token].logprob)
        with torch.inference_mode():
            expected = oracle.detect_language(features(folder, samples))
        assert best == int(expected[0])


@pytest.mark.parametrize("backend", ["paged", "varlen"])
def test_a_backend_may_be_named_that_serves_half_of_it(whisper, llm, backend):
    samples = sound(0)
    with LLM(str(whisper[1]), attention_backend=backend, **SETTINGS) as named:
        (output,) = named.generate([asked(named, samples)], PARAMS)
    (plain,) = llm.generate([asked(llm, samples)], PARAMS)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
