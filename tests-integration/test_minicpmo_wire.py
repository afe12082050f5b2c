"""MiniCPM-o 2.6: its spectrograms beside Whisper's in transformers, tokens beside the published formulas, and
prompts with recordings and images in the whole engine and over a socket."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hearing_checkpoints
import httpx2
import numpy as np
import pytest
import soundfile
from hearing_checkpoints import MINICPMO_TOKENS
from image_checkpoints import CHAT, data_url
from PIL import Image
from posted import post, stream
from servers import serving
from speech_checkpoints import RATE, save_tokenizer, sound, token_ids, wav
from test_hearing_prompts import CLIP, LONGER, PARAMS, PICTURE, SETTINGS, asked, check, expected
from tokenizers import Tokenizer

from headrace import LLM
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import content_hash, processor_for

NAME, MARK = "MiniCPMO", "(<audio>./</audio>)"
NUM_TOKENS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path, ("<|endoftext|>", *MINICPMO_TOKENS))
    return tmp_path


def item(samples: np.ndarray[Any, Any]) -> MediaItem:
    return MediaItem("audio", samples, content_hash("audio", samples), {"sampling_rate": RATE})


def written(number: int) -> str:
    """What the published processor puts in place of a mark, for so many samples."""
    states = (math.ceil(number / 160) - 1) // 2 + 1
    vectors, found = (states - 2) // 2 + 1, ""
    while vectors > 0:
        found += "<|audio_start|>" + "<unk>" * min(25, vectors) + "<|audio_end|>"
        vectors -= 25
    return found


CONFIG: dict[str, Any] = {"vision_config": {"model_type": "siglip"}, "audio_config": {}}


@pytest.mark.parametrize("seconds", [0.04, 0.7, 1.0, 12.345, 30.0, 33.31])
def test_numbers_and_tokens(seconds: float, folder: Path) -> None:
    from transformers import WhisperFeatureExtractor

    samples = np.ascontiguousarray(np.tile(sound(3, 5.0), 8)[: int(seconds * RATE)])
    processor = processor_for(NAME, CONFIG, folder)
    (made,) = processor.process([item(samples)], {})
    packed = made.inputs["input_features"]
    frames = np.frombuffer(packed.data, np.float32).reshape(packed.shape)
    library, theirs = WhisperFeatureExtractor(feature_size=80), []
    for begin in range(0, len(samples), 30 * RATE):
        piece = samples[begin : begin + 30 * RATE]
        given = library(piece, sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
        theirs.append(given["input_features"][0][:, : given["attention_mask"].sum()].T)
    np.testing.assert_allclose(frames, np.concatenate(theirs), atol=2e-5, rtol=0)
    assert list(made.token_ids) == token_ids(folder, written(len(samples)))
    [vector] = token_ids(folder, "<unk>")
    taken = {first + at for first, number in made.runs for at in range(number)}
    assert taken == {at for at, token in enumerate(made.token_ids) if token == vector}


def test_prompts(folder: Path) -> None:
    """Of text as published, of tokens; beside an image, which has a number."""
    processor = processor_for(NAME, CONFIG, folder)
    clips = [sound(1, 0.5), sound(2, 1.2)]
    pixels = np.zeros((40, 40, 3), np.uint8)
    image = MediaItem("image", pixels, content_hash("image", pixels), {})
    media = processor.process([item(clips[0]), image, item(clips[1])], {})
    first, second = (written(len(clip)) for clip in clips)
    seen = f"<image_id>0</image_id><image>{'<unk>' * 64}</image>"
    wanted = token_ids(folder, f"the {first} of {seen}in{second}\n")
    for text in (f"the {MARK} of (<image>./</image>)in{MARK}\n",
                 "the <|audio_start|> of <unk>in<|audio_start|>\n"):  # fmt: skip
        placed = processor.place(token_ids(folder, text), media)
        assert list(placed.token_ids) == wanted
    assert processor.placeholder("audio", 0) == "<|audio_start|>"
    assert processor.place([5, 6], []).token_ids == [5, 6]
    assert processor.largest("audio", {"num_tokens": 60}).num_tokens <= 60
    assert processor.largest("audio", {}).num_tokens == 30 * 27
    given = processor.embedded("audio", 30, {})
    assert given.runs == ((1, 25), (28, 5))
    shown = processor.embedded("image", 64, {"image_sizes": [40, 40]})
    placed = processor.place(token_ids(folder, "<|audio_start|>in<unk>"), [shown, given])
    assert list(placed.token_ids) == token_ids(folder, f"{written(30 * 640)}in{seen}")


def test_what_is_refused(folder: Path) -> None:
    processor = processor_for(NAME, CONFIG, folder)
    with pytest.raises(RequestError, match="too short to become a token"):
        processor.process([item(sound(1, 0.01))], {})
    few = processor_for(NAME, {**CONFIG, "max_position_embeddings": 800}, folder)
    with pytest.raises(RequestError, match="at most 30 s"):
        few.process([item(np.zeros(31 * RATE, np.float32))], {})
    (cut,) = few.process([item(np.zeros(31 * RATE, np.float32))], {"truncation": True})
    assert cut.num_tokens == 30 * 27
    config = {**CONFIG, "audio_config": {"max_source_positions": 100}}
    with pytest.raises(UnsupportedModel, match="chunk_length makes pieces of 480000"):
        processor_for(NAME, config, folder)
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.pieces"):
        processor.process([item(sound(1, 1.0))], {"pieces": 3})


def test_prompts_in_the_whole_engine(tmp_path: Path) -> None:
    """Of one piece and of two, beside an image, from caches, and without what sees."""
    oracle = hearing_checkpoints.save_minicpmo(tmp_path)
    text = f"the water {MARK} runs (<image>./</image>) in {MARK} the race"
    media = [CLIP, PICTURE, LONGER]
    check(tmp_path, oracle, text, media)
    wanted = expected(tmp_path, oracle, text, media)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for _ in range(2):
            [found] = llm.generate([asked(text, media)], PARAMS, use_tqdm=False)
            assert list(found.outputs[0].token_ids) == wanted
    text, heard = f"the {MARK} race", [LONGER]
    wanted = expected(tmp_path, oracle, text, heard)
    with LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt={"image": 0, "video": 0}) as llm:
        [found] = llm.generate([asked(text, heard)], PARAMS, use_tqdm=False)
        assert list(found.outputs[0].token_ids) == wanted


def read(file: bytes) -> np.ndarray[Any, Any]:
    """Samples as a file keeps them."""
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    assert rate == RATE
    return np.asarray(samples)


def body(parts: Sequence[Any]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif part.ndim == 1:
            data = base64.b64encode(wav(part)).decode()
            content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        else:
            url = data_url(Image.fromarray(part))
            content.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": "ears", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": NUM_TOKENS, "ignore_eos": True}  # fmt: skip


def test_chats_over_a_socket(tmp_path: Path) -> None:
    oracle = hearing_checkpoints.save_minicpmo(tmp_path)
    template = CHAT.replace("part.type == 'video'", "part.type == 'audio'")
    template = template.replace("MARK", "<unk>").replace("FILM", "<|audio_start|>")
    (tmp_path / "chat_template.jinja").write_text(template)
    config = json.loads((tmp_path / "config.json").read_text())
    processor: Any = processor_for(NAME, config, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(tmp_path), *words, "--served-model-name", "ears") as server:
        url = f"{server.api}/chat/completions"
        found = []
        for parts in (["the ", CLIP, " water"], [PICTURE, "runs ", CLIP], ["in the race"]):
            media, text = [], ""
            for part in parts:
                if isinstance(part, str):
                    text += part
                    continue
                heard = part.ndim == 1
                kind, own = ("audio", read(wav(part))) if heard else ("image", part)
                media += processor.process([MediaItem(kind, own, "", {})], {})
                text += "<|audio_start|>" if heard else "<unk>"
            ids = processor.place(token_ids(tmp_path, f"user: {text}assistant:"), media).token_ids
            wanted = tokenizer.decode(oracle(ids, media)[:NUM_TOKENS])
            made = post(url, body(parts))
            assert made["usage"]["prompt_tokens"] == len(ids)
            assert made["choices"][0]["message"]["content"] == wanted
            events = stream(url, body(parts))
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == wanted
            found.append(wanted)
        assert len(set(found)) == 3
        spoken = {**body(["in the race"]), "modalities": ["text", "audio"]}
        answer = httpx2.post(url, json=spoken, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "modalities"
