"""A decoder that hears: audio in place of placeholders, in the whole engine."""

from __future__ import annotations

import base64
import contextlib

import httpx2
import numpy as np
import openai
import pytest
import torch
from servers import serving
from speech_checkpoints import features, save_qwen2_audio, sound, token_ids, wav
from together import together

from headrace import LLM, EngineArgs, SamplingParams
from headrace.assembly.inspection import inspect_model
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_models.families.audio_language.qwen2_audio import (
    Qwen2AudioForConditionalGeneration as Family,
)

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CLIPS = {"a": (1, 1.5), "b": (2, 0.4), "c": (3, 2.0)}
"""Name -> seed and seconds."""
PROMPTS = {
    "the water <|AUDIO|> runs": "a",
    "<|AUDIO|>": "c",
    "the wheel<|AUDIO|> in <|AUDIO|> the long race over the water": "ab",
    "in the race": "",
    "<|AUDIO|><|AUDIO|>": "cc",
    "the water <|AUDIO|> runs over": "b",
}


def clip(name):
    return sound(*CLIPS[name])


def asked(text, names):
    media = [(clip(name), 16000) for name in names]
    if not media:
        return text
    return {"prompt": text, "multi_modal_data": {"audio": media if len(media) > 1 else media[0]}}


def placeholders(name):
    frames = -(-len(clip(name)) // 160)
    return (frames + 1) // 2 // 2


def expanded(folder, text, names):
    [mark] = token_ids(folder, "<|AUDIO|>")
    left, ids = list(names), []
    for token in token_ids(folder, text):
        ids += [mark] * placeholders(left.pop(0)) if token == mark else [token]
    return ids


def continued(oracle, folder, text, names):
    """Greedy tokens by transformers, without a cache."""
    tokens = expanded(folder, text, names)
    media = {}
    if names:
        frames = [-(-len(clip(name)) // 160) for name in names]
        media["input_features"] = torch.cat([features(folder, clip(name)) for name in names])
        media["feature_attention_mask"] = torch.stack(
            [(torch.arange(media["input_features"].shape[-1]) < n).long() for n in frames]
        )
    start = len(tokens)
    for _ in range(PARAMS.max_tokens):
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listener")
    return save_qwen2_audio(folder), folder


@pytest.fixture(scope="module")
def wanted(listener):
    found = [continued(*listener, text, names) for text, names in PROMPTS.items()]
    assert found[0] != found[5][: len(found[0])], "the model hears differences"
    return found


MODES = {
    "batched": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preempted": {
        "num_gpu_blocks_override": 22,
        "kv_cache_memory_bytes": None,
        "max_model_len": 128,
    },
    "two processes": {"engine_process": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers_in_every_mode(listener, wanted, mode):
    folder = listener[1]
    every = [asked(text, names) for text, names in PROMPTS.items()]
    with LLM(str(folder), **{**SETTINGS, **MODES[mode]}) as llm:
        with together(llm, len(every)) if mode == "preempted" else contextlib.nullcontext():
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        again = llm.generate(every, PARAMS, use_tqdm=False)
        stats = llm.engine.stats()
    assert [list(o.outputs[0].token_ids) for o in outputs] == wanted
    assert [list(o.outputs[0].token_ids) for o in again] == wanted
    for output, (text, names) in zip(outputs, PROMPTS.items(), strict=True):
        assert output.prompt_token_ids == expanded(folder, text, names)
        assert output.prompt == text
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    if mode in ("batched", "chunked", "two processes"):
        assert all(o.num_cached_tokens >= 8 for o in (again[0], again[2], again[4]))
    assert stats.num_free_blocks == stats.num_blocks


def test_equal_placeholders_with_other_audio_share_nothing(listener):
    one, other = sound(7, 2.0), sound(8, 2.0)
    with LLM(str(listener[1]), **SETTINGS) as llm:

        def run(samples, text="<|AUDIO|> the race"):
            prompt = {"prompt": text, "multi_modal_data": {"audio": (samples, 16000)}}
            return llm.generate(prompt, PARAMS, use_tqdm=False)[0]

        first = run(one)
        assert run(other).num_cached_tokens == 0
        hit = run(one)
        assert hit.num_cached_tokens >= 40
        assert hit.outputs[0].token_ids == first.outputs[0].token_ids
        assert run(one[:-1]).num_cached_tokens == 0
        # What comes before the audio is shared whatever is heard.
        long = "the water runs in the long race over the wheel the water runs <|AUDIO|>"
        run(one, long)
        assert 8 <= run(other, long).num_cached_tokens < 40


def test_a_chat_that_brings_files_equals_the_prompt(listener):
    pytest.importorskip("soundfile", reason="audio files need headrace-multimodal[audio]")
    pytest.importorskip("av", reason="audio files need headrace-multimodal[audio]")
    samples = (clip("a") * 32767).astype("<i2").astype(np.float32) / 32768
    data = base64.b64encode(wav(clip("a"))).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    text = "user: the water<|AUDIO|>assistant:"
    prompt = {"prompt": text, "multi_modal_data": {"audio": (samples, 16000)}}
    with LLM(str(listener[1]), **SETTINGS) as llm:
        [expected] = llm.generate(prompt, PARAMS, use_tqdm=False)
        for part in parts:
            content = [{"type": "text", "text": "the water"}, part]
            [output] = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
            assert output.prompt == text
            assert len(output.prompt_token_ids) == len(expected.prompt_token_ids)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        bad = [{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}]
        with pytest.raises(RequestError, match=r"audio_url\.url: host '127\.0\.0\.1'.* not public"):
            llm.chat([{"role": "user", "content": bad}], PARAMS, use_tqdm=False)


def test_what_is_refused_by_name(listener):
    silence = np.zeros(16000, np.float32)
    with LLM(str(listener[1]), **SETTINGS, limit_mm_per_prompt={"audio": {"count": 2}}) as llm:
        for prompt, message in [
            ({"prompt": "no mark", "multi_modal_data": {"audio": silence}}, "placeholder"),
            ({"prompt": "<|AUDIO|>" * 3, "multi_modal_data": {"audio": [silence] * 3}},
             "3 items; at most 2"),
            ({"encoder_prompt": "", "decoder_prompt": "x"}, "this model has no encoder"),
        ]:  # fmt: skip
            with pytest.raises(RequestError, match=message):
                llm.generate(prompt, PARAMS, use_tqdm=False)
        cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=4)
        with pytest.raises(RequestError, match="would cut placeholders"):
            llm.generate(asked("<|AUDIO|>", "a"), cut, use_tqdm=False)


def test_recordings_are_written_down_without_times(listener):
    samples = clip("c")
    with LLM(str(listener[1]), **SETTINGS) as llm:
        asked_for = Family.get_generation_prompt(
            AudioClip(samples, 16000),
            llm.model_info,
            SpeechToTextConfig(),
            "en",
            "transcribe",
            "",
            None,
        )
        [expected] = llm.generate([asked_for], SamplingParams(temperature=0, max_tokens=8))
        [found] = llm.transcribe(
            (samples, 16000), language="en", temperature=[0], max_tokens=8, use_tqdm=False
        )
        assert found.text == expected.outputs[0].text.strip()
        assert (found.segments, found.words) == (None, None)
        for wanted in (["segment"], ["word"]):
            with pytest.raises(UnsupportedFeature, match="timestamp_granularities"):
                llm.transcribe((samples, 16000), timestamp_granularities=wanted)


def test_the_openai_client_sends_audio(listener):
    pytest.importorskip("soundfile", reason="audio files need headrace-multimodal[audio]")
    pytest.importorskip("av", reason="audio files need headrace-multimodal[audio]")
    data = base64.b64encode(wav(clip("a"))).decode()
    content = [
        {"type": "text", "text": "the water"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ]
    chat = [{"role": "user", "content": content}]
    with LLM(str(listener[1]), **SETTINGS) as llm:
        [expected] = llm.chat(chat, PARAMS, use_tqdm=False)
    words = (str(listener[1]), "--dtype", "float32", "--num-threads", "1", "--block-size", "8",
             "--kv-cache-memory-bytes", "16M", "--limit-mm-per-prompt", '{"audio": 1}')  # fmt: skip
    with (
        serving(*words) as running,
        openai.OpenAI(base_url=running.api, api_key="none", max_retries=0) as client,
    ):
        model = client.models.list().data[0].id

        def ask(messages):
            return client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=8,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

        answer = ask(chat)
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        with pytest.raises(openai.BadRequestError, match="2 items; at most 1 are taken"):
            ask([{"role": "user", "content": [*content, content[1]]}])
        broken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        with pytest.raises(openai.BadRequestError, match="content"):
            ask([{"role": "user", "content": [broken]}])
        assert ask(chat).choices[0].message.content == answer.choices[0].message.content


@pytest.mark.parametrize("mode", [{}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}])
def test_what_is_heard_is_embedded(listener, mode):
    oracle, folder = listener
    settings = {**SETTINGS, **mode, "runner": "pooling", "convert": "embed"}
    asked_for = {text: names for text, names in PROMPTS.items() if len(names) == 1}
    with LLM(str(folder), **settings) as llm:
        every = [asked(text, names) for text, names in asked_for.items()]
        found = llm.embed(every, use_tqdm=False)
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.embed(every[:1], truncate_prompt_tokens=4, use_tqdm=False)
    for output, (text, [name]) in zip(found, asked_for.items(), strict=True):
        tokens = expanded(folder, text, [name])
        assert output.prompt_token_ids == tokens
        ids, frames = torch.tensor([tokens]), -(-len(clip(name)) // 160)
        heard = features(folder, clip(name))
        with torch.inference_mode():
            states = oracle(
                input_ids=ids, attention_mask=torch.ones_like(ids), input_features=heard,
                feature_attention_mask=(torch.arange(heard.shape[-1]) < frames).long()[None],
                output_hidden_states=True,
            ).hidden_states[-1]  # fmt: skip
        want = torch.nn.functional.normalize(states[0, -1], dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=1e-4, rtol=0)


def test_what_conversations_bring_is_embedded_over_http(listener):
    pytest.importorskip("soundfile", reason="audio files need headrace-multimodal[audio]")
    pytest.importorskip("av", reason="audio files need headrace-multimodal[audio]")
    samples = (clip("a") * 32767).astype("<i2").astype(np.float32) / 32768
    text = "user: the water<|AUDIO|>assistant:"
    settings = {**SETTINGS, "runner": "pooling"}
    with LLM(str(listener[1]), **settings) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"audio": (samples, 16000)}}
        [expected] = llm.embed(prompt, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="does not transcribe"):
            llm.transcribe(wav(clip("a")))
    data = base64.b64encode(wav(clip("a"))).decode()
    said = {"type": "text", "text": "the water"}
    heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    seen = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    words = (str(listener[1]), "--runner", "pooling", "--dtype", "float32", "--num-threads", "1",
             "--block-size", "8", "--kv-cache-memory-bytes", "16M")  # fmt: skip
    with (
        serving(*words) as running,
        httpx2.Client(base_url=running.url) as client,
    ):

        def ask(*content, path="/v1/embeddings", **more):
            messages = [{"role": "user", "content": list(content)}]
            body = {"messages": messages, **more}
            return client.post(path, json=body)

        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            task = {"task": "embed"} if path == "/pooling" else {}
            answer = ask(said, heard, path=path, **task).json()
            assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
            np.testing.assert_allclose(
                answer["data"][0][key], expected.outputs.embedding, atol=1e-5
            )
        for refused, message in (
            (seen, "image_url"),
            ({**heard, "input_audio": {"data": "AAAA"}}, ""),
        ):
            answer = ask(said, refused)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        assert client.post("/v1/audio/transcriptions").status_code in (400, 404)


@pytest.mark.parametrize(("limit", "taken"), [({}, ("audio",)), ({"audio": 0}, ())])
def test_inspecting_tells_of_the_media_that_are_taken(listener, limit, taken):
    args = EngineArgs(model=str(listener[1]), limit_mm_per_prompt=limit)
    assert inspect_model(args.create_engine_config()).model.modalities == taken
