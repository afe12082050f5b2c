"""Pixtral's image processors beside those of the checkpoints' own library: numbers, tokens of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_image_processors import ProcessorConformance, item, picture
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace_core.errors import UnsupportedModel
from headrace_multimodal import processor_for

SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def tokenizer(special: tuple[str, ...] = SPECIAL, **settings: Any) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(("<unk>", "a", "b", "c"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **settings)


def pil() -> Any:
    from transformers.models.pixtral import image_processing_pil_pixtral

    return image_processing_pil_pixtral


class PixtralProcessors(ProcessorConformance):
    patch: ClassVar[int]
    merge: ClassVar[int]

    @pytest.fixture(autouse=True)
    def tokens(self, tmp_path: Path) -> None:
        """The processors look special tokens up: beside the settings, and in the folders of the cases."""
        for number in ("", *map(str, range(len(self.settings)))):
            tokenizer().save_pretrained(tmp_path / number)

    def library(self, **settings: Any) -> Any:
        return pil().PixtralImageProcessorPil(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        height, width = made["pixel_values"].shape[-2:]
        unit = self.patch * self.merge
        return (height // unit) * (width // unit + 1)

    def prompt(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
    ) -> tuple[list[int], list[int]]:
        """A prompt of two images, by the library and by headrace's processor."""
        name = "transformers.models.pixtral.image_processing_pixtral"
        monkeypatch.setitem(sys.modules, name, pil())  # the library's own needs torchvision
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

        text, images = "a [IMG] b [IMG] c", [picture(37, 61), picture(90, 31)]
        theirs = PixtralProcessor(
            self.library(size={"longest_edge": 64}), tokenizer(), patch_size=self.patch, **settings
        )
        theirs.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        own = processor_for(self.architecture, self.config, folder)
        media = own.process([item(image) for image in images], {})
        for one in media:
            at = [at for first, number in one.runs for at in range(first, first + number)]
            assert [one.token_ids[i] for i in at] == [4] * len(at)
            assert one.token_ids.count(4) == len(at)
        ids = tokenizer()(text)["input_ids"]
        found = theirs(images=images, text=text, return_tensors=None)["input_ids"][0]
        return list(found), own.place(ids, media).token_ids


class TestPixtral(PixtralProcessors):
    architecture = "LlavaForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": 4, "vision_config": {"model_type": "pixtral", "patch_size": 16},
    }  # fmt: skip
    patch, merge = 16, 1
    settings = (
        {},
        {"size": {"longest_edge": 100}},
        {"size": {"height": 64, "width": 200}, "resample": 2, "do_normalize": False},
    )

    def test_prompt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs, own = self.prompt(tmp_path, monkeypatch)
        assert own == theirs
        assert own[:7] == [1, 4, 4, 4, 4, 5, 4]

    @pytest.mark.parametrize(
        ("listed", "ids"),
        [
            ({}, (12, 13)),
            (
                {
                    "special_tokens": [
                        {"rank": 7, "token_str": "[IMG_BREAK]"}, {"rank": 9, "token_str": "[IMG_END]"},
                    ]
                },
                (7, 9),
            ),
        ],
    )  # fmt: skip
    def test_folder_with_mistrals_own_tokenizer_alone(
        self, listed: dict[str, Any], ids: tuple[int, int], tmp_path: Path
    ) -> None:
        folder = tmp_path / "own"
        folder.mkdir()
        (folder / "tekken.json").write_text(json.dumps({"config": {}, **listed}))
        vision = {**self.config["vision_config"], "image_size": 48}
        own = processor_for(self.architecture, {**self.config, "vision_config": vision}, folder)
        (media,) = own.process([item(picture(100, 100))], {})
        assert media.token_ids == (4, 4, 4, ids[0], 4, 4, 4, ids[0], 4, 4, 4, ids[1])

    def test_what_is_refused(self, tmp_path: Path) -> None:
        def made(**settings: Any) -> None:
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
            processor_for(self.architecture, self.config, tmp_path)

        made(size={"longest_edge": 64})
        with pytest.raises(UnsupportedModel, match="do_resize = False"):
            made(do_resize=False)
        with pytest.raises(UnsupportedModel, match="size = 'big'"):
            made(size="big")
        (tmp_path / "processor_config.json").write_text('{"patch_size": 14}')
        with pytest.raises(UnsupportedModel, match="patch_size = 14"):
            made()
        (tmp_path / "processor_config.json").write_text('{"image_break_token": "[X]"}')
        with pytest.raises(UnsupportedModel, match=r"no token '\[X\]'"):
            made()


class TestMistral3(PixtralProcessors):
    architecture = "Mistral3ForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": 4, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "patch_size": 8},
    }  # fmt: skip
    patch, merge = 8, 2
    settings = (
        {},
        {"size": {"longest_edge": 160}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )

    def test_prompt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs, own = self.prompt(tmp_path, monkeypatch, spatial_merge_size=2)
        assert own == theirs
        assert own.count(6) == 2


class TestLightOnOCR(ProcessorConformance):
    architecture = "LightOnOcrForConditionalGeneration"
    config: ClassVar = {
        "image_token_id": 4, "vision_config": {"model_type": "pixtral", "patch_size": 8},
    }  # fmt: skip
    settings = ({}, {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 160}})

    def library(self, **settings: Any) -> Any:
        return pil().PixtralImageProcessorPil(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        height, width = made["pixel_values"].shape[-2:]
        return (height // 16) * (width // 16)

    def test_prompt(self, tmp_path: Path) -> None:
        from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor

        named = dict(
            zip(("image_token", "image_break_token", "image_end_token"), SPECIAL, strict=True)
        )
        words = tokenizer(extra_special_tokens=named)
        text, images = "a [IMG] b [IMG] c", [picture(37, 61), picture(90, 31)]
        image_processor = self.library(patch_size=16, size={"longest_edge": 64})
        theirs = LightOnOcrProcessor(image_processor, words, patch_size=8, spatial_merge_size=2)
        image_processor.save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        media = own.process([item(image) for image in images], {})
        ids = words(text)["input_ids"]
        found = theirs(images=images, text=text, return_tensors=None)["input_ids"][0]
        assert own.place(ids, media).token_ids == list(found)
        assert found.count(4) == media[0].num_tokens + media[1].num_tokens
