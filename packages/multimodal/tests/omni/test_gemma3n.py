"""Gemma 3n's media processor: numbers of transformers' images, tokens of prompts with images and recordings
beside that library's whole processor, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal.omni.gemma3n import Gemma3nProcessor

NAMES = (
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<start_of_audio>", "<audio_soft_token>",
    "<end_of_audio>",
)  # fmt: skip
BOI, IMAGE, EOI, BOA, AUDIO, EOA = SPECIAL = range(30, 36)
CONFIG: dict[str, Any] = {
    "boi_token_id": BOI, "image_token_id": IMAGE, "eoi_token_id": EOI, "boa_token_id": BOA,
    "audio_token_id": AUDIO, "eoa_token_id": EOA, "vision_soft_tokens_per_image": 4,
    "audio_soft_tokens_per_image": 6, "vision_config": {}, "audio_config": {},
}  # fmt: skip
SETTINGS = {
    "size": {"height": 48, "width": 48}, "resample": 2, "do_normalize": False, "feature_size": 128,
    "dither": 0.0, "sampling_rate": 16_000,
}  # fmt: skip
"""As published checkpoints have them, in one file for both; there images have 768 pixels of a side."""


def sound(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


def picture(height: int, width: int) -> MediaItem:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    return MediaItem("image", pixels, "0" * 64, {})


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer in which line ends up to six are a token, and letters."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [*"abcdefghij", *map("<{}>".format, range(13))]
    lines = ["\n" * number for number in range(1, 7)]
    vocabulary = {text: number for number, text in enumerate(letters + lines)}
    merges = [(line, "\n") for line in lines[:-1]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.add_special_tokens(["<pad>", *NAMES])
    assert tuple(map(made.token_to_id, NAMES)) == tuple(SPECIAL)
    return made


@pytest.fixture(scope="module")
def folder(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3n")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("size", [(37, 61), (48, 48), (90, 31), (300, 211)])
@pytest.mark.parametrize("change", [{}, {"do_normalize": True}, {"resample": 3}])
def test_images_are_those_of_transformers(size, change: dict[str, Any], tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
    settings = {**SETTINGS, **change}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    item = picture(*size)
    (made,) = Gemma3nProcessor(CONFIG, tmp_path).process([item], {})
    packed = made.inputs["pixel_values"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    named = {key: settings[key] for key in ("size", "resample", "do_normalize")}
    library = theirs.SiglipImageProcessorPil(**named)
    expected = library(images=item.data, return_tensors="pt")["pixel_values"][0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    assert (made.token_ids, made.runs) == ((BOI, *[IMAGE] * 4, EOI), ((1, 4),))


@pytest.fixture(scope="module")
def library(words: Any) -> Any:
    """The library's whole processor."""
    transformers = pytest.importorskip("transformers")
    siglip = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
    names = ("boi", "image", "eoi", "boa", "audio", "eoa")
    extra = {f"{name}_token": text for name, text in zip(names, NAMES, strict=True)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", extra_special_tokens=extra
    )
    return transformers.Gemma3nProcessor(
        transformers.Gemma3nAudioFeatureExtractor(), siglip.SiglipImageProcessorPil(), tokenizer,
        audio_seq_length=6, image_seq_length=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["ab{i}c{a}d", "{i}", "{a}", "a\n{a}{i}\n\nb", "{i}\n{i}\n\n{a}a\n", "a\n\nb\n"]
)
def test_prompts_are_those_of_transformers(text: str, words, library, folder: Path) -> None:
    processor = Gemma3nProcessor(CONFIG, folder)
    kinds = [part[0] for part in text.split("{")[1:]]
    items = [picture(20, 20 + at) if kind == "i" else sound(3000) for at, kind in enumerate(kinds)]
    whole = text.format(i=processor.placeholder("image", 0), a=processor.placeholder("audio", 0))
    media = processor.process(items, {})
    placed = processor.place(words.encode(whole).ids, media)
    of_kind = {
        kind: [item.data for item in items if item.modality == kind] for kind in ("image", "audio")
    }
    given = {
        "images": [of_kind["image"]] if of_kind["image"] else None,
        "audio": of_kind["audio"] or None,
    }
    expected = library(text=[whole], **given)["input_ids"][0]
    assert placed.token_ids == list(expected)
    starts = [BOI if item.modality == "image" else BOA for item in items]
    assert [placed.token_ids[offset] for offset in placed.offsets] == starts


def test_each_tower_takes_what_is_its_own(folder: Path) -> None:
    both = Gemma3nProcessor(CONFIG, folder)
    assert list(both.modalities()) == ["image", "audio"]
    image, cut = both.process([picture(9, 9), sound(31 * 16_000)], {"truncation": True})
    assert (image.num_tokens, cut.num_tokens) == (6, 8)
    assert [both.largest(kind, {}).num_tokens for kind in ("image", "audio")] == [6, 8]
    with pytest.raises(RequestError, match="pan: no such option; this model's are truncation"):
        both.process([picture(9, 9)], {"pan": 1})
    with pytest.raises(RequestError, match=r"2 placeholders .* 1 media"):
        both.place([IMAGE, IMAGE, AUDIO], [image, cut])
    hears = {key: value for key, value in CONFIG.items() if key != "vision_config"}
    assert list(Gemma3nProcessor(hears, folder).modalities()) == ["audio"]
