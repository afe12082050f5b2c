"""Phi-4-multimodal's processor beside a plain reading of the published one (images are resampled by
Pillow) and beside the library's extractor of audio."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from speech_checkpoints import save_tokenizer, sound, token_ids
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

NAME, SIDE, PATCH = "Phi4MMForCausalLM", 448, 14
CONFIG = {"embd_layer": {}, "audio_processor": {"config": {}}}
SIZES = ((37, 61), (448, 448), (901, 310), (460, 1201), (3000, 500), (120, 2900))


def plain(image: Image.Image, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of tiles behind those of the whole, and which patches of the canvas are image."""
    width, height = columns * SIDE, rows * SIDE
    if width / image.width < height / image.height:
        size = width, int(image.height * (width / image.width))
    else:
        size = int(image.width * (height / image.height)), height
    canvas = Image.new("RGB", (width, height), "white")
    canvas.paste(image.resize(size, Image.Resampling.BILINEAR), (0, 0))
    pixels = (torch.tensor(np.array(canvas)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    small = torch.nn.functional.interpolate(pixels[None], size=(SIDE, SIDE), mode="bicubic")
    tiles = pixels.view(3, rows, SIDE, columns, SIDE).permute(1, 3, 0, 2, 4).flatten(0, 1)
    mask = torch.ones(height // PATCH, width // PATCH)
    if width - size[0] >= PATCH:
        mask[:, -((width - size[0]) // PATCH) :] = 0
    if height - size[1] >= PATCH:
        mask[-((height - size[1]) // PATCH) :] = 0
    return torch.cat([small, tiles]), mask


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [36, 5])
def test_images_are_the_published_ones(size: tuple[int, int], most: int, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"dynamic_hd": most}))
    processor = processor_for(NAME, CONFIG, tmp_path)
    image = picture(*size)
    (own,) = processor.process([item(image)], {})
    rows, columns = array(own, "image_grid").tolist()
    whole = math.ceil(size[0] / SIDE), math.ceil(size[1] / SIDE)
    if math.prod(whole) <= most:
        assert (rows, columns) == whole
    else:
        assert rows * columns <= most
        shapes = {(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)}
        nearest = min(abs(size[1] / size[0] - j / i) for i, j in shapes)
        assert abs(size[1] / size[0] - columns / rows) == nearest
    pixels, mask = plain(image, rows, columns)
    np.testing.assert_allclose(array(own, "pixel_values"), pixels.numpy(), atol=1e-5, rtol=0)
    height, width = array(own, "image_patches").tolist()
    assert mask[:height, :width].all()
    assert mask.sum() == height * width
    halved = mask.view(rows, 32, columns, 32)[:, ::2, :, ::2]
    assert own.num_tokens == 256 + 16 + 1 + halved.sum() + halved[:, :, 0, 0].sum()


def test_no_image_takes_more_than_the_largest(tmp_path: Path) -> None:
    processor = processor_for(NAME, CONFIG, tmp_path)
    most = processor.largest("image", {}).num_tokens
    for size in (*SIZES, (5000, 5000), (448, 448 * 36), (448 * 36, 448)):
        (own,) = processor.process([item(picture(*size))], {"dynamic_hd": 36})
        assert own.num_tokens <= most
    assert processor.largest("image", {"num_tokens": 1200}).num_tokens <= 1200
    assert processor.largest("audio", {"num_tokens": 100}).num_tokens == 100


@pytest.mark.parametrize("samples", [400, 559, 560, 16000, 21_777])
def test_audio_is_the_librarys(samples: int, tmp_path: Path) -> None:
    from transformers import Phi4MultimodalFeatureExtractor

    heard = sound(1, 2.0)[:samples]
    processor = processor_for(NAME, CONFIG, tmp_path)
    (own,) = processor.process([MediaItem("audio", heard, "", {})], {})
    made = Phi4MultimodalFeatureExtractor()([heard], sampling_rate=16000)
    wanted = made["audio_input_features"][0].numpy()
    np.testing.assert_allclose(array(own, "input_features"), wanted, atol=1e-5, rtol=0)
    assert own.num_tokens == int(made["audio_embed_sizes"][0])


def test_prompts(tmp_path: Path) -> None:
    """Marks stand for the next item of their kind, whatever their numbers; tokens do, too."""
    ids = save_tokenizer(tmp_path, ("<|user|>", "<|endoftext10|>", "<|endoftext11|>"))
    image, audio = ids["<|endoftext10|>"], ids["<|endoftext11|>"]
    config = {
        "vision_config": {"image_token_id": image}, "audio_config": {"audio_token_id": audio},
    }  # fmt: skip
    processor: Any = processor_for("Phi4MultimodalForCausalLM", config, tmp_path)
    items = [item(picture(30, 40)), MediaItem("audio", sound(1, 0.5), "", {})]
    assert processor.options_for_numbers({"image": 1}, {}) == {}
    assert processor.options_for_numbers({"audio": 2}, {}) == {}
    options = processor.options_for_numbers({"image": 1, "audio": 1}, {"dynamic_hd": 2})
    media = processor.process(items, options)
    assert array(media[1], "beside_images").tolist() == [1]
    assert array(processor.process(items[1:], {})[0], "beside_images").tolist() == [0]
    plain = "<|user|>the water <|endoftext10|>runs in<|endoftext11|> the race"
    expected = []
    for token in token_ids(tmp_path, plain):
        kinds = {image: media[0].num_tokens, audio: media[1].num_tokens}
        expected += [token] * kinds.get(token, 1)
    marked = plain.replace("<|endoftext10|>", "<|image_7|>").replace(
        "<|endoftext11|>", "<|audio_2|>"
    )
    for text in (plain, marked, plain.replace("<|endoftext10|>", "<|image_1|>")):
        placed = processor.place(token_ids(tmp_path, text), media)
        assert placed.token_ids == expected
        assert [expected[at] for at in placed.offsets] == [image, audio]
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(token_ids(tmp_path, "<|user|>the <|image_1|>"), media)
    with pytest.raises(RequestError, match="beside_images: no such option"):
        processor.options_for_numbers({"audio": 1}, {"beside_images": True})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dynamic_hd": 0}, "dynamic_hd = 0"),
        ({"size": {"height": 336, "width": 336}}, r"size = \(336, 336\)"),
        ({"patch_size": 16}, "patch_size = 16"),
        ({"hop_length": 200}, "hop_length = 200"),
        ({"audio_compression_rate": 4}, "audio_compression_rate = 4"),
        ({"audio_downsample_rate": 2}, "audio_downsample_rate = 2"),
    ],
)
def test_other_settings_are_refused(settings: Any, named: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=named):
        processor_for(NAME, CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (item(Image.new("RGB", (20_000, 8))), "its shorter side would have"),
        (MediaItem("audio", np.zeros(399, np.float32), "", {}), "too short for one frame"),
        (MediaItem("audio", np.zeros(16000 * 1801, np.float32), "", {}), "at most 1800 s"),
    ],
    ids=["narrow", "short", "long"],
)
def test_items_that_cannot_be_taken_are_refused(
    given: MediaItem, named: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=named):
        processor_for(NAME, CONFIG, tmp_path).process([given], {})


@pytest.mark.parametrize("most", [0, 37, True, "4"])
def test_options_are_checked(most: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be a number of tiles from 1 to 36"):
        processor_for(NAME, CONFIG, tmp_path).process([item(picture(9, 9))], {"dynamic_hd": most})
