"""Image processors of Aya Vision and Command A Vision beside the library's: grids, tiles, prompts."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.images.cohere_vision import nearest_shape, smallest_cover

SPECIAL = (
    "<BOS>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL",
    *(f"TILE_{number}" for number in range(1, 10)),
)  # fmt: skip
SIDES = st.integers(1, 3000)
PER_TILE = 4
"""Vectors of a tile of 56 pixels, whose patches have 14."""


@cache
def tokenizer(*more: str) -> Tokenizer:
    """Of bytes.

    Args:
        more: special tokens.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the of in >the <image> ><" for _ in range(9)], trainer)
    made.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in (*SPECIAL, *more)]
    )
    return made


IMAGE = tokenizer().token_to_id("<|IMG_PATCH|>")


@cache
def cohere2_module() -> Any:
    """transformers' image processor of Command A Vision, which imports torchvision at its top; what it uses
    of that is not called here."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[2]].functional = types.SimpleNamespace()  # type: ignore[attr-defined]
    try:
        return importlib.import_module(
            "transformers.models.cohere2_vision.image_processing_cohere2_vision"
        )
    finally:
        for name in missing:
            del sys.modules[name]


class Tiled(ProcessorConformance):
    config: ClassVar = {
        "image_token_id": IMAGE, "downsample_factor": 2,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    }  # fmt: skip
    settings: ClassVar = ({}, {"max_patches": 3, "resample": 2}, {"image_mean": [0.5] * 3})

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )

        class WithTokenizer(GotOcr2ImageProcessorPil):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                tokenizer().save(str(Path(folder) / "tokenizer.json"))
                return super().save_pretrained(folder, **kwargs)

        given = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 9}
        return WithTokenizer(**{**given, **settings})

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = made[name].numpy()
        return found

    def text(self, made: Mapping[str, Any]) -> str:
        """What the library puts in place of an image."""
        raise NotImplementedError

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(tokenizer().encode(self.text(made)).ids)

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        said = {"size": {"height": 56, "width": 56}, "max_patches": 9}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(70, 140))], {})
        made = self.library()(images=picture(70, 140), return_tensors="pt")
        np.testing.assert_allclose(
            array(own, "pixel_values"), made["pixel_values"].numpy(), atol=1e-5, rtol=0
        )

    @pytest.mark.parametrize("size", [(56, 56), (100, 210), (500, 30), (170, 160)])
    def test_tokens_are_the_librarys(self, size: tuple[int, int], tmp_path: Path) -> None:
        library = self.library()
        library.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(*size))], {})
        made = library(images=picture(*size), return_tensors="pt")
        expected = tokenizer().encode(f"<BOS>the {self.text(made)}of").ids
        prompt = tokenizer().encode("<BOS>the <|IMG_PATCH|>of").ids
        placed = processor.place(prompt, [own])
        assert placed.token_ids == expected
        at = [
            placed.offsets[0] + first + index
            for first, number in own.runs
            for index in range(number)
        ]
        assert at == [index for index, token in enumerate(expected) if token == IMAGE]
        assert len(at) == len(array(own, "pixel_values")) * PER_TILE

    def test_an_image_that_is_not_cut(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(300, 90))], {"crop_to_patches": False})
        assert array(own, "pixel_values").shape == (1, 3, 56, 56)
        with pytest.raises(RequestError, match="crop_to_patches = 1"):
            processor.process([item(picture(9, 9))], {"crop_to_patches": 1})

    def test_unfit_files_are_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        tower = {**self.config["vision_config"], "image_size": 112}
        for key, value, said in (
            ("image_token_id", 5, r"<\|IMG_PATCH\|> has the id .*config.json says 5"),
            ("downsample_factor", 3, "downsample_factor = 3"),
            ("vision_config", tower, "image_size = 112"),
        ):
            with pytest.raises(UnsupportedModel, match=said):
                processor_for(self.architecture, {**self.config, key: value}, tmp_path)


class TestAyaVision(Tiled):
    architecture = "AyaVisionForConditionalGeneration"

    def processor(self) -> Any:
        from transformers import AyaVisionProcessor, PreTrainedTokenizerFast

        words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="<BOS>")
        return AyaVisionProcessor(
            self.library(), words, patch_size=14, img_size=56, downsample_factor=2
        )

    def text(self, made: Mapping[str, Any]) -> str:
        return str(self.processor().replace_image_token(made, 0))

    @pytest.mark.parametrize(
        "prompt",
        [
            "<BOS>the <image>of <image><image>>the",
            "<image>\n<image>of<image>",
            "a<image>.<image> <image>",
        ],
    )
    def test_a_prompt_of_images_whose_placeholder_is_no_token(
        self, prompt: str, tmp_path: Path
    ) -> None:
        """Beside the whole of the library's processor."""
        library = self.processor()
        library.image_processor.save_pretrained(tmp_path)
        images = [picture(80, 50), picture(20, 90), picture(56, 56)]
        expected = library(text=prompt, images=images, add_special_tokens=False)["input_ids"]
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(image) for image in images], {})
        assert processor.place(tokenizer().encode(prompt).ids, own).token_ids == expected[0]

    def test_tokens_that_no_text_gives(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(picture(9, 9))], {})
        bytes_of = [tokenizer().token_to_id(letter) for letter in "<image>"]
        with pytest.raises(RequestError, match=rf"'<image>' cannot be found: write token {IMAGE}"):
            processor.place(bytes_of, own)
        with pytest.raises(RequestError, match="0 placeholders"):
            processor.place(tokenizer().encode("the of").ids, own)

    def test_a_placeholder_that_is_a_token(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        words = tokenizer("<image>")
        words.save(str(tmp_path / "tokenizer.json"))
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(picture(9, 9))], {})
        placed = processor.place(words.encode("the<image>").ids, own)
        assert placed.token_ids[-own[0].num_tokens :] == list(own[0].token_ids)

    @given(SIDES, SIDES, st.integers(20, 500), st.integers(1, 4), st.integers(4, 12))
    @settings(deadline=None)
    def test_grids_are_the_librarys(
        self, height: int, width: int, tile: int, fewest: int, most: int
    ) -> None:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            get_optimal_tiled_canvas,
        )

        columns, rows = get_optimal_tiled_canvas((height, width), (tile, tile), fewest, most)
        assert nearest_shape((height, width), tile, fewest, most) == (rows, columns)


class TestCohere2Vision(Tiled):
    """Its library class needs torchvision: its grids are beside the library's own function, and its tiles
    beside the class on Pillow that makes the same of a grid."""

    architecture = "Cohere2VisionForConditionalGeneration"

    @pytest.fixture(autouse=True)
    @classmethod
    def _its_grids(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as module

        own = cohere2_module().get_optimal_tiled_canvas
        monkeypatch.setattr(module, "get_optimal_tiled_canvas", own)

    def text(self, made: Mapping[str, Any]) -> str:
        from transformers import Cohere2VisionProcessor

        processor = Cohere2VisionProcessor.__new__(Cohere2VisionProcessor)
        processor.boi_token, processor.eoi_token = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
        processor.image_token, processor.img_line_break_token = SPECIAL[3:5]
        processor.patch_size = PER_TILE**0.5
        return str(processor.replace_image_token(made, 0))

    def test_names_of_tokens_are_the_tokenizers(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        said = {"extra_special_tokens": {"boi_token": "TILE_1"}, "eoi_token": {"content": "TILE_2"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(9, 9))], {})
        ends = [tokenizer().token_to_id(word) for word in ("TILE_1", "TILE_2")]
        assert [own.token_ids[0], own.token_ids[-1]] == ends

    @given(SIDES, SIDES, st.integers(20, 500), st.integers(1, 12))
    @settings(deadline=None)
    def test_grids_are_the_librarys(self, height: int, width: int, tile: int, most: int) -> None:
        function = cohere2_module().get_optimal_tiled_canvas
        columns, rows = function((height, width), (tile, tile), 1, most)
        assert smallest_cover((height, width), tile, most) == (rows, columns)
