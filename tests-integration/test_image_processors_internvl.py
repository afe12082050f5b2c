"""InternVL's image processor beside that of the checkpoints' own library: numbers, tokens of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from speech_checkpoints import save_tokenizer
from test_image_processors import ProcessorConformance, array, item, picture
from test_image_processors_pixtral import tokenizer
from transformers import GotOcr2ImageProcessorPil

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SPECIAL = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
NAMES = {
    "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
    "video_token": "<video>",
}  # fmt: skip


class Cutting(GotOcr2ImageProcessorPil):  # type: ignore[misc]
    """As the processor of InternVL's class calls it."""

    crop_to_patches = True


class TestInternVL(ProcessorConformance):
    architecture = "InternVLForConditionalGeneration"
    config: ClassVar = {
        "image_token_id": 4,
        "vision_config": {"model_type": "internvl_vision", "image_size": [384, 384], "patch_size": 14},
    }  # fmt: skip
    settings = (
        {},
        {"min_patches": 3, "max_patches": 6},
        {"max_patches": 1, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )

    @pytest.fixture(autouse=True)
    def tokens(self, tmp_path: Path) -> None:
        for number in ("", *map(str, range(len(self.settings)))):
            tokenizer(SPECIAL, extra_special_tokens=NAMES).save_pretrained(tmp_path / number)

    def library(self, **settings: Any) -> Any:
        return Cutting(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return np.asarray(made[name])

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["num_patches"][0]) * 13 * 13 + 2

    def test_prompt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        # Its check of classes looks for one of videos, which needs torchvision.
        monkeypatch.setattr(
            InternVLProcessor, "check_argument_for_proper_class", lambda *given: None
        )
        text, images = "a <IMG_CONTEXT> b <IMG_CONTEXT> c", [picture(37, 61), picture(60, 31)]
        words = tokenizer(SPECIAL, extra_special_tokens=NAMES)
        library = self.library(size={"height": 28, "width": 28}, max_patches=4)
        theirs = InternVLProcessor(library, words, image_seq_length=4)
        library.save_pretrained(tmp_path)
        vision = {**self.config["vision_config"], "image_size": 28, "patch_size": 7}
        config = {**self.config, "vision_config": vision}
        own = processor_for(self.architecture, config, tmp_path)
        media = own.process([item(image) for image in images], {})
        made = theirs(images=images, text=text, return_tensors=None)
        ids = words(text)["input_ids"]
        assert own.place(ids, media).token_ids == list(made["input_ids"][0])
        pixels = np.concatenate([array(one, "pixel_values") for one in media])
        np.testing.assert_allclose(pixels, np.asarray(made["pixel_values"]), atol=1e-5, rtol=0)
        for one in media:
            ((first, number),) = one.runs
            assert one.token_ids[first : first + number] == (4,) * one.token_ids.count(4)

    def test_options(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)

        def tiles(**options: Any) -> int:
            (made,) = own.process([item(picture(384, 1152))], options)
            return array(made, "pixel_values").shape[0]

        assert tiles() == 4
        assert tiles(crop_to_patches=False) == 1
        assert tiles(max_patches=2) == 3
        assert tiles(min_patches=12) == 13
        with pytest.raises(RequestError, match="max_patches = 13"):
            tiles(max_patches=13)
        with pytest.raises(RequestError, match="min_patches = 3"):
            tiles(max_patches=2, min_patches=3)
        with pytest.raises(RequestError, match="crop_to_patches = 1"):
            tiles(crop_to_patches=1)

    def test_what_is_refused(self, tmp_path: Path) -> None:
        for settings, named in (
            ({"size": {"height": 448, "width": 448}}, "size = \\(448, 448\\)"),
            ({"max_patches": 0}, "max_patches = 0"),
        ):
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
            with pytest.raises(UnsupportedModel, match=named):
                processor_for(self.architecture, self.config, tmp_path)


def test_those_of_intern_s1_are_the_same(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"))
    size = {"size": {"height": 56, "width": 56}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(size))
    config = {
        "image_token_id": 302, "vision_config": {"image_size": [56, 56], "patch_size": [14, 14]},
    }  # fmt: skip
    own, other = (
        processor_for(name, config, tmp_path)
        for name in ("InternS1ForConditionalGeneration", "InternVLForConditionalGeneration")
    )
    images = [item(picture(37, 161))]
    assert own.process(images, {}) == other.process(images, {})
    assert list(own.modalities()) == ["image", "video"]
