"""MiDashengLM: its spectrogram and tokens beside the published formulas, and chats with recordings over a
socket."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hearing_checkpoints
import httpx2
import numpy as np
import pytest
import torch
from posted import post, stream
from servers import serving
from speech_checkpoints import RATE, save_tokenizer, sound, token_ids, wav
from tokenizers import Tokenizer

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

NAME = "MiDashengLMModel"
ENCODER = {
    "n_mels": 64, "n_fft": 512, "win_length": 512, "hop_length": 160, "sample_rate": 16000, "f_min": 0.0,
    "f_max": 8000.0, "center": True, "patch_size": [64, 4], "patch_stride": [64, 4],
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
NUM_TOKENS = 6


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    ids = save_tokenizer(tmp_path, ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"))
    stated = {"sampling_rate": 16000, "do_normalize": False, "feature_size": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    config = {"audio_encoder_config": ENCODER, "audio_token_id": ids["<|AUDIO|>"]}
    return processor_for(NAME, config, tmp_path)


def item(samples: np.ndarray[Any, Any]) -> MediaItem:
    return MediaItem("audio", samples, "", {})


def decibels(samples: np.ndarray[Any, Any]) -> torch.Tensor:
    """As torch and torchaudio's formulas have it: [frames, bins]."""
    from transformers.audio_utils import mel_filter_bank

    wave = torch.from_numpy(samples)
    window = torch.hann_window(512)
    power = torch.stft(wave, 512, 160, 512, window, return_complex=True).abs().double() ** 2
    bank = torch.from_numpy(mel_filter_bank(257, 64, 0.0, 8000.0, 16000, None, "htk"))
    loud = 10 * torch.log10((power.T @ bank).clamp(min=1e-10))
    return loud.clamp(min=float(loud.max()) - 120).float()


@pytest.mark.parametrize("number", [3200, 3041, 16000, 24007, 49999, 3040])
def test_numbers_and_tokens(number: int, processor: Any) -> None:
    samples = np.ascontiguousarray(sound(1, 4.0)[:number])
    (made,) = processor.process([item(samples)], {})
    packed = made.inputs["input_features"]
    frames = np.frombuffer(packed.data, np.float32).reshape(packed.shape)
    np.testing.assert_allclose(frames, decibels(samples).numpy(), atol=2e-3, rtol=1e-5)
    assert made.num_tokens == int(1 + number / 160) // 4 // 5
    heard = np.frombuffer(made.inputs["num_heard"].data, np.int64)
    assert heard.tolist() == [int(number / 640)]


def test_prompts(processor: Any, tmp_path: Path) -> None:
    media = processor.process([item(sound(1, 0.5)), item(sound(2, 1.0))], {})
    begin, mark, end = token_ids(tmp_path, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    text = "the <|audio_bos|><|AUDIO|><|audio_eos|> water <|AUDIO|>"
    placed = processor.place(token_ids(tmp_path, text), media)
    first, second = ([begin, *[mark] * one.num_tokens, end] for one in media)
    ids = [*token_ids(tmp_path, "the "), *first, *token_ids(tmp_path, " water "), *second]
    assert list(placed.token_ids) == ids
    assert [ids[offset] for offset in placed.offsets] == [mark, mark]
    assert processor.place([5, 6], []).token_ids == [5, 6]
    assert processor.largest("audio", {"num_tokens": 12}).num_tokens == 12
    assert processor.embedded("audio", 7, {}).num_tokens == 7


def test_what_is_refused(processor: Any, tmp_path: Path) -> None:
    for samples, words in (
        (sound(1, 0.18), "too short to become a token"),
        (np.zeros(16000 * 601, np.float32), "at most 600 s"),
    ):
        with pytest.raises(RequestError, match=words):
            processor.process([item(samples)], {})
    with pytest.raises(RequestError, match="has no options"):
        processor.process([item(sound(1, 1.0))], {"truncation": True})
    for change in ({"f_max": 4000}, {"center": False}, {"patch_stride": [64, 8]}):
        config = {"audio_encoder_config": {**ENCODER, **change}, "audio_token_id": 1}
        with pytest.raises(UnsupportedModel, match=f"{next(iter(change))}"):
            processor_for(NAME, config, tmp_path)


def body(parts: Sequence[str | int]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "input_audio",
            "input_audio": {
                "data": base64.b64encode(wav(sound(part, 1.0 + part / 2))).decode(),
                "format": "wav",
            },
        }
        for part in parts
    ]
    return {"model": "ears", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": NUM_TOKENS, "ignore_eos": True}  # fmt: skip


def test_chats_with_recordings(tmp_path: Path) -> None:
    oracle = hearing_checkpoints.save_midashenglm(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((tmp_path / "config.json").read_text())
    processor: Any = processor_for(NAME, config, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(tmp_path), *words, "--served-model-name", "ears") as server:
        url = f"{server.api}/chat/completions"
        found = []
        for parts in (["the ", 1, " water"], [1, "runs ", 2], ["in the race"]):
            clips = [read(wav(sound(x, 1.0 + x / 2))) for x in parts if isinstance(x, int)]
            media = processor.process([item(clip) for clip in clips], {})
            mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
            text = "".join(x if isinstance(x, str) else mark for x in parts)
            ids = processor.place(token_ids(tmp_path, text), media).token_ids
            expected = tokenizer.decode(oracle(ids, media)[:NUM_TOKENS])
            made = post(url, body(parts))
            assert made["choices"][0]["message"]["content"] == expected
            assert made["usage"]["prompt_tokens"] == len(ids)
            events = stream(url, body(parts))
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == expected
            found.append(expected)
        assert len(set(found)) == 3
        wrong = body(["the ", 1])
        data = base64.b64encode(b"a text that is called x.wav").decode()
        wrong["messages"][0]["content"][1]["input_audio"]["data"] = data
        answer = httpx2.post(url, json=wrong, timeout=60)
        assert answer.status_code == 400
        assert "messages[0].content[1]" in answer.json()["error"]["param"]


def read(file: bytes) -> np.ndarray[Any, Any]:
    """Samples as a file keeps them."""
    import io

    import soundfile

    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    assert rate == RATE
    return np.asarray(samples)
