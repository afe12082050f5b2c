"""The image processor of InternVL as published: numbers beside those of the library that transformers' class
uses, prompts beside the published formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_image_processors import SIZES, ProcessorConformance, array, item, picture
from test_image_processors_internvl import Cutting
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SPECIAL = ("<s>", "<img>", "</img>", "<IMG_CONTEXT>")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
TOWER = {"model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14}
CONFIG: Mapping[str, Any] = {
    "vision_config": TOWER, "force_image_size": 56, "downsample_ratio": 0.5,
    "dynamic_image_size": True, "use_thumbnail": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12,
}  # fmt: skip
PER_TILE = 4


@cache
def tokenizer() -> Tokenizer:
    """Of bytes; merges reach over the edges of ``<image>``, which is no token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the of in >the <image> >< : <image>" for _ in range(9)], trainer)
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def published(text: str, tiles: list[int]) -> list[int]:
    """Tokens of a prompt as the published ``chat`` makes them: text in place of ``<image>``."""
    for number in tiles:
        vectors = "<IMG_CONTEXT>" * PER_TILE * number
        text = text.replace("<image>", f"<img>{vectors}</img>", 1)
    return ids(text)


class TestInternVLChat(ProcessorConformance):
    architecture = "InternVLChatModel"
    config: ClassVar = CONFIG
    settings = ({}, {**IMAGENET, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        for number in ("", *map(str, range(len(cls.settings)))):
            (tmp_path / number).mkdir(exist_ok=True)
            tokenizer().save(str(tmp_path / number / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        return library(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return np.asarray(made[name])

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["num_patches"][0]) * PER_TILE + 2

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Nothing is cut, and the numbers are ImageNet's."""
        processor = processor_for(self.architecture, {"vision_config": TOWER}, tmp_path)
        image = picture(70, 40)
        (own,) = processor.process([item(image)], {})
        made = library(max_patches=1)(images=image, return_tensors="np")
        np.testing.assert_allclose(array(own, "pixel_values"), made["pixel_values"], atol=1e-5)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("bounds", [(1, 6), (3, 7), (1, 1), (2, 40)])
    def test_numbers_of_tiles(
        self, size: tuple[int, int], bounds: tuple[int, int], tmp_path: Path
    ) -> None:
        least, most = bounds
        config = {**CONFIG, "min_dynamic_patch": least, "max_dynamic_patch": most}
        (own,) = processor_for(self.architecture, config, tmp_path).process(
            [item(picture(*size))], {}
        )
        theirs = library(min_patches=least, max_patches=most)
        made = theirs(images=picture(*size), return_tensors="np")
        np.testing.assert_allclose(array(own, "pixel_values"), made["pixel_values"], atol=1e-5)

    def test_without_a_thumbnail(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, {**CONFIG, "use_thumbnail": False}, tmp_path)
        (own,) = processor.process([item(picture(37, 61))], {})
        made = library()(images=picture(37, 61), return_tensors="np")
        np.testing.assert_allclose(
            array(own, "pixel_values"), np.asarray(made["pixel_values"])[:-1], atol=1e-5
        )

    @pytest.mark.parametrize(
        "text",
        [
            "<image>\nthe",
            "<s>Image-1: <image>\nImage-2: <image>\nthe of",
            "the<image><image>the",
            "<image>",
            "in the <image> of <image>, <image>",
        ],
    )
    @pytest.mark.parametrize("as_token", [False, True])
    def test_prompts_are_the_published_ones(
        self, text: str, as_token: bool, tmp_path: Path
    ) -> None:
        images = [picture(37, 61), picture(60, 31), picture(300, 40)][: text.count("<image>")]
        processor = processor_for(self.architecture, CONFIG, tmp_path)
        media = processor.process([item(image) for image in images], {})
        tiles = [array(one, "pixel_values").shape[0] for one in media]
        written = text.replace("<image>", "<IMG_CONTEXT>") if as_token else text
        placed = processor.place(ids(written), media)
        assert placed.token_ids == published(text, tiles)
        context = ids("<IMG_CONTEXT>")[0]
        for one, offset in zip(media, placed.offsets, strict=True):
            ((first, number),) = one.runs
            begin = offset + first
            assert set(placed.token_ids[begin : begin + number]) == {context}
            assert context not in (placed.token_ids[begin - 1], placed.token_ids[begin + number])

    def test_a_chat_has_an_image_in_front_of_a_line(self, tmp_path: Path) -> None:
        """Parts of a message are joined by line ends, which is the published ``<image>\\n``."""
        processor = processor_for(self.architecture, CONFIG, tmp_path)
        media = processor.process([item(picture(37, 61))], {})
        text = "\n".join((processor.placeholder("image", 0), "the of"))
        tiles = array(media[0], "pixel_values").shape[0]
        assert processor.place(ids(text), media).token_ids == published("<image>\nthe of", [tiles])

    def test_text_alone_is_left(self, tmp_path: Path) -> None:
        tokens = ids("the <image> tag")
        placed = processor_for(self.architecture, CONFIG, tmp_path).place(tokens, [])
        assert placed.token_ids == tokens

    def test_options(self, tmp_path: Path) -> None:
        own = processor_for(self.architecture, CONFIG, tmp_path)

        def tiles(**options: Any) -> int:
            (made,) = own.process([item(picture(56, 168))], options)
            return array(made, "pixel_values").shape[0]

        assert tiles() == 4
        assert tiles(dynamic_image_size=False) == 1
        assert tiles(max_dynamic_patch=2) == 3
        assert tiles(min_dynamic_patch=12) == 13
        for name, value in [
            ("max_dynamic_patch", 13), ("min_dynamic_patch", 0), ("dynamic_image_size", 1),
        ]:  # fmt: skip
            with pytest.raises(RequestError, match=f"{name} = {value}"):
                tiles(**{name: value})

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"pad2square": True}, "pad2square = True"),
            ({"force_image_size": 448}, "force_image_size = 448"),
            ({"max_dynamic_patch": 0}, "max_dynamic_patch = 0"),
            ({"use_thumbnail": "yes"}, "use_thumbnail = 'yes'"),
        ],
    )
    def test_what_is_refused(self, change: Any, named: str, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, {**CONFIG, **change}, tmp_path)

    def test_a_tokenizer_without_the_tokens_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
        with pytest.raises(UnsupportedModel, match="<IMG_CONTEXT>"):
            processor_for(self.architecture, CONFIG, tmp_path)


def library(**settings: Any) -> Any:
    """The library's image processor with the published numbers."""
    return Cutting(**{"size": {"height": 56, "width": 56}, **IMAGENET, **settings})
