"""Voxtral in the whole engine: recordings of one piece and of several, beside text, in every mode."""

from __future__ import annotations

import base64
import contextlib

import httpx2
import numpy as np
import pytest
import torch
from servers import serving
from speech_checkpoints import RATE, SECONDS, save_voxtral, sound, token_ids, wav
from together import together

from headrace import LLM, SamplingParams
from headrace_core.errors import UnsupportedFeature

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
GREEDY = {"model": "ears", "temperature": 0, "ignore_eos": True}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ONCE = SamplingParams(temperature=0, max_tokens=8)
CLIPS = {"a": (1, 1.5), "b": (2, 3.1), "c": (3, 2.0)}
"""Name -> seed and seconds: of one piece, two, and exactly one."""
PROMPTS = {
    "the water [AUDIO] runs": "a",
    "[AUDIO]": "b",
    "the wheel[AUDIO] in [AUDIO] the long race over the water": "ab",
    "in the race": "",
    "[AUDIO][AUDIO]": "cc",
    "the water [AUDIO] runs over": "c",
}
PIECE = SECONDS * RATE
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


def clip(name):
    return sound(*CLIPS[name])


def pieces(name):
    return -(-len(clip(name)) // PIECE)


def asked(text, names):
    media = [(clip(name), RATE) for name in names]
    return {"prompt": text, "multi_modal_data": {"audio": media}} if media else text


def expanded(folder, text, names):
    [mark] = token_ids(folder, "[AUDIO]")
    left, ids = list(names), []
    for token in token_ids(folder, text):
        ids += [mark] * 25 * pieces(left.pop(0)) if token == mark else [token]
    return ids


def features(folder, name):
    """[pieces, bins, frames], by transformers."""
    from transformers import WhisperFeatureExtractor

    made = WhisperFeatureExtractor.from_pretrained(folder)(
        clip(name), sampling_rate=RATE, truncation=False, padding=True, pad_to_multiple_of=PIECE,
        return_tensors="pt",
    ).input_features[0]  # fmt: skip
    return torch.stack(made.split(made.shape[1] // pieces(name), dim=1))


def continued(oracle, folder, text, names):
    """Greedy tokens by transformers, without a cache."""
    tokens = expanded(folder, text, names)
    start = len(tokens)
    media = {"input_features": torch.cat([features(folder, n) for n in names])} if names else {}
    for _ in range(PARAMS.max_tokens):
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voxtral")
    return save_voxtral(folder), folder


@pytest.fixture(scope="module")
def wanted(listener):
    return [continued(*listener, text, names) for text, names in PROMPTS.items()]


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
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    assert stats.num_free_blocks == stats.num_blocks


def test_files_in_chats_over_a_socket(listener):
    """The chats' answers are those of the same prompt offline; what is wrong is a 400 that names the part."""
    pytest.importorskip("soundfile", reason="audio files need headrace-multimodal[audio]")
    pytest.importorskip("av", reason="audio files need headrace-multimodal[audio]")
    file = base64.b64encode(wav(clip("b"))).decode()
    text = base64.b64encode(b"hello, I am text").decode()
    heard = np.round(clip("b") * 32767).astype("<i2").astype(np.float32) / 32768
    prompt = {"prompt": "user: the water[AUDIO]assistant:", "multi_modal_data": {"audio": heard}}
    with LLM(str(listener[1]), **SETTINGS) as llm:
        [expected] = llm.generate(prompt, PARAMS, use_tqdm=False)
        request = "[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]"
        [asked_for] = llm.generate({**prompt, "prompt": request}, ONCE, use_tqdm=False)
        [found] = llm.transcribe(
            (heard, RATE), language="en", temperature=[0], max_tokens=8, use_tqdm=False
        )
        assert found.text == asked_for.outputs[0].text.strip()

    def sound_of(data=file, **more):
        return {"type": "input_audio", "input_audio": {"data": data, **more}}

    by_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{file}"}}
    argv = (str(listener[1]), "--dtype", "float32", "--num-threads", "1", "--block-size", "8",
            "--kv-cache-memory-bytes", "16M", "--limit-mm-per-prompt", '{"audio": 1}',
            "--served-model-name", "ears")  # fmt: skip
    with serving(*argv) as running, httpx2.Client(base_url=running.url, timeout=60) as client:

        def chat(*parts):
            content = [{"type": "text", "text": "the water"}, *parts]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
            return client.post("/v1/chat/completions", json={**body, **GREEDY})

        def responses(*parts):
            content = [{"type": "input_text", "text": "the water"}, *parts]
            body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8}
            return client.post("/v1/responses", json={**body, **GREEDY})

        for part in (sound_of(format="wav"), sound_of(), by_url):
            answer = chat(part).json()
            assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
            assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        answer = responses(sound_of(format="wav")).json()
        assert answer["output"][0]["content"][0]["text"] == expected.outputs[0].text

        chats, items = "messages[0].content[1].input_audio", "input[0].content[1].input_audio"
        for answer, *words in (
            (chat(sound_of(text, format="wav")), f"{chats}.data", "not a supported audio file"),
            (chat(sound_of("?")), f"{chats}.data", "base64"),
            (chat({"type": "input_audio"}), f"{chats}.data", "must be text"),
            (chat(by_url, sound_of()), "content[2].input_audio.data", "2 items; at most 1"),
            (chat({"type": "image_url", "image_url": {"url": "x"}}), "image_url", "input_audio"),
            (responses(sound_of(text)), f"{items}.data", "not a supported audio file"),
            (responses({"type": "input_audio"}), f"{items}.data", "must be text"),
        ):
            assert answer.status_code == 400
            assert all(word in answer.json()["error"]["message"] for word in words), answer.text
        assert chat(sound_of()).status_code == 200

        def upload(path, **form):
            files = {"file": ("a.wav", wav(clip("b")))}
            return client.post(f"/v1/audio/{path}", files=files, data={"model": "ears", **form})

        limits = {"max_completion_tokens": 8, "temperature[]": 0}
        answer = upload("transcriptions", language="en", **limits)
        assert answer.json()["text"] == found.text
        for answer, word in (
            (upload("transcriptions", prompt="names"), "prompt = 'names'"),
            (upload("translations"), "only writes down what is said"),
        ):
            assert answer.status_code in (400, 501)
            assert word in answer.json()["error"]["message"]


def test_without_recordings_text_alone_is_served(listener, wanted):
    with LLM(str(listener[1]), **SETTINGS, limit_mm_per_prompt={"audio": 0}) as llm:
        [output] = llm.generate(["in the race"], PARAMS, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="this model takes text only"):
            llm.generate([asked("[AUDIO]", "a")], PARAMS, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="does not transcribe"):
            llm.transcribe((clip("a"), RATE))
    assert list(output.outputs[0].token_ids) == wanted[3]
